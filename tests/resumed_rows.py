"""A law of conversations that several families of models share."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.decoding import Session, autoregressive_decode
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

MAX_LENGTH = 80
NUM_NEW = 10


def check_resumed_conversation(
    target: LanguageModel, drafter: Drafter, prompt: Sequence[int]
) -> None:
    """Assert that a row that is resumed with more tokens equals a fresh one."""
    session = Session(target, drafter, max_length=MAX_LENGTH, max_new_tokens=NUM_NEW)
    row = session.add(prompt)
    while session.step():
        pass
    longer_prompt = [*row.text, 11, 12, 13]
    row = session.resume(row, longer_prompt)
    while session.step():
        pass
    expected = autoregressive_decode(target, [longer_prompt], max_new_tokens=NUM_NEW).tokens[0]
    assert row.text[len(longer_prompt) :] == expected
