"""Laws of models taken apart: the parts in turn are the model, wherever a pass is split."""

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
from transformers.models.gptj.modeling_gptj import GPTJBlock

from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.models import ExitStates, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack, cache_name
from lightning_specdec.models.packed import quantize

WHOLE = ["gemma3_text", "gemma2", "gpt_oss", "gemma3n_text", "falcon", "opt", "cohere2"]
if cache_name(GPTJBlock.forward) == "layer_past":
    # Before transformers 5.24.
    WHOLE.append("gptj")
APART = [family for family in FAMILIES if family not in WHOLE]
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


@every_family
@torch.inference_mode()
def test_without_a_state_the_parts_give_the_models_own_logits_and_hidden_states(
    family: str,
) -> None:
    """Over more tokens than Mistral's window of five, and over fewer."""
    model = ours(family)
    reference = tiny(family)
    assert model.takes_apart
    layers = range(model.stack.num_layers)
    for length in (20, 3, 1):
        tokens = random_tokens(2, length)
        expected = reference(tokens, output_hidden_states=True)
        output = model(tokens, features=layers)
        assert_close(output.logits, expected.logits)
        for layer in layers:
            assert_close(output.features[layer], expected.hidden_states[layer + 1])
        assert_close(model(tokens).logits, output.logits)


def check_same(output: ModelOutput, expected: ModelOutput, lengths: list[int]) -> None:
    """Compare the logits and hidden states of the rows' tokens, without padding."""
    assert list(output.features) == list(expected.features)
    for row, length in enumerate(lengths):
        assert_close(output.logits[row, :length], expected.logits[row, :length])
        for layer, feature in output.features.items():
            assert_close(feature[row, :length], expected.features[layer][row, :length])


@every_family
@torch.inference_mode()
def test_through_a_state_ragged_pieces_give_the_models_own_logits_and_hidden_states(
    family: str,
) -> None:
    generator = random.Random(1)
    model = ours(family)
    whole_model = undivided(family)
    state = model.init_state(3, 2 * LENGTH)
    whole_state = whole_model.init_state(3, 2 * LENGTH)
    while max(state.consumed) < LENGTH:
        width = generator.randint(1, 6)
        lengths = [generator.randint(0, width) for _ in range(3)]
        tokens = random_tokens(3, width, seed=generator.randrange(1000))
        options: dict[str, Any] = {
            "valid_lengths": lengths,
            "features": range(model.stack.num_layers),
        }
        output = model(tokens, state, **options)
        check_same(output, whole_model(tokens, whole_state, **options), lengths)


def write_garbage(state: Any) -> None:
    """Write large numbers into all slots after the rows."""
    for row, length in enumerate(state.consumed):
        for keys, values in state.storage.layers.values():
            keys[row, :, length:] = 1e4
            values[row, :, length:] = 1e4


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", [*APART, "deepseek_v3", "smollm3", "mixtral"])
@torch.inference_mode()
def test_wherever_a_pass_is_split_it_is_the_whole_pass(family: str, num_layers: int) -> None:
    """For rows of different lengths, of which the lower layers have read some tokens already."""
    model = ours(family)
    generator = random.Random(num_layers)
    split_state = model.init_state(3, 3 * LENGTH)
    whole_state = model.init_state(3, 3 * LENGTH)
    while max(split_state.consumed) < LENGTH:
        write_garbage(split_state)
        write_garbage(whole_state)

        width = generator.randint(1, 5)
        tokens = random_tokens(3, width, seed=generator.randrange(1000))
        lengths = [generator.randint(1, width) for _ in range(3)]
        random_lengths = [generator.randint(0, width) for _ in range(3)]
        # The number of tokens of each row that the lower layers have read.
        num_known = generator.choice(
            [[0, 0, 0], lengths, [min(lengths)] * 3, [width] * 3, random_lengths]
        )
        options: dict[str, Any] = {"features": range(num_layers - 1, model.stack.num_layers)}
        has_padding = generator.random() >= 0.3
        if has_padding:
            options["valid_lengths"] = lengths
        else:
            lengths = [width] * 3
            num_known = [width - 1] * 3

        hidden = model.lower(tokens, split_state, split_state.consumed, num_layers)
        for row, length in enumerate(num_known):
            hidden[row, length:] = torch.nan
        exit_states = ExitStates(num_layers, hidden, num_known)
        output = model(tokens, split_state, exit_states=exit_states, **options)
        check_same(output, model(tokens, whole_state, **options), lengths)
        assert split_state.consumed == whole_state.consumed


