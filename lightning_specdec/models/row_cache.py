"""Decode models of transformers over the caches that they make themselves, one row at a time.

Recurrent layers, masks of a model's own, and sparse attention do not fit a `KVState`, whose rows of
different lengths share a call. Here each row has a cache of the model's own kind, and each call is
one that transformers itself would make for this row alone.

Shapes: B rows, T tokens, N scored positions, S slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

from lightning_specdec.models.attention import max_positions
from lightning_specdec.models.base import ModelOutput
from lightning_specdec.models.layers import CACHE_NAMES, cache_name, scoring_only
from lightning_specdec.models.model_config import first_line
from lightning_specdec.models.snapshot_state import (
    RowCache,
    SnapshotRow,
    SnapshotState,
    tensor_bytes,
)
from lightning_specdec.models.state import Lengths, as_list

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Places = Int[Tensor, "B N"] | slice | None

MAX_REREAD = 16
"""Most tokens that are read again together with new ones. More of them are read in a call before,
and a snapshot is taken after it, so that they are not read a third time."""
STATE_NAMES = (*CACHE_NAMES, "state")
"""Names of what a forward pass continues from, as argument and in its output."""
_GROWING_TENSORS = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}
"""Tensors of attention layers that only grow, with the dimension of the tokens."""
_GROWING_LAYERS = (DynamicLayer, DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer)
"""Layers whose tensors of these names have a slot for each token of the text."""
_STATES_IN_MODULES = ("conv1d_state", "recurrent_states")
"""Attributes of modules in which RecurrentGemma keeps its state."""
_IGNORES_STATE = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")
"""Families of transformers 5.24 whose calls on several tokens begin with an empty state."""
_CHOOSES_KEYS = ("indexed", "sparse", "compressed")
"""Parts of the names of layers that attend to the keys of the highest scores only. Scores may be
equal, and which key is chosen then depends on the shape of the call (seen in Dots3)."""
_NUM_PROMPT_TOKENS = 7
_CALL_LENGTHS = (4, 2)
"""Tokens of the calls that are compared with calls on one token each."""
_MIN_TOLERANCE = 2e-5
_MAX_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Largest difference of logits that may be taken for rounding, relative to the largest logit. In
float32, an error of 1.4e-4 has been seen (Zamba)."""
_MAX_COARSE_TOLERANCE = 0.1
"""The same in half precision."""
_modules_lock = threading.Lock()
"""Held while the attributes of modules are a row's."""

log = logging.getLogger(__name__)


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
            for module, path, name in _modules_with_state(model):
                previous[path, name] = vars(module)[name]
                setattr(module, name, self._states.get((path, name)))
            try:
                return super().call(model, **options)
            finally:
                for module, path, name in _modules_with_state(model):
                    self._states[path, name] = vars(module)[name]
                    setattr(module, name, previous[path, name])

    def snapshot(self) -> Any:
        return super().snapshot(), deepcopy(self._states)

    def restore(self, saved: Any) -> None:
        saved_cache, states = saved
        super().restore(saved_cache)
        self._states = deepcopy(states)


