"""Law 9: a metric is its formula, from rounds counted by hand."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import ModuleType

import cases
import pytest
import torch

from lightning_specdec.decoding import (
    PHASES,
    Counts,
    Request,
    Round,
    RowResult,
    autoregressive_decode,
    open_session,
)
from lightning_specdec.decoding.timing import PhaseTimer
from lightning_specdec.rules import Sampling

ROOT = Path(__file__).parent.parent
RECORDS = sorted(path.stem for path in (ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize(
    ("drafted", "num_accepted", "next_token", "added", "counts"),
    [
        # All draft tokens accepted, and the bonus token.
        ([3, 4, 5], 3, 6, [3, 4, 5, 6], (3, 3, 3)),
        # The second one rejected and corrected.
        ([3, 4, 5], 1, 6, [3, 6], (3, 2, 1)),
        # The first one rejected.
        ([3, 4, 5], 0, 6, [6], (3, 1, 0)),
        # No draft.
        ([], 0, 6, [6], (0, 0, 0)),
        # Stopped by an accepted draft token: tokens after it are not counted.
        ([3, 9, 5], 3, 6, [3, 9], (2, 2, 2)),
        # Stopped by a correction: the rejected draft token counts as tested.
        ([3, 4, 5], 1, 9, [3, 9], (2, 2, 1)),
        # Stopped by the bonus token.
        ([3, 4, 5], 3, 9, [3, 4, 5, 9], (3, 3, 3)),
        # Stopped by the last draft token: there is no bonus token.
        ([3, 4, 9], 3, 6, [3, 4, 9], (3, 3, 3)),
    ],
)
def test_a_round_counts_what_is_in_the_output(
    drafted: list[int],
    num_accepted: int,
    next_token: int,
    added: list[int],
    counts: tuple[int, int, int],
) -> None:
    row = Request(0, [1, 2], max_new_tokens=10, eos=frozenset([9]), speculative=True)
    assert row.commit(drafted, num_accepted, next_token, seconds=0.0) == added
    assert row.stop_reason == ("eos" if 9 in added else "")

    proposed, tested, accepted = counts
    assert row.counts is not None
    assert row.counts.num_proposed == proposed
    assert row.counts.num_tested == tested
    assert row.counts.num_accepted == accepted
    assert row.counts.histogram == [0] * accepted + [1]
    ending = None if len(added) == accepted else added[-1]
    assert row.rounds == [Round(drafted[:proposed], accepted, ending)]


def counts_from_rounds(row: RowResult) -> Counts:
    """Count a row's rounds again, and check that they contain its tokens."""
    assert row.rounds is not None
    counts = Counts()
    tokens: list[int] = []
    for round_ in row.rounds:
        num_drafted = len(round_.drafted)
        tokens += round_.drafted[: round_.num_accepted]
        num_tested = round_.num_accepted
        if round_.next_token is not None:
            # The rejected draft token, if there is one, was tested too.
            tokens.append(round_.next_token)
            num_tested = min(round_.num_accepted + 1, num_drafted)
        counts.record(num_drafted, num_tested, round_.num_accepted)
    assert tokens == row.tokens
    return counts