@torch.inference_mode()
def test_an_exits_logits_are_those_of_the_final_norm_and_the_head_on_its_layer() -> None:
    model = ours("qwen2")
    tokens = random_tokens(2, 6)
    hidden = tiny("qwen2")(tokens, output_hidden_states=True).hidden_states[2]
    expected_logits = model.model.lm_head(model.model.model.norm(hidden))
    assert_close(model.exit_logits(hidden), expected_logits)


def test_a_copy_is_taken_apart_separately() -> None:
    model = HuggingFaceLM(tiny("llama"))
    tokens = random_tokens(1, 5)
    logits = model(tokens).logits
    copy = deepcopy(model)
    assert copy.stack.model is copy.model
    assert copy.model is not model.model
    with torch.no_grad():
        copy.model.lm_head.weight.zero_()
    assert not copy(tokens).logits.any()
    assert torch.equal(model(tokens).logits, logits)

    packed = model.fused()
    assert packed.stack.layers[0] is not model.stack.layers[0]
    assert packed.stack.inner.embed_tokens.weight is model.stack.inner.embed_tokens.weight


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_neox"])
def test_in_training_the_parts_have_the_models_own_gradients(
    family: str, checkpointing: bool
) -> None:
    """GPT-2 drops the same values for the same seed, and checking the parts changes no mode."""
    model = HuggingFaceLM(tiny(family).train())
    reference = tiny(family).train()
    tokens = random_tokens(2, 9)
    LayerStack(model.model).layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert model.takes_apart
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    model.train()

    if checkpointing:
        model.model.gradient_checkpointing_enable()
        reference.gradient_checkpointing_enable()
    for network in (model, reference):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            logits = network(tokens).logits
            logits.float().log_softmax(-1)[..., 0].mean().backward()

    parameters = zip(model.model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), expected in parameters:
        if expected.grad is None:
            continue
        assert parameter.grad is not None, name
        assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("family", WHOLE)
def test_a_model_that_cannot_be_taken_apart_says_so_by_name_and_decodes_as_before(
    family: str,
) -> None:
    inner: Any = tiny(family)
    target = HuggingFaceLM(inner)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"{type(target.model).__name__} cannot be taken apart: ."
        ):
            EarlyExitDrafter(1).check_target(target)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    expected = inner.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert (
        autoregressive_decode(target, ids, max_new_tokens=12).tokens[0] == expected[0, 5:].tolist()
    )


class Scaled(LlamaForCausalLM):
    """A function that is applied after the head may not show in small logits."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, **options)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


class Added(LlamaForCausalLM):
    """An untrained head hides in its logits what comes before the layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.nn.init.zeros_(self.lm_head.weight)

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        embedded = 2 * self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, **options)


@pytest.mark.parametrize("kind", [Scaled, Added])
def test_a_model_that_has_learnt_nothing_yet_hides_nothing(kind: Any) -> None:
    with torch.random.fork_rng():
        model = kind(tiny("llama").config).eval()
    with pytest.raises(
        ValueError, match=f"{kind.__name__} cannot be taken apart: its own forward pass"
    ):
        HuggingFaceLM(model).check_exit(1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.inference_mode()
def test_eager_attention_is_causal_by_parts_too(family: str) -> None:
    inner: Any = tiny(family)
    inner.set_attn_implementation("eager")
    model, tokens = HuggingFaceLM(inner), random_tokens(2, 9)
    model.check_exit(1)
    assert_close(model(tokens).logits, inner(tokens).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["packed", "packed int8", "packed bfloat16"])
@torch.inference_mode()
def test_packed_rounded_and_coarse_models_are_taken_apart(family: str, form: str) -> None:
    model, tokens = HuggingFaceLM(tiny(family)), random_tokens(2, 9)
    if "bfloat16" in form:
        model = model.to(torch.bfloat16)
    if "int8" in form:
        quantize(model.model, "int8")
    model.pack()
    assert model.takes_apart
    # bfloat16 has 8 bits, and the two passes may sum in another order.
    near = (
        functools.partial(torch.testing.assert_close, rtol=0.1, atol=0.3)
        if "bfloat16" in form
        else assert_close
    )
    near(model(tokens).logits, model.model(input_ids=tokens).logits)
