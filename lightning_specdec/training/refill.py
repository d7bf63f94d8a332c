"""Many prompts through one session: rows join as others end, so that the batch stays full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.inference import Row, Session, Window
from lightning_specdec.inference.windows import Plan
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling

MOST_LEFT = 1 / 2
"""Of a batch that others may join: docs/log.md has the figures."""


class NoGuesses(Window):
    """Standard decoding: rounds that guess nothing."""

    largest = 0

    def plan(self, *, jointly: bool) -> Plan:
        return _NoPlan()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "NoGuesses"}


class _NoPlan(Plan):
    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [0] * len(rows)


def continue_all(
    target: LanguageModel,
    prompts: Mapping[int, Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    window: Window,
    sampling: Sampling,
    eos: Sequence[int],
    seed: int,
    watch: Callable[[int, int], None] = lambda num_tokens, num_ended: None,
) -> dict[int, list[int]]:
    """The new tokens of every prompt, by its number.

    Theory: a round in which rows join has the target read, for every row of the batch, as many tokens as the longest
    new prompt has. So prompts of like lengths join together, and they wait until half the batch has ended; very long
    ones until the new tokens that the free places may hold are as many as those that the other rows read in vain.
    Meanwhile the batch shrinks to powers of two, and a round costs little more than its rows do. All of this follows
    from the prompts and the rows alone, not from the clock, so the same prompts make the same batches.

    Args:
        prompts: by the numbers that key their noise.
        max_new_tokens: new tokens of each row at most.
        batch_size: rows that are decoded together at most.
        window: how many tokens the n-gram look-up guesses.
        eos: tokens that end a row, and are kept.
        watch: is told of each round how many tokens are new and how many rows have ended.
    """
    waiting = sorted(
        prompts, key=lambda number: (-len(prompts[number]), number)
    )  # taken from the end, short ones first
    session = Session(
        target,
        NGramDrafter(),
        max_length=max(map(len, prompts.values())) + max_new_tokens,
        sampling=sampling,
        num_draft_tokens=window,
        batch_size=min(batch_size, len(prompts)),
        eos=eos,
        seed=seed,
    )
    made: dict[int, list[int]] = {}
    num_live = 0
    while waiting or num_live:
        joining = waiting[num_live - batch_size :] if num_live < batch_size else []
        few = num_live <= MOST_LEFT * batch_size
        if joining and few and num_live * len(prompts[joining[0]]) <= len(joining) * max_new_tokens:
            for number in reversed(joining):
                session.add(prompts[number], max_new_tokens=max_new_tokens, index=number)
            del waiting[-len(joining) :]
        events = session.step()
        ended = [row for row, _ in events if not row.live]
        for row in ended:
            made[row.index] = row.text[row.prompt_length :]
            session.release(row)
        num_live = len(events) - len(ended)
        watch(sum(len(tokens) for _, tokens in events), len(ended))
    return made
