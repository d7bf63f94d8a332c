"""What transformers keeps of the text of one row, and the caches of several rows as one.

Recurrent layers, masks of a model's own, and sparse attention do not fit a `KVState`, whose rows of
different lengths share a call. Here each row has a cache of the model's own kind.

A call takes about the same time for one row as for a few, since it reads the same weights. So the
caches of rows that continue with equally many tokens can be joined for a call. Texts of different
lengths are padded on the left, as transformers' own generation pads prompts: the padding precedes
each text, so it cannot enter a recurrent state.

Shapes: B rows, S slots.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

from lightning_specdec.models.layers import CACHE_NAMES
from lightning_specdec.models.snapshot_state import RowCache

STATE_NAMES = (*CACHE_NAMES, "state")
"""Names of what a forward pass continues from, as argument and in its output."""
_GROWING_TENSORS = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}
"""Tensors of attention layers that only grow, with the dimension of the tokens."""
_GROWING_LAYERS = (DynamicLayer, DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer)
"""Layers whose tensors of these names have a slot for each token of the text."""
_JOINED_TYPES = (
    "DynamicCache",
    "MiniMaxCache",
    "xLSTMCache",
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Caches and layers whose tensors have the rows in their first dimension, and the tokens, if any,
in the dimension before the last."""
_CONSTANT_TYPES = (bool, int, float, str, type, torch.dtype, torch.device, PreTrainedConfig)
"""Of attributes that are the same for all rows. A count of tokens is an exception."""
_STATES_IN_MODULES = ("conv1d_state", "recurrent_states")
"""Attributes of modules in which RecurrentGemma keeps its state."""
_modules_lock = threading.Lock()
"""Held while the attributes of modules are a row's."""


class _NumSlots(int):
    """In a snapshot, stands for the first slots of a tensor that has only grown since."""


class ModelCache(RowCache):
    """What a model of transformers returns to continue a text: its cache, or a list of tensors.

    Attributes:
        name: of the argument that it is passed as; empty before the first call.
        value: the cache; None before the first call, so that the model makes one.
    """

    def __init__(self) -> None:
        self.name = ""
        self.value: Any = None

    def call(self, model: nn.Module, **options: Any) -> Any:
        """Call the model so that it continues this text. Returns its output.

        Raises:
            ValueError: the output contains nothing to continue from.
        """
        if self.name:
            options[self.name] = self.value
        output = model(**options)
        for name in STATE_NAMES:
            value = getattr(output, name, None)
            if value is not None:
                self.name = name
                self.value = value
                return output
        if not self.name:
            raise ValueError(
                f"{type(model).__name__} returns no cache, so that it would read the whole text "
                "in every call: use another model"
            )
        return output

    def snapshot(self) -> Any:
        if not isinstance(self.value, Cache):
            return _copied(self.value)
        other_values = {name: item for name, item in vars(self.value).items() if name != "layers"}
        return [_saved_layer(layer) for layer in self.value.layers], deepcopy(other_values)

    def restore(self, saved: Any) -> None:
        if not isinstance(self.value, Cache):
            self.value = _copied(saved)
            return
        saved_layers, other_values = saved
        del self.value.layers[len(saved_layers) :]
        for layer, saved_layer in zip(self.value.layers, saved_layers, strict=True):
            _restore_layer(layer, saved_layer)
        vars(self.value).update(deepcopy(other_values))

    def copy(self) -> ModelCache:
        # Python would copy all that shares memory with a tensor: the rows of a joined call.
        copies = {id(tensor): tensor.clone() for tensor in _growing_tensors(self.value)}
        return deepcopy(self, copies)

    # Several rows

    @property
    def can_be_joined(self) -> bool:
        """Whether caches of this kind can be joined with others of it."""
        return _can_be_joined(self.value)

    @property
    def has_tokens(self) -> bool:
        """Whether a layer keeps a tensor with a slot for each token."""
        return next(_growing_tensors(self.value), None) is not None


def call_joined(
    model: nn.Module,
    caches: Sequence[ModelCache],
    lengths: Sequence[int],
    **options: Any,
) -> Any:
    """Call the model once, so that it continues the texts of all caches. Returns its output.

    Args:
        caches: one for each row. All of them have been used, and `can_be_joined`.
        lengths: of the texts, including the tokens of this call.
    """
    joined = ModelCache()
    joined.name = caches[0].name
    joined.value = _joined("", [cache.value for cache in caches])
    output = joined.call(model, **options)
    for index, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        cache.name = joined.name
        cache.value = _row_of("", joined.value, index, length)
    return output


def _can_be_joined(value: Any) -> bool:
    if value is None or isinstance(value, (Tensor, *_CONSTANT_TYPES)):
        return True
    if isinstance(value, list | tuple):
        return all(_can_be_joined(item) for item in value)
    if isinstance(value, Mapping):
        return all(_can_be_joined(item) for item in value.values())
    if type(value).__name__ not in _JOINED_TYPES:
        return False
    return _can_be_joined(vars(value))


