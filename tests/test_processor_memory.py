"""A logits processor that remembers its calls is refused by name, whether it shows it at once or late."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import cases
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as theirs

from lightning_specdec.inference import autoregressive_decode, speculative_decode
from lightning_specdec.rules import LogitsProcessor, Sampling

VOCAB = cases.VOCAB


class CountsCalls:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        return scores if self.num_calls < 100 else -scores


class TakesTheFirstTextForThePrompt:
    """Changes on its first call alone, as a lazily prepared processor does, but by what that call was about."""

    prompt_length: int | None = None

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        if self.prompt_length is None:
            self.prompt_length = prefix.shape[1]
        return scores - 1.0 * (prefix.shape[1] > self.prompt_length)


class WritesIntoItsTensor:
    def __init__(self) -> None:
        self.seen = torch.zeros(VOCAB)

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        self.seen[prefix[0, -1]] += 1
        return scores - self.seen


class DrawsAtRandom:
    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class HidesItsMemory:
    """In a slot, which no dictionary shows; its answers do."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        before, self.last = self.last, int(prefix[0, -1]) + prefix.shape[1]
        return scores + before


def counting_closure() -> LogitsProcessor:
    num_calls = 0

    def processor(prefix: Tensor, scores: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return scores

    return processor


def guidance(scale: float) -> LogitsProcessor:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    processor: LogitsProcessor = theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, LlamaForCausalLM(config))
    return processor


def synth_id(**options: bool) -> LogitsProcessor:
    processor: LogitsProcessor = theirs.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5,
        keys=[3, 5],
        sampling_table_size=64,
        sampling_table_seed=0,
        context_history_size=8,
        device=torch.device("cpu"),
        **options,
    )
    return processor


REMEMBERS: dict[str, Callable[[], LogitsProcessor]] = {
    "SynthIDTextWatermarkLogitsProcessor": synth_id,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda: guidance(1.5),
    "DiaEOSDelayPatternLogitsProcessor": lambda: theirs.DiaEOSDelayPatternLogitsProcessor([0], 5, 40),
    "CountsCalls": CountsCalls,
    "TakesTheFirstTextForThePrompt": TakesTheFirstTextForThePrompt,
    "WritesIntoItsTensor": WritesIntoItsTensor,
    "DrawsAtRandom": DrawsAtRandom,
    "HidesItsMemory": HidesItsMemory,
    "CountsCalls.__call__": lambda: CountsCalls().__call__,
    "counting_closure": counting_closure,
}
FORGETS: dict[str, Callable[[], LogitsProcessor]] = {
    "sequence bias, which prepares itself": lambda: theirs.SequenceBiasLogitsProcessor([[[3], 2.0], [[1, 2], -2.0]]),
    "bad words": lambda: theirs.NoBadWordsLogitsProcessor([[4], [1, 2]]),
    "watermark, which seeds its generator anew": lambda: theirs.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "guidance that is off": lambda: guidance(1.0),
    "repetition by a tensor": lambda: theirs.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([2])),
    "length": lambda: theirs.ExponentialDecayLengthPenalty((3, 1.1), 5, 4),
    "top p": lambda: theirs.TopPLogitsWarper(0.7),
    "lambda": lambda: lambda prefix, scores: scores / prefix.shape[1],
    "method": lambda: theirs.TopKLogitsWarper(3).__call__,
}


@pytest.mark.parametrize("name", REMEMBERS)
@pytest.mark.parametrize("drafter", ["near", "ngram", None])
def test_a_processor_with_a_memory_is_refused_by_name(name: str, drafter: str | None) -> None:
    model, sampling = (
        cases.target("rnn"),
        Sampling(processors=[theirs.RepetitionPenaltyLogitsProcessor(1.6), REMEMBERS[name]()]),
    )
    with pytest.raises(ValueError, match=f"the logits processor {name}.* remembers its calls"):
        if drafter is None:
            autoregressive_decode(model, cases.PROMPTS, max_new_tokens=4, sampling=sampling)
        else:
            speculative_decode(model, cases.drafter(drafter, "rnn"), cases.PROMPTS, max_new_tokens=4, sampling=sampling)


def test_a_watermark_that_begins_late_is_refused_too() -> None:
    with pytest.raises(ValueError, match="SynthID.* remembers its calls"):
        Sampling(processors=[synth_id(skip_first_ngram_calls=True)]).process(torch.zeros(1, 1, VOCAB), [[1]])


@pytest.mark.parametrize("name", FORGETS)
def test_a_processor_without_a_memory_is_let_through(name: str) -> None:
    model, sampling = cases.target("rnn"), Sampling(processors=[FORGETS[name]()])
    drafter = cases.drafter("near", "rnn")
    result = speculative_decode(model, drafter, cases.PROMPTS, max_new_tokens=8, sampling=sampling)
    assert result.tokens == autoregressive_decode(model, cases.PROMPTS, max_new_tokens=8, sampling=sampling).tokens


class RemembersLongTexts:
    """Harmless at first: only calls about texts of more than eight tokens leave a trace."""

    def __init__(self) -> None:
        self.traces: dict[str, list[int]] = {"long": []}

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        if prefix.shape[1] > 8:
            self.traces["long"].append(1)
        return scores


def test_a_memory_that_shows_later_stops_the_decode() -> None:
    model, sampling = cases.target("rnn"), Sampling(processors=[RemembersLongTexts()])
    assert autoregressive_decode(model, [1, 2], max_new_tokens=5, sampling=sampling).tokens
    with pytest.raises(ValueError, match="RemembersLongTexts remembers its calls"):
        speculative_decode(model, cases.drafter("near", "rnn"), [1, 2], max_new_tokens=12, sampling=sampling)


def test_looking_for_a_memory_leaves_the_processor_itself_alone() -> None:
    processor = synth_id()
    with pytest.raises(ValueError, match="remembers"):
        Sampling(processors=[processor]).process(torch.zeros(1, 1, VOCAB), [[1]])
    assert processor.state is None  # type: ignore[attr-defined]


def test_what_cannot_be_copied_is_refused() -> None:
    class Locked:
        def __init__(self) -> None:
            self.values = (number for number in itertools.count())

        def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
            return scores

    with pytest.raises(ValueError, match="Locked cannot be copied, so whether it has a memory cannot be told"):
        Sampling(processors=[Locked()]).process(torch.zeros(1, 1, VOCAB), [[1]])
