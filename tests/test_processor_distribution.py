"""Law 2 with logits processors: a round, and whole decodes, have the distribution of the processed target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import cases
import pytest
import test_distribution as exact
import torch
from test_whole_decodes import BOUND, NUM_NEW, NUM_ROWS, PROMPT, SEQUENCES
from test_whole_decodes import target as tiny_target
from torch import Tensor
from transformers.generation import logits_process as theirs

from lightning_specdec.inference import speculative_decode
from lightning_specdec.rules import LogitsProcessor, RejectionSampling, Sampling


def fewer_repeats(prefix: Tensor, scores: Tensor) -> Tensor:
    """A penalty that depends on the whole prefix, in the order of its tokens."""
    weights = torch.linspace(0.2, 0.5, prefix.shape[1])
    return scores.scatter_add(1, prefix, -weights[None])


@pytest.mark.parametrize("processor", [fewer_repeats, theirs.RepetitionPenaltyLogitsProcessor(2.5)])
@pytest.mark.parametrize("sampling", exact.SAMPLINGS)
def test_a_round_with_processors_has_exactly_the_processed_targets_distribution(
    sampling: str, processor: LogitsProcessor
) -> None:
    own, start = replace(exact.SAMPLINGS[sampling], processors=(processor,)), [1, 1, 0]
    target, draft = exact.world(1), exact.world(101)
    texts, guesses = [start] * len(exact.DRAFTS), [list(each) for each in exact.DRAFTS]
    target_logits = own.process(exact.along(target, exact.WINDOW + 1), texts, guesses)
    draft_logits = own.process(exact.along(draft, exact.WINDOW), texts, [each[:-1] for each in guesses])
    measured = exact.Measured(
        RejectionSampling(), target_logits, draft_logits, own, exact.Proposal(own, own), exact.WINDOW
    )
    law = measured.law(exact.guess_probs(own, draft_logits))
    by_definition = {
        prefix: processor(torch.tensor([[*start, *prefix]]), logits[None])[0] for prefix, logits in target.items()
    }
    expected = exact.block_probs(by_definition, own)
    probs = {prefix: own.probs(logits).double() for prefix, logits in by_definition.items()}
    for block in exact.BLOCKS:
        total = 0.0
        for n in range(1, exact.WINDOW + 2):
            rest = law[block[:n]]
            for i in range(n, exact.WINDOW + 1):
                rest *= float(probs[block[:i]][block[i]])
            total += rest
        assert total == pytest.approx(expected[block], abs=exact.TOLERANCE)


def chi_square(sampling: Sampling, rows: Sequence[Sequence[int]]) -> float:
    """The statistic of sequences decoded from the tiny target against the processed one, position by position."""
    expected = []
    for sequence in SEQUENCES:
        probability = 1.0
        for i, token in enumerate(sequence):
            ids = torch.tensor([[*PROMPT, *sequence[:i]]])
            with torch.no_grad():
                scores = tiny_target("rnn")(ids).logits[:, -1]
            for processor in sampling.processors:
                scores = processor(ids, scores)
            probability *= float((scores.double() / sampling.temperature).softmax(-1)[0, token])
        expected.append(NUM_ROWS * probability)
    assert sum(expected) == pytest.approx(NUM_ROWS) and min(expected) > 4
    counts = Counter(map(tuple, rows))
    return sum((counts[s] - wanted) ** 2 / wanted for s, wanted in zip(SEQUENCES, expected, strict=True))


@pytest.mark.parametrize("drafter", ["near", "ngram"])
def test_whole_decodes_with_processors_have_the_processed_targets_distribution(drafter: str) -> None:
    sampling, rows = Sampling(1.2, processors=[fewer_repeats]), []
    for first in range(0, NUM_ROWS, 256):
        rows += speculative_decode(
            tiny_target("rnn"),
            cases.DRAFTERS[drafter](tiny_target("rnn")),
            [PROMPT] * 256,
            max_new_tokens=NUM_NEW,
            num_draft_tokens=2,
            rule=RejectionSampling(),
            sampling=sampling,
            indices=range(first, first + 256),
        ).tokens
    assert chi_square(sampling, rows) < BOUND
    assert chi_square(Sampling(1.2), rows) > BOUND, "the processor hardly changes anything"
