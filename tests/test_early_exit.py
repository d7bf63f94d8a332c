"""Laws of early exits: they draft like the model cut off there, and every layer reads a token once.

The laws of all drafters include early exits, see `cases`. Here are those that only early exits
have, for all model families.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cases
import pytest
import torch
from families import tiny

from lightning_specdec.decoding import (
    Session,
    autoregressive_decode,
    open_session,
    speculative_decode,
)
from lightning_specdec.drafters import (
    Draft,
    DraftRequest,
    DraftState,
    EarlyExitDrafter,
    ModelDrafter,
    TargetContext,
)
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack
from lightning_specdec.models.packed import quantize
from lightning_specdec.rules import RejectionSampling, Sampling

PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 60, 66]]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gpt_neox"]
every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def ours(family: str) -> HuggingFaceLM:
    return HuggingFaceLM(tiny(family))


def cut_off(family: str, num_layers: int) -> HuggingFaceLM:
    """A separate model that ends after that layer."""
    inner = tiny(family)
    stack = LayerStack(inner)
    del stack.layers[num_layers:]
    return HuggingFaceLM(inner)


def idle_above(family: str, num_layers: int) -> HuggingFaceLM:
    """A model whose upper layers add nothing, so its exit predicts what the model predicts."""
    inner = tiny(family)
    with torch.no_grad():
        for layer in LayerStack(inner).layers[num_layers:]:
            for name, weight in layer.named_parameters():
                if not any(word in name for word in ("norm", "ln_")):
                    weight.zero_()
    return HuggingFaceLM(inner)


# Its draft tokens.


@pytest.mark.parametrize(("exit_layer", "temperature"), [(1, 0.9), (2, 0.0)])
@every_family
def test_its_rounds_are_those_of_the_cut_off_model_as_a_draft(
    family: str,
    exit_layer: int,
    temperature: float,
) -> None:
    """Drafts, verdicts and draws are equal, although the cut-off model has its own KV cache."""
    target = ours(family)
    cut_off_drafter = ModelDrafter(cut_off(family, exit_layer))
    options: dict[str, Any] = {
        "max_new_tokens": 10,
        "rule": RejectionSampling(),
        "sampling": Sampling(temperature),
    }
    result = speculative_decode(target, EarlyExitDrafter(exit_layer), PROMPTS, **options)
    expected = speculative_decode(target, cut_off_drafter, PROMPTS, **options)
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]
    assert result.acceptance_rate is not None and 0 < result.acceptance_rate < 1


@every_family
def test_it_is_always_right_where_the_layers_above_add_nothing(family: str) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "rule": RejectionSampling(),
        "sampling": Sampling(1.0),
    }
    result = speculative_decode(idle_above(family, 1), EarlyExitDrafter(1), PROMPTS, **options)
    assert result.acceptance_rate == 1.0 and result.block_efficiency == 4


def test_an_own_head_reads_the_exits_layer() -> None:
    target = cases.target("llama")
    drafter = cases.drafter("early_exit_own", "llama")
    assert isinstance(drafter, EarlyExitDrafter) and drafter.head is not None
    text = [1, 2, 3, 4]
    with torch.inference_mode():
        state = target.init_state(1, 12)
        request = DraftRequest([text], torch.tensor([text[-2:]]), None, wants_logits=True)
        draft = drafter.propose(
            drafter.init_state(1, 12, TargetContext(target, state)), request, [3], Sampling()
        )
        text_and_draft = torch.tensor([[*text, *draft.tokens[0].tolist()]])
        hidden = target(text_and_draft, features=[1]).features[1]
        expected = drafter.head(hidden)[:, len(text) - 1 : -1]
    assert draft.logits is not None
    torch.testing.assert_close(draft.logits, expected, rtol=1e-4, atol=1e-4)
    assert draft.tokens.tolist() == expected.argmax(-1).tolist()


# Its cost.


def count_tokens(model: HuggingFaceLM) -> list[list[int]]:
    """For each layer, the number of tokens of every call from now on."""
    counts_by_layer: list[list[int]] = [[] for _ in model.stack.layers]
    for layer, counts in zip(model.stack.layers, counts_by_layer, strict=True):
        layer.register_forward_hook(
            lambda module, inputs, output, counts=counts: counts.append(inputs[0].shape[1])
        )
    return counts_by_layer


@pytest.mark.parametrize("exit_layer", [1, 2])
@every_family
def test_every_layer_reads_every_token_once(family: str, exit_layer: int) -> None:
    """Lower layers read the last draft token when it is verified, all other tokens while drafting.

    Upper layers read all tokens in one call.
    """
    target = HuggingFaceLM(tiny(family))
    prompt = PROMPTS[3]
    session = open_session(
        target, EarlyExitDrafter(exit_layer), prompt, max_new_tokens=14, num_draft_tokens=3
    )
    (row,) = session.live
    counts_by_layer = count_tokens(target)
    num_unread = len(prompt)
    while session.live:
        for counts in counts_by_layer:
            counts.clear()
        session.step()
        num_draft_tokens = min(3, len(row.rounds[-1].drafted or ()))
        for layer, counts in enumerate(counts_by_layer):
            if layer < exit_layer and num_draft_tokens:
                assert counts == [num_unread, *[1] * num_draft_tokens]
            else:
                assert counts == [num_unread + num_draft_tokens]
        num_unread = 1
    assert row.num_rounds > 4


# Its effect on the target.


@every_family
def test_a_text_may_fill_the_context_to_its_last_token(family: str) -> None:
    """Padding and draft tokens after the end of the context use no position outside the model."""
    target = ours(family)
    prompts = [[i % 67 for i in range(86)], [1, 2]]
    result = speculative_decode(
        target, EarlyExitDrafter(1), prompts, max_new_tokens=10, num_draft_tokens=5
    )
    assert result.tokens == autoregressive_decode(target, prompts, max_new_tokens=10).tokens


class Listening(EarlyExitDrafter):
    """Fills padding, which must not be read, with NaN."""

    def __init__(self, exit_layer: int) -> None:
        super().__init__(exit_layer)
        self.num_spoilt = 0

    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        assert draft.exit_states is not None
        for row, length in enumerate(draft.exit_states.lengths):
            self.num_spoilt += draft.exit_states.hidden[row, length:].numel()
            draft.exit_states.hidden[row, length:] = torch.nan
        return draft


def spoil(session: Session) -> None:
    """Write large numbers to every slot after the rows' texts."""
    state = session._batch.target_state
    for row, length in enumerate(state.consumed):
        for buffers in state.storage.layers.values():  # type: ignore[attr-defined]
            for buffer in buffers:
                buffer[row, :, length:] = 1e4


