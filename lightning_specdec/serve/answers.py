"""Answers in the shapes of OpenAI's API: whole ones, and the chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_specdec.decoding.requests import TopLogprobs
from lightning_specdec.serve.engine import Update
from lightning_specdec.serve.structured import ToolStream, ToolUse
from lightning_specdec.text.tokenizer import Tokenizer
from lightning_specdec.text.vocabulary import ROLES, Vocabulary

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's words for the reasons that a row stops."""

LOWEST_LOGPROB = -9999.0
"""Stands for a probability of 0, as in other servers."""

Json = dict[str, Any]


@dataclass(frozen=True)
class TokenScore:
    """A generated token with its log probability and the likeliest tokens in its place."""

    token: int
    logprob: float
    likeliest: TopLogprobs


class TokenNames:
    """How tokens are written in answers.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._special_texts = {
            token: text for text, token in vocabulary.special.items() if text not in ROLES
        }

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token's text; of its name if it is special."""
        token_bytes = None
        if token < len(self._token_bytes):
            token_bytes = self._token_bytes[token]
        if token_bytes is None:
            return self._special_texts.get(token, f"<token {token}>").encode()
        return token_bytes

    def text_of(self, token: int) -> str:
        """A token's text; bytes that are part of no character become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")


@dataclass
class Piece:
    """What an update adds to a choice.

    Args:
        texts: parts of the new text, each with whether it comes from accepted draft tokens.
        scores: the new tokens with their log probabilities; empty unless requested.
        num_drafted: draft tokens of the round.
        num_accepted: accepted draft tokens.
        finish_reason: in the last piece.
    """

    texts: list[tuple[str, bool]] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The whole new text."""
        return "".join(text for text, _ in self.texts)

    def speculative(self, *, with_pieces: bool) -> Json:
        """Our own field of a chunk."""
        counts: Json = {"draft_tokens": self.num_drafted, "accepted_tokens": self.num_accepted}
        if with_pieces:
            counts["pieces"] = [[text, is_draft] for text, is_draft in self.texts]
        return counts


class Choice:
    """One answer that grows by updates.

    Args:
        index: its number in the response.
        tokenizer: the model's.
    """

    def __init__(self, index: int, tokenizer: Tokenizer) -> None:
        self.index = index
        self._stream = tokenizer.stream()
        self._eos = tokenizer.eos
        self.text = ""
        self.scores: list[TokenScore] = []
        self.tokens: list[int] = []
        self.num_drafted = 0
        self.num_accepted = 0
        self.finish_reason: str | None = None

    def push(self, update: Update) -> Piece:
        """Add an update and return what is new."""
        num_accepted = update.num_accepted
        accepted_text = self._stream.push(update.tokens[:num_accepted], hold=update.num_hidden)
        other_text = self._stream.push(update.tokens[num_accepted:], hold=update.num_hidden)
        if update.stop_reason:
            self.finish_reason = FINISH_REASONS[update.stop_reason]
            num_dropped = update.num_hidden if update.stop_reason == "stop" else 0
            other_text += self._stream.finish(drop=num_dropped)

        texts = []
        if accepted_text:
            texts.append((accepted_text, True))
        if other_text:
            texts.append((other_text, False))
        piece = Piece(
            texts=texts,
            scores=self._scores_of(update),
            num_drafted=update.num_drafted,
            num_accepted=num_accepted,
            finish_reason=self.finish_reason,
        )
        self.text += piece.text
        self.scores += piece.scores
        self.tokens += update.tokens
        self.num_drafted += update.num_drafted
        self.num_accepted += num_accepted
        return piece

    def _scores_of(self, update: Update) -> list[TokenScore]:
        """The new tokens with their log probabilities, without the one that ends the text."""
        if update.logprobs is None:
            return []
        scores = []
        for i, (token, logprob) in enumerate(zip(update.tokens, update.logprobs, strict=True)):
            likeliest: TopLogprobs = []
            if update.top_logprobs:
                likeliest = [(other, _finite(score)) for other, score in update.top_logprobs[i]]
            scores.append(TokenScore(token, _finite(logprob), likeliest))
        if update.stop_reason == "eos":
            scores.pop()
        return scores


def _finite(logprob: float) -> float:
    """A log probability that JSON can write."""
    return max(logprob, LOWEST_LOGPROB)


@dataclass(frozen=True)
class Usage:
    """The tokens of a response.

    Args:
        num_prompt_tokens: of all prompts.
        num_cached: prompt tokens that were not read again.
        choices: the answers.
    """

    num_prompt_tokens: int
    num_cached: int
    choices: Sequence[Choice]

    def to_dict(self) -> Json:
        """OpenAI's field `usage`."""
        num_new_tokens = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_new_tokens,
            "total_tokens": self.num_prompt_tokens + num_new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }

    def speculative(self) -> Json:
        """Our own field of a whole response."""
        return {
            "draft_tokens": sum(choice.num_drafted for choice in self.choices),
            "accepted_tokens": sum(choice.num_accepted for choice in self.choices),
        }


