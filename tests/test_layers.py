"""Laws of models taken apart: the parts in turn are the model, wherever a pass is split, and over the same weights."""

from __future__ import annotations

import functools
import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from families import FAMILIES, MORE, tiny
from torch import Tensor
from transformers import LlamaForCausalLM

from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.drafters.early_exit import ExitModel, LowerState
from lightning_specdec.models import ExitStates, KVState, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack
from lightning_specdec.models.packed import quantize

APART = ["llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gpt_neox"]
WHOLE = ["gemma3_text", "gemma2", "gpt_oss", "gemma3n_text", "falcon", "opt", "gptj", "cohere2"]
ALSO_APART = [family for family in MORE if family not in WHOLE]
every_family = pytest.mark.parametrize("family", [*APART, *ALSO_APART])
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
LENGTH = 24


@functools.cache
def ours(family: str) -> HuggingFaceLM:
    return HuggingFaceLM(tiny(family))


@functools.cache
def undivided(family: str) -> HuggingFaceLM:
    """The same weights, read by the model's own forward pass."""
    model = HuggingFaceLM(tiny(family))
    model._parts = "kept whole"
    return model


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 67, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_every_family_is_on_one_side() -> None:
    assert {*APART, *ALSO_APART, *WHOLE} == {*FAMILIES, *MORE}


@every_family
@torch.inference_mode()
def test_without_a_state_the_parts_give_the_models_own_logits_and_hidden_states(family: str) -> None:
    """Over more tokens than Mistral's window of five, and over fewer."""
    model, reference = ours(family), tiny(family)
    assert model.takes_apart
    for length in (20, 3, 1):
        tokens, layers = random_tokens(2, length), range(model.stack.num_layers)
        expected = reference(tokens, output_hidden_states=True)
        output = model(tokens, features=layers)
        assert_close(output.logits, expected.logits)
        for layer in layers:
            assert_close(output.features[layer], expected.hidden_states[layer + 1])
        assert_close(model(tokens).logits, output.logits)


def same(found: ModelOutput, expected: ModelOutput, lengths: list[int]) -> None:
    """Logits and hidden states of the rows' own tokens."""
    assert list(found.features) == list(expected.features)
    for one, other in [
        (found.logits, expected.logits),
        *((found.features[i], expected.features[i]) for i in found.features),
    ]:
        for row, length in enumerate(lengths):
            assert_close(one[row, :length], other[row, :length])


@every_family
@torch.inference_mode()
def test_through_a_state_ragged_pieces_give_the_models_own_logits_and_hidden_states(family: str) -> None:
    generator, models = random.Random(1), [ours(family), undivided(family)]
    layers = range(models[0].stack.num_layers)
    states = [model.init_state(3, 2 * LENGTH) for model in models]
    while max(states[0].consumed) < LENGTH:
        width = generator.randint(1, 6)
        lengths = [generator.randint(0, width) for _ in range(3)]
        tokens = random_tokens(3, width, seed=generator.randrange(1000))
        outputs = [
            model(tokens, state, valid_lengths=lengths, features=layers)
            for model, state in zip(models, states, strict=True)
        ]
        same(outputs[0], outputs[1], lengths)


class Split:
    """A state that is filled by lower layers first and upper ones later, beside one that whole passes fill."""

    def __init__(self, model: HuggingFaceLM, num_layers: int, seed: int) -> None:
        self.model, self.num_layers, self.random = model, num_layers, random.Random(seed)
        self.exit = ExitModel(model, num_layers, None)
        self.state, self.other = (model.init_state(3, 3 * LENGTH) for _ in range(2))

    def poison(self) -> None:
        """Large numbers in all slots that no row has reached."""
        for state in (self.state, self.other):
            assert isinstance(state, KVState)
            for row, length in enumerate(state.consumed):
                for buffers in state.buffers.values():
                    for each in buffers:
                        each[row, :, length:] = 1e4

    def read_ahead(self, tokens: Tensor, known: list[int]) -> ExitStates:
        """What the lower layers make of the first `known` tokens of each row, in pieces, some of them taken back first;
        NaN behind them."""
        lower = LowerState(self.state)
        while lower.ahead != known:
            if self.random.random() < 0.3:
                shorter = [self.random.randint(0, ahead) for ahead in lower.ahead]
                lower.truncate([a + b for a, b in zip(self.state.consumed, shorter, strict=True)])
            missing = [length - ahead for length, ahead in zip(known, lower.ahead, strict=True)]
            width = self.random.randint(1, max(missing))
            counts = [min(width, self.random.randint(0, each)) for each in missing]
            places = torch.tensor(lower.ahead)[:, None] + torch.arange(width)
            piece = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
            even = min(counts) == width
            self.exit(piece, lower, valid_lengths=None if even else counts)
        if not lower._chunks:
            return ExitStates(self.num_layers, torch.empty(3, 0, 32), known)
        done = lower.exit_states(self.num_layers)
        for row, length in enumerate(done.lengths):
            done.hidden[row, length:] = torch.nan
        return done

    def call(self) -> None:
        """One call by both ways: logits, hidden states above the split, and what is remembered are the same."""
        width = self.random.randint(1, 5)
        lengths = [self.random.randint(1, width) for _ in range(3)]
        kind = self.random.randrange(5)
        known = {
            0: [0, 0, 0],
            1: list(lengths),
            2: [min(lengths)] * 3,
            3: [lengths[0] - 1, lengths[1], 0],
        }.get(kind, [self.random.randint(0, length) for length in lengths])
        if self.random.random() < 0.3:
            lengths = [width] * 3
            known = [width - 1] * 3
        tokens = random_tokens(3, width, seed=self.random.randrange(1000))
        layers = range(self.num_layers - 1, self.model.stack.num_layers)
        self.poison()
        done = self.read_ahead(tokens, known)
        even = min(lengths) == width
        options: dict[str, Any] = {"valid_lengths": None if even else lengths, "features": layers}
        assert self.state.consumed == self.other.consumed, "reading ahead moves no length"
        found = self.model.finish(done, tokens, self.state, **options)
        same(found, self.model(tokens, self.other, **options), lengths)
        assert self.state.consumed == self.other.consumed


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", [*APART, "deepseek_v3", "smollm3", "mixtral"])
@torch.inference_mode()
def test_wherever_a_pass_is_split_it_is_the_whole_pass(family: str, num_layers: int) -> None:
    """Rows of other lengths, some read ahead in pieces, some not at all, some to their end."""
    split = Split(ours(family), num_layers, seed=num_layers)
    while max(split.state.consumed) < LENGTH:
        split.call()


