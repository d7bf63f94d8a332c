"""A transformers model whose layers and output head run in OpenVINO on a CPU, over a paged attention state.

The layers are converted once; each one's attention becomes OpenVINO's paged attention, in which the tokens of all rows
lie one behind the other without padding and every row's keys and values in blocks of its own (as in vLLM, Kwon et al.
2023). Going back lowers a length and copies nothing.

Shapes: B rows, T tokens, D hidden size, N scored positions, V vocabulary; P tokens of all rows, without padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension
from torch import Tensor

from lightning_specdec.config.files import cache_home, new_directory
from lightning_specdec.models.base import ExitStates, ModelOutput, select, weights_digest
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.openvino_conversion import FORMAT, GROUP, Attention, convert, shared_tensor
from lightning_specdec.models.state import DecodeState, Lengths, as_list

BLOCK = 32
"""Tokens of a block of keys and values: the only size that OpenVINO's CPU kernels take."""
PRECISIONS = {torch.float32: ("f32", ov.Type.f32), torch.bfloat16: ("bf16", ov.Type.bf16)}
"""What a model of that dtype computes in and keeps its keys and values in."""
_PLACES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")
"""Inputs that say where the tokens belong, named as OpenVINO's own pipelines do."""


def converted(model: HuggingFaceLM, quantization: str | None = None) -> Path:
    """The directory of a model's converted files: made once, kept in the cache by its weights, checked when read.

    Raises:
        ValueError: OpenVINO cannot run it, or the files are damaged or cannot be written.
    """
    kind = model.dtype, quantization, GROUP, FORMAT, ov.get_version()
    settings = repr((weights_digest(model), model.arguments(), kind))
    home = cache_home() / f"openvino-{hashlib.sha256(settings.encode()).hexdigest()[:24]}"
    sums = home / "sha256.json"
    if not sums.is_file():
        try:
            with new_directory(home) as made:
                single = model.in_float32()
                convert(single, made, model.dtype, quantization)
                if quantization is None:
                    _check(single, OpenVINOLM(model, made))
                (made / sums.name).write_text(json.dumps(_sha256(made)), encoding="ascii")
        except (OSError, ValueError):  # another process may have been first
            if not sums.is_file():
                raise
    elif _sha256(home) != json.loads(sums.read_text(encoding="ascii")):
        raise ValueError(f"{home} is damaged: delete it, and it is made again")
    return home


