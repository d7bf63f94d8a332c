"""A transformers model whose layers and output head run in OpenVINO on a CPU, over a paged attention state.

The layers are converted once; each one's attention becomes OpenVINO's paged attention, in which the tokens of all rows
lie one behind the other without padding and every row's keys and values in blocks of its own (as in vLLM, Kwon et al.
2023). Going back lowers a length and copies nothing.

Shapes: B rows, T tokens, D hidden size, N scored positions, V vocabulary; P tokens of all rows, without padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import accumulate, pairwise
from operator import add
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension
from torch import Tensor, nn

from lightning_specdec.config.files import cache_home, new_directory
from lightning_specdec.config.memory import require_memory
from lightning_specdec.models.base import ExitStates, ModelOutput, weights_digest, weights_stamp
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import check_openvino
from lightning_specdec.models.openvino_conversion import (
    FORMAT,
    GROUP,
    QUANTIZED_ROW,
    ROW,
    Attention,
    convert,
    shared_tensor,
    traced,
)
from lightning_specdec.models.paged_state import BLOCK, PagedState, lengthened, without_padding
from lightning_specdec.models.state import DecodeState, Lengths, as_list

PRECISIONS = {torch.float32: ("f32", ov.Type.f32), torch.bfloat16: ("bf16", ov.Type.bf16)}
"""What a model of that dtype computes in and keeps its keys and values in."""
DYNAMIC = 32
"""Activations that share a scale where they meet quantized weights."""
_PLACES = (
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)
"""Inputs that say where the tokens belong, named as OpenVINO's own pipelines do."""
_CONVERTING = Lock()  # torch traces one network at a time


def converted(model: HuggingFaceLM, quantization: str | None = None) -> Path:
    """The directory of a model's converted files, see `_kept`; ValueError also where OpenVINO cannot run it."""

    def make(directory: Path) -> None:
        require_memory(
            "converting the model to OpenVINO", 12 * model.num_parameters, "cpu"
        )  # in float32
        single = model.in_float32()
        convert(single, directory, model.dtype, quantization)
        if quantization is None:
            _check(single, OpenVINOLM(single, directory))

    return _kept((weights_digest(model), model.arguments(), model.dtype, quantization), make)


def _kept(settings: object, make: Callable[[Path], None]) -> Path:
    """A directory of converted files: made once, kept in the cache by its settings, checked when read.

    Raises:
        ValueError: the files are damaged or cannot be written.
    """
    everything = repr((settings, GROUP, DYNAMIC, FORMAT, ov.get_version()))
    home = cache_home() / f"openvino-{hashlib.sha256(everything.encode()).hexdigest()[:24]}"
    sums = home / "sha256.json"
    if not home.exists():
        try:
            with _CONVERTING, new_directory(home) as made:
                make(made)
                (made / sums.name).write_text(json.dumps(_sha256(made)), encoding="ascii")
        except (OSError, ValueError):  # another process may have been first
            if not home.exists():
                raise
    try:
        whole = _sha256(home) == json.loads(sums.read_text(encoding="ascii"))
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{home} is damaged: delete it to have it rebuilt")
    return home


@cache
def _core() -> ov.Core:
    core = ov.Core()
    core.add_extension(Attention)
    return core


