"""Lookup with a fallback: each row has tokens of one of the two, and neither affects the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cases
import pytest
import test_whole_decodes
import torch
from test_whole_decodes import BOUND, NUM_NEW, NUM_ROWS, SAMPLING, chi_square, expected
from test_whole_decodes import target as whole_target

from lightning_specdec.decoding import Session, open_session, speculative_decode
from lightning_specdec.drafters import (
    Draft,
    Drafter,
    DraftRequest,
    DraftState,
    EarlyExitDrafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
    TargetContext,
    known_tokens,
    last_two_tokens_of,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import EpsilonThreshold, RejectionSampling, Sampling

LOOPS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 6, 4, 6, 4, 6]]
PROMPTS = [*LOOPS, [3, 9, 7], [8, 2, 10, 1, 8, 2]]
"""Two that repeat themselves, one that does not, and one that begins to."""

FALLBACKS: dict[str, tuple[str, Callable[[LanguageModel], Drafter]]] = {
    "model": ("rnn", cases.DRAFTERS["near"]),
    "hotter": ("rnn", cases.DRAFTERS["hotter"]),
    "cross": ("rnn", cases.DRAFTERS["cross"]),
    "staged": ("rnn", cases.DRAFTERS["staged"]),
    "heads": ("transformer", cases.DRAFTERS["heads"]),
    "exit": ("llama", cases.DRAFTERS["early_exit"]),
    "staged exit": ("llama", cases.DRAFTERS["staged_exit"]),
}
"""Drafters to fall back to, each with a target."""


class Counted(ModelDrafter):
    """Records which rows it drafts for."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.drafted_rows: list[list[int]] = []

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        self.drafted_rows.append([row for row, window in enumerate(windows) if window])
        return super().propose(state, request, windows, sampling)


def start(texts: Sequence[Sequence[int]], **options: Any) -> DraftRequest:
    """The first round of these texts."""
    return DraftRequest(
        texts,
        last_two_tokens_of(texts, torch.device("cpu")),
        None,
        vocab_size=cases.VOCAB,
        **options,
    )


def propose(
    drafter: Drafter,
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    temperature: float = 0.0,
) -> Draft:
    """Guesses of a first round, at most three."""
    context = TargetContext(target, target.init_state(len(texts), 40))
    uniform = (
        torch.rand(len(texts), 3, generator=torch.Generator().manual_seed(1))
        if temperature
        else None
    )
    request = replace(start(texts), uniform=uniform)
    with torch.inference_mode():
        state = drafter.init_state(len(texts), 40, context)
        return drafter.propose(state, request, [3] * len(texts), Sampling(temperature))


@pytest.mark.parametrize("prompts", [LOOPS, LOOPS[:1]], ids=["batch", "one row"])
def test_if_the_lookup_finds_something_for_every_row_the_fallback_does_not_run(
    prompts: list[list[int]],
) -> None:
    target = cases.target("rnn")
    fallback = Counted(cases.related(target))
    session = open_session(
        target, NGramWithFallback(NGramDrafter(), fallback), prompts, max_new_tokens=8
    )
    session.step()
    assert not fallback.drafted_rows and session.num_draft_calls == 0
    assert all(row.rounds[0].drafted for row in session.live)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_was_drawn_from_the_distribution_that_is_reported(temperature: float) -> None:
    """It is one-hot for rows with a match, and the fallback's for the others."""
    target = cases.target("rnn")
    lookup = cases.LONG_MATCHES
    fallback = cases.drafter("near", "rnn")
    draft = propose(NGramWithFallback(lookup, fallback), target, PROMPTS, temperature)
    fallback_draft = propose(fallback, target, PROMPTS, temperature)
    lookup_draft = propose(lookup, target, PROMPTS)
    assert draft.lengths is not None and draft.lengths.tolist() == [3, 3, 3, 3]
    assert lookup_draft.lengths is not None and lookup_draft.lengths.tolist() == [3, 3, 0, 3]

    matched = [0, 1, 3]
    assert torch.equal(draft.tokens[matched], lookup_draft.tokens[matched])
    assert torch.equal(draft.tokens[2], fallback_draft.tokens[2])
    assert (draft.probs is None) == (fallback_draft.probs is None) == (temperature == 0)
    if draft.probs is not None and fallback_draft.probs is not None:
        one_hot = torch.nn.functional.one_hot(draft.tokens, cases.VOCAB).float()
        assert torch.equal(draft.probs[matched], one_hot[matched])
        assert torch.equal(draft.probs[2], fallback_draft.probs[2])


@pytest.mark.parametrize("kind", FALLBACKS)
def test_rows_of_a_batch_have_the_drafts_that_each_has_alone(kind: str) -> None:
    """So the fallback forgets its draft where the lookup's tokens went to the target."""
    name, make = FALLBACKS[kind]
    target = cases.target(name)
    drafter = NGramWithFallback(cases.LONG_MATCHES, make(target))
    mixed: list[Any] = []
    joined = known_tokens._joined

    def noted(*drafts: Any) -> Draft:
        mixed.append(drafts)
        return joined(*drafts)

    options: dict[str, Any] = {
        "max_new_tokens": 16,
        "rule": RejectionSampling(),
        "sampling": Sampling(0.7),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_tokens, "_joined", noted)
        batch = speculative_decode(target, drafter, PROMPTS, **options)
        assert len(mixed) > 1, "the rows are alike"
        for index, row in enumerate(batch.rows):
            del mixed[:]
            alone = speculative_decode(
                target, drafter, PROMPTS[index], indices=[index], **options
            ).rows[0]
            assert row.rounds == alone.rounds and row.tokens == alone.tokens and not mixed


