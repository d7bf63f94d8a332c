"""Logits processors: all laws hold for the processed distribution of the target.

Processors of transformers are used unchanged. The oracles are standard decoding by its definition,
and exact enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cases
import exact_rounds as exact
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.rules import LogitsProcessor, RejectionSampling, Sampling

VOCAB = cases.VOCAB
PENALTY = theirs.RepetitionPenaltyLogitsProcessor(1.6)
PREFIXES: list[list[int]] = []
KINDS: dict[str, tuple[LogitsProcessor, ...]] = {
    "repetition": (PENALTY,),
    "no_repeat": (theirs.NoRepeatNGramLogitsProcessor(2),),
    "min_length": (theirs.MinLengthLogitsProcessor(9, cases.EOS, device="cpu"),),
    "sequence_bias": (
        theirs.SequenceBiasLogitsProcessor([[[3], 4.0], [[7, 2], 6.0], [[1, 2, 3], -9.0]]),
    ),
    "all": (
        theirs.RepetitionPenaltyLogitsProcessor(1.3),
        theirs.NoRepeatNGramLogitsProcessor(3),
        theirs.MinLengthLogitsProcessor(8, cases.EOS, device="cpu"),
        theirs.NoBadWordsLogitsProcessor([[4], [2, 2]]),
    ),
}
HOT = {
    "t1": Sampling(1.0, processors=KINDS["repetition"]),
    "top_p": Sampling(0.8, top_p=0.8, processors=KINDS["all"]),
}


def slow_decode(
    target: str,
    prompt: Sequence[int],
    processors: Sequence[LogitsProcessor],
    num_new: int,
) -> list[int]:
    """Greedy decoding by definition: read and process the whole text of one row for each token."""
    text = list(prompt)
    while len(text) < len(prompt) + num_new:
        ids = torch.tensor([text])
        with torch.no_grad():
            scores = cases.target(target)(ids).logits[:, -1]
        for processor in processors:
            scores = processor(ids, scores)
        text.append(int(scores.argmax()))
        if text[-1] == cases.EOS:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", cases.MODELS)
def test_standard_decoding_with_processors_is_its_definition(target: str, kind: str) -> None:
    sampling = Sampling(processors=KINDS[kind])
    result = autoregressive_decode(
        cases.target(target), cases.PROMPTS, max_new_tokens=10, sampling=sampling, eos=cases.EOS
    )
    assert result.tokens == [
        slow_decode(target, prompt, KINDS[kind], 10) for prompt in cases.PROMPTS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_processors_of_these_laws_do_change_the_output(kind: str) -> None:
    with_them, without = (
        [cases.standard(target, sampling, 10).tokens for target in cases.MODELS]
        for sampling in (Sampling(processors=KINDS[kind]), Sampling())
    )
    assert with_them != without


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "kind", "rule"),
    [
        (*pair, *turn)
        for pair in cases.pairs(targets=["rnn", "transformer"])
        for turn in cases.in_turn(
            cases.few(["repetition", "sequence_bias", "all"], *pair), cases.LOSSLESS, *pair
        )
    ],
)
def test_greedy_speculative_equals_autoregressive_with_processors(
    target: str,
    drafter: str,
    kind: str,
    rule: str,
) -> None:
    """Rules get processed logits only."""
    sampling = Sampling(processors=KINDS[kind])
    result = cases.decode(
        target,
        drafter,
        max_new_tokens=10,
        num_draft_tokens=4,
        rule=rule,
        sampling=sampling,
        eos=cases.EOS,
    )
    assert result.tokens == cases.standard(target, sampling, 10).tokens


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "hot"),
    [
        (*pair, hot)
        for pair in cases.pairs(targets=["rnn", "transformer"])
        for hot in cases.few([*HOT], *pair)
    ],
)
def test_exact_match_equals_autoregressive_with_processors_at_every_temperature(
    target: str,
    drafter: str,
    hot: str,
) -> None:
    result = cases.decode(target, drafter, max_new_tokens=10, sampling=HOT[hot], eos=cases.EOS)
    assert result.tokens == cases.standard(target, HOT[hot], 10).tokens


def dead_end(length: int) -> LogitsProcessor:
    """Forbids all tokens after texts of at least that length."""
    return lambda prefix, scores: (
        torch.full_like(scores, -torch.inf) if prefix.shape[1] >= length else scores
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(["near", "itself", "repeater", "ngram", "early_exit"], ["rnn"]),
)
def test_a_processor_that_leaves_no_token_ends_its_row_both_ways(
    target: str,
    drafter: str,
    temperature: float,
) -> None:
    model = cases.target(target)
    sampling = Sampling(temperature, processors=[dead_end(5)])
    for decode in (
        lambda: autoregressive_decode(model, [1, 2, 3], max_new_tokens=6, sampling=sampling),
        lambda: speculative_decode(
            model, cases.drafter(drafter, target), [1, 2, 3], max_new_tokens=6, sampling=sampling
        ),
    ):
        assert decode().rows[0].stop_reason == "failed"


def record(prefix: Tensor, scores: Tensor) -> Tensor:
    PREFIXES.append(prefix[0].tolist())
    return scores


def test_processors_get_the_unpadded_prefix_of_each_position() -> None:
    sampling = Sampling(processors=[record])
    PREFIXES.clear()
    logits = torch.randn(4, 3, VOCAB)
    processed = sampling.process(logits, [[5], [6, 7, 8], None, [9]], [[1, 2], [3], [4, 4], []])
    assert PREFIXES == [[5], [5, 1], [5, 1, 2], [6, 7, 8], [6, 7, 8, 3], [9]]
    assert torch.equal(processed, logits)


def test_no_processor_is_called_after_a_draft_token_that_a_lossless_rule_must_reject() -> None:
    never_four = theirs.SuppressTokensLogitsProcessor([4], device="cpu")
    sampling = Sampling(processors=[never_four, record])
    expected_prefixes = {
        True: [[1], [1, 2]],
        False: [[1], [1, 2], [1, 2, 4], [1, 2, 4, 3]],
    }
    for stop, prefixes in expected_prefixes.items():
        PREFIXES.clear()
        sampling.process(torch.zeros(1, 4, VOCAB), [[1]], [[2, 4, 3]], stop_at_impossible=stop)
        assert prefixes == PREFIXES


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    """It is built in, so the command line needs no transformers. It precedes other processors."""
    built_in = Sampling(0.7, repetition_penalty=1.6)
    of_transformers = Sampling(0.7, processors=[PENALTY])
    logits = torch.randn(3, 1, VOCAB)
    texts = [[1], [2, 3, 2], list(range(VOCAB))]
    assert torch.equal(built_in.process(logits, texts), of_transformers.process(logits, texts))
    penalty, *processors = replace(built_in, processors=[record]).processors
    assert type(penalty).__name__ == "RepetitionPenalty" and processors == [record]
    assert built_in.changed(repetition_penalty=None).processors == ()
    config = DecodingConfig(temperature=0.7, repetition_penalty=1.6, top_k=3, processors=(record,))
    assert Sampling.of(config) == Sampling(
        0.7, top_k=3, repetition_penalty=1.6, processors=[record]
    )
    assert Sampling.of(DecodingConfig.of(sampling=built_in)) == built_in


@pytest.mark.parametrize("answer", [lambda ids, scores: None, lambda ids, scores: scores[0]])
def test_a_processor_that_returns_no_scores_is_named(answer: LogitsProcessor) -> None:
    with pytest.raises(ValueError, match="must return scores"):
        Sampling(processors=[answer]).process(torch.zeros(1, 1, VOCAB), [[1]])


def fewer_repeats(prefix: Tensor, scores: Tensor) -> Tensor:
    """A penalty that depends on the whole prefix, in the order of its tokens."""
    weights = torch.linspace(0.2, 0.5, prefix.shape[1])
    return scores.scatter_add(1, prefix, -weights[None])


@pytest.mark.parametrize("processor", [fewer_repeats, theirs.RepetitionPenaltyLogitsProcessor(2.5)])
@pytest.mark.parametrize("sampling", exact.SAMPLINGS)
def test_a_round_with_processors_has_exactly_the_processed_targets_distribution(
    sampling: str, processor: LogitsProcessor
) -> None:
    processed = replace(exact.SAMPLINGS[sampling], processors=(processor,))
    prompt = [1, 1, 0]
    texts = [prompt] * len(exact.DRAFTS)
    drafts = [list(tokens) for tokens in exact.DRAFTS]
    draft_prefixes = [tokens[:-1] for tokens in drafts]
    target_logits = processed.process(exact.TARGET_LOGITS, texts, drafts)
    draft_logits = processed.process(exact.DRAFT_LOGITS, texts, draft_prefixes)

    reported_probs = processed.probs(draft_logits)
    measured = exact.MeasuredRule(RejectionSampling(), processed, target_logits, reported_probs)
    draft_probs = exact.measure_draft_probs(processed, draft_logits)
    round_probs = measured.round_probs(draft_probs)

    # The definition: the processor is called on each text and its next scores.
    processed_target = {}
    for text, logits in exact.TARGET.items():
        whole_text = torch.tensor([[*prompt, *text]])
        processed_target[text] = processor(whole_text, logits[None])[0]
    target_probs = exact.sampled_probs(processed_target, processed)
    assert exact.largest_error(round_probs, target_probs) < exact.TOLERANCE


def test_a_processor_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="processors must be callables"):
        Sampling(processors=[5])