def _modules_with_state(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Modules that keep a state: the module, its path, and the attribute's name."""
    for path, module in model.named_modules():
        for name in _STATES_IN_MODULES:
            if name in vars(module):
                yield module, path, name


class RowReader:
    """Reads the rows of a `SnapshotState` with a model of transformers, one row at a time.

    Args:
        model: the model.
        config: of its text part.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        self.model = model
        self.config = config
        self._measured_dtype: torch.dtype | None = None
        self._reads_several = True

    def new_cache(self) -> ModelCache:
        """An empty cache for one row."""
        name = cache_name(type(self.model).forward)
        if name is not None and next(_modules_with_state(self.model), None) is not None:
            return ModuleStates(name, self.model.config)
        return ModelCache()

    def init_state(self, batch_size: int, device: torch.device) -> SnapshotState:
        """An empty state for `batch_size` rows."""
        return SnapshotState(batch_size, device, self.new_cache)

    def snapshot_bytes(self, device: torch.device) -> int:
        """Bytes of one snapshot of a row, as one token shows."""
        state = self.init_state(1, device)
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.read(token, state, None, None, ())
        return tensor_bytes(state.rows[0].cache.snapshot())

    @torch.no_grad()
    def read(
        self,
        tokens: Int[Tensor, "B T"],
        state: SnapshotState,
        valid_lengths: Lengths | None,
        logits_for: Places,
        features: Sequence[int],
    ) -> ModelOutput:
        """Continue the state, as `LanguageModel.forward` does.

        Logits and features of padding are zero, and so are those beyond the model's context.
        """
        batch_size, num_tokens = tokens.shape
        lengths = [num_tokens] * batch_size
        if valid_lengths is not None:
            lengths = as_list(valid_lengths)
        positions = _positions_of(logits_for, batch_size, num_tokens)

        outputs: list[_RowOutput] = []
        for index, row in enumerate(state.rows):
            row.truncate(state.consumed[index])
            row.append(tokens[index, : lengths[index]])
            columns: dict[int, int] = {}
            for column, position in enumerate(positions[index]):
                if position < lengths[index]:
                    columns[column] = position
            output = _RowOutput(columns, features)
            self._read_row(row, lengths[index], state.committed[index], output)
            outputs.append(output)
        state.advance(num_tokens, valid_lengths)
        return self._joined(outputs, len(positions[0]), num_tokens, logits_for)

    def _read_row(self, row: SnapshotRow, num_new: int, committed: int, output: _RowOutput) -> None:
        """Read the unread tokens of a row, of which the last `num_new` are new.

        Args:
            committed: length that the row is never truncated below.
            output: gets the logits and features of the new tokens.
        """
        unread = row.unread
        num_again = len(unread) - num_new
        limit = max_positions(self.config)
        if limit is not None:
            # A row near the end of the context may share a call with longer drafts.
            unread = unread[: max(0, limit - row.num_read)]

        num_before = num_again + min(output.columns.values(), default=num_new)
        num_final = self._num_final(row, num_before, committed)
        part_lengths = [len(unread)]
        if 0 < num_final < len(unread):
            part_lengths = [num_final, len(unread) - num_final]

        if row.num_read <= committed:
            row.take_snapshot(committed)
        start = -num_again
        for part_length in part_lengths:
            if start > -num_again:
                row.take_snapshot(committed)
            for call_length in self._call_lengths(row, part_length):
                call_tokens = unread[start + num_again :][:call_length]
                self._call(row, call_tokens, start, output)
                start += call_length

    def _num_final(self, row: SnapshotRow, num_before: int, committed: int) -> int:
        """How many unread tokens to read before a snapshot, which spares reading them once more.

        Tokens up to the first scored one are final as a rule.

        Args:
            num_before: unread tokens before the first scored one.
        """
        if self._reads_several:
            return num_before if num_before > MAX_REREAD else 0
        if row.num_read > 0:
            return num_before
        # The first call reads a whole prompt, as transformers' own generation does.
        return committed or num_before + 1

    def _call_lengths(self, row: SnapshotRow, num_tokens: int) -> list[int]:
        """Tokens of the calls that read so many tokens."""
        if num_tokens == 0:
            return []
        if self._reads_several or row.num_read == 0:
            return [num_tokens]
        return [1] * num_tokens

    def _call(
        self,
        row: SnapshotRow,
        tokens: Int[Tensor, "T"],
        start: int,
        output: _RowOutput,
    ) -> None:
        """One call of the model, which continues a row.

        Args:
            start: position of the first token among the new ones; negative if it is read again.
            output: gets what it wants of this call.
        """
        last_layer = int(self.config.num_hidden_layers) - 1
        options = self._options(row.num_read, tokens)
        if any(layer != last_layer for layer in output.features):
            options["output_hidden_states"] = True

        columns = []
        positions = []
        for column, position in output.columns.items():
            if start <= position < start + len(tokens):
                columns.append(column)
                positions.append(position - start)
        # The output head computes at least one position, since its kernels may not accept none.
        positions = positions or [len(tokens) - 1]

        def scored(hidden: Tensor) -> Tensor:
            return hidden[:, positions]

        cache: Any = row.cache
        with scoring_only(self.model, scored) as head_inputs, row.reading(len(tokens)):
            model_output = cache.call(self.model, **options)

        logits = model_output.logits[0]
        if not head_inputs:
            # A replaced forward function may compute logits without the output head.
            logits = logits[positions]
        if columns:
            output.add_logits(columns, logits)
        for layer in output.features:
            hidden = head_inputs[0] if layer == last_layer else self._hidden(model_output, layer)
            output.add_feature(layer, hidden[0, max(0, -start) :])

    def _options(self, start: int, tokens: Int[Tensor, "T"]) -> dict[str, Any]:
        """Arguments of a call on tokens from position `start` on."""
        options: dict[str, Any] = {"input_ids": tokens[None], "use_cache": True}
        forward = type(self.model).forward
        parameters = inspect.signature(forward).parameters
        end = start + len(tokens)
        if "position_ids" in parameters:
            options["position_ids"] = torch.arange(start, end, device=tokens.device)[None]
        elif "attention_mask" in parameters and not getattr(self.model, "_is_stateful", False):
            # ALiBi takes positions from the mask, which covers the whole text.
            options["attention_mask"] = tokens.new_ones(1, end)
        if "return_dict" in parameters:
            options["return_dict"] = True
        return options

    def _hidden(self, output: Any, layer: int) -> Float[Tensor, "1 T D"]:
        """A layer's output; ValueError if the model does not return it."""
        hidden_states = getattr(output, "hidden_states", None)
        if hidden_states is None or len(hidden_states) != self.config.num_hidden_layers + 1:
            raise ValueError(
                f"{type(self.model).__name__} does not return the hidden states of its layers: use "
                "a drafter that does not read them"
            )
        return hidden_states[layer + 1]

    def _joined(
        self,
        outputs: Sequence[_RowOutput],
        num_columns: int,
        num_tokens: int,
        logits_for: Places,
    ) -> ModelOutput:
        """The outputs of all rows side by side, with zeros where nothing was read."""
        logits = _side_by_side([output.logits for output in outputs], num_columns)
        if logits is None:
            # No row has read a token.
            shape = (len(outputs), num_columns, self.config.vocab_size)
            logits = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

        features: dict[int, Tensor] = {}
        for layer in outputs[0].features:
            hidden = _side_by_side([output.features[layer] for output in outputs], num_tokens)
            if hidden is None:
                hidden = logits.new_zeros(len(outputs), num_tokens, self.config.hidden_size)
            features[layer] = hidden
        return ModelOutput(logits, features, logits_for)

    # Whether calls on several tokens can be trusted

    @torch.no_grad()
    def measure(self, device: torch.device) -> None:
        """Compare calls on several tokens, and a return to a snapshot, with calls on one token.

        It is measured once for each dtype. If calls on several tokens differ by more than rounding,
        tokens are read one by one from now on, as transformers' own generation reads them.

        Raises:
            ValueError: the model does not continue a text from its cache, or a snapshot does not
                bring back its state.
        """
        if self.model.dtype == self._measured_dtype:
            return
        try:
            self._reads_several = self._can_read_several(device)
        except RuntimeError as error:
            raise ValueError(
                f"{type(self.model).__name__} does not continue a text from its cache "
                f"({first_line(error)}): use transformers' own generate"
            ) from error
        self._measured_dtype = self.model.dtype

    def _can_read_several(self, device: torch.device) -> bool:
        """Whether calls on several tokens continue a text as calls on one token do."""
        self._reads_several = False
        if self.config.model_type in _IGNORES_STATE:
            self._log_single_tokens("in transformers, longer calls begin with an empty state")
            return False
        if any(kind in layer for layer in self._layer_kinds for kind in _CHOOSES_KEYS):
            self._log_single_tokens("its attention may choose other keys in longer calls")
            return False
        num_compared = sum(_CALL_LENGTHS)
        num_tokens = _NUM_PROMPT_TOKENS + num_compared
        limit = max_positions(self.config)
        if limit is not None and limit < num_tokens:
            return False

        # The multiplier scatters the tokens over the vocabulary.
        tokens = torch.arange(1, num_tokens + 1, device=device) * 7919 % self.config.vocab_size
        expected = self._measured_logits(tokens, [1] * num_compared, num_removed=0)
        scale = float(expected.abs().max())
        whole = self.model(input_ids=tokens[None], use_cache=False).logits[0, -num_compared:]
        rounding = float((whole.float() - expected).abs().max()) / scale
        max_tolerance = _MAX_TOLERANCES.get(self.model.dtype, _MAX_COARSE_TOLERANCE)
        tolerance = min(max(_MIN_TOLERANCE, 2 * rounding), max_tolerance)

        self._reads_several = True
        several = self._measured_logits(tokens, _CALL_LENGTHS, num_removed=2)
        difference = float((several - expected).abs().max()) / scale
        if difference <= tolerance:
            return True

        self._reads_several = False
        restored = self._measured_logits(tokens, [1] * num_compared, num_removed=2)
        if not float((restored - expected).abs().max()) <= tolerance * scale:
            raise ValueError(
                f"{type(self.model).__name__} keeps a state that cannot be restored, so that draft "
                "tokens cannot be removed: use transformers' own generate"
            )
        self._log_single_tokens(f"its logits differ by {difference:.1e} in longer calls")
        return False

    @property
    def _layer_kinds(self) -> list[str]:
        return list(getattr(self.config, "layer_types", None) or [])

    def _log_single_tokens(self, reason: str) -> None:
        name = type(self.model).__name__
        log.warning("%s reads one token a call, so drafts save no time: %s", name, reason)

    def _measured_logits(
        self,
        tokens: Int[Tensor, "T"],
        call_lengths: Sequence[int],
        num_removed: int,
    ) -> Float[Tensor, "N V"]:
        """Logits of all tokens after a prompt.

        Args:
            num_removed: number of other tokens that are read after the prompt and removed again.
        """
        state = self.init_state(1, tokens.device)
        text = tokens[None]
        start = _NUM_PROMPT_TOKENS
        self.read(text[:, :start], state, None, slice(-1, None), ())
        state.commit([start])
        if num_removed:
            self.read(text.flip(1)[:, :num_removed], state, None, slice(-1, None), ())
            state.truncate([start])

        logits = []
        for length in call_lengths:
            logits.append(self.read(text[:, start : start + length], state, None, None, ()).logits)
            start += length
        return torch.cat(logits, dim=1)[0].float()


class _RowOutput:
    """What the calls on one row's new tokens return.

    Args:
        columns: for each column of the logits, the position among the new tokens that it is for.
        features: layers whose outputs are wanted.
    """

    def __init__(self, columns: dict[int, int], features: Sequence[int]) -> None:
        self.columns = columns
        self.logits: list[tuple[list[int], Tensor]] = []
        """Columns with their logits."""
        self.features: dict[int, list[tuple[list[int], Tensor]]] = {layer: [] for layer in features}
        """Columns, which are positions, with the outputs of a layer."""

    def add_logits(self, columns: list[int], logits: Float[Tensor, "N V"]) -> None:
        self.logits.append((columns, logits))

    def add_feature(self, layer: int, hidden: Float[Tensor, "T D"]) -> None:
        """Append a layer's outputs for the next new tokens."""
        parts = self.features[layer]
        start = parts[-1][0][-1] + 1 if parts else 0
        if len(hidden):
            parts.append((list(range(start, start + len(hidden))), hidden))


def _side_by_side(
    rows: Sequence[Sequence[tuple[list[int], Tensor]]], num_columns: int
) -> Float[Tensor, "B N D"] | None:
    """One tensor from each row's columns, with zeros elsewhere; None if no row has any."""
    joined = None
    for index, row in enumerate(rows):
        for columns, values in row:
            if joined is None:
                joined = values.new_zeros(len(rows), num_columns, values.shape[-1])
            joined[index, columns] = values
    return joined


def _positions_of(logits_for: Places, batch_size: int, num_tokens: int) -> list[list[int]]:
    """The positions that each row's logits are wanted for."""
    if isinstance(logits_for, Tensor):
        positions: list[list[int]] = logits_for.tolist()
        return positions
    row_positions = list(range(num_tokens))
    if logits_for is not None:
        row_positions = row_positions[logits_for]
    return [row_positions] * batch_size