def _sha256(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.glob("*.xml")) + sorted(directory.glob("*.bin")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


@torch.no_grad()
def _check(model: HuggingFaceLM, made: OpenVINOLM) -> None:
    """Raise ValueError unless the converted model gives the model's logits, both computed in float32."""
    tokens = torch.arange(12)[None] * 7919 % model.vocab_size
    wanted, got = model(tokens).logits, made(tokens).logits
    if not (got - wanted).abs().max() <= 1e-3 * wanted.abs().max():
        what = type(model.model).__name__
        raise ValueError(
            f"OpenVINO computes other logits for {what} than torch does: use --backend torch"
        )


class Compiled:
    """A network that runs in OpenVINO, with paged attention in the place of `Attention`.

    Args:
        model: with inputs that are all read; the positions are the last one, where it has attention. It is changed.
        dtype: as of `PRECISIONS`.
        memory: what the model reads and does not keep.

    Attributes:
        sizes: see `PagedState`.
    """

    def __init__(self, model: ov.Model, dtype: torch.dtype, memory: object = None) -> None:
        self._memory, self.sizes = memory, list[tuple[int, int, int]]()
        places = [
            ops.parameter([] if name == _PLACES[-1] else [-1], ov.Type.i32, name)
            for name in _PLACES
        ]
        caches: list[Any] = []
        for node in model.get_ordered_ops():
            if node.get_type_name() == "Attention":
                heads, key, value, window = (
                    int(each) for each in node.input_value(3).get_node().data
                )
                here = places
                if (
                    node.get_input_size() > 5
                ):  # a token that follows in the same layer, the only one
                    here = [*_next_places(node.input_value(5)), *places[2:]]
                else:
                    caches += [
                        ops.parameter([-1, heads, BLOCK, size], PRECISIONS[dtype][1])
                        for size in (key, value)
                    ]
                    self.sizes.append((heads, key, value))
                paged = _paged_attention(node, caches[-2:], here, window)
                for kind, size in (("k", key), ("v", value)):
                    paged.set_rt_info(heads, f"num_{kind}_heads")
                    paged.set_rt_info(size, f"{kind}_head_size")
                node.output(0).replace(paged.output(0))
        if caches:
            model = ov.Model(
                model.get_results(), [*model.get_parameters(), *places, *caches], "paged"
            )
        model.validate_nodes_and_infer_types()
        precision = PRECISIONS[dtype][0]
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # float16 otherwise, also for float32
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": DYNAMIC,
        }
        self.request = _core().compile_model(model, "CPU", options).create_infer_request()
        self._narrow = [output.get_element_type() == ov.Type.bf16 for output in model.outputs]
        self._bound: object = None
        self._inputs: dict[int, np.ndarray] = {}
        self._lock = Lock()
        """Held for a call: it has one memory for inputs and outputs, and threads may share it."""

    @classmethod
    def of(
        cls,
        network: nn.Module,
        example: tuple[Tensor, ...],
        dtype: torch.dtype,
        quantization: str | None,
        settings: object,
        *,
        shared: bool = False,
    ) -> Compiled:
        """A small network of torch, with inputs like these; converted once. Other arguments as of `convert`.

        Args:
            settings: what the network computes, besides its class and weights.
            shared: whether the first input is always the one given here, whose memory is used as it is.

        Raises:
            ValueError: see `_kept`.
        """

        def make(directory: Path) -> None:
            made = traced(deepcopy(network).float(), example, dtype, quantization)
            ov.save_model(made, directory / "model.xml", compress_to_fp16=False)

        kind = type(network).__name__, weights_digest(network), settings, dtype, quantization
        model = _core().read_model(_kept(kind, make) / "model.xml")
        memory = shared_tensor(example[0].detach()) if shared else None
        if shared:
            given = model.get_parameters()[0]
            constant = ops.constant(memory, shared_memory=True)
            given.output(0).replace(ops.convert(constant, given.get_element_type()).output(0))
            model.remove_parameter(given)
        return cls(model, dtype, memory)

    def run(
        self, inputs: Sequence[Any], state: PagedState | None = None, first: int = 0
    ) -> list[Tensor]:
        """The outputs.

        Args:
            inputs: the model's, of numpy or contiguous ones of torch; behind its positions what else
                `PagedState.places` gives.
            state: the keys and values; those from layer `first` on are its own.
        """
        with self._lock:
            if state is not None and self._bound is not state.caches:
                self._bound = None  # until all are bound
                for i, cache in enumerate(state.caches[2 * first : 2 * (first + len(self.sizes))]):
                    self.request.set_input_tensor(len(inputs) + i, cache)
                self._bound = state.caches
            for i, each in enumerate(inputs):
                array, own = each.numpy() if isinstance(each, Tensor) else each, self._inputs.get(i)
                if own is not None and own.shape == array.shape:
                    own[...] = array
                else:  # costs as much as ten copies of a few integers
                    self._inputs.pop(i, None)
                    own = array.copy()
                    self.request.set_input_tensor(i, ov.Tensor(own, shared_memory=True))
                    self._inputs[i] = own
            self.request.infer()
            outputs = [self.request.get_output_tensor(i).data for i in range(len(self._narrow))]
            return [
                torch.from_numpy(output.view(np.int16).copy()).view(
                    torch.bfloat16
                )  # numpy has no bfloat16
                if narrow
                else torch.from_numpy(output.copy())
                for output, narrow in zip(outputs, self._narrow, strict=True)
            ]


