"""What logits processors are asked: each row and position about its own text, as it would have come token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cases
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.drafters import Context, ModelDrafter
from lightning_specdec.drafters.compiled import CompiledDrafter
from lightning_specdec.inference import Session, speculative_decode
from lightning_specdec.rules import LogitsProcessor, Sampling
from lightning_specdec.rules.processors import flat

PENALTY = theirs.RepetitionPenaltyLogitsProcessor(1.6)
VOCAB = cases.VOCAB
ASKED: list[list[int]] = []


def record(prefix: Tensor, scores: Tensor) -> Tensor:
    ASKED.append(prefix[0].tolist())
    return scores


def test_each_position_is_asked_about_with_its_own_unpadded_prefix() -> None:
    sampling = Sampling(processors=[record])
    sampling.process(torch.zeros(1, 1, VOCAB), [[1]])  # looks for a memory first
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
    sampling.process(torch.zeros(1, 1, VOCAB), [[1]])
    for stop, asked in ((True, [[1], [1, 2]]), (False, [[1], [1, 2], [1, 2, 4], [1, 2, 4, 3]])):
        ASKED.clear()
        sampling.process(torch.zeros(1, 4, VOCAB), [[1]], [[2, 4, 3]], stop_at_impossible=stop)
        assert ASKED == asked


def test_texts_that_a_constraint_does_not_know_are_not_asked_about() -> None:
    """A look-up guesses what is not allowed; the constraint, which has no answer behind that, is left in peace."""
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


def test_without_processors_logits_go_through_untouched() -> None:
    logits = torch.randn(2, 3, VOCAB)
    assert Sampling(0.7).process(logits, [[1], [2]]) is logits


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


def test_sampling_with_processors_is_a_key_like_any_other() -> None:
    penalty = theirs.RepetitionPenaltyLogitsProcessor(1.2)
    one, other = Sampling(1.0, processors=[penalty]), Sampling(1.0, processors=(penalty,))
    assert one == other and hash(one) == hash(other) and one != Sampling(1.0)
    assert one != Sampling(1.0, processors=[theirs.RepetitionPenaltyLogitsProcessor(1.2)])
    listed = theirs.LogitsProcessorList([penalty, theirs.LogitsProcessorList([record])])
    assert Sampling(processors=listed).processors == (penalty, record)


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (record, "processors must be a list of logits processors, got record: put it into a list"),
        ([1.2], "a logits processor is called with a prefix and its scores, and 1.2 cannot be called"),
    ],
)
def test_what_is_no_processor_is_refused(processors: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flat(processors)


@pytest.mark.parametrize(
    ("answer", "found"),
    [(lambda ids, scores: None, "NoneType"), (lambda ids, scores: scores[0], r"\(11,\)")],
)
def test_a_processor_that_gives_no_scores_is_named(answer: LogitsProcessor, found: str) -> None:
    with pytest.raises(ValueError, match=f"lambda> gave {found}: scores .1, 11. are due"):
        Sampling(processors=[answer]).process(torch.zeros(1, 1, VOCAB), [[1]])


def test_a_memory_is_looked_for_once_and_not_each_round() -> None:
    sampling = Sampling(processors=[record])
    sampling.process(torch.zeros(1, 1, VOCAB), [[1]])
    ASKED.clear()
    sampling.process(torch.zeros(1, 1, VOCAB), [[1]])
    assert len(ASKED) == 1


@dataclass
class Unhashable:
    penalty: float

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        return scores - self.penalty


def test_a_processor_need_not_be_hashable() -> None:
    assert hash(Sampling(processors=[Unhashable(1.0)])) == hash(Sampling(processors=[Unhashable(2.0)]))
    assert Sampling(processors=[Unhashable(1.0)]) != Sampling(processors=[Unhashable(2.0)])


def test_a_decoder_takes_them_beside_the_other_settings_of_sampling() -> None:
    decoder = SpeculativeDecoder(cases.target("rnn"), cases.drafter("ngram", "rnn"))
    result = decoder.decode(cases.PROMPTS, max_new_tokens=8, processors=[PENALTY])
    assert result.tokens == decoder.decode_standard(cases.PROMPTS, max_new_tokens=8, processors=[PENALTY]).tokens
    assert result.tokens != decoder.decode(cases.PROMPTS, max_new_tokens=8).tokens


def test_a_compiled_draft_has_no_room_for_processors() -> None:
    drafter, sampling = ModelDrafter(cases.MODELS["rnn"](8)), Sampling(processors=(PENALTY,))
    with pytest.raises(ValueError, match="a roll-out with logits processors cannot be compiled"):
        CompiledDrafter(drafter, num_draft_tokens=2, sampling=sampling)


def test_the_logits_that_a_draft_reports_are_the_processed_ones() -> None:
    drafter, text = ModelDrafter(cases.target("rnn")), [1, 2, 3]
    context = Context([text], torch.tensor([[2, 3]]), None, wants_logits=True)
    with torch.inference_mode():
        sampling = Sampling(processors=(PENALTY,))
        draft = drafter.propose(drafter.init_state(1, 9), context, [2], sampling)
        whole = cases.target("rnn")(torch.tensor([[*text, *draft.tokens[0].tolist()]])).logits[0]
    assert draft.logits is not None
    for i in range(2):
        prefix = torch.tensor([[*text, *draft.tokens[0, :i].tolist()]])
        expected = PENALTY(prefix, whole[2 + i : 3 + i])[0]
        torch.testing.assert_close(draft.logits[0, i], expected, rtol=1e-4, atol=1e-4)
