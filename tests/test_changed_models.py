"""Laws of models that their users change: what the model computes now is what is decoded."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import greedy_tokens, tiny
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import lightning_specdec
from lightning_specdec import ModelDrafter, NGramDrafter, SpeculativeDecoder
from lightning_specdec.hf_generate import _decoders
from lightning_specdec.models.changes import ModelStamp, user_code
from lightning_specdec.models.huggingface import HuggingFaceLM, _in_eval_mode
from lightning_specdec.models.layers import scoring_only
from lightning_specdec.models.packed import PackedLinear

PROMPTS = [[3, 5, 7, 3, 5], [11, 2, 11, 2, 11, 2, 9]]
NUM_NEW = 6


def model_of(family: str = "llama", **sizes: Any) -> Any:
    model: Any = tiny(family, **sizes)
    model.generation_config = GenerationConfig(do_sample=False)
    return model


def reference(model: Any, *, num_new: int = NUM_NEW, **options: Any) -> list[list[int]]:
    """Greedy tokens of transformers' own `generate`, row by row."""
    return [greedy_tokens(model, prompt, num_new, **options) for prompt in PROMPTS]


@functools.cache
def unchanged_tokens() -> list[list[int]]:
    """The tokens of the model of most tests before it is changed."""
    return reference(model_of())


def through_generate(model: Any, *, num_new: int = NUM_NEW) -> list[list[int]]:
    return reference(model, num_new=num_new, custom_generate=lightning_specdec.generate)


class Decoders:
    """A model with its decoder, which is made before the model changes.

    Args:
        model: the model.
        inner: the form of the model that the decoder gets, if it is another object.
        num_new: tokens to decode. Small changes need more until they show.
    """

    def __init__(self, model: Any, inner: Any = None, *, num_new: int = NUM_NEW) -> None:
        self.model = model
        self.decoder = SpeculativeDecoder(model if inner is None else inner)
        self.num_new = num_new

    def check(self) -> list[list[int]]:
        """All ways to decode give the tokens of transformers, which are returned."""
        expected = reference(self.model, num_new=self.num_new)
        assert through_generate(self.model, num_new=self.num_new) == expected
        assert self.decoder.decode(PROMPTS, max_new_tokens=self.num_new).tokens == expected
        standard = self.decoder.decode_standard(PROMPTS, max_new_tokens=self.num_new)
        assert standard.tokens == expected
        return expected


