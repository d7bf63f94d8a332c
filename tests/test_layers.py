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
from lightning_specdec.models import ExitStates, KVState, ModelOutput
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack, cache_name
from lightning_specdec.models.packed import quantize

WHOLE = ["gemma3_text", "gemma2", "gpt_oss", "gemma3n_text", "falcon", "opt", "cohere2"]
WHOLE += ["gptj"] * (cache_name(GPTJBlock.forward) == "layer_past")  # before transformers 5.24
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
    pairs = [
        (found.logits, expected.logits),
        *((found.features[i], expected.features[i]) for i in found.features),
    ]
    for one, other in pairs:
        for row, length in enumerate(lengths):
            assert_close(one[row, :length], other[row, :length])


@every_family
@torch.inference_mode()
def test_through_a_state_ragged_pieces_give_the_models_own_logits_and_hidden_states(
    family: str,
) -> None:
    generator, models = random.Random(1), [ours(family), undivided(family)]
    layers = range(models[0].stack.num_layers)
    states = [model.init_state(3, 2 * LENGTH) for model in models]
    while max(states[0].consumed) < LENGTH:
        width = generator.randint(1, 6)
        lengths = [generator.randint(0, width) for _ in range(3)]
        tokens = random_tokens(3, width, seed=generator.randrange(1000))
        one, other = (
            model(tokens, state, valid_lengths=lengths, features=layers)
            for model, state in zip(models, states, strict=True)
        )
        same(one, other, lengths)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", [*APART, "deepseek_v3", "smollm3", "mixtral"])
@torch.inference_mode()
def test_wherever_a_pass_is_split_it_is_the_whole_pass(family: str, num_layers: int) -> None:
    """Rows of different lengths, read ahead to different positions; garbage everywhere else."""
    model, generator = ours(family), random.Random(num_layers)
    split, whole = (model.init_state(3, 3 * LENGTH) for _ in range(2))
    while max(split.consumed) < LENGTH:
        for state in (split, whole):
            for row, length in enumerate(state.consumed):
                assert isinstance(state, KVState)
                for each in (buffer for pair in state.storage.layers.values() for buffer in pair):
                    each[row, :, length:] = 1e4
        width = generator.randint(1, 5)
        tokens = random_tokens(3, width, seed=generator.randrange(1000))
        lengths = [generator.randint(1, width) for _ in range(3)]
        known = generator.choice(
            [
                [0, 0, 0],
                lengths,
                [min(lengths)] * 3,
                [width] * 3,
                [generator.randint(0, width) for _ in range(3)],
            ]
        )
        options: dict[str, Any] = {"features": range(num_layers - 1, model.stack.num_layers)}
        if generator.random() < 0.3:
            lengths, known = [width] * 3, [width - 1] * 3
        else:
            options["valid_lengths"] = lengths
        hidden = model.lower(tokens, split, split.consumed, num_layers)
        for row, length in enumerate(known):
            hidden[row, length:] = torch.nan
        found = model(tokens, split, exit_states=ExitStates(num_layers, hidden, known), **options)
        same(found, model(tokens, whole, **options), lengths)
        assert split.consumed == whole.consumed


@torch.inference_mode()
def test_an_exits_logits_are_those_of_the_final_norm_and_the_head_on_its_layer() -> None:
    model, tokens = ours("qwen2"), random_tokens(2, 6)
    expected = tiny("qwen2")(tokens, output_hidden_states=True).hidden_states[2]
    head = model.model.lm_head(model.model.model.norm(expected))
    assert_close(model.exit_logits(expected), head)


def test_a_copy_is_taken_apart_by_itself() -> None:
    model, tokens = HuggingFaceLM(tiny("llama")), random_tokens(1, 5)
    before = model(tokens).logits
    copy, packed = deepcopy(model), model.fused()
    assert copy.stack.model is copy.model is not model.model
    with torch.no_grad():
        copy.model.lm_head.weight.zero_()
    assert not copy(tokens).logits.any() and torch.equal(model(tokens).logits, before)
    assert packed.stack.layers[0] is not model.stack.layers[0]
    assert packed.stack.inner.embed_tokens.weight is model.stack.inner.embed_tokens.weight


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_neox"])
def test_in_training_the_parts_have_the_models_own_gradients(
    family: str, checkpointing: bool
) -> None:
    """GPT-2 drops the same values for the same seed, and checking the parts changes no mode."""
    model, reference, tokens = (
        HuggingFaceLM(tiny(family).train()),
        tiny(family).train(),
        random_tokens(2, 9),
    )
    LayerStack(model.model).layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert (
        model.takes_apart
        and modes == [module.training for module in model.modules()]
        and len(set(modes)) == 2
    )
    model.train()
    for each in (model.model, reference):
        if checkpointing:
            each.gradient_checkpointing_enable()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            logits = (model if each is model.model else each)(tokens).logits
            logits.float().log_softmax(-1)[..., 0].mean().backward()
    for (name, found), expected in zip(
        model.model.named_parameters(), reference.parameters(), strict=True
    ):
        assert found.grad is not None or expected.grad is None, name
        if expected.grad is not None:
            assert_close(found.grad, expected.grad)


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
    """What comes behind its head cannot be seen in small logits."""

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
