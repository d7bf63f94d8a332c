"""Compile the layers of a transformers model for decoding.

All layers of a model run the same code over different weights. So one layer is compiled, with
weights, buffers and lengths as arguments, and serves every layer and every text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_specdec.models.huggingface import HuggingFaceLM

MOST_COMPILATIONS = 128
"""Limit for one layer class's code, over all models of the process. Beyond torch's default of 8,
layers silently run uncompiled."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that families of transformers apply to the same input."""
_WARMUP_WIDTHS = (2, 1, 4)
"""Tokens of the warm-up calls: a first call, a step of standard decoding, a round."""


@dataclass
class _LayerCache:
    """One layer's part of a state, as the compiled code reads it.

    It consists of tensors and a number, with the same shapes for every layer.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    span: int

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        # Indices around a slice put the rows and positions first: `[B, T, H, E]`.
        self.keys[self.rows, :, self.positions] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.positions] = value_states.transpose(1, 2)

        attended_keys = self.keys[:, :, : self.span]
        attended_values = self.values[:, :, : self.span]
        return attended_keys, attended_values


class _JoinedLinear(nn.Module):
    """One of several linear layers over the same input, as rows of one joined weight.

    Compiled for several tokens, each layer computes the joined product and takes its own rows. The
    compiler leaves one product, so that fewer and larger kernels read the weights. In other calls
    each layer reads its own rows only.

    Args:
        layer: the layer to replace. Its weight becomes a part of the joined one, so that whoever
            else holds the layer reads the same memory.
        joined: weights of all layers, `[sum of out, in]`.
        start: the layer's first row in `joined`.
    """

    def __init__(self, layer: nn.Linear, joined: Tensor, start: int) -> None:
        super().__init__()
        self.joined = joined
        self.start = start
        self.end = start + layer.out_features
        layer.weight.data = joined[self.start : self.end]
        self.weight = layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        has_several_tokens = inputs.numel() > inputs.shape[-1]
        if torch.compiler.is_compiling() and has_several_tokens:
            joined_outputs = nn.functional.linear(inputs, self.joined)
            return joined_outputs[..., self.start : self.end]
        return nn.functional.linear(inputs, self.weight)


def join_linears(model: nn.Module) -> None:
    """Join the linear layers that read the same input, in place.

    On a GPU, launching a small product takes longer than reading its weights.
    """
    for parent in list(model.modules()):
        for names in _JOINED:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if not all(_can_join(layer) for layer in layers):
                continue

            joined = torch.cat([layer.weight.data for layer in layers])
            start = 0
            for name, layer in zip(names, layers, strict=True):
                setattr(parent, name, _JoinedLinear(layer, joined, start))
                start += layer.out_features


def _can_join(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and layer.bias is None


@cache
def _options(backend: str, one_token: bool) -> dict[str, Any] | None:
    """The compiler's options.

    They are one object for all layers, since layers with equal options share what is compiled. With
    one token, products become sums over the weights in tuned kernels, which a GPU reads faster.
    """
    if backend != "inductor":
        return None
    from torch._inductor import config

    options: dict[str, Any] = {"post_grad_custom_pre_pass": _merging_pass()}
    if one_token:
        options["coordinate_descent_tuning"] = True
        # Programmatic dependent launch: a kernel starts while the one before it ends.
        if hasattr(config.triton, "enable_pdl"):
            options["triton.enable_pdl"] = True
    return options


def _merging_pass() -> Any:
    """A pass that merges equal computations in a graph, which torch does for training only.

    `_JoinedLinear` relies on it: of the equal joined products one is left.
    """
    # Importing torch's compiler takes long, so it is imported only where layers are compiled.
    from torch._inductor.custom_graph_pass import CustomGraphPass

    aten = torch.ops.aten
    linear_operations = (aten.mm, aten.permute, aten.t, aten.view, aten.reshape)
    mergeable = {operation.default for operation in linear_operations}

    class MergeEqual(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            first_nodes: dict[str, torch.fx.Node] = {}
            for node in list(graph.nodes):
                if node.op != "call_function" or node.target not in mergeable:
                    continue
                computation = f"{node.target} {node.args} {node.kwargs}"
                first_node = first_nodes.setdefault(computation, node)
                if first_node is not node:
                    node.replace_all_uses_with(first_node)
                    graph.erase_node(node)

        def uuid(self) -> str:
            return "lightning_specdec.merge_equal.1"

    return MergeEqual()


def compile_layers(model: HuggingFaceLM, *, backend: str = "inductor") -> float:
    """Compile the recorded calls of a model's layers in place, and warm up.

    Other calls stay uncompiled. Recorded calls have few shapes, and code for one shape is faster.

    Returns:
        Seconds that it took: ten to forty for the first time on a machine, a few later.

    Raises:
        ValueError: the model records no calls.
    """
    started = time.perf_counter()
    if model._pool is None:
        raise ValueError("only calls that are recorded on a GPU are compiled: leave compiling out")
    join_linears(model)

    # Recordings made so far contain uncompiled kernels.
    model.record()
    for layer_index, layer in enumerate(model.stack.layers):
        module: Any = layer
        if not hasattr(module, "forward_uncompiled"):
            module.forward_uncompiled = module.forward
            module.forward = _dispatch(layer_index, module.forward, backend)

    with torch.inference_mode():
        state = model.init_state(1, 8)
        for width in _WARMUP_WIDTHS:
            tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
            model(tokens, state, logits_for=slice(-1, None))
    return time.perf_counter() - started


def _dispatch(layer_index: int, plain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A layer's forward pass: compiled in a recorded call, else the plain function."""

    def compiled_for(*, one_token: bool) -> Callable[..., Any]:
        options = _options(backend, one_token)
        return torch.compile(plain, dynamic=False, backend=backend, options=options)

    compiled_for_one = compiled_for(one_token=True)
    compiled_for_several = compiled_for(one_token=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        state_cache = _find_cache(args, kwargs)
        if state_cache is None or not state_cache.recorded:
            return plain(*args, **kwargs)

        # The layer reads its part of the cache in place of the whole one.
        storage = state_cache.storage
        slots = state_cache.slots
        positions = slots.positions.clamp(max=storage.num_slots - 1)
        keys, values = storage.layers[layer_index]
        layer_cache = _LayerCache(keys, values, storage.rows, positions, slots.span)

        args = tuple(layer_cache if value is state_cache else value for value in args)
        for name, value in kwargs.items():
            if value is state_cache:
                kwargs[name] = layer_cache

        hidden = args[0]
        has_one_token = hidden.numel() == hidden.shape[-1]
        compiled = compiled_for_one if has_one_token else compiled_for_several

        # A layer reads its own number only to find its part of the cache, so that no code depends
        # on it. All models share a layer class's code, and with it the count of compilations.
        with torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True, recompile_limit=MOST_COMPILATIONS
        ):
            return compiled(*args, **kwargs)

    return forward


def _find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The `StateCache` among a layer's arguments; None without one."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "slots"):
            return value
    return None
