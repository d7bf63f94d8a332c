"""Laws of `chat`: the answers are standard decoding's, streamed, turn by turn, and nothing else is on stdout."""

from __future__ import annotations

import io
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import text_cases
import tiny_models
from cli_fixtures import call, here, refused, succeed

from lightning_specdec.cli.chat import Talk
from lightning_specdec.config.terminal import visible
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding.session import Conversation
from lightning_specdec.text.tokenizer import Message, TextTokenizer

__all__ = ["here"]
TURNS = ["the oak", "Où est l'été ?", "thunder 🌩"]
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random Llama and a tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("chat")
    return tiny_models.write(path, tokenizer=text_cases.byte_level(), max_position_embeddings=512)


@pytest.fixture(scope="module")
def decoder(model: str) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(model)


def oracle(
    decoder: SpeculativeDecoder, turns: list[str], *, system: str | None = None, **options: Any
) -> list[str]:
    """Standard decoding's answers, each to the whole chat read from scratch."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        tokens = decoder.encode_chat(messages)
        answers.append(str(decoder.decode_standard(tokens, max_new_tokens=NEW, **options).text))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def talk(model: str, *arguments: str, turns: list[str] | None = None) -> str:
    stdin = "".join(f"{turn}\n" for turn in (TURNS if turns is None else turns))
    return succeed(
        "chat", "--target", model, "--max_new_tokens", str(NEW), *arguments, stdin=stdin
    ).out


def shown(answers: list[str]) -> str:
    return "".join(f"{visible(answer)}\n" for answer in answers)


@pytest.mark.parametrize("window", ["1", "5"])
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_the_answers_are_those_of_standard_decoding(
    model: str, decoder: SpeculativeDecoder, draft: str, window: str
) -> None:
    drafts = {"lookup": ["--drafter", "NGramDrafter"], "itself": ["--draft", model]}
    assert talk(model, "--num_draft_tokens", window, *drafts[draft]) == shown(
        oracle(decoder, TURNS)
    )


def test_a_system_prompt_precedes_the_chat_and_stop_strings_end_an_answer(
    model: str, decoder: SpeculativeDecoder
) -> None:
    whole = oracle(decoder, TURNS[:1], system="You are an oak.")[0]
    written = re.findall(r"[ -~]{2,3}", whole)
    stops = [written[-1], written[len(written) // 2]]
    answers = oracle(decoder, TURNS, system="You are an oak.", stop=stops)
    assert answers[0] == whole[: min(whole.find(stop) for stop in stops)]
    assert talk(
        model, "--system", "You are an oak.", "--stop", stops[0], "--stop", stops[1]
    ) == shown(answers)


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_commands_begin_a_new_chat_and_leave(
    model: str, decoder: SpeculativeDecoder, leave: str
) -> None:
    once = oracle(decoder, TURNS[:2])
    turns = [*TURNS[:2], "/help", "/reset", "", *TURNS[:2], f" {leave} ", TURNS[2]]
    told = call(
        "chat", "--target", model, "--max_new_tokens", str(NEW), "-v", stdin="\n".join(turns)
    )
    assert told.out == shown([*once, *once]) and told.err.count(" tokens/s") == 4


class Impatient(io.StringIO):
    """Somebody who presses Ctrl-C as soon as an answer begins, once or twice."""

    presses = 1

    def write(self, text: str) -> int:
        for _ in range(self.presses if text.strip() else 0):
            signal.raise_signal(signal.SIGINT)
        self.presses = 0
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(decoder.tokenizer, TextTokenizer)
    conversation = Conversation(*decoder.ready(), decoder.config(max_new_tokens=NEW))
    talker = Talk(decoder.tokenizer, conversation, interactive=True)
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdout", Impatient())
    told = talker.say(TURNS[0])
    whole, row = oracle(decoder, TURNS[:1])[0], conversation.row
    first = talker.messages[-1]["content"]
    assert (
        row is not None
        and row.stop_reason == "cancelled"
        and "cancelled" in told
        and row.num_new < NEW
    )
    assert whole.startswith(first) and len(first) < len(whole)
    talker.say(TURNS[1])
    assert row.resumed
    assert isinstance(sys.stdout, Impatient)
    sys.stdout.presses = 2
    with pytest.raises(KeyboardInterrupt):
        talker.say(TURNS[2])
    assert [each["content"] for each in talker.messages[::2]] == TURNS[:2], (
        "a question without an answer is dropped"
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_what_cannot_chat_is_refused_in_one_line(model: str, here: None) -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = None
    tiny_models.write(Path("base"), tokenizer=tokenizer)
    for arguments, told in (
        ((), "name the models by one of"),
        (
            ("--ckpt", "x.ckpt"),
            "chat takes --pair or --target, since a checkpoint has no chat template",
        ),
        (("--target", "base"), "has no chat template"),
        (("--pair", "smolm2"), "did you mean smollm2?"),
        (("--target", model, "--num_draft_tokens", "some"), "num_draft_tokens"),
    ):
        refused("chat", *arguments, told=told)
    refused("chat", "--target", model, "--stop", "", stdin="a\n", told="stop string is empty")
    refused("chat", "--target", model, stdin="the oak " * 600 + "\n", told="begin a new one")
    for command in ("/clear", "/save chat.txt", "/reset now"):
        refused(
            "chat",
            "--target",
            model,
            stdin=f"{command}\n",
            told=f"no command {command}: /reset starts",
        )
    assert succeed(
        "chat", "--target", model, "--max_new_tokens", "4", stdin="/usr/bin/ls?\n"
    ).out, "a path is text"
