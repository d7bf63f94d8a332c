"""Law 2, empirically: thousands of decodes have the target's distribution; biased rules are
detected.

Sequences of 3 tokens over 4 are counted and compared with their exact probabilities by the
chi-square statistic. With 63 degrees of freedom an unbiased decoder exceeds 132 once in a million
runs (Wilson-Hilferty approximation). The seeds are fixed, so the tests are not flaky: the odds are
those of a change of seed.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from exact_rounds import BonusFromDraft, NoResidual

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    autoregressive_decode,
    speculative_decode,
)
from lightning_specdec.drafters import Draft, Drafter, DraftRequest, DraftState, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, RejectionSampling, Sampling

VOCAB = 4
NUM_NEW = 3
NUM_ROWS = 2048
BOUND = 132.0
PROMPT = [0, 2, 1]
SEQUENCES = list(itertools.product(range(VOCAB), repeat=NUM_NEW))
SAMPLING = Sampling(1.2)
TARGETS = {"rnn": (0, 1.5), "transformer": (2, 1.2), "llama": (4, 4.0)}
"""Seed and sharpness: all tokens have a fair chance, so that the statistic's cells are full."""


@functools.cache
def target(name: str) -> LanguageModel:
    seed, sharpness = TARGETS[name]
    return cases.MODELS[name](seed, vocab_size=VOCAB, sharpness=sharpness)


@functools.cache
def expected(name: str) -> list[float]:
    """Each sequence's exact count."""
    texts = torch.tensor([[*PROMPT, *sequence] for sequence in SEQUENCES])
    with torch.no_grad():
        logits = target(name)(texts[:, :-1]).logits.double()
    logprobs = (logits / SAMPLING.temperature).log_softmax(-1)
    new_logprobs = logprobs[:, len(PROMPT) - 1 :]
    new_tokens = texts[:, len(PROMPT) :, None]
    probs = new_logprobs.gather(2, new_tokens).sum((1, 2)).exp()
    assert float(probs.sum()) == pytest.approx(1)
    return (NUM_ROWS * probs).tolist()


def chi_square(name: str, rows: Sequence[Sequence[int]]) -> float:
    """The statistic of the decoded sequences."""
    assert len(rows) == NUM_ROWS
    counts = Counter(map(tuple, rows))
    assert set(counts) <= set(SEQUENCES)
    statistic = 0.0
    for sequence, expected_count in zip(SEQUENCES, expected(name), strict=True):
        statistic += (counts[sequence] - expected_count) ** 2 / expected_count
    return statistic


def decode(
    name: str,
    drafter: Drafter,
    rule: AcceptanceRule,
    *,
    window: Any = 2,
    chunk: int = 128,
) -> list[list[int]]:
    """The tokens of all rows, decoded in batches of `chunk`."""
    rows = []
    for first in range(0, NUM_ROWS, chunk):
        result = speculative_decode(
            target(name),
            drafter,
            [PROMPT] * chunk,
            max_new_tokens=NUM_NEW,
            num_draft_tokens=window,
            rule=rule,
            sampling=SAMPLING,
            indices=range(first, first + chunk),
        )
        rows += result.tokens
    return rows


@pytest.mark.parametrize("name", TARGETS)
def test_the_cells_of_the_statistic_are_full_enough(name: str) -> None:
    assert min(expected(name)) > 5
    assert max(expected(name)) > 3 * NUM_ROWS / len(SEQUENCES), "the target hardly prefers anything"


@pytest.mark.parametrize("name", TARGETS)
def test_standard_decoding_has_the_targets_distribution(name: str) -> None:
    result = autoregressive_decode(
        target(name), [PROMPT] * NUM_ROWS, max_new_tokens=NUM_NEW, sampling=SAMPLING
    )
    assert chi_square(name, result.tokens) < BOUND


@pytest.mark.quick_cases("rnn-near", "rnn-ragged", "transformer-heads", "llama-early_exit_own")
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *(
            ("rnn", kind)
            for kind in ("near", "unrelated", "hotter", "certain", "ragged", "ngram", "cross")
        ),
        *(("transformer", kind) for kind in ("unrelated", "heads", "block")),
        *(("llama", kind) for kind in ("early_exit", "early_exit_own", "early_exit_hotter", "mtp")),
    ],
)
def test_whole_decodes_under_rejection_sampling_have_the_targets_distribution(
    name: str, drafter: str
) -> None:
    rows = decode(name, cases.DRAFTERS[drafter](target(name)), RejectionSampling())
    assert chi_square(name, rows) < BOUND


@pytest.mark.parametrize(
    ("name", "drafter"), [("rnn", "near"), ("rnn", "ngram"), ("llama", "early_exit")]
)
def test_whole_decodes_with_adaptive_windows_have_the_targets_distribution(
    name: str, drafter: str
) -> None:
    window = AdaptiveWindow(Calibration((1, 3), (1.0, 1.2), (0.0, 0.0), 0.0, 0.2, 0.0))
    rows = decode(name, cases.DRAFTERS[drafter](target(name)), RejectionSampling(), window=window)
    assert chi_square(name, rows) < BOUND


class Overconfident(ModelDrafter):
    """Proposes its argmax and reports its softmax, as a well-known library did."""

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, replace(request, wants_logits=True), windows, Sampling(0.0))
        assert draft.logits is not None
        return Draft(draft.tokens, draft.lengths, sampling.probs(draft.logits))


@pytest.mark.parametrize(
    "bias", ["no residual", "bonus from the draft", "argmax reported as softmax"]
)
def test_biased_decodes_are_detected(bias: str) -> None:
    draft = cases.MODELS["rnn"](8, vocab_size=VOCAB)
    rules = {"no residual": NoResidual, "bonus from the draft": BonusFromDraft}
    drafter = ModelDrafter(draft) if bias in rules else Overconfident(draft)
    rows = decode("rnn", drafter, rules.get(bias, RejectionSampling)())
    assert chi_square("rnn", rows) > 2 * BOUND