def _sha256(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.glob("*.xml")) + sorted(directory.glob("*.bin")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


@torch.no_grad()
def _check(model: HuggingFaceLM, made: OpenVINOLM) -> None:
    """Raise ValueError unless the converted model gives the logits of the model in float32."""
    tokens = torch.arange(12)[None] * 7919 % model.vocab_size
    wanted, got = model(tokens).logits, made(tokens).logits
    tolerance = 1e-3 if made.dtype == torch.float32 else 0.1
    if not (got - wanted).abs().max() <= tolerance * wanted.abs().max():
        what = type(model.model).__name__
        raise ValueError(f"OpenVINO computes other logits for {what} than torch does: use --backend torch")


class _Graph:
    """Some of a model's layers, compiled.

    Args:
        layers: all of them, as `convert` wrote them; it is taken apart.
        first, end: the layers from `first` to before `end`.
        features: of these, those whose output is given too.
        dtype: as of `PRECISIONS`.
    """

    def __init__(self, layers: ov.Model, first: int, end: int, features: set[int], dtype: torch.dtype) -> None:
        self.first, self.end = first, end
        self.outputs = sorted({*(layer for layer in features if first <= layer < end), end - 1})
        self.sizes: list[tuple[int, int, int]] = []
        hidden, positions = (each.get_node() for each in layers.inputs)
        if first > 0:
            hidden = _entry_behind(layers, first - 1)
        places = [ops.parameter([] if name == _PLACES[-1] else [-1], ov.Type.i32, name) for name in _PLACES]
        results, caches = [layers.outputs[layer].get_node() for layer in self.outputs], []
        for node in ov.Model(results, [hidden, positions], "layers").get_ordered_ops():
            if node.get_type_name() == "Attention":
                heads, key, value, window = (int(each) for each in node.input_value(3).get_node().data)
                pair = [ops.parameter([-1, heads, BLOCK, size], PRECISIONS[dtype][1]) for size in (key, value)]
                paged = _paged_attention(node, pair, places, window)
                for kind, size in (("k", key), ("v", value)):
                    paged.set_rt_info(heads, f"num_{kind}_heads")
                    paged.set_rt_info(size, f"{kind}_head_size")
                node.output(0).replace(paged.output(0))
                caches += pair
                self.sizes.append((heads, key, value))
        model = ov.Model(results, [hidden, positions, *places, *caches], "layers")
        model.validate_nodes_and_infer_types()
        self._request = _compiled(model, dtype)
        self._bound: object = None

    def run(self, hidden: np.ndarray, state: PagedState, places: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """The layers' outputs `[1, P, D]` by layer, until the next call."""
        if self._bound is not state.caches:
            for i, cache in enumerate(state.caches[2 * self.first : 2 * self.end]):
                self._request.set_input_tensor(2 + len(_PLACES) + i, cache)
            self._bound = state.caches
        for i, each in enumerate((hidden, *places)):
            self._request.set_input_tensor(i, ov.Tensor(each, shared_memory=True))
        self._request.infer()
        return {layer: self._request.get_output_tensor(i).data for i, layer in enumerate(self.outputs)}


def _entry_behind(layers: ov.Model, layer: int) -> Any:
    """A new input that takes the place of a layer's output, and of the first layer's input, whose shape may be read."""
    source = layers.outputs[layer].get_node().input_value(0)
    entry = ops.parameter(source.get_partial_shape(), ov.Type.f32)
    for replaced in (source, layers.inputs[0].get_node().output(0)):
        for reader in replaced.get_target_inputs():
            if reader.get_node().get_type_name() != "Result":
                reader.replace_source_output(entry.output(0))
    return entry


def _paged_attention(node: Any, caches: Sequence[Any], places: Sequence[Any], window: int) -> Any:
    """OpenVINO's paged attention in the place of `Attention`, without sinks, eviction and sparsity."""

    def constant(value: Any, kind: type = np.int32) -> Any:
        return ops.constant(np.array(value, dtype=kind)).output(0)

    def nothing(kind: type = np.int32) -> Any:
        return constant(np.zeros(0), kind)

    query, key, value, _, scale = node.input_values()
    *starts, longest = (place.output(0) for place in places)
    floats, bytes_ = nothing(np.float32), nothing(np.uint8)
    inputs = [query, key, value, *(cache.output(0) for cache in caches), *starts, scale, constant(window)]
    inputs += [floats, longest, nothing()]  # slopes by position; window of scores
    inputs += [nothing(), nothing(), floats]  # rotation of evicted blocks
    inputs += [floats, constant(0), constant(0), floats]  # sparsity; sinks
    inputs += [constant(0), nothing(), nothing(), nothing()]  # eviction
    inputs += [nothing(), bytes_, nothing()]  # types of tokens; trees
    return _PagedAttentionExtension(inputs)


def _compiled(model: ov.Model, dtype: torch.dtype) -> ov.InferRequest:
    precision = PRECISIONS[dtype][0]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # float16 otherwise, also for float32
    }
    return ov.Core().compile_model(model, "CPU", options).create_infer_request()


class PagedState(DecodeState):
    """Attention's keys and values, layer by layer, in blocks of `BLOCK` tokens; a row's blocks lie together.

    Args:
        batch_size: rows.
        max_length: most tokens that a row consumes.
        sizes: of each layer: its key heads, the size of a key's head, that of a value's.
        dtype: of keys and values.
    """

    def __init__(
        self, batch_size: int, max_length: int, *, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype
    ) -> None:
        super().__init__(batch_size, torch.device("cpu"))
        self.num_blocks = max(1, -(-max_length // BLOCK))
        shapes = [(batch_size * self.num_blocks, heads, BLOCK, size) for heads, *kinds in sizes for size in kinds]
        self._use([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def _use(self, buffers: list[Tensor]) -> None:
        self._buffers, self.caches = buffers, [shared_tensor(buffer) for buffer in buffers]

    def places(self, starts: Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
        """The positions `[1, P]` of the next `lengths[b]` tokens of each row, from `starts[b]` on, and `_PLACES`."""
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        rows = [row for row, length in enumerate(lengths) if length]
        blocks = [-(-ends[row] // BLOCK) for row in rows]
        assert max(blocks) <= self.num_blocks, f"{max(ends)} tokens overrun {self.num_blocks * BLOCK} slots"
        firsts = [row * self.num_blocks for row in rows]
        positions = [np.arange(starts[row], ends[row]) for row in rows]
        tables = [np.arange(first, first + num, dtype=np.int32) for first, num in zip(firsts, blocks, strict=True)]
        return [
            np.concatenate(positions)[None],
            np.array([starts[row] for row in rows], dtype=np.int32),
            np.array([0, *accumulate(lengths[row] for row in rows)], dtype=np.int32),
            np.concatenate(tables),
            np.array([0, *accumulate(blocks)], dtype=np.int32),
            np.array(max(ends), dtype=np.int32),
        ]

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        for buffer in self._buffers:
            self._by_row(buffer)[list(rows)] = 0  # a request that ended in NaN must not poison the next one

    def _by_row(self, buffer: Tensor) -> Tensor:
        return buffer.unflatten(0, (-1, self.num_blocks))

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        taken = [self._by_row(buffer)[source] for buffer in self._buffers]
        for each in taken:
            each[empty] = 0
        self._use([each.flatten(0, 1) for each in taken])


class OpenVINOLM(HuggingFaceLM):
    """A transformers model on a CPU whose layers and output head run in OpenVINO; for decoding only.

    Args:
        model: the model, of a dtype of `PRECISIONS`; its weights are shared.
        directory: its converted files, as `converted` gives them.
        quantization: of these files' weights.
    """

    def __init__(self, model: HuggingFaceLM, directory: Path, quantization: str | None = None) -> None:
        super().__init__(model.model, tokenizer=model.tokenizer)
        self.origin, self.directory, self.settings = model.origin, directory, quantization
        self._core = ov.Core()
        self._core.add_extension(Attention)
        self._head = _compiled(self._core.read_model(directory / "head.xml"), self.dtype)
        self._features: set[int] = set()
        self._cut(())

    @classmethod
    def of(cls, model: HuggingFaceLM, quantization: str | None = None) -> OpenVINOLM:
        """That model in OpenVINO: converted when it is first asked for, read from the cache from then on.

        Raises:
            ValueError: see `converted`; it is not on a CPU, or of another dtype.
        """
        if model.device.type != "cpu" or model.dtype not in PRECISIONS:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in PRECISIONS)
            raise ValueError(f"the OpenVINO backend computes in {kinds} on a CPU, got {model.dtype} on {model.device}")
        return cls(model, converted(model, quantization), quantization)

    def _cut(self, exits: Sequence[int]) -> None:
        """Compile the layers, divided behind each of these numbers of layers."""
        ends = pairwise((0, *exits, self.stack.num_layers))
        file = self.directory / "layers.xml"
        self._graphs = [_Graph(self._core.read_model(file), *each, self._features, self.dtype) for each in ends]

    def __deepcopy__(self, memo: dict[int, Any]) -> HuggingFaceLM:
        return HuggingFaceLM(deepcopy(self.model, memo), tokenizer=self.tokenizer)

    def packed(self) -> OpenVINOLM:
        return self

    fused = pack = packed

    def init_state(self, batch_size: int, max_length: int) -> PagedState:  # type: ignore[override]
        sizes = [size for graph in self._graphs for size in graph.sizes]
        return PagedState(batch_size, max_length, sizes=sizes, dtype=self.dtype)

    def check_exit(self, num_layers: int) -> None:
        super().check_exit(num_layers)
        exits = {graph.first for graph in self._graphs} - {0}
        if num_layers not in exits:
            self._cut(sorted({*exits, num_layers}))

    def exit_logits(self, hidden: Tensor) -> Tensor:
        return self.output_logits(self.stack.norm(hidden))

    def output_logits(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            return super().output_logits(hidden)
        flat = hidden.detach().flatten(0, -2).float().contiguous().numpy()
        self._head.set_input_tensor(ov.Tensor(flat, shared_memory=True))
        self._head.infer()
        return torch.from_numpy(self._head.get_output_tensor().data.copy()).unflatten(0, hidden.shape[:-1])

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
        """See `HuggingFaceLM.forward`."""
        if state is None:
            state = self.init_state(*tokens.shape)
        if not self._features.issuperset(features):
            self._features |= {*features}
            self._cut([graph.first for graph in self._graphs[1:]])
        num_tokens, last = tokens.shape[1], self.stack.num_layers - 1
        lengths = [num_tokens] * len(tokens) if valid_lengths is None else as_list(valid_lengths)
        first, given = 0, tokens
        if exit_states is not None:
            first, given = exit_states.num_layers, self._completed(tokens, state, valid_lengths, exit_states)
        outputs = self._run(given, state, state.consumed, lengths, first, last + 1)
        state.advance(num_tokens, valid_lengths)
        if last in features:
            outputs[last] = self.stack.norm(outputs[last])
            normed = select(outputs[last], logits_for)
        else:
            normed = self.stack.norm(select(outputs[last], logits_for))
        return ModelOutput(self.output_logits(normed), {layer: outputs[layer] for layer in features}, logits_for)

    @torch.no_grad()
    def lower(self, tokens: Tensor, state: DecodeState, starts: Sequence[int], num_layers: int) -> Tensor:
        lengths = [tokens.shape[1]] * len(tokens)
        return self._run(tokens, state, starts, lengths, 0, num_layers)[num_layers - 1]

    def _run(
        self, given: Tensor, state: DecodeState, starts: Sequence[int], lengths: Sequence[int], first: int, end: int
    ) -> dict[int, Tensor]:
        """The output `[B, T, D]` of some layers, for tokens or for the input of layer `first`; zeros at padding."""
        assert isinstance(state, PagedState), f"OpenVINO needs a PagedState, got {state}"
        shape, steps = given.shape[:2], torch.arange(given.shape[1])
        if not given.is_floating_point():
            positions = torch.tensor(starts)[:, None] + steps
            most = self.max_positions
            given = self.stack.embed(given, positions if most is None else positions.clamp(max=most - 1))
        real = None if min(lengths) == shape[1] else steps < torch.tensor(lengths)[:, None]
        flat = given.flatten(0, 1) if real is None else given[real]
        hidden, places = flat[None].float().contiguous().numpy(), state.places(starts, lengths)
        outputs: dict[int, np.ndarray] = {}
        for graph in self._graphs:
            if first <= graph.first and graph.end <= end:
                outputs |= graph.run(hidden, state, places)
                hidden = outputs[graph.end - 1]
        made = {}
        for layer, output in outputs.items():
            new = torch.from_numpy(output)[0].to(self.dtype, copy=True)
            if real is None:
                made[layer] = new.unflatten(0, shape)
            else:
                made[layer] = new.new_zeros(*shape, new.shape[-1])
                made[layer][real] = new
        return made