class AnswerFormat:
    """The shape of the answers of one response; subclasses know an endpoint.

    Args:
        model: the model's name.
        names: how tokens are written.
        with_scores: whether log probabilities were requested.
        with_tokens: whether token ids were requested.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(
        self,
        model: str,
        names: TokenNames,
        *,
        with_scores: bool,
        with_tokens: bool = False,
    ) -> None:
        self.model = model
        self.names = names
        self.with_scores = with_scores
        self.with_tokens = with_tokens
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """The answer that is not streamed."""
        return {
            **self._head(self.object_name),
            "choices": [self._whole_choice_with_tokens(choice) for choice in choices],
            "usage": usage.to_dict(),
            "speculative": usage.speculative(),
        }

    def _whole_choice_with_tokens(self, choice: Choice) -> Json:
        """A choice, with its tokens if they were requested; the one that ends it is included."""
        content = self.whole_choice(choice)
        if self.with_tokens:
            content["token_ids"] = choice.tokens
        return content

    def chunk(self, choices: list[Json], *, usage: Usage | None, asks_usage: bool) -> Json:
        """A chunk of a stream."""
        chunk = {**self._head(self.chunk_name), "choices": choices}
        if usage is not None:
            chunk["usage"] = usage.to_dict()
            chunk["speculative"] = usage.speculative()
        elif asks_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, object_name: str) -> Json:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def first_choice(self, choice: Choice) -> Json | None:
        """A choice of the chunk before its first text; None if there is no such chunk."""
        return None

    def whole_choice(self, choice: Choice) -> Json:
        """A choice of an answer that is not streamed."""
        raise NotImplementedError

    def piece_choice(self, choice: Choice, piece: Piece) -> Json:
        """A choice of a chunk with new text."""
        raise NotImplementedError

    def last_choice(self, choice: Choice) -> Json:
        """A choice of the chunk that ends it."""
        raise NotImplementedError


class ChatFormat(AnswerFormat):
    """Answers of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first_choice(self, choice: Choice) -> Json | None:
        return self._choice(choice, delta={"role": "assistant", "content": ""})

    def whole_choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._choice(
            choice,
            message=message,
            logprobs=self._logprobs(choice.scores),
            finish_reason=choice.finish_reason,
        )

    def piece_choice(self, choice: Choice, piece: Piece) -> Json:
        delta = {"content": piece.text}
        return self._choice(choice, delta=delta, logprobs=self._logprobs(piece.scores))

    def last_choice(self, choice: Choice) -> Json:
        return self._choice(choice, delta={}, finish_reason=choice.finish_reason)

    def _choice(self, choice: Choice, **values: Any) -> Json:
        return {"index": choice.index, "logprobs": None, "finish_reason": None, **values}

    def _logprobs(self, scores: Sequence[TokenScore]) -> Json | None:
        if not self.with_scores:
            return None
        content = []
        for score in scores:
            likeliest = [self._entry(token, logprob) for token, logprob in score.likeliest]
            entry = self._entry(score.token, score.logprob)
            content.append({**entry, "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self.names.text_of(token),
            "logprob": logprob,
            "bytes": list(self.names.bytes_of(token)),
        }


class ToolFormat(ChatFormat):
    """Answers of chats that may call tools.

    Args:
        use: how the text of an answer is read.
    """

    def __init__(
        self,
        model: str,
        names: TokenNames,
        use: ToolUse,
        *,
        with_scores: bool,
        with_tokens: bool,
    ) -> None:
        super().__init__(model, names, with_scores=with_scores, with_tokens=with_tokens)
        self.use = use
        self._streams: dict[int, ToolStream] = {}

    def whole_choice(self, choice: Choice) -> Json:
        content, calls = self.use.read(choice.text)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = calls
        return self._choice(
            choice,
            message=message,
            logprobs=self._logprobs(choice.scores),
            finish_reason=self.use.finish_reason(choice.finish_reason, calls),
        )

    def piece_choice(self, choice: Choice, piece: Piece) -> Json:
        if choice.index not in self._streams:
            self._streams[choice.index] = ToolStream(self.use)
        stream = self._streams[choice.index]
        delta = stream.push(piece.text, is_last=piece.finish_reason is not None)
        return self._choice(choice, delta=delta, logprobs=self._logprobs(piece.scores))

    def last_choice(self, choice: Choice) -> Json:
        calls = self._streams[choice.index].calls
        reason = self.use.finish_reason(choice.finish_reason, calls)
        return self._choice(choice, delta={}, finish_reason=reason)


class CompletionFormat(AnswerFormat):
    """Answers of `/v1/completions`."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        model: str,
        names: TokenNames,
        *,
        with_scores: bool,
        with_tokens: bool = False,
    ) -> None:
        super().__init__(model, names, with_scores=with_scores, with_tokens=with_tokens)
        # Characters of the tokens that each choice has sent, for `text_offset`.
        self._offsets: dict[int, int] = {}

    def whole_choice(self, choice: Choice) -> Json:
        return self._choice(choice, choice.text, choice.scores, choice.finish_reason)

    def piece_choice(self, choice: Choice, piece: Piece) -> Json:
        return self._choice(choice, piece.text, piece.scores, None)

    def last_choice(self, choice: Choice) -> Json:
        return self._choice(choice, "", [], choice.finish_reason)

    def _choice(
        self,
        choice: Choice,
        text: str,
        scores: Sequence[TokenScore],
        finish_reason: str | None,
    ) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, scores),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, choice: Choice, scores: Sequence[TokenScore]) -> Json | None:
        if not self.with_scores:
            return None
        texts = [self.names.text_of(score.token) for score in scores]
        offset = self._offsets.get(choice.index, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[choice.index] = offset

        top_logprobs = []
        for score in scores:
            likeliest = [*score.likeliest, (score.token, score.logprob)]
            top_logprobs.append({self.names.text_of(token): value for token, value in likeliest})
        return {
            "tokens": texts,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