@pytest.mark.parametrize("rule", cases.RULES)
@pytest.mark.parametrize(
    ("target", "drafter"), cases.pairs(["near", "ragged", "early_exit"], ["rnn"])
)
def test_a_result_can_be_counted_again_from_its_rounds(
    target: str,
    drafter: str,
    rule: str,
) -> None:
    result = cases.decode(
        target,
        drafter,
        max_new_tokens=12,
        rule=rule,
        sampling=Sampling(1.0),
        eos=cases.EOS,
        logprobs=True,
    )
    total = Counts()
    for row in result.rows:
        total.add(counts_from_rounds(row))
        assert row.rounds is not None
        assert row.counts is not None
        assert row.logprobs is not None
        assert len(row.tokens) == len(row.token_seconds) == len(row.logprobs) <= 12
        assert row.token_seconds == sorted(row.token_seconds)
        assert len(row.rounds) == row.num_rounds == sum(row.counts.histogram)

    counts = result.counts
    assert counts is not None
    total.num_changed = counts.num_changed
    assert counts == total
    num_rounds = sum(row.num_rounds for row in result.rows)
    assert result.num_new_tokens == sum(len(row.tokens) for row in result.rows)
    assert result.block_efficiency == result.num_new_tokens / num_rounds
    assert result.acceptance_rate == total.num_accepted / total.num_tested
    assert counts.draft_utilization == total.num_accepted / total.num_proposed
    assert result.num_target_calls == max(row.num_rounds for row in result.rows)
    assert result.tokens_per_second == result.num_new_tokens / result.seconds


def test_counts_of_nothing_have_no_rate() -> None:
    result = autoregressive_decode(
        cases.target("rnn"), cases.PROMPTS, max_new_tokens=7, eos=cases.EOS
    )
    for name in (
        "counts",
        "acceptance_rate",
        "num_changed",
        "rule",
        "num_draft_calls",
        "num_draft_tokens",
    ):
        assert getattr(result, name) is None
    assert result.block_efficiency == 1.0
    assert result.lossless
    assert result.num_target_calls == max(len(row.tokens) for row in result.rows)

    without_drafts = cases.decode("rnn", "near", max_new_tokens=1)
    assert without_drafts.acceptance_rate is None
    assert without_drafts.block_efficiency == 1.0
    assert without_drafts.counts is not None
    assert without_drafts.counts.draft_utilization is None

    target = cases.target("rnn")
    drafter = cases.drafter("near", "rnn")
    session = open_session(target, drafter, cases.PROMPTS, max_new_tokens=3)
    without_rounds = session.result()
    assert without_rounds.tokens == [[]] * len(cases.PROMPTS)
    assert without_rounds.block_efficiency is None


def test_a_gpus_timer_adds_up_what_lies_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock of CUDA's events, so that no GPU is needed."""
    clock = itertools.count()
    synchronized: list[torch.device] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.time = next(clock) ** 2

        def record(self, stream: str) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    timer = PhaseTimer(torch.device("cuda:0"))
    for phase in PHASES:
        timer.lap(phase)
    assert not synchronized, "a lap waits for nothing"
    assert timer.seconds() == timer.seconds() == {"draft": 1, "verify": 3, "accept": 5, "rest": 7}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


def test_every_table_that_is_shown_is_made_from_its_record(tables: ModuleType) -> None:
    shown_names = set()
    for path in tables.pages():
        text = path.read_text()
        assert tables.renewed(text) == text, path
        shown_names.update(tables.names(text))
    assert shown_names == set(tables.TABLES), "every table is shown"


@pytest.mark.parametrize(
    ("words", "expected_names"),
    [
        ("", ["eagle", "twice"]),
        ("--also x", []),
        ("--also x --only eagle x", ["eagle"]),
        ("--only twice", ["twice"]),
    ],
)
def test_a_comparison_with_other_draft_files_trains_only_those_that_are_named(
    words: str,
    expected_names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    comparison = importlib.import_module("draft_comparison")
    trained_names: list[str] = []
    monkeypatch.setattr(comparison, "KINDS", {"eagle": None, "twice": None})
    monkeypatch.setattr(comparison, "train", lambda names, options: trained_names.extend(names))
    monkeypatch.setattr("sys.argv", ["draft_comparison.py", str(tmp_path), *words.split()])
    comparison.main()
    assert trained_names == expected_names


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_how_it_was_made(name: str) -> None:
    path = ROOT / "docs" / "results" / f"{name}.json"
    manifest = json.loads(path.read_text())["manifest"]
    for key in ("torch", "processor", "threads", "commit", "options"):
        assert manifest[key] not in (None, ""), key
