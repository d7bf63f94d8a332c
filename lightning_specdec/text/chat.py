"""A chat as one growing text: each turn's tokens go behind those that are there, which stay as they were decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_specdec.text.tokenizer import Message, TextTokenizer


@dataclass(frozen=True)
class _Turn:
    """The chat as it stands after a question, or after its answer.

    Args:
        messages: all of it.
        rendered: what the template made of all up to the question.
        tokens: of everything.
        text: of the answer.
        rest: the end of that text, if a stop string cut through a token: it has no tokens yet.
        ending: the EOS token that the answer ended with.
    """

    messages: list[Message]
    rendered: str
    tokens: list[int]
    text: str = ""
    rest: str = ""
    ending: int | None = None


class Chat:
    """What was said, as messages and as tokens.

    A template renders the whole chat anew for each turn, and a tokenizer may cut an answer into other tokens than the
    model wrote. But nearly every template only adds to its last rendering, so only what stands behind the answer is
    encoded, and appended. Where a template rewrites what it rendered before, the whole chat is encoded again.

    Args:
        tokenizer: of the model, with a chat template.
        system: the system message; the template's own when None.
    """

    def __init__(self, tokenizer: TextTokenizer, *, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._asked: _Turn | None = None
        self._answered: _Turn | None = None

    def ask(self, content: str) -> list[int]:
        """The tokens of the whole chat with this question, up to where the answer begins.

        A question that is followed by another one instead of an answer is dropped.

        Raises:
            ValueError: the template does not take this chat.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        rendered = self.tokenizer.render_chat(messages)
        tokens = None if self._answered is None else self._appended(self._answered, rendered)
        if tokens is None:
            tokens = self.tokenizer.encode_rendered(rendered)
        self._asked = _Turn(messages, rendered, tokens)
        return list(tokens)

    def answer(self, tokens: Sequence[int], *, num_cut: int = 0) -> str:
        """Add the model's answer, without the last `num_cut` bytes of its text; gives the text."""
        assert self._asked is not None, "an answer follows a question"
        asked, kept, rest, left = self._asked, list(tokens), "", num_cut
        while left > 0 and kept:  # tokens that end before the text's last bytes
            piece = self.tokenizer.vocabulary.join([kept.pop()])
            rest = piece[:-left].decode(errors="ignore") if len(piece) > left else ""
            left -= len(piece)
        stream = self.tokenizer.stream()
        text = stream.push(tokens, hold=num_cut) + stream.finish(drop=num_cut)
        ending = kept[-1] if kept and kept[-1] in self.tokenizer.eos else None
        self.messages = [*asked.messages, {"role": "assistant", "content": text}]
        self._answered = _Turn(self.messages, asked.rendered, [*asked.tokens, *kept], text, rest, ending)
        self._asked = None
        return text

    def _appended(self, before: _Turn, rendered: str) -> list[int] | None:
        """The tokens so far and those of what the rendering has behind the answer; None where it rewrites it."""
        behind, text = rendered.removeprefix(before.rendered), before.text.strip()
        if not rendered.startswith(before.rendered):
            return None
        if behind.startswith(before.text):
            behind = behind[len(before.text) :]
        elif behind.lstrip().startswith(text):  # templates trim answers, or set them off by a space
            behind = behind.lstrip()[len(text) :]
        else:
            return None
        if before.ending is None:
            return [*before.tokens, *self._encode(before.rest + behind, after="")]
        end = self.tokenizer.decode([before.ending], show_special=True)
        if behind.lstrip().startswith(end):  # the answer's own end is the template's
            return [*before.tokens, *self._encode(behind.lstrip()[len(end) :], after=end)]
        return [*before.tokens[:-1], *self._encode(behind, after="")]

    def _encode(self, text: str, *, after: str) -> list[int]:
        """The tokens of a text that stands behind another one, where some tokenizers encode it otherwise."""
        for context in (after, "a"):
            before = self.tokenizer.encode_rendered(context)
            tokens = self.tokenizer.encode_rendered(context + text)
            if context and tokens[: len(before)] == before:
                return tokens[len(before) :]
        return self.tokenizer.encode_rendered(text)
