"""A row of results: one run of one cell. What is written, what is read, and what a row of this format must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

FORMAT = 1
"""Counted up when rows or manifests change, so that results of another version are not misread."""


@dataclass(kw_only=True)
class ResultRow:
    """One repeat of one cell. Counts and seconds, no rate: every rate follows from them.

    Args:
        cell: a hash of all that decides its outcome.
        draft_kind: the draft's class.
        rule: with its arguments.
        error: what it failed by; then there are no figures.
        window: of a window that chooses for itself, all that it goes by.
        setting: of transformers' ways.
        commit, versions, date: of the program that ran it, and when it had finished (UTC).
        seconds: of all prompts, by the decodes' own clocks.
        histogram: row-rounds that kept 0, 1, ... guesses.
        tested_at, accepted_at: by the guess's position in its window.
        token_seconds: each token's own since the last one, by prompt; the tokens of a round come together.
        peak_memory_bytes: of each phase where they can be told apart.
        same_tokens: whether they are standard decoding's; None where they may differ.
        num_changed: under a lossy rule, tokens kept where the target drew another one.
    """

    cell: str
    repeat: int
    pair: str
    way: str
    draft: str | None
    draft_kind: str | None
    domain: str
    num_draft_tokens: int | str | None
    temperature: float
    batch_size: int
    rule: str | None
    lossless: bool | None
    seed: int
    max_new_tokens: int
    error: str | None = None
    window: dict[str, Any] | None = None
    setting: dict[str, Any] | None = None
    commit: str | None = None
    versions: dict[str, str] | None = None
    date: str | None = None
    seconds: float | None = None
    num_prompts: int | None = None
    num_new_tokens: int | None = None
    phase_seconds: dict[str, float] | None = None
    num_target_calls: int | None = None
    num_draft_calls: int | None = None
    num_proposed: int | None = None
    num_tested: int | None = None
    num_accepted: int | None = None
    histogram: list[int] | None = None
    tested_at: list[int] | None = None
    accepted_at: list[int] | None = None
    num_row_rounds: int | None = None
    prompt_ids: list[str] | None = None
    prompt_seconds: list[float] | None = None
    prompt_new_tokens: list[int] | None = None
    token_seconds: list[list[float]] | None = None
    time_to_first_token: list[float] | None = None
    peak_memory_bytes: dict[str, int] | int | None = None
    gpu_utilization: float | None = None
    same_tokens: bool | None = None
    tokens_sha256: str | None = None
    num_changed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a line of a file."""
        return {"format": FORMAT, **vars(self)}


SETTINGS = (*(each.name for each in fields(ResultRow) if each.default is MISSING), "error")
"""What is known of a run before it is measured, and whether it failed."""


def lacking(row: Mapping[str, Any]) -> list[str]:
    """What a row should say and does not: it says all, one that failed too."""
    return [each.name for each in fields(ResultRow) if each.name not in row]
