"""Compile the layers of a transformers model for decoding.

All layers of a model run the same code on other weights, so one layer is compiled, with weights, buffers and lengths
as arguments, and serves every layer and every text.
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
"""Of one layer class's code, over all models of the process; beyond torch's limit of 8 layers silently run plain."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that families of transformers apply to the same input."""


@dataclass
class _LayerCache:
    """One layer's part of a state, as the compiled code sees it: tensors and a number, the same for every layer."""

    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    span: int

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[self.rows, :, self.positions] = key_states.transpose(1, 2)
        self.values[self.rows, :, self.positions] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.span], self.values[:, :, : self.span]


class _JoinedLinear(nn.Module):
    """One of several linear layers over the same input, as a part of all of them joined.

    Compiled for several tokens, each computes the joined product and takes its own rows, and the compiler leaves one
    product: fewer and larger kernels read the weights. Otherwise each reads its own rows alone.
    """

    def __init__(self, layer: nn.Linear, joined: Tensor, first: int) -> None:
        super().__init__()
        self.joined, self.first, self.last = joined, first, first + layer.out_features
        layer.weight.data = joined[
            first : self.last
        ]  # whoever else holds the layer reads the same memory
        self.weight = layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and inputs.numel() > inputs.shape[-1]:
            return nn.functional.linear(inputs, self.joined)[..., self.first : self.last]
        return nn.functional.linear(inputs, self.weight)


def join_linears(model: nn.Module) -> None:
    """Join the linear layers that read the same input, in place: on a GPU small products cost more than their bytes."""
    for parent in list(model.modules()):
        for names in _JOINED:
            layers = [getattr(parent, name, None) for name in names]
            if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
                continue
            joined, first = torch.cat([layer.weight.data for layer in layers]), 0  # type: ignore[union-attr]
            for name, layer in zip(names, layers, strict=True):
                assert isinstance(layer, nn.Linear)
                setattr(parent, name, _JoinedLinear(layer, joined, first))
                first += layer.out_features


@cache
def _options(backend: str, one_token: bool) -> dict[str, Any] | None:
    """The compiler's options. One object, since layers with equal options share what is compiled.

    With a pass that computes once what a graph computes several times; torch does so for training alone. Products with
    one token become sums over the weights in kernels that are tuned, which a GPU reads faster.
    """
    if backend != "inductor":
        return None
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    aten = torch.ops.aten
    pure = {
        each.default for each in (aten.mm, aten.permute, aten.t, aten.view, aten.reshape)
    }  # of a linear layer

    class MergeEqual(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen: dict[str, torch.fx.Node] = {}
            for node in list(graph.nodes):
                if node.op == "call_function" and node.target in pure:
                    first = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
                    if first is not node:
                        node.replace_all_uses_with(first)
                        graph.erase_node(node)

        def uuid(self) -> str:
            return "lightning_specdec.merge_equal.1"

    options: dict[str, Any] = {"post_grad_custom_pre_pass": MergeEqual()}
    if one_token:
        options["coordinate_descent_tuning"] = True
        if hasattr(
            config.triton, "enable_pdl"
        ):  # a kernel's launch overlaps with the end of the one before
            options["triton.enable_pdl"] = True
    return options


def compile_layers(model: HuggingFaceLM, *, backend: str = "inductor") -> float:
    """Compile the recorded calls of a model's layers in place, and warm up; other calls stay uncompiled.

    They come in few shapes, and code for one shape is faster.

    Returns:
        Seconds that it took: some ten to forty for the first time on a machine, a few after.

    Raises:
        ValueError: the model records no calls.
    """
    started = time.perf_counter()
    if model._pool is None:
        raise ValueError("only calls that are recorded on a GPU are compiled: leave compiling out")
    join_linears(model)
    model.record()  # anew: what was recorded before runs uncompiled
    for i, layer in enumerate(model.stack.layers):
        if not hasattr(layer, "forward_uncompiled"):
            layer.forward_uncompiled = layer.forward  # type: ignore[assignment]
            layer.forward = _dispatch(i, layer.forward, backend)
    with torch.inference_mode():
        state = model.init_state(1, 8)
        for width in (2, 1, 4):  # a first call, a step of standard decoding, a round
            model(
                torch.zeros(1, width, dtype=torch.long, device=model.device),
                state,
                logits_for=slice(-1, None),
            )
    return time.perf_counter() - started


def _dispatch(index: int, plain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A layer's forward pass: compiled where a recorded call continues a state whose buffers are there."""
    compiled = [
        torch.compile(plain, dynamic=False, backend=backend, options=_options(backend, one_token))
        for one_token in (False, True)
    ]

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache: Any = next(
            (value for value in (*args, *kwargs.values()) if hasattr(value, "slots")), None
        )
        if cache is None or not cache.recorded:
            return plain(*args, **kwargs)
        storage, slots = cache.storage, cache.slots
        positions = slots.positions.clamp(max=storage.num_slots - 1)
        keys, values = storage.layers[index]
        part = _LayerCache(keys, values, storage.rows, positions, slots.span)
        args = tuple(part if value is cache else value for value in args)
        kwargs = {name: part if value is cache else value for name, value in kwargs.items()}
        # A layer's own number is read by its code, but only to find its part of the cache: no code depends on it.
        # All models share a layer class's code, so they share its count of compilations too.
        with torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True, recompile_limit=MOST_COMPILATIONS
        ):
            return compiled[args[0].numel() == args[0].shape[-1]](*args, **kwargs)

    return forward