class _Graph:
    """Some of a model's layers, compiled; behind the last one also the final norm and the output head.

    Args:
        model: all of it, as `convert` wrote it; it is taken apart.
        first, end: the layers from `first` to before `end`; none where they are equal.
        features: layers whose output is given too.
        dtype: as of `PRECISIONS`.
    """

    def __init__(
        self, model: ov.Model, first: int, end: int, features: set[int], dtype: torch.dtype
    ) -> None:
        num_layers = len(model.outputs) - 2
        self.first, self.end, self._scores = first, end, end == num_layers
        self.features = sorted(layer for layer in features if first <= layer < end)
        outputs = [num_layers if layer == num_layers - 1 else layer for layer in self.features]
        last = num_layers + 1 if self._scores else end - 1
        outputs += (
            [] if last in outputs else [last]
        )  # OpenVINO breaks down where one is named twice
        hidden, positions, scored = (each.get_node() for each in model.inputs)
        if first > 0:
            hidden = _entry_behind(model, first - 1)
        results = [model.outputs[i].get_node() for i in outputs]
        for result in results[
            :-1
        ]:  # where an output has another type, OpenVINO adds up all layers in that type
            typed = ops.convert(result.input_value(0), PRECISIONS[dtype][1])
            result.input(0).replace_source_output(typed.output(0))
        inputs = [
            hidden,
            *([scored] if self._scores else []),
            *([positions] if first < end else []),
        ]
        self.compiled = Compiled(ov.Model(results, inputs, "layers"), dtype)

    def run(
        self,
        hidden: Any,
        scored: np.ndarray,
        state: PagedState | None,
        places: Sequence[np.ndarray],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The logits `[N, V]`, or the last layer's output `[P, 1, D]`; and the features."""
        if not self._scores:
            outputs = self.compiled.run([hidden, *places], state, self.first)
        else:
            size = state.num_scored.padded(len(scored)) if state is not None and len(scored) else 0
            wide = np.resize(scored, size) if size > len(scored) else scored
            outputs = self.compiled.run([hidden, wide, *places], state, self.first)
            outputs[-1] = outputs[-1][: len(scored)]
        return outputs[-1], dict(zip(self.features, outputs, strict=False))


def _entry_behind(model: ov.Model, layer: int) -> Any:
    """A new input that takes the place of a layer's output, and of the first layer's input, whose shape may be read."""
    source = model.outputs[layer].get_node().input_value(0)
    entry = ops.parameter(source.get_partial_shape(), ov.Type.f32)
    for replaced in (source, model.inputs[0].get_node().output(0)):
        for reader in replaced.get_target_inputs():
            if reader.get_node().get_type_name() != "Result":
                reader.replace_source_output(entry.output(0))
    return entry


def _next_places(past: Any) -> list[Any]:
    """The first two of `_PLACES` where each row has one token more."""
    size = ops.gather(
        ops.shape_of(past, "i32"), ops.constant(np.int32(0)), ops.constant(np.int32(0))
    )
    one = ops.constant(np.int32(1))
    return [
        ops.convert(past, "i32"),
        ops.range(ops.constant(np.int32(0)), ops.add(size, one), one, "i32"),
    ]


def _paged_attention(node: Any, caches: Sequence[Any], places: Sequence[Any], window: int) -> Any:
    """OpenVINO's paged attention in the place of `Attention`, without sinks, eviction and sparsity."""

    def constant(value: Any, kind: type = np.int32) -> Any:
        return ops.constant(np.array(value, dtype=kind)).output(0)

    def nothing(kind: type = np.int32) -> Any:
        return constant(np.zeros(0), kind)

    query, key, value, _, scale = node.input_values()[:5]
    *starts, longest = (place.output(0) for place in places)
    floats, bytes_ = nothing(np.float32), nothing(np.uint8)
    inputs = [
        query,
        key,
        value,
        *(cache.output(0) for cache in caches),
        *starts,
        scale,
        constant(window),
    ]
    inputs += [floats, longest, nothing()]  # slopes by position; window of scores
    inputs += [nothing(), nothing(), floats]  # rotation of evicted blocks
    inputs += [floats, constant(0), constant(0), floats]  # sparsity; sinks
    inputs += [constant(0), nothing(), nothing(), nothing()]  # eviction
    inputs += [nothing(), bytes_, nothing()]  # types of tokens; trees
    return _PagedAttentionExtension(inputs)


class OpenVINOLM(HuggingFaceLM):
    """A transformers model on a CPU whose layers and output head run in OpenVINO; for decoding only.

    Args:
        model: the model, of a dtype of `PRECISIONS`; its weights are shared.
        directory: its converted files, as `converted` gives them.
        quantization: of these files' weights.
    """

    backend = "openvino"

    def __init__(
        self, model: HuggingFaceLM, directory: Path, quantization: str | None = None
    ) -> None:
        super().__init__(model.model, tokenizer=model.tokenizer)
        self.origin, self.directory, self.settings = model.origin, directory, quantization
        self._features: set[int] = set()
        self._cutting = Lock()
        self._exits: list[int] = []
        self._head: _Graph | None = None
        self._stamp, self._dtype = weights_stamp(self), model.dtype
        self._cut()

    @classmethod
    def of(cls, model: HuggingFaceLM, quantization: str | None = None) -> OpenVINOLM:
        """That model in OpenVINO: converted when it is first asked for, read from the cache from then on.

        Raises:
            ValueError: see `converted` and `check_openvino`.
        """
        check_openvino(model.device, model.dtype)
        return cls(model, converted(model, quantization), quantization)

    def _cut(self) -> None:
        """Compile the layers, divided behind each number of layers in `_exits`."""
        self._graphs = [
            self._part(*ends) for ends in pairwise((0, *self._exits, self.stack.num_layers))
        ]

    def _part(self, first: int, end: int) -> _Graph:
        return _Graph(
            _core().read_model(self.directory / "model.xml"), first, end, self._features, self.dtype
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HuggingFaceLM:
        return HuggingFaceLM(deepcopy(self.model, memo), tokenizer=self.tokenizer)

    def packed(self) -> OpenVINOLM:
        return self

    fused = pack = packed

    def init_state(self, batch_size: int, max_length: int) -> PagedState:  # type: ignore[override]
        if weights_stamp(self) != self._stamp:
            raise ValueError(
                "the weights changed after the model was converted: convert it anew with OpenVINOLM.of"
            )
        sizes = [size for graph in self._graphs for size in graph.compiled.sizes]
        row = QUANTIZED_ROW if self.settings else ROW
        return PagedState(batch_size, max_length, sizes=sizes, dtype=self.dtype, row=row)

    def check_exit(self, num_layers: int) -> None:
        super().check_exit(num_layers)
        with self._cutting:
            if num_layers not in self._exits:
                self._exits = sorted({*self._exits, num_layers})
                self._cut()

    @torch.no_grad()
    def exit_logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            self._head = self._part(self.stack.num_layers, self.stack.num_layers)
        flat = hidden.flatten(0, -2)
        logits, _ = self._head.run(
            flat[:, None].float().contiguous(), np.arange(len(flat)), None, ()
        )
        return logits.unflatten(0, hidden.shape[:-1])

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Tensor | slice | None = None,
        features: Sequence[int] = (),
        exit_states: ExitStates | None = None,
    ) -> ModelOutput:
        if state is None:
            state = self.init_state(*tokens.shape)
        with self._cutting:
            if not self._features.issuperset(features):
                self._features |= {*features}
                self._cut()
        lengths = (
            [tokens.shape[1]] * len(tokens) if valid_lengths is None else as_list(valid_lengths)
        )
        first, given = 0, tokens
        if exit_states is not None:
            first, given = (
                exit_states.num_layers,
                self._completed(tokens, state, valid_lengths, exit_states),
            )
        scored = _places_of(lengths, tokens.shape[1], logits_for)
        logits, hidden = self._run(
            given, state, state.consumed, lengths, scored, first, self.stack.num_layers
        )
        state.advance(tokens.shape[1], valid_lengths)
        return ModelOutput(logits, {layer: hidden[layer] for layer in features}, logits_for)

    @torch.no_grad()
    def lower(
        self, tokens: Tensor, state: DecodeState, starts: Sequence[int], num_layers: int
    ) -> Tensor:
        assert isinstance(state, PagedState)
        room = state.num_blocks * BLOCK  # what is behind it pads a row beside longer ones
        lengths = [max(0, min(tokens.shape[1], room - start)) for start in starts]
        nothing = np.zeros((len(tokens), 0), dtype=np.int64)
        return self._run(tokens, state, starts, lengths, nothing, 0, num_layers)[0]

    def _run(
        self,
        given: Tensor,
        state: DecodeState,
        starts: Sequence[int],
        lengths: Sequence[int],
        scored: np.ndarray,
        first: int,
        end: int,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The layers from `first` to before `end`, for tokens or for the input of layer `first`.

        Returns:
            The logits `[B, N, V]` of the scored places, or layer `end - 1`'s output `[B, T, D]` where there are layers
            behind it; and the features by layer; zeros at padding.
        """
        assert isinstance(state, PagedState), f"OpenVINO needs a PagedState, got {state}"
        shape, flat = given.shape[:2], without_padding(given, lengths)
        graphs = [graph for graph in self._graphs if first <= graph.first and graph.end <= end]
        context = max(map(add, starts, lengths))
        places = state.places(
            starts, lengths, state.num_tokens[graphs[0].first].padded(len(flat), context)
        )
        entry, outputs = lengthened(flat, places), dict[int, Tensor]()
        if not given.is_floating_point():
            positions, most = torch.from_numpy(places[0]), self.max_positions
            entry = self.stack.embed(
                entry, positions if most is None else positions.clamp(max=most - 1)
            )
        hidden = entry.float().contiguous()
        for graph in graphs:
            hidden, features = graph.run(hidden, scored.reshape(-1), state, places)
            outputs |= features

        def padded(output: Tensor) -> Tensor:
            new = output[: len(flat), 0].to(self._dtype)
            if len(flat) == shape.numel():
                return new.view(*shape, new.shape[-1])
            made = new.new_zeros(*shape, new.shape[-1])
            for row, part in zip(made, new.split(list(lengths)), strict=True):
                row[: len(part)] = part
            return made

        last = (
            hidden.view(*scored.shape, hidden.shape[-1])
            if end == self.stack.num_layers
            else padded(hidden)
        )
        return last, {layer: padded(output) for layer, output in outputs.items()}


def _places_of(
    lengths: Sequence[int], num_tokens: int, logits_for: Tensor | slice | None
) -> np.ndarray:
    """Where the wanted positions `[B, N]` lie among the P tokens; the first one for those at padding."""
    if isinstance(logits_for, Tensor):
        wanted = logits_for.numpy()
    elif min(lengths) == num_tokens:
        return np.arange(len(lengths) * num_tokens).reshape(-1, num_tokens)[
            :, logits_for or slice(None)
        ]
    else:
        wanted = np.arange(num_tokens)[None, logits_for or slice(None)]
    starts = np.array([0, *accumulate(lengths)])[:-1, None]
    return np.where(wanted < np.array(lengths)[:, None], starts + wanted, 0)
