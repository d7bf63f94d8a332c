"""A server that answers as an engine does, with this package's own decoding and any fault."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from local_server import Handler

from lightning_specdec.decoder import SpeculativeDecoder


@dataclass
class Answers:
    """What the engine is able to do, and its fault.

    Args:
        decoder: continues the prompts.
        reports: how tokens are reported: "token_ids" (vLLM), "content_ids" (llama.cpp), "logprobs".
        takes_tokens: whether prompts may be tokens.
        chat_tokens: what `/tokenize` answers; None if there is no such path.
        num_added_tokens: tokens that the engine adds to every prompt, in its counts.
        shown_text: the text of all answers; None for the right one.
        fixed_text: what all answers say, in text and tokens; None for what the decoder generates.
        fault: what is broken; "" if nothing is.
        bodies: the completions that were asked for.
    """

    decoder: SpeculativeDecoder
    reports: frozenset[str] = frozenset({"token_ids"})
    takes_tokens: bool = True
    chat_tokens: list[int] | None = None
    num_added_tokens: int = 0
    shown_text: str | None = None
    fixed_text: str | None = None
    fault: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)

    def completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and content of an answer."""
        self.bodies.append(body)
        prompt = body["prompt"]
        if not isinstance(prompt, str) and not self.takes_tokens:
            return 400, {"error": {"message": "prompt must be a string"}}
        # Like our server, it knows no fields of llama.cpp.
        for name in ("samplers", "repeat_penalty", "return_tokens"):
            if name in body:
                return 400, {"error": {"message": f"the field {name} is not supported"}}
        if self.fault == "error":
            return 500, {"error": {"message": "out of memory"}}
        if self.fault == "empty":
            return 200, {"choices": []}

        decoder = self.decoder
        tokens = decoder.encode(prompt) if isinstance(prompt, str) else prompt
        with self.lock:
            row = decoder.decode_standard(
                [tokens],
                max_new_tokens=body["max_tokens"],
                temperature=body["temperature"],
                top_p=body["top_p"],
                seed=body["seed"],
            ).rows[0]
        new_tokens = list(row.tokens)
        text = self.shown_text or row.text
        if self.fault == "tokens":
            new_tokens = [99999]
        if self.fixed_text is not None:
            text = self.fixed_text
            new_tokens = decoder.tokenizer.encode_plain(text)  # type: ignore[union-attr]
        usage = {
            "prompt_tokens": len(tokens) + self.num_added_tokens,
            "completion_tokens": len(new_tokens),
        }
        finish_reason = "stop" if row.stop_reason == "eos" else "length"
        choice = {"text": text, "finish_reason": finish_reason}
        choice.update(self.token_fields(new_tokens, body))
        return 200, {"choices": [choice], "usage": usage}

    def token_fields(self, tokens: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """How the tokens are reported."""
        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None
        if "token_ids" in self.reports:
            return {"token_ids": tokens}
        if "logprobs" not in body:
            return {}
        if "content_ids" in self.reports:
            return {"logprobs": {"content": [{"id": token, "token": "?"} for token in tokens]}}
        if "logprobs" in self.reports:
            vocabulary = tokenizer.vocabulary
            names = {token: name for name, token in vocabulary.special.items()}
            texts = []
            for token in tokens:
                token_bytes = vocabulary.token_bytes[token]
                text = (
                    names.get(token, "")
                    if token_bytes is None
                    else token_bytes.decode("utf-8", "replace")
                )
                texts.append(text)
            return {"logprobs": {"tokens": texts}}
        return {}


class StandIn(Handler):
    """Handles the requests; `answers` is set by `stand_in`."""

    answers: Answers

    def do_GET(self) -> None:  # noqa: N802  # named by http.server
        if self.path == "/v1/models" and self.answers.fault == "html":
            self.send(200, "<html><body>Welcome</body></html>")
        elif self.path == "/v1/models" and self.answers.fault == "models":
            self.send(200, json.dumps({"status": "ok"}))
        elif self.path == "/v1/models":
            self.send(200, json.dumps({"data": [{"id": "stand-in", "owned_by": "nobody"}]}))
        else:
            self.send(404, "not found")

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and self.answers.chat_tokens is not None:
            self.send(200, json.dumps({"tokens": self.answers.chat_tokens}))
            return
        if self.path != "/v1/completions":
            self.send(404, "not found")
            return
        if self.answers.fault == "slow":
            time.sleep(1.5)
        status, content = self.answers.completion(body)
        text = json.dumps(content)
        extra_length = 100 if self.answers.fault == "cut" and status == 200 else 0
        self.send(status, text, extra_length=extra_length)

    def send(self, status: int, text: str, *, extra_length: int = 0) -> None:
        """Send an answer, which ends too early if its length is said to be larger."""
        data = text.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + extra_length))
            self.end_headers()
            self.wfile.write(data)
        except BrokenPipeError:
            # The client has given up, as after its timeout.
            pass


def stand_in(answers: Answers) -> type[StandIn]:
    """A handler for a server with these abilities."""
    return type("StandInOfOneTest", (StandIn,), {"answers": answers})