def negated(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook with an effect that no rounding hides."""
    if isinstance(output, tuple):
        return (-output[0], *output[1:])
    return -output


def negated_with_kwargs(module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> Any:
    return negated(module, inputs, output)


def halved(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    if inputs[0].is_floating_point():
        return (-0.5 * inputs[0], *inputs[1:])
    return ((inputs[0] + 1) % 67, *inputs[1:])


def halved_with_kwargs(module: nn.Module, inputs: tuple[Any, ...], kwargs: Any) -> Any:
    if not inputs:
        return inputs, {**kwargs, "hidden_states": -0.5 * kwargs["hidden_states"]}
    return halved(module, inputs), kwargs


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda part: part.register_forward_hook(negated),
    "forward with kwargs": lambda part: part.register_forward_hook(
        negated_with_kwargs, with_kwargs=True
    ),
    "pre": lambda part: part.register_forward_pre_hook(halved),
    "pre with kwargs": lambda part: part.register_forward_pre_hook(
        halved_with_kwargs, with_kwargs=True
    ),
}
PARTS: dict[str, str] = {
    "block": "model.layers.1",
    "linear": "model.layers.1.mlp.down_proj",
    "query": "model.layers.0.self_attn.q_proj",
    "head": "lm_head",
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
}


BEFORE_FIRST_CALL = "before the first call"
AFTER_FIRST_CALL = "after the first call"


def hook_cases() -> list[tuple[str, str, str]]:
    """Every kind of hook on every part. Each kind and each part has hooks of both times."""
    times = (BEFORE_FIRST_CALL, AFTER_FIRST_CALL)
    cases = []
    for kind_index, kind in enumerate(HOOKS):
        for part_index, part in enumerate(PARTS):
            cases.append((kind, part, times[(kind_index + part_index) % 2]))
    return cases


@pytest.mark.parametrize(("kind", "part", "time"), hook_cases())
def test_a_hook_counts_while_it_is_registered(kind: str, part: str, time: str) -> None:
    model = model_of()
    module = model.get_submodule(PARTS[part])
    if time == BEFORE_FIRST_CALL:
        handle = HOOKS[kind](module)
        pair = Decoders(model)
    else:
        pair = Decoders(model)
        assert pair.check() == unchanged_tokens()
        handle = HOOKS[kind](module)
    assert pair.check() != unchanged_tokens()
    handle.remove()
    assert pair.check() == unchanged_tokens()


def test_a_hook_of_all_modules_counts() -> None:
    pair = Decoders(model_of())
    plain_tokens = pair.check()

    def negated_down(module: nn.Module, inputs: Any, output: Any) -> Any:
        return -output if module is pair.model.model.layers[0].mlp.down_proj else output

    handle = nn.modules.module.register_module_forward_hook(negated_down)
    try:
        assert pair.check() != plain_tokens
    finally:
        handle.remove()
    assert pair.check() == plain_tokens


def test_a_hook_reads_what_the_models_own_modules_compute() -> None:
    model = model_of()
    seen: list[Any] = []
    handle = model.model.register_forward_hook(lambda m, i, output: seen.append(type(output)))
    Decoders(model).check()
    handle.remove()
    assert len({*seen}) == 1 and seen[0].__name__ == "BaseModelOutputWithPast"


@pytest.mark.parametrize("prompt_only", [True, False])
def test_a_hook_that_depends_on_the_length_of_a_call_is_refused(prompt_only: bool) -> None:
    """Such as a steering vector for the last token of a call: rounds read several tokens."""
    model = model_of()

    def steer(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if prompt_only:
            return -output if output.shape[1] > 1 else output
        return torch.cat((output[:, :-1], -output[:, -1:]), dim=1)

    decoder = SpeculativeDecoder(model)
    model.model.layers[1].register_forward_hook(steer)
    for decode in (lambda: decoder.decode(PROMPTS), lambda: through_generate(model)):
        with pytest.raises(ValueError, match="a forward hook on model.layers.1, and its output"):
            decode()


def test_hooks_of_accelerate_count() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Negate(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return negated(module, (), output)

    for path in ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.1", "model.layers.2.mlp"):
        pair = Decoders(model_of())
        plain_tokens = pair.check()
        add_hook_to_module(pair.model.get_submodule(path), Negate())
        assert pair.check() != plain_tokens
        remove_hook_from_module(pair.model.get_submodule(path))
        assert pair.check() == plain_tokens


def replaced(module: Any, *, wraps: bool) -> Callable[..., Any]:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if isinstance(module, nn.Linear):
            return -output
        if hasattr(output, "logits"):
            output.logits = -output.logits
            return output
        return negated(module, (), output)

    return functools.wraps(original)(forward) if wraps else forward


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("path", ["", "lm_head", "model.layers.1", "model.layers.1.self_attn"])
def test_a_replaced_forward_function_counts(path: str, wraps: bool) -> None:
    pair = Decoders(model_of())
    plain_tokens = pair.check()
    module = pair.model.get_submodule(path)
    module.forward = replaced(module, wraps=wraps)
    assert pair.check() != plain_tokens
    assert Decoders(pair.model).check() != plain_tokens
    del module.forward
    assert pair.check() == plain_tokens


def test_a_ragged_batch_and_a_single_draft_token_run_a_replaced_forward_function() -> None:
    model = model_of()
    original = model.forward
    model.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
    expected = reference(model)
    decoder = SpeculativeDecoder(model)
    assert decoder.decode_standard(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
    one_token = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=1)
    assert one_token.tokens == expected


def test_a_function_of_a_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Decoders(model_of())
    plain_tokens = pair.check()
    mlp_class = type(pair.model.model.layers[0].mlp)
    original = mlp_class.forward
    monkeypatch.setattr(mlp_class, "forward", lambda self, hidden: -original(self, hidden))
    assert pair.check() != plain_tokens


def test_a_replaced_activation_or_setting_counts() -> None:
    pair = Decoders(model_of())
    tokens = [pair.check()]
    for layer in pair.model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
    tokens.append(pair.check())
    for layer in pair.model.model.layers:
        layer.self_attn.scaling *= 3
    tokens.append(pair.check())
    for layer in pair.model.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0
    tokens.append(pair.check())
    assert len({str(row) for row in tokens}) == 4


def test_a_replaced_or_reordered_layer_counts() -> None:
    pair = Decoders(model_of())
    tokens = [pair.check()]
    layers = pair.model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 0, 1
    tokens.append(pair.check())
    pair.model.lm_head = nn.Linear(32, 67)
    tokens.append(pair.check())

    class Negated(type(layers[0].mlp)):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Tensor:
            return -super().forward(hidden)

    layers[2].mlp.__class__ = Negated
    tokens.append(pair.check())
    assert len({str(row) for row in tokens}) == 4


def test_a_compiled_part_is_refused_by_name() -> None:
    def compile_forward(model: Any) -> None:
        model.forward = torch.compile(model.forward, backend="eager")

    def compile_layer(model: Any) -> None:
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")

    def compile_in_place(model: Any) -> None:
        model.model.layers[1].compile(backend="eager")

    for change in (compile_forward, compile_layer, compile_in_place):
        pair = Decoders(model_of())
        pair.check()
        change(pair.model)
        for decode in (
            lambda pair=pair: pair.decoder.decode(PROMPTS),
            lambda pair=pair: through_generate(pair.model),
        ):
            with pytest.raises(ValueError, match="pass it without torch.compile"):
                decode()


def test_a_compiled_model_is_decoded_as_the_model_inside() -> None:
    model = model_of()
    Decoders(model, torch.compile(model)).check()
    assert through_generate(torch.compile(model)) == reference(model)


# Adapters of PEFT


def with_adapter(
    modules: Any = ("q_proj", "down_proj"),
    *,
    seed: int = 0,
    **options: Any,
) -> tuple[Any, Any]:
    """A model, and the same with a LoRA adapter whose effect shows."""
    model = model_of()
    config = peft.LoraConfig(
        r=4, target_modules=list(modules), task_type="CAUSAL_LM", lora_alpha=64, **options
    )
    adapted: Any = peft.get_peft_model(model, config).eval()
    randomize(adapted, seed)
    return model, adapted


def randomize(adapted: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize(
    "modules",
    [
        ("q_proj", "o_proj"),
        ("gate_proj", "down_proj"),
        ("embed_tokens",),
        ("lm_head",),
        ("q_proj", "down_proj", "embed_tokens", "lm_head"),
    ],
    ids=str,
)
def test_an_adapter_counts_wherever_it_is(modules: tuple[str, ...]) -> None:
    model, adapted = with_adapter(modules)
    with adapted.disable_adapter():
        plain_tokens = reference(model)
    # The model as it was before PEFT.
    assert plain_tokens == unchanged_tokens()
    pair = Decoders(model, adapted)
    adapter_tokens = pair.check()
    assert adapter_tokens != plain_tokens
    assert through_generate(adapted) == adapter_tokens
    with adapted.disable_adapter():
        assert pair.check() == plain_tokens
        assert through_generate(adapted) == plain_tokens
    assert pair.check() == adapter_tokens


def test_a_decoder_made_without_the_adapter_has_it_afterwards() -> None:
    """Each way to pass the model, also if an error ends the time without the adapter."""
    model, adapted = with_adapter(("q_proj", "down_proj", "lm_head"))
    adapter_tokens = reference(adapted)
    assert adapter_tokens != unchanged_tokens()
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW}
    for form in (model, adapted):
        with pytest.raises(KeyError), adapted.disable_adapter():
            decoder = SpeculativeDecoder(form)
            assert decoder.decode(PROMPTS, **options).tokens == unchanged_tokens()
            raise KeyError("ends the context")
        assert decoder.decode(PROMPTS, **options).tokens == adapter_tokens
        assert decoder.decode_standard(PROMPTS, **options).tokens == adapter_tokens


def test_an_adapter_of_the_draft_is_disabled_and_enabled_with_it() -> None:
    """As a draft of the model without an adapter, it is always right only while it is disabled."""
    _, adapted = with_adapter()
    target = model_of()
    decoder = SpeculativeDecoder(target, adapted)

    def acceptance_rate() -> float:
        result = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=2)
        assert result.tokens == unchanged_tokens()
        assert result.acceptance_rate is not None
        return result.acceptance_rate

    assert acceptance_rate() < 1
    with adapted.disable_adapter():
        assert acceptance_rate() == 1
    assert acceptance_rate() < 1


def test_an_adapter_counts_once_it_is_added() -> None:
    pair = Decoders(model_of())
    plain_tokens = pair.check()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=64)
    peft.inject_adapter_in_model(config, pair.model)
    randomize(pair.model, 1)
    assert pair.check() != plain_tokens
    for module in pair.model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)
    assert pair.check() == plain_tokens


def test_another_adapter_another_scale_and_merged_weights_count() -> None:
    model, adapted = with_adapter()
    adapted.add_adapter(
        "b", peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=64)
    )
    pair = Decoders(model, adapted)
    tokens = [pair.check()]
    adapted.set_adapter("b")
    tokens.append(pair.check())
    randomize(adapted, 3)
    tokens.append(pair.check())
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("b", 0.125)
    tokens.append(pair.check())
    assert len({str(row) for row in tokens}) == 4
    adapted.merge_adapter()
    assert pair.check() == tokens[3]
    adapted.unmerge_adapter()
    assert pair.check() == tokens[3]
    adapted.set_adapter("default")
    pair.check()


def test_an_adapter_with_weight_decomposition_counts() -> None:
    model, adapted = with_adapter(use_dora=True)
    Decoders(model, adapted).check()


def test_prompt_tuning_is_refused_by_name() -> None:
    model = model_of()
    decoder = SpeculativeDecoder(model)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned: Any = peft.get_peft_model(model, config).eval()
    with pytest.raises(ValueError, match="prompt tuning of PEFT"):
        SpeculativeDecoder(tuned)
    with pytest.raises(ValueError, match="prompt tuning of PEFT"):
        through_generate(tuned)
    # The model inside has no virtual tokens.
    expected = reference(model)
    assert through_generate(model) == expected
    assert decoder.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected


def test_a_batch_of_mixed_adapters_is_refused_by_name() -> None:
    _, adapted = with_adapter()
    with pytest.raises(ValueError, match="adapter_names"):
        reference(adapted, adapter_names=["__base__"], custom_generate=lightning_specdec.generate)


# Weights


class Negation(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def test_parametrizations_count() -> None:
    for path in ("model.layers.1.mlp.down_proj", "lm_head", "model.embed_tokens"):
        pair = Decoders(model_of())
        plain_tokens = pair.check()
        module = pair.model.get_submodule(path)
        parametrize.register_parametrization(module, "weight", Negation())
        assert pair.check() != plain_tokens
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        assert pair.check() == plain_tokens
    pair = Decoders(model_of())
    parametrizations.weight_norm(pair.model.model.layers[1].mlp.up_proj)
    pair.check()


def in_data(weight: Tensor) -> None:
    weight.data[5] = -3 * weight.data[5]


def in_numpy(weight: Tensor) -> None:
    values = weight.detach().numpy()
    values[5] *= -3


def sparse(weight: Tensor) -> None:
    rows = torch.tensor([[5, 6], [1, 2]])
    weight.data.add_(torch.sparse_coo_tensor(rows, torch.tensor([40.0, -40.0]), weight.shape))


def swapped(weight: Tensor) -> None:
    """The same numbers in another order."""
    weight.data[[5, 6]] = weight.data[[6, 5]]


def columns_swapped(weight: Tensor) -> None:
    weight.data[:, [0, 8]] = weight.data[:, [8, 0]]


def replaced_data(weight: Tensor) -> None:
    weight.data = -weight.data


def counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(-1)


def an_optimizers_step(weight: Tensor) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    weight.grad = 2 * weight.detach().clone()
    optimizer.step()
    weight.grad = None


WRITES = [
    in_data,
    in_numpy,
    sparse,
    swapped,
    columns_swapped,
    replaced_data,
    counted,
    an_optimizers_step,
]
FOR_MATRICES = (sparse, swapped, columns_swapped)


def decoders_in_use(*, tie_word_embeddings: bool) -> Decoders:
    """A model with its decoder, which has packed the weights. Tests restore what they change."""
    pair = Decoders(model_of(tie_word_embeddings=tie_word_embeddings))
    pair.check()
    return pair


@pytest.fixture(scope="module")
def untied() -> Decoders:
    return decoders_in_use(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied() -> Decoders:
    """The output head and the embedding share one matrix."""
    return decoders_in_use(tie_word_embeddings=True)


def check_that_a_write_counts(
    pair: Decoders,
    write: Callable[[Tensor], None],
    path: str,
    *,
    changes_tokens: bool,
) -> None:
    plain_tokens = reference(pair.model)
    weight = pair.model.get_submodule(path).weight
    original_weight = weight.detach().clone()
    write(weight)
    assert not torch.equal(weight, original_weight)
    changed_tokens = pair.check()
    if changes_tokens:
        assert changed_tokens != plain_tokens
    weight.data.copy_(original_weight)
    assert pair.check() == plain_tokens


@pytest.mark.quick_cases("counted", "in_data", "swapped")
@pytest.mark.parametrize("write", WRITES)
def test_every_write_to_a_matrix_counts(write: Callable[[Tensor], None], untied: Decoders) -> None:
    """Linear layers have packed copies, which are made again."""
    path = "model.layers.1.mlp.down_proj"
    is_large = write not in (swapped, columns_swapped)
    check_that_a_write_counts(untied, write, path, changes_tokens=is_large)


@pytest.mark.parametrize("write", [write for write in WRITES if write not in FOR_MATRICES])
def test_every_write_to_a_vector_counts(write: Callable[[Tensor], None], untied: Decoders) -> None:
    # A norm scales all logits, so the most likely tokens may stay the same.
    check_that_a_write_counts(untied, write, "model.norm", changes_tokens=False)


@pytest.mark.quick_cases("counted-untied", "in_data-untied", "in_numpy-tied")
@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_to_the_output_head_counts(
    write: Callable[[Tensor], None],
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    pair: Decoders = request.getfixturevalue(kind)
    is_large = write not in (swapped, columns_swapped)
    check_that_a_write_counts(pair, write, "lm_head", changes_tokens=is_large)


def test_a_write_to_the_drafts_weights_counts() -> None:
    draft = model_of(seed=2)
    decoder = SpeculativeDecoder(model_of(), draft)
    before = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW)
    for ours, theirs in zip(draft.parameters(), decoder.target.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    after = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW)
    assert after.tokens == before.tokens
    assert after.acceptance_rate == 1.0 > (before.acceptance_rate or 0.0)


def test_another_type_of_weights_counts() -> None:
    pair = Decoders(model_of())
    pair.check()
    pair.model.to(torch.float64)
    pair.check()
    assert pair.decoder.target.dtype == torch.float64
    pair.model.to(torch.float32)
    pair.check()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_tokens", [90, 40])
def test_a_resized_vocabulary_counts(num_tokens: int, is_tied: bool) -> None:
    pair = Decoders(model_of(tie_word_embeddings=is_tied))
    pair.check()
    pair.model.resize_token_embeddings(num_tokens, mean_resizing=False)
    with torch.no_grad():
        pair.model.lm_head.weight.copy_(6 * torch.randn(num_tokens, 32))
    pair.check()
    assert pair.decoder.target.vocab_size == num_tokens


def test_weights_that_are_tied_later_count() -> None:
    pair = Decoders(model_of())
    plain_tokens = pair.check()
    pair.model.config.tie_word_embeddings = True
    pair.model.tie_weights()
    assert pair.model.lm_head.weight is pair.model.model.embed_tokens.weight
    assert pair.check() != plain_tokens


def test_a_model_that_is_ready_to_train_adapters_is_still_packed() -> None:
    model = model_of()
    model.enable_input_require_grads()
    pair = Decoders(model)
    pair.check()
    target, _ = pair.decoder.ready()
    assert any(isinstance(module, PackedLinear) for module in target.modules())


def test_an_embedding_tied_to_a_packed_head_stays() -> None:
    target = HuggingFaceLM(model_of(tie_word_embeddings=True)).pack()
    decoder = SpeculativeDecoder(target)
    decoder.decode(PROMPTS, max_new_tokens=3)
    with torch.no_grad():
        target.model.model.embed_tokens.weight.mul_(2)
    with pytest.raises(ValueError, match="load the model with pack=False"):
        decoder.decode(PROMPTS, max_new_tokens=3)


def test_a_hook_counts_in_a_forward_pass_without_a_state() -> None:
    """Training and distillation read whole texts, through the parts of the model."""
    model = model_of()
    target = HuggingFaceLM(model)
    tokens = torch.tensor(PROMPTS[:1])
    plain_logits = target(tokens).logits
    handle = model.model.register_forward_hook(
        lambda module, inputs, output: output.__class__(last_hidden_state=-output[0])
    )
    torch.testing.assert_close(target(tokens).logits, model(tokens).logits)
    assert not torch.allclose(target(tokens).logits, plain_logits)
    handle.remove()
    torch.testing.assert_close(target(tokens).logits, plain_logits)
    assert target.takes_apart


def test_weights_that_are_quantized_later_count() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    pair = Decoders(model_of(hidden_size=64, intermediate_size=96))
    pair.check()
    quantize_(pair.model, Int8WeightOnlyConfig())
    pair.check()


def test_a_changed_config_counts() -> None:
    pair = Decoders(model_of("mistral"))
    tokens = [pair.check()]
    pair.model.config.sliding_window = 2
    tokens.append(pair.check())
    pair.model.config.sliding_window = None
    tokens.append(pair.check())
    assert len({str(row) for row in tokens}) == 3


def test_changed_rotary_parameters_count() -> None:
    pair = Decoders(model_of(), num_new=12)
    plain_tokens = pair.check()
    rotary_class = type(pair.model.model.rotary_emb)
    pair.model.config.rope_parameters = {"rope_type": "default", "rope_theta": 20.0}
    pair.check()
    pair.model.model.rotary_emb = rotary_class(pair.model.config)
    assert pair.check() != plain_tokens


# Modes, copies, memory


def test_a_model_keeps_its_mode() -> None:
    for with_hook in (False, True):
        model, draft = model_of(), model_of(seed=2)
        model.train()
        model.model.layers[1].eval()
        draft.train()
        modes = [module.training for module in model.modules()]
        if with_hook:
            model.model.layers[0].register_forward_hook(negated)
        decoder = SpeculativeDecoder(model, draft)
        tokens = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens
        assert decoder.decode_standard(PROMPTS, max_new_tokens=NUM_NEW).tokens == tokens
        list(decoder.stream(PROMPTS, max_new_tokens=3))
        through_generate(model)
        assert [module.training for module in model.modules()] == modes
        assert all(module.training for module in draft.modules())
        assert tokens == reference(model.eval())


def test_dropout_does_not_reach_the_output() -> None:
    model = model_of("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = reference(model)
    model.train()
    decoder = SpeculativeDecoder(model)
    assert decoder.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
    assert model.training and model.transformer.drop.training


def test_an_unchanged_model_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_packed = [0]
    original = PackedLinear.__init__

    def counted_init(self: Any, *args: Any) -> None:
        num_packed[0] += 1
        original(self, *args)

    monkeypatch.setattr(PackedLinear, "__init__", counted_init)
    pair = Decoders(model_of())
    pair.check()
    num_first = num_packed[0]
    assert num_first >= 2 * 22
    for _ in range(2):
        pair.check()
        pair.model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert num_packed[0] == num_first


def test_a_model_is_freed_with_its_decoder() -> None:
    # Models of other tests may still be in use.
    gc.collect()
    num_models_before = len(_decoders)
    for with_hook in (False, True):
        model = model_of()
        if with_hook:
            model.lm_head.register_forward_hook(lambda *args, model=model: None)
        through_generate(model)
        reference_to_model = weakref.ref(model)
        del model
        gc.collect()
        assert reference_to_model() is None
    assert len(_decoders) == num_models_before


def test_a_decoder_can_be_copied_and_pickled(tmp_path: Path) -> None:
    decoder = SpeculativeDecoder(model_of(), model_of(seed=2))
    expected = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens
    packed = SpeculativeDecoder(HuggingFaceLM(model_of()).pack())
    for original in (decoder, packed):
        for other in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            assert other.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
            assert other.target is not original.target
    assert isinstance(decoder.drafter, ModelDrafter)
    with_lookup = decoder.with_drafter(None)
    assert with_lookup._lock is decoder._lock


def test_weights_outside_of_memory_are_refused() -> None:
    pair = Decoders(model_of())
    pair.check()
    pair.model.model.layers[1].mlp.to("meta")
    for decode in (
        lambda: pair.decoder.decode(PROMPTS),
        lambda: through_generate(pair.model),
    ):
        with pytest.raises(ValueError, match="weights on the meta device or on disk"):
            decode()


def test_disk_offload_is_refused(tmp_path: Path) -> None:
    import accelerate

    model = model_of()
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    for decode in (
        lambda: SpeculativeDecoder(model).decode(PROMPTS),
        lambda: through_generate(model),
    ):
        with pytest.raises(ValueError, match="weights on the meta device or on disk"):
            decode()


@contextmanager
def bfloat16() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.quick_cases("llama")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_autocast_around_a_call_changes_nothing(family: str) -> None:
    model, draft = model_of(family), model_of(family, seed=2)
    expected = reference(model)
    decoder = SpeculativeDecoder(model, draft)
    with bfloat16():
        for form in (decoder, SpeculativeDecoder(HuggingFaceLM(model_of(family)).pack())):
            assert form.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
            assert form.decode_standard(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
        assert through_generate(model) == expected


def test_a_config_without_return_dict_decodes() -> None:
    """In most families, transformers' own code fails then."""
    model = model_of("falcon")
    model.config.return_dict = False
    expected = reference(model)
    assert SpeculativeDecoder(model).decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
    assert through_generate(model) == expected


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    config = AutoConfig.for_model("openai-gpt", n_embd=16, n_layer=1, n_head=2, vocab_size=67)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel keeps no key-value cache"):
        SpeculativeDecoder(model)


def test_a_module_of_another_kind_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="Linear is not a model of transformers: pass"):
        SpeculativeDecoder(nn.Linear(2, 2))