def _joined(name: Any, values: Sequence[Any]) -> Any:
    """One value for all rows, from the values that a cache has under this name for each row."""
    first = values[0]
    if type(first).__name__ in _JOINED_TYPES:
        joined = copy(first)
        vars(joined).update(_joined("", [vars(value) for value in values]))
        return joined
    if isinstance(first, list | tuple):
        return type(first)(_joined("", items) for items in zip(*values, strict=True))
    if isinstance(first, Mapping):
        return {key: _joined(key, [value[key] for value in values]) for key in first}
    if not isinstance(first, Tensor):
        return max(values) if name == "cumulative_length" else first
    if first.dim() == 0:
        return first
    if name in _GROWING_TENSORS:
        return _padded(values)
    return torch.cat(list(values))


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Keys or values `[1, heads, S, D]` of all rows, with zeros before the shorter ones."""
    num_slots = max(row.shape[-2] for row in rows)
    padded = []
    for row in rows:
        padded.append(nn.functional.pad(row, (0, 0, num_slots - row.shape[-2], 0)))
    return torch.cat(padded)


def _row_of(name: Any, value: Any, index: int, length: int) -> Any:
    """The value that one row gets from the value of all rows.

    Args:
        name: under which a cache has it.
        length: tokens of the row's text.
    """
    if type(value).__name__ in _JOINED_TYPES:
        row_value = copy(value)
        vars(row_value).update(_row_of("", vars(value), index, length))
        return row_value
    if isinstance(value, list | tuple):
        return type(value)(_row_of("", item, index, length) for item in value)
    if isinstance(value, Mapping):
        return {key: _row_of(key, item, index, length) for key, item in value.items()}
    if not isinstance(value, Tensor):
        # A layer that shares the keys of another one has read no token.
        return length if name == "cumulative_length" and value else value
    if value.dim() == 0:
        return value
    row = value[index : index + 1]
    if name not in _GROWING_TENSORS:
        # Models write to these in place.
        return row.clone()
    num_slots = row.shape[-2]
    num_padding = max(0, num_slots - length)
    return row.narrow(-2, num_padding, num_slots - num_padding)


def _growing_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a cache that have a slot for each token."""
    for layer in getattr(value, "layers", ()):
        for name in _GROWING_TENSORS:
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                yield tensor


def _copied(value: Any) -> Any:
    """A copy that shares the config, which a cache may refer to."""
    config = getattr(value, "config", None)
    return deepcopy(value, {id(config): config})


def _saved_layer(layer: Any) -> dict[str, Any]:
    """The values of a cache layer, with only the length of tensors that have a slot per token."""
    saved: dict[str, Any] = {}
    grows = type(layer) in _GROWING_LAYERS
    for name, value in vars(layer).items():
        if grows and name in _GROWING_TENSORS and isinstance(value, Tensor):
            # An empty tensor has no dimension of tokens yet.
            dim = _GROWING_TENSORS[name] if value.dim() > 1 else 0
            saved[name] = _NumSlots(value.shape[dim])
        elif isinstance(value, Tensor):
            # Python would copy all that shares memory with it: a whole prompt, or all joined rows.
            saved[name] = value.clone()
        else:
            saved[name] = deepcopy(value)
    return saved


def _restore_layer(layer: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, _NumSlots):
            tensor = getattr(layer, name)
            dim = _GROWING_TENSORS[name] if tensor.dim() > 1 else 0
            setattr(layer, name, tensor.narrow(dim, 0, int(value)))
        else:
            setattr(layer, name, deepcopy(value))


class ModuleStates(ModelCache):
    """The cache of a model that keeps a part of its state in attributes of its modules.

    The attributes are set for each call and reset after it, since all rows share the modules.

    Args:
        name: of the argument for the cache of the attention layers. The model does not return it.
        config: of the model.
    """

    def __init__(self, name: str, config: PreTrainedConfig) -> None:
        super().__init__()
        self.name = name
        self.value = DynamicCache(config=config)
        self._states: dict[tuple[str, str], Any] = {}

    def call(self, model: nn.Module, **options: Any) -> Any:
        previous: dict[tuple[str, str], Any] = {}
        # Threads may decode with one model at the same time.
        with _modules_lock:
            for module, path, name in modules_with_state(model):
                previous[path, name] = vars(module)[name]
                setattr(module, name, self._states.get((path, name)))
            try:
                return super().call(model, **options)
            finally:
                for module, path, name in modules_with_state(model):
                    self._states[path, name] = vars(module)[name]
                    setattr(module, name, previous[path, name])

    @property
    def can_be_joined(self) -> bool:
        return False

    def snapshot(self) -> Any:
        return super().snapshot(), deepcopy(self._states)

    def restore(self, saved: Any) -> None:
        saved_cache, states = saved
        super().restore(saved_cache)
        self._states = deepcopy(states)


def modules_with_state(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Modules that keep a state: the module, its path, and the attribute's name."""
    for path, module in model.named_modules():
        for name in _STATES_IN_MODULES:
            if name in vars(module):
                yield module, path, name