@torch.inference_mode()
def test_only_the_wanted_places_are_scored_behind_a_split() -> None:
    model, tokens = ours("llama"), random_tokens(2, 4)
    whole = model(tokens).logits
    for places in (slice(-2, None), torch.tensor([[3], [1]])):
        state = model.init_state(2, 9)
        done = ExitStates(1, model.lower(tokens[:, :2], state, [0, 0], 1), [2, 2])
        found = model.finish(done, tokens, state, logits_for=places).logits
        expected = whole[:, places] if isinstance(places, slice) else torch.stack([whole[0, 3:4], whole[1, 1:2]])
        assert_close(found, expected)


@torch.inference_mode()
def test_lower_layers_may_have_read_more_than_is_wanted_of_them() -> None:
    model, tokens = ours("llama"), random_tokens(2, 5)
    expected = model(tokens[:, :3]).logits
    for known, lengths in (([5, 5], [3, 3]), ([5, 2], [3, 3]), ([4, 5], [1, 3])):
        state = model.init_state(2, 9)
        done = ExitStates(1, model.lower(tokens, state, [0, 0], 1), known)
        logits = model.finish(done, tokens[:, :3], state, valid_lengths=lengths).logits
        for row, length in enumerate(lengths):
            assert_close(logits[row, :length], expected[row, :length])


@torch.inference_mode()
def test_an_exits_logits_are_those_of_the_final_norm_and_the_head_on_its_layer() -> None:
    model, tokens = ours("qwen2"), random_tokens(2, 6)
    expected = tiny("qwen2")(tokens, output_hidden_states=True).hidden_states[2]
    assert_close(ExitModel(model, 2, None)(tokens).logits, model.model.lm_head(model.model.model.norm(expected)))
    assert_close(model.exit_logits(expected[:, -1:]), model.model.lm_head(model.model.model.norm(expected[:, -1:])))


# The same weights, and no others.


def test_a_copy_is_taken_apart_by_itself() -> None:
    model, tokens = HuggingFaceLM(tiny("llama")), random_tokens(1, 5)
    before = model(tokens).logits
    copy = deepcopy(model)
    assert copy.stack.model is copy.model is not model.model
    with torch.no_grad():
        copy.model.lm_head.weight.zero_()
    assert not copy(tokens).logits.any() and torch.equal(model(tokens).logits, before)
    packed = model.fused()
    assert packed.stack.model is packed.model is not model.model
    assert packed.stack.layers[0] is not model.stack.layers[0]
    assert packed.stack.inner.embed_tokens.weight is model.stack.inner.embed_tokens.weight


def test_later_changes_to_its_modules_are_seen() -> None:
    model, tokens = HuggingFaceLM(tiny("llama")), random_tokens(1, 5)
    assert model.takes_apart
    model.model.lm_head = torch.nn.Linear(32, 67, bias=False)
    expected = model.model(input_ids=tokens).logits
    assert_close(model(tokens).logits, expected)


# Training.


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", APART)
def test_in_training_the_parts_have_the_models_own_gradients(family: str, checkpointing: bool) -> None:
    """GPT-2 drops values at random, each time the same ones for the same seed."""
    model, reference, tokens = HuggingFaceLM(tiny(family)), tiny(family), random_tokens(2, 9)
    assert model.takes_apart
    for each in (model.model, reference):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            logits = (model if each is model.model else each)(tokens).logits
            logits.float().log_softmax(-1)[..., 0].mean().backward()
    for (name, found), expected in zip(model.model.named_parameters(), reference.parameters(), strict=True):
        assert found.grad is not None or expected.grad is None, name
        if expected.grad is not None:
            assert_close(found.grad, expected.grad)


