"""Logits processors: the target's distribution is the processed one, and everything that holds of it holds with them.

Those of transformers are used as they are, and the oracle is standard decoding by its definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cases
import pytest
import torch
from transformers.generation import logits_process as theirs

from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.inference import autoregressive_decode, speculative_decode
from lightning_specdec.rules import LogitsProcessor, RejectionSampling, Sampling

VOCAB = cases.VOCAB
KINDS: dict[str, tuple[LogitsProcessor, ...]] = {
    "repetition": (theirs.RepetitionPenaltyLogitsProcessor(1.6),),
    "no_repeat": (theirs.NoRepeatNGramLogitsProcessor(2),),
    "min_length": (theirs.MinLengthLogitsProcessor(9, cases.EOS, device="cpu"),),
    "sequence_bias": (theirs.SequenceBiasLogitsProcessor([[[3], 4.0], [[7, 2], 6.0], [[1, 2, 3], -9.0]]),),
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


def slow_decode(target: str, prompt: Sequence[int], processors: Sequence[LogitsProcessor], num_new: int) -> list[int]:
    """Greedy decoding by the definition: one row alone, for each token the whole text is read and processed."""
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
    assert result.tokens == [slow_decode(target, prompt, KINDS[kind], 10) for prompt in cases.PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_processors_of_these_laws_do_change_the_output(kind: str) -> None:
    with_them, without = (
        [cases.standard(target, sampling, 10).tokens for target in cases.MODELS]
        for sampling in (Sampling(processors=KINDS[kind]), Sampling())
    )
    assert with_them != without


@pytest.mark.parametrize(
    ("target", "drafter", "kind", "rule"),
    [
        (*pair, *turn)
        for pair in cases.pairs(targets=["rnn", "transformer"])
        for turn in cases.in_turn(["repetition", "sequence_bias", "all"], cases.LOSSLESS, *pair)
    ],
)
def test_greedy_speculative_equals_autoregressive_with_processors(
    target: str, drafter: str, kind: str, rule: str
) -> None:
    """A rule sees processed logits alone, whatever processed them."""
    sampling = Sampling(processors=KINDS[kind])
    result = speculative_decode(
        cases.target(target),
        cases.drafter(drafter, target),
        cases.PROMPTS,
        max_new_tokens=10,
        num_draft_tokens=4,
        rule=cases.RULES[rule](),
        sampling=sampling,
        eos=cases.EOS,
    )
    assert result.tokens == cases.standard(target, sampling, 10).tokens


@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize(("target", "drafter"), cases.pairs(targets=["rnn", "transformer"]))
def test_exact_match_equals_autoregressive_with_processors_at_every_temperature(
    target: str, drafter: str, hot: str
) -> None:
    result = speculative_decode(
        cases.target(target),
        cases.drafter(drafter, target),
        cases.PROMPTS,
        max_new_tokens=10,
        sampling=HOT[hot],
        eos=cases.EOS,
    )
    assert result.tokens == cases.standard(target, HOT[hot], 10).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("target", cases.BUT_LLAMA)
def test_a_drafter_that_is_the_target_accepts_everything_with_processors(
    target: str, window: int, kind: str, temperature: float
) -> None:
    """Both sides are processed alike, each guess with the guesses before it."""
    result = speculative_decode(
        cases.target(target),
        ModelDrafter(cases.target(target)),
        cases.PROMPTS,
        max_new_tokens=2 * (window + 1),
        num_draft_tokens=window,
        rule=RejectionSampling(),
        sampling=Sampling(temperature, processors=KINDS[kind]),
    )
    assert result.acceptance_rate == 1.0 and result.block_efficiency == window + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        *cases.triples(["near", "ragged", "ngram", "heads"], ["rnn", "transformer"]),
        ("llama", "early_exit", "RejectionSampling"),
    ],
)
def test_a_ragged_batch_with_processors_equals_its_rows_decoded_one_by_one(
    target: str, drafter: str, rule: str, temperature: float
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(temperature, processors=KINDS["all"]),
        "eos": cases.EOS,
        "seed": 4,
    }
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    batch = speculative_decode(model, guesser, cases.PROMPTS, **options)
    for index, row in enumerate(batch.rows):
        alone = speculative_decode(model, guesser, cases.PROMPTS[index], indices=[index], **options).rows[0]
        assert (row.tokens, row.counts, row.rounds) == (alone.tokens, alone.counts, alone.rounds)


@pytest.mark.parametrize("speculative", [True, False])
def test_logprobs_are_the_targets_own_whatever_the_processors(speculative: bool) -> None:
    model, options = cases.target("rnn"), {"max_new_tokens": 9, "logprobs": True}
    sampling = Sampling(1.0, processors=KINDS["all"])
    if speculative:
        drafter = cases.drafter("near", "rnn")
        result = speculative_decode(model, drafter, cases.PROMPTS, sampling=sampling, **options)  # type: ignore[arg-type]
    else:
        result = autoregressive_decode(model, cases.PROMPTS, sampling=sampling, **options)  # type: ignore[arg-type]
    for row in result.rows:
        scores = model(torch.tensor([row.prompt + row.tokens])).logits[0].detach().log_softmax(-1)
        scores = scores[len(row.prompt) - 1 :]
        assert row.logprobs == pytest.approx([float(scores[i, token]) for i, token in enumerate(row.tokens)], abs=1e-4)


def dead_end(length: int) -> LogitsProcessor:
    """Leaves no token to texts of that length or more."""
    return lambda prefix, scores: torch.full_like(scores, -torch.inf) if prefix.shape[1] >= length else scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("target", "drafter"), cases.pairs(["near", "itself", "repeater", "ngram", "early_exit"], ["rnn"])
)
def test_a_processor_that_leaves_no_token_is_an_error_both_ways(target: str, drafter: str, temperature: float) -> None:
    model, sampling = cases.target(target), Sampling(temperature, processors=[dead_end(5)])
    for decode in (
        lambda: autoregressive_decode(model, [1, 2, 3], max_new_tokens=6, sampling=sampling),
        lambda: speculative_decode(
            model, cases.drafter(drafter, target), [1, 2, 3], max_new_tokens=6, sampling=sampling
        ),
    ):
        with pytest.raises(ValueError, match="not finite"):
            decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_processor_leaves_behind_eos_is_nobodys_business(temperature: float) -> None:
    model, sampling = cases.target("rnn"), Sampling(temperature)
    plain = autoregressive_decode(model, [1, 2, 3], max_new_tokens=8, sampling=sampling).tokens[0]
    eos = plain[2]
    num_new = plain.index(eos) + 1
    ending = Sampling(temperature, processors=[dead_end(3 + num_new)])
    drafter = cases.drafter("itself", "rnn")
    result = speculative_decode(
        model, drafter, [1, 2, 3], max_new_tokens=8, num_draft_tokens=6, sampling=ending, eos=eos
    )
    assert result.tokens[0] == plain[:num_new]