@pytest.mark.parametrize("kind", ["near", "transformer", "staged", "early_exit"])
def test_a_row_has_the_draft_of_the_lookup_or_that_of_the_fallback_alone(
    kind: str,
) -> None:
    """Whatever rounds it was not asked in."""
    name = cases.target_of(kind)
    target, fallback, lookup = cases.target(name), cases.drafter(kind, name), cases.LONG_MATCHES
    num_rounds = {"found": 0, "guessed": 0}
    drafter = NGramWithFallback(lookup, fallback)
    session = open_session(target, drafter, PROMPTS[1:3], max_new_tokens=20, num_draft_tokens=3)
    while session.live:
        rows = {row: list(row.text) for row in session.live}
        session.step()
        for row, text in rows.items():
            if row.live and row.rounds[-1].drafted:
                found = any(lookup.look_up(lookup.init_state(1, 40), start([text]), [3]))
                fresh = open_session(
                    target,
                    lookup if found else fallback,
                    text,
                    max_new_tokens=9,
                    num_draft_tokens=3,
                )
                fresh.step()
                expected = fresh.live[0].rounds[0].drafted
                assert (
                    row.rounds[-1].drafted
                    == expected[: row.remaining + row.rounds[-1].num_accepted]
                )
                num_rounds["found" if found else "guessed"] += 1
    assert min(num_rounds.values()) > 1


def test_an_exit_reads_no_prompt_twice_if_the_lookup_drafts() -> None:
    """The outputs of its layers are kept: for the text, and for a draft that the target reads."""
    target = cases.target("llama")
    draft = propose(NGramWithFallback(NGramDrafter(), EarlyExitDrafter(1)), target, PROMPTS[1:3])
    assert draft.exit_states is not None
    assert draft.exit_states.lengths == [len(PROMPTS[1]), len(PROMPTS[2]) + 2]


def decoded(drafter: Drafter) -> list[list[int]]:
    """Decode many rows of one prompt, for which the lookup has a match in the first round.

    Each batch also has one row for which it has none.
    """
    rows = []
    for start_index in range(0, NUM_ROWS, 128):
        result = speculative_decode(
            whole_target("rnn"),
            drafter,
            [*[test_whole_decodes.PROMPT] * 128, [0, 2, 1]],
            max_new_tokens=NUM_NEW,
            num_draft_tokens=2,
            rule=RejectionSampling(),
            sampling=SAMPLING,
            indices=[*range(start_index, start_index + 128), NUM_ROWS + start_index],
        )
        rows += result.tokens[:-1]
    return rows


def test_whole_decodes_have_the_targets_distribution_and_a_wrong_report_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Odds as in test_whole_decodes.py."""
    drafter = NGramWithFallback(NGramDrafter(), cases.DRAFTERS["unrelated"](whole_target("rnn")))
    joined = known_tokens._joined

    def misreported(looked_up: Draft, guessed: Draft, exit_states: None) -> Draft:
        draft = joined(looked_up, guessed, exit_states)
        assert (
            guessed.probs is not None
            and draft.probs is not None
            and guessed.probs.shape == draft.probs.shape
        )
        return replace(draft, probs=guessed.probs)

    monkeypatch.setattr(test_whole_decodes, "PROMPT", [0, 2, 0])
    expected.cache_clear()
    try:
        assert chi_square("rnn", decoded(drafter)) < BOUND
        monkeypatch.setattr(known_tokens, "_joined", misreported)
        assert chi_square("rnn", decoded(drafter)) > 2 * BOUND
    finally:
        expected.cache_clear()


@pytest.mark.parametrize("kind", ["near", "unrelated"])
def test_on_a_text_that_repeats_itself_rounds_yield_at_least_what_the_fallback_yields(
    kind: str,
) -> None:
    target = cases.MODELS["rnn"](2)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "weight_hh" in name:
                # The next token depends on the last one only, so the text soon repeats itself.
                weight.zero_()
    fallback = cases.DRAFTERS[kind](target)
    options: dict[str, Any] = {"max_new_tokens": 40, "num_draft_tokens": 4}
    alone = speculative_decode(target, fallback, PROMPTS, **options)
    joined = speculative_decode(
        target, NGramWithFallback(cases.LONG_MATCHES, fallback), PROMPTS, **options
    )
    assert joined.tokens == alone.tokens
    assert (joined.block_efficiency or 0) >= (alone.block_efficiency or 9)
    assert (joined.num_draft_calls or 9) < (alone.num_draft_calls or 0) / 2


def test_it_needs_of_a_session_what_its_fallback_needs() -> None:
    target = cases.target("transformer")
    heads, hotter = (
        NGramWithFallback(NGramDrafter(), cases.DRAFTERS[kind](target))
        for kind in ("heads", "hotter")
    )
    assert list(heads.features(target)) == list(heads.fallback.features(target)) != []
    assert heads.inside_target and not hotter.inside_target
    assert hotter.needs_noise(Sampling(0.0)) and not heads.needs_noise(Sampling(0.0))
    assert heads.max_draft_tokens is None and heads.fallback.max_draft_tokens == 3
    shortest = NGramWithFallback.for_target(target, heads.fallback, max_ngram=1)
    assert shortest.settings.min_ngram == 1, "its default is no larger than what is given"
    with pytest.raises(ValueError, match="NGramWithFallback has none: use another rule"):
        Session(target, heads, max_length=9, rule=EpsilonThreshold())
    with pytest.raises(ValueError, match="the draft is for"):
        Session(cases.MODELS["transformer"](1, vocab_size=7), heads, max_length=9)
