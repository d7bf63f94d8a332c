"""A chat as messages, and as tokens by the model's template."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.text.tokenizer import Message, TextTokenizer


class Chat:
    """What was said.

    A template renders the whole chat anew for each turn. Nearly every template only adds to its last rendering, so a
    conversation that continues with it reads little more than the question.

    Args:
        tokenizer: of the model, with a chat template.
        system: the system message; the template's own when None.
    """

    def __init__(self, tokenizer: TextTokenizer, *, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._question: Message | None = None

    def ask(self, content: str) -> list[int]:
        """The tokens of the whole chat with this question, up to where the answer begins.

        A question that is followed by another one instead of an answer is dropped.

        Raises:
            ValueError: the template does not take this chat.
        """
        question = {"role": "user", "content": content}
        tokens = self.tokenizer.encode_chat([*self.messages, question])
        self._question = question
        return tokens

    def answer(self, tokens: Sequence[int], *, num_cut: int = 0) -> str:
        """Add the model's answer, without the last `num_cut` bytes of its text; gives the text."""
        assert self._question is not None, "an answer follows a question"
        stream = self.tokenizer.stream()
        text = stream.push(tokens, hold=num_cut) + stream.finish(drop=num_cut)
        self.messages += [self._question, {"role": "assistant", "content": text}]
        self._question = None
        return text