def test_a_look_at_the_parts_leaves_every_module_in_its_mode_and_the_random_numbers_as_they_were() -> None:
    model = HuggingFaceLM(tiny("gpt2").train())
    LayerStack(model.model).layers[1].eval()
    before = [module.training for module in model.modules()], torch.get_rng_state()
    assert model.takes_apart
    assert [module.training for module in model.modules()] == before[0] and len(set(before[0])) == 2
    assert torch.equal(torch.get_rng_state(), before[1])


# Models that cannot be taken apart.


@pytest.mark.parametrize("family", WHOLE)
def test_a_model_that_cannot_be_taken_apart_says_so_by_name_and_decodes_as_before(family: str) -> None:
    inner: Any = tiny(family)
    target = HuggingFaceLM(inner)
    assert not target.takes_apart
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{type(target.model).__name__} cannot be taken apart: .") as caught:
            EarlyExitDrafter(1).check_target(target)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="cannot be taken apart"):
        speculative_decode(target, EarlyExitDrafter(1), [1, 2], max_new_tokens=4)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    expected = inner.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert autoregressive_decode(target, ids, max_new_tokens=12).tokens[0] == expected[0, 5:].tolist()


class Scaled(LlamaForCausalLM):
    """What comes behind its head cannot be seen in small logits."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, **options)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


class Added(LlamaForCausalLM):
    """What comes before its layers cannot be seen in their logits, for its head says nothing yet."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.nn.init.zeros_(self.lm_head.weight)

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        embedded = 2 * self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, **options)


@pytest.mark.parametrize(("kind", "told"), [(Scaled, "changes the logits"), (Added, "more than pass them on")])
def test_a_model_that_has_learnt_nothing_yet_hides_nothing(kind: Any, told: str) -> None:
    with torch.random.fork_rng():
        model = kind(tiny("llama").config).eval()
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be taken apart: .*{told}"):
        HuggingFaceLM(model).check_exit(1)


def test_caps_on_logits_are_found_in_a_model_whose_layers_are_all_alike() -> None:
    model = tiny("gemma2", layer_types=["full_attention"] * 3, attn_logit_softcapping=None, sharpness=0.1)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM cannot be taken apart"):
        HuggingFaceLM(model).check_exit(1)


def test_a_layer_that_takes_its_cache_by_another_name_is_found_out() -> None:
    """It would do without one, and nothing would be remembered."""

    class Forgetful(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden: Tensor, past_key_value: Any = None, **options: Any) -> Tensor:
            options.pop("past_key_values", None)
            output: Tensor = self.layer(hidden, past_key_values=past_key_value, **options)
            return output

    inner = tiny("llama")
    inner.model.layers[1] = Forgetful(inner.model.layers[1])
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be taken apart"):
        HuggingFaceLM(inner).check_exit(1)


def test_a_model_of_one_layer_has_no_exit() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has a single layer: there is nothing to exit from"):
        HuggingFaceLM(tiny("llama", num_hidden_layers=1)).check_exit(1)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@torch.inference_mode()
def test_a_window_shorter_than_the_look_at_the_parts_is_heeded(window: int) -> None:
    model, tokens = HuggingFaceLM(tiny("mistral", sliding_window=window)), random_tokens(1, 9)
    assert model.takes_apart
    assert_close(model(tokens).logits, tiny("mistral", sliding_window=window)(tokens).logits)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.inference_mode()
def test_eager_attention_is_causal_by_parts_too(family: str) -> None:
    inner: Any = tiny(family)
    inner.set_attn_implementation("eager")
    model, tokens = HuggingFaceLM(inner), random_tokens(2, 9)
    model.check_exit(1)
    assert_close(model(tokens).logits, inner(tokens).logits)
    assert_close(model(tokens[:, :3]).logits, inner(tokens[:, :3]).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("form", ["packed", "int8", "packed int8", "bfloat16", "packed bfloat16"])
@torch.inference_mode()
def test_packed_rounded_and_coarse_models_are_taken_apart(family: str, form: str) -> None:
    model, tokens = HuggingFaceLM(tiny(family)), random_tokens(2, 9)
    if "bfloat16" in form:
        model = model.to(torch.bfloat16)
    if "int8" in form:
        quantize(model.model, "int8")
    if "packed" in form:
        model = model.pack()
    assert model.takes_apart
    # bfloat16 has 8 bits, and the two passes may sum in another order.
    near = functools.partial(torch.testing.assert_close, rtol=0.1, atol=0.3) if "bfloat16" in form else assert_close
    expected = model.model(input_ids=tokens).logits
    near(model(tokens).logits, expected)
    state = model.init_state(2, 9)
    done = ExitStates(1, model.lower(tokens[:, :5], state, [0, 0], 1), [5, 5])
    near(model.finish(done, tokens, state).logits, expected)