def test_a_stamp_sees_values_and_not_only_objects() -> None:
    module = nn.Linear(2, 2)
    module.settings = types.SimpleNamespace(scale=1.0, names=["a"], table={"x": {"y": 2}})  # type: ignore[assignment]
    settings: Any = module.settings
    stamps = [ModelStamp(module)]
    assert ModelStamp(module) == stamps[0]
    settings.scale = 2.0
    stamps.append(ModelStamp(module))
    settings.names.append("b")
    stamps.append(ModelStamp(module))
    settings.table["x"]["y"] = 3
    stamps.append(ModelStamp(module))
    module.vector = torch.zeros(3)
    stamps.append(ModelStamp(module))
    module.vector.data[1] = 1.0
    stamps.append(ModelStamp(module))
    module.partial = functools.partial(max, 3)  # type: ignore[assignment]
    stamps.append(ModelStamp(module))
    for i, stamp in enumerate(stamps):
        assert all(stamp != later for later in stamps[i + 1 :])
    with contextlib.suppress(AttributeError):
        del module.settings


def test_threads_that_share_a_model_leave_each_module_in_its_mode() -> None:
    model = model_of()
    model.train()
    model.model.layers[0].eval()
    expected = [module.training for module in model.modules()]
    barrier = threading.Barrier(2)
    are_all_in_eval_mode: list[bool] = []

    def first() -> None:
        with _in_eval_mode(model):
            barrier.wait()
            barrier.wait()

    def second() -> None:
        barrier.wait()
        with _in_eval_mode(model):
            barrier.wait()
            # The first block ends within this one.
            thread.join()
            are_all_in_eval_mode.append(not any(module.training for module in model.modules()))

    thread = threading.Thread(target=first)
    thread.start()
    second()
    assert are_all_in_eval_mode == [True]
    assert [module.training for module in model.modules()] == expected


