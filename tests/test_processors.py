"""Logits processors: the target's distribution is the processed one, and everything that holds of it holds with them.

Those of transformers are used as they are. The oracle is standard decoding by its definition, and exact enumeration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cases
import pytest
import test_distribution as exact
import torch
from test_whole_decodes import BOUND, NUM_NEW, NUM_ROWS, PROMPT, SEQUENCES
from test_whole_decodes import target as tiny_target
from torch import Tensor
from transformers.generation import logits_process as theirs

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import DraftRequest, ModelDrafter
from lightning_specdec.rules import LogitsProcessor, RejectionSampling, Sampling

VOCAB = cases.VOCAB
PENALTY = theirs.RepetitionPenaltyLogitsProcessor(1.6)
ASKED: list[list[int]] = []
KINDS: dict[str, tuple[LogitsProcessor, ...]] = {
    "repetition": (PENALTY,),
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
def test_a_processor_that_leaves_no_token_ends_its_row_both_ways(target: str, drafter: str, temperature: float) -> None:
    model, sampling = cases.target(target), Sampling(temperature, processors=[dead_end(5)])
    for decode in (
        lambda: autoregressive_decode(model, [1, 2, 3], max_new_tokens=6, sampling=sampling),
        lambda: speculative_decode(
            model, cases.drafter(drafter, target), [1, 2, 3], max_new_tokens=6, sampling=sampling
        ),
    ):
        assert decode().rows[0].stop_reason == "failed"


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


def record(prefix: Tensor, scores: Tensor) -> Tensor:
    ASKED.append(prefix[0].tolist())
    return scores


def test_each_position_is_asked_about_with_its_own_unpadded_prefix() -> None:
    sampling = Sampling(processors=[record])
    ASKED.clear()
    logits = torch.randn(4, 3, VOCAB)
    processed = sampling.process(logits, [[5], [6, 7, 8], None, [9]], [[1, 2], [3], [4, 4], []])
    assert ASKED == [[5], [5, 1], [5, 1, 2], [6, 7, 8], [6, 7, 8, 3], [9]]
    assert torch.equal(processed, logits)


def test_rows_that_nobody_wants_are_not_asked_about() -> None:
    model, sampling = cases.target("rnn"), Sampling(processors=[record])
    session = Session(model, cases.drafter("near", "rnn"), max_length=20, sampling=sampling, batch_size=4)
    long = session.add([1, 2, 3], max_new_tokens=9)
    session.cancel(session.add([8, 8, 8, 8], max_new_tokens=9))
    session.step()
    ASKED.clear()
    while session.step():
        pass
    assert ASKED and all(prefix[:3] == [1, 2, 3] for prefix in ASKED)
    assert max(map(len, ASKED)) < len(long.text), "nothing was asked behind the last wanted token"


def test_nothing_is_asked_behind_a_guess_that_a_lossless_rule_cannot_keep() -> None:
    never_four = theirs.SuppressTokensLogitsProcessor([4], device="cpu")
    sampling = Sampling(processors=[never_four, record])
    for stop, asked in ((True, [[1], [1, 2]]), (False, [[1], [1, 2], [1, 2, 4], [1, 2, 4, 3]])):
        ASKED.clear()
        sampling.process(torch.zeros(1, 4, VOCAB), [[1]], [[2, 4, 3]], stop_at_impossible=stop)
        assert ASKED == asked


def test_texts_that_a_constraint_does_not_know_are_not_asked_about() -> None:
    """A lookup guesses what is not allowed; the constraint, which has no answer behind that, is left in peace."""
    allowed = {(): [3, 5], (3,): [1], (3, 1): [3, 6], (3, 1, 3): [7, 2], (3, 1, 6): [2]}

    def after(batch: int, prefix: Tensor) -> list[int]:
        new = tuple(prefix.tolist()[4:])
        return [8] if len(new) > 3 else allowed[new]

    constraint = theirs.PrefixConstrainedLogitsProcessor(after, num_beams=1)
    result = speculative_decode(
        cases.target("rnn"),
        cases.drafter("ngram", "rnn"),
        [3, 1, 9, 3],
        max_new_tokens=4,
        sampling=Sampling(processors=[constraint, theirs.SuppressTokensLogitsProcessor([5], device="cpu")]),
        num_draft_tokens=3,
    )
    assert result.tokens[0][:2] == [3, 1] and result.tokens[0][2] in (3, 6)


def test_processing_leaves_the_targets_logits_as_they_were() -> None:
    def spoil(prefix: Tensor, scores: Tensor) -> Tensor:
        return scores.zero_()

    logits = torch.randn(1, 1, VOCAB)
    before = logits.clone()
    assert Sampling(processors=[spoil]).process(logits, [[1]]).eq(0).all()
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_processed_in_float32() -> None:
    processed = Sampling(processors=[lambda ids, scores: scores + 2**-12]).process(
        torch.ones(1, 1, VOCAB, dtype=torch.bfloat16), [[1]]
    )
    assert processed.dtype == torch.float32 and bool((processed == 1 + 2**-12).all())


def test_the_logits_that_a_draft_reports_are_the_processed_ones() -> None:
    drafter, text = ModelDrafter(cases.target("rnn")), [1, 2, 3]
    request = DraftRequest([text], torch.tensor([[2, 3]]), None, wants_logits=True)
    with torch.inference_mode():
        sampling = Sampling(processors=(PENALTY,))
        draft = drafter.propose(drafter.init_state(1, 9), request, [2], sampling)
        whole = cases.target("rnn")(torch.tensor([[*text, *draft.tokens[0].tolist()]])).logits[0]
    assert draft.logits is not None
    for i in range(2):
        prefix = torch.tensor([[*text, *draft.tokens[0, :i].tolist()]])
        expected = PENALTY(prefix, whole[2 + i : 3 + i])[0]
        torch.testing.assert_close(draft.logits[0, i], expected, rtol=1e-4, atol=1e-4)


@dataclass
class Unhashable:
    penalty: float

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        return scores - self.penalty


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    """Built in, so that the command line needs no transformers; it goes before other processors."""
    own, others = Sampling(0.7, repetition_penalty=1.6), Sampling(0.7, processors=[PENALTY])
    logits, texts = torch.randn(3, 1, VOCAB), [[1], [2, 3, 2], list(range(VOCAB))]
    assert torch.equal(own.process(logits, texts), others.process(logits, texts))
    assert [type(each).__name__ for each in replace(own, processors=[record]).processors][1:] == ["function"]
    assert own.changed(repetition_penalty=None).processors == ()
    config = DecodingConfig(temperature=0.7, repetition_penalty=1.6, top_k=3, processors=(record,))
    assert Sampling.of(config) == Sampling(0.7, top_k=3, repetition_penalty=1.6, processors=[record])
    assert Sampling.of(DecodingConfig.of(sampling=own)) == own


def test_sampling_with_processors_is_a_key_like_any_other() -> None:
    one, other = Sampling(1.0, processors=[PENALTY]), Sampling(1.0, processors=theirs.LogitsProcessorList([PENALTY]))
    assert one == other and hash(one) == hash(other) and one != Sampling(1.0)
    assert hash(Sampling(processors=[Unhashable(1.0)])) == hash(Sampling(processors=[Unhashable(2.0)]))
    assert Sampling(processors=[Unhashable(1.0)]) != Sampling(processors=[Unhashable(2.0)])
    logits = torch.randn(2, 3, VOCAB)
    assert Sampling(0.7).process(logits, [[1], [2]]) is logits


@pytest.mark.parametrize("processors", [record, [1.2], "repetition"])
def test_what_is_no_processor_is_refused(processors: Any) -> None:
    with pytest.raises(ValueError, match="processors must be"):
        Sampling(processors=processors)


@pytest.mark.parametrize("answer", [lambda ids, scores: None, lambda ids, scores: scores[0]])
def test_a_processor_that_returns_no_scores_is_named(answer: LogitsProcessor) -> None:
    with pytest.raises(ValueError, match="lambda> must return scores"):
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
    assert exact.error_of(law, probs, expected) < exact.TOLERANCE


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