@every_family
def test_slots_after_the_rows_are_never_read(family: str) -> None:
    target = ours(family)
    drafter = Listening(2)
    sampling = Sampling(0.9)
    session = open_session(
        target, drafter, PROMPTS, max_new_tokens=8, num_draft_tokens=4, sampling=sampling
    )
    with torch.inference_mode():
        while session.step():
            spoil(session)
    assert drafter.num_spoilt
    expected = autoregressive_decode(target, PROMPTS, max_new_tokens=8, sampling=sampling)
    assert session.result().tokens == expected.tokens


def test_a_failed_round_does_not_affect_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower layers have read draft tokens, and the upper ones have not."""
    target = HuggingFaceLM(tiny("llama"))
    failures = [False, True, False, True, True] + [False] * 30
    forward = target.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if "exit_states" in kwargs and failures.pop(0):
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", failing)
    session = open_session(
        target, EarlyExitDrafter(1), PROMPTS, max_new_tokens=12, sampling=Sampling(1.0)
    )
    num_failed = 0
    while session.live:
        try:
            session.step()
        except KeyboardInterrupt:
            num_failed += 1
    expected = autoregressive_decode(target, PROMPTS, max_new_tokens=12, sampling=Sampling(1.0))
    assert session.result().tokens == expected.tokens and num_failed == 3


# Packed and quantized targets.


@pytest.mark.parametrize("form", ["packed", "int8", "packed int8"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_target_may_be_packed_or_rounded(family: str, form: str) -> None:
    target = HuggingFaceLM(tiny(family))
    if "int8" in form:
        quantize(target.model, "int8")
    if "packed" in form:
        target = target.pack()
    result = speculative_decode(target, EarlyExitDrafter(1), PROMPTS, max_new_tokens=20)
    assert result.tokens == autoregressive_decode(target, PROMPTS, max_new_tokens=20).tokens
    assert result.acceptance_rate is not None and result.acceptance_rate > 0


# Several exits.


def test_another_exit_shares_the_heads() -> None:
    drafter = EarlyExitDrafter(
        1, head_layers=[1, 2], hidden_size=32, vocab_size=67, sampling=Sampling(0.7)
    )
    second_exit = drafter.at(2)
    assert second_exit.exit_layer == 2 and second_exit.sampling == drafter.sampling
    assert second_exit.heads is drafter.heads and second_exit.head is drafter.heads["2"]
    assert drafter.head is not None and drafter.at(3).head is None
    with pytest.raises(ValueError, match="exit_layer must be at least 1"):
        drafter.at(0)


@every_family
def test_the_output_is_the_standard_one_at_every_temperature(family: str) -> None:
    target = ours(family)
    for sampling, exit_layer, window in ((Sampling(), 1, 6), (Sampling(0.9), 2, 2)):
        options: dict[str, Any] = {"max_new_tokens": 10, "sampling": sampling, "eos": 5}
        result = speculative_decode(
            target, EarlyExitDrafter(exit_layer), PROMPTS, num_draft_tokens=window, **options
        )
        assert result.tokens == autoregressive_decode(target, PROMPTS, **options).tokens