def test_a_check_of_the_parts_leaves_the_logits_of_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    tokens = torch.tensor([[3, 5, 7]])
    expected = model(tokens).logits
    logits = []
    register = nn.Module.register_forward_hook

    def register_and_call(module: nn.Module, hook: Any, **options: Any) -> Any:
        handle = register(module, hook, **options)
        if hook.__name__ == "large_logits":
            thread = threading.Thread(target=lambda: logits.append(model(tokens).logits))
            thread.start()
            thread.join()
        return handle

    monkeypatch.setattr(nn.Module, "register_forward_hook", register_and_call)
    assert HuggingFaceLM(model).stack is not None
    assert len(logits) == 1
    assert torch.equal(logits[0], expected)


class CountingDrafter(NGramDrafter):
    """A user's drafter, which holds a lock and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.num_calls = 0

    def propose(self, *args: Any, **options: Any) -> Any:
        with self.lock:
            self.num_calls += 1
        return super().propose(*args, **options)


def test_a_users_drafter_in_training_mode_is_not_copied() -> None:
    drafter = CountingDrafter().train()
    decoder = SpeculativeDecoder(model_of(), drafter)
    decoder.decode(PROMPTS, max_new_tokens=NUM_NEW)
    assert drafter.num_calls > 0


def test_a_drafter_that_changes_with_each_call_leaves_the_target_packed() -> None:
    decoder = SpeculativeDecoder(model_of(), CountingDrafter())
    first, _ = decoder.ready()
    decoder.decode(PROMPTS, max_new_tokens=NUM_NEW)
    second, _ = decoder.ready()
    assert second is first


@pytest.mark.parametrize(
    ("module_class", "name"), [(nn.Linear, "forward"), (nn.Module, "_call_impl")]
)
def test_a_replaced_function_of_torch_counts(
    module_class: type,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoders = Decoders(model_of())
    before = decoders.check()
    original = getattr(module_class, name)

    def halved(module: nn.Module, *args: Any, **options: Any) -> Any:
        output = original(module, *args, **options)
        is_projection = isinstance(module, nn.Linear) and module.out_features == module.in_features
        return output * 0.5 if is_projection else output

    monkeypatch.setattr(module_class, name, halved)
    during = decoders.check()
    assert during != before
    monkeypatch.undo()
    assert decoders.check() == before


def test_a_replaced_function_of_linear_layers_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = Decoders(model_of())
    before = decoders.check()
    original = nn.functional.linear

    def halved(inputs: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        output = original(inputs, weight, bias)
        return output * 0.5 if weight.shape[0] == weight.shape[1] else output

    monkeypatch.setattr(nn.functional, "linear", halved)
    during = decoders.check()
    assert during != before
    monkeypatch.undo()
    assert decoders.check() == before


def test_a_stamp_sees_writes_to_buffers_even_without_those_to_parameters() -> None:
    model = nn.BatchNorm1d(3)
    stamp = ModelStamp(model, count_writes=False)
    with torch.no_grad():
        model.weight.add_(1)
    assert ModelStamp(model, count_writes=False) == stamp
    model.running_mean.add_(1)  # type: ignore[union-attr]
    assert ModelStamp(model, count_writes=False) != stamp


def test_a_call_in_another_thread_is_no_code_of_a_user() -> None:
    model = model_of()
    with scoring_only(model, lambda hidden: hidden):
        assert user_code(model) == []
