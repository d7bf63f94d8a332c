"""Decode models of transformers over the caches that they make themselves.

Each row has a cache of the model's own kind (`models/row_cache.py`), and each call is one that
transformers itself would make for this row, or for several rows padded on the left.

Shapes: B rows, T tokens, N scored positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_specdec.models.attention import accepts_positions, positions_before_switch
from lightning_specdec.models.base import ModelOutput
from lightning_specdec.models.layers import cache_name, parameter_names, scoring_only
from lightning_specdec.models.model_config import first_line
from lightning_specdec.models.row_cache import (
    ModelCache,
    ModuleStates,
    call_joined,
    modules_with_state,
)
from lightning_specdec.models.snapshot_state import SnapshotRow, SnapshotState, tensor_bytes
from lightning_specdec.models.state import Lengths, as_list

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Places = Int[Tensor, "B N"] | slice | None

MAX_REREAD = 16
"""Most tokens that are read again together with new ones. More of them are read in a call before,
and a snapshot is taken after it, so that they are not read a third time."""
MAX_JOINED_TOKENS = 32
"""Most tokens of each row in a call for several rows. Longer calls take as much time together as
one after the other, and need more memory."""
SHORT_TEXT = 511
"""Texts of at most this many tokens are padded to each other's length."""
_IGNORES_STATE = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")
"""Families of transformers 5.24 whose calls on several tokens begin with an empty state."""
_CHOOSES_KEYS = ("indexed", "sparse", "compressed")
"""Parts of the names of layers that attend to the keys of the highest scores only. Scores may be
equal, and which key is chosen then depends on the shape of the call (seen in Dots3)."""
_COUNTS_SLOTS = ("chunked",)
"""Parts of the names of layers whose masks depend on the slot of a token, which padding shifts."""
_NUM_PROMPT_TOKENS = 7
_CALL_LENGTHS = (4, 2)
"""Tokens of the calls that are compared with calls on one token each."""
_JOINED_CALL_LENGTHS = (1, 4, 1)
"""Tokens of each row in the calls for several rows that are compared with calls for one row. RWKV
reads several rows correctly in calls on several tokens only."""
_MIN_TOLERANCE = 2e-5
_MAX_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Largest difference of logits that may be taken for rounding, relative to the largest logit. In
float32, an error of 1.4e-4 has been seen (Zamba)."""
_MAX_COARSE_TOLERANCE = 0.1
"""The same in half precision."""
_measuring = threading.Lock()
"""Held while it is measured how a model may be called, since other threads would decode by what is
only tried."""

log = logging.getLogger(__name__)


class Joins(IntEnum):
    """Which rows may share a call."""

    NONE = 0
    EQUAL_LENGTHS = 1
    """Rows whose texts are equally long, so that nothing is padded."""
    ALL = 2


@dataclass(frozen=True)
class _RowCall:
    """A call that a row needs next.

    Args:
        tokens: to read.
        start: position of the first of them among the new tokens; negative if it is read again.
        output: gets what it wants of this call.
    """

    row: SnapshotRow
    tokens: Int[Tensor, "T"]
    start: int
    output: _RowOutput

    def scored(self) -> tuple[list[int], list[int]]:
        """The columns that this call can fill, and their positions among its tokens."""
        columns = []
        positions = []
        for column, position in self.output.columns.items():
            if self.start <= position < self.start + len(self.tokens):
                columns.append(column)
                positions.append(position - self.start)
        return columns, positions


class RowReader:
    """Reads the rows of a `SnapshotState` with a model of transformers.

    Rows that read equally many tokens share a call, if the model was found to compute the same
    for them as for each row alone.

    Args:
        model: the model.
        config: of its text part.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        self.model = model
        self.config = config
        self._measured_dtype: torch.dtype | None = None
        self._reads_several = True
        self.joins = Joins.NONE
        """Which rows share a call."""

    def new_cache(self) -> ModelCache:
        """An empty cache for one row."""
        name = cache_name(type(self.model).forward)
        if name is not None and next(modules_with_state(self.model), None) is not None:
            return ModuleStates(name, self.model.config)
        return ModelCache()

    def init_state(self, batch_size: int, device: torch.device) -> SnapshotState:
        """An empty state for `batch_size` rows."""
        state = SnapshotState(batch_size, device, self.new_cache)
        state.reads_in_parts = self._reads_several
        return state

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
        plans: list[Iterator[_RowCall]] = []
        for index, row in enumerate(state.rows):
            row.truncate(state.consumed[index])
            row.append(tokens[index, : lengths[index]])
            columns: dict[int, int] = {}
            for column, position in enumerate(positions[index]):
                if position < lengths[index]:
                    columns[column] = position
            output = _RowOutput(columns, features)
            outputs.append(output)
            plans.append(self._calls_of(row, lengths[index], state.committed[index], output))
        self._make_calls(plans)
        state.advance(num_tokens, valid_lengths)
        return self._joined(outputs, len(positions[0]), num_tokens, logits_for)

    def _calls_of(
        self,
        row: SnapshotRow,
        num_new: int,
        committed: int,
        output: _RowOutput,
    ) -> Iterator[_RowCall]:
        """The calls that read the unread tokens of a row, of which the last `num_new` are new.

        Each call has to be made before the next one is asked for.

        Args:
            committed: length that the row is never truncated below.
            output: gets the logits and features of the new tokens.
        """
        unread = row.unread
        num_again = len(unread) - num_new
        limit = positions_before_switch(self.config)
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
                yield _RowCall(row, call_tokens, start, output)
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
        if committed > 0:
            return committed
        # The first call reads a whole prompt, as transformers' own generation does.
        return num_before + 1

    def _call_lengths(self, row: SnapshotRow, num_tokens: int) -> list[int]:
        """Tokens of the calls that read so many tokens."""
        if num_tokens == 0:
            return []
        if self._reads_several or row.num_read == 0:
            return [num_tokens]
        return [1] * num_tokens

    def _make_calls(self, plans: Sequence[Iterator[_RowCall]]) -> None:
        """Make the calls of all rows, in steps of one call for each row that needs another one."""
        unfinished = list(plans)
        while unfinished:
            groups: dict[Hashable, list[_RowCall]] = {}
            continued = []
            for plan in unfinished:
                call = next(plan, None)
                if call is not None:
                    groups.setdefault(self._group_of(call), []).append(call)
                    continued.append(plan)
            for calls in groups.values():
                self._call(calls)
            unfinished = continued

    def _group_of(self, call: _RowCall) -> Hashable:
        """What the rows that share a call have in common."""
        num_tokens = len(call.tokens)
        num_read = call.row.num_read
        if self.joins is Joins.NONE or num_read == 0 or num_tokens > MAX_JOINED_TOKENS:
            # Nothing: only this call has this number.
            return id(call)
        if self.joins is Joins.EQUAL_LENGTHS:
            return num_tokens, num_read
        cache: Any = call.row.cache
        if not cache.has_tokens:
            return num_tokens
        # A row is padded to twice its length at most, unless all of them are short.
        return num_tokens, max(num_read, SHORT_TEXT).bit_length()

    def _call(self, calls: Sequence[_RowCall]) -> None:
        """One call of the model, which continues the row of each of these calls."""
        last_layer = int(self.config.num_hidden_layers) - 1
        features = calls[0].output.features
        options = self._options(calls)
        if any(layer != last_layer for layer in features):
            options["output_hidden_states"] = True

        rows: list[int] = []
        positions: list[int] = []
        columns_by_call: list[list[int]] = []
        for index, call in enumerate(calls):
            columns, row_positions = call.scored()
            columns_by_call.append(columns)
            rows += [index] * len(row_positions)
            positions += row_positions
        if not positions:
            # The output head computes at least one position, since its kernels may not accept none.
            rows = [0]
            positions = [len(calls[0].tokens) - 1]

        def scored(hidden: Tensor) -> Tensor:
            return hidden[rows, positions][None]

        with ExitStack() as stack:
            head_inputs = stack.enter_context(scoring_only(self.model, scored))
            for call in calls:
                stack.enter_context(call.row.reading(len(call.tokens)))
            model_output = self._call_model(calls, options)

        logits = model_output.logits[0]
        if not head_inputs:
            # A replaced forward function may compute logits without the output head.
            logits = model_output.logits[rows, positions]
        first = 0
        for call, columns in zip(calls, columns_by_call, strict=True):
            if columns:
                call.output.add_logits(columns, logits[first : first + len(columns)])
            first += len(columns)
        for layer in features:
            hidden = head_inputs[0] if layer == last_layer else self._hidden(model_output, layer)
            for index, call in enumerate(calls):
                call.output.add_feature(layer, hidden[index, max(0, -call.start) :])

    def _call_model(self, calls: Sequence[_RowCall], options: dict[str, Any]) -> Any:
        """The model's output for these calls. Afterwards, each row's cache has read its tokens."""
        caches: list[Any] = [call.row.cache for call in calls]
        if len(calls) == 1:
            return caches[0].call(self.model, **options)
        lengths = [call.row.num_read + len(call.tokens) for call in calls]
        return call_joined(self.model, caches, lengths, **options)

    def _options(self, calls: Sequence[_RowCall]) -> dict[str, Any]:
        """Arguments of one call for these rows, other than the cache."""
        tokens = torch.stack([call.tokens for call in calls])
        num_tokens = tokens.shape[1]
        options: dict[str, Any] = {"input_ids": tokens, "use_cache": True}

        parameters = parameter_names(type(self.model).forward)
        lengths = [call.row.num_read for call in calls]
        starts = torch.tensor(lengths, device=tokens.device)
        has_positions = accepts_positions(self.model)
        if has_positions:
            new_positions = torch.arange(num_tokens, device=tokens.device)
            options["position_ids"] = starts[:, None] + new_positions

        is_stateful = getattr(self.model, "_is_stateful", False)
        # ALiBi takes positions from the mask, which covers the whole text.
        positions_from_mask = not has_positions and not is_stateful
        cache: Any = calls[0].row.cache
        is_padded = len(set(lengths)) > 1 and cache.has_tokens
        if "attention_mask" in parameters and (positions_from_mask or is_padded):
            options["attention_mask"] = _text_mask(starts + num_tokens)
        if "return_dict" in parameters:
            options["return_dict"] = True
        return options

    def _hidden(self, output: Any, layer: int) -> Float[Tensor, "B T D"]:
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
        with _measuring:
            if self.model.dtype == self._measured_dtype:
                return
            self._reads_several = False
            self.joins = Joins.NONE
            try:
                self._measure(device)
            except RuntimeError as error:
                raise ValueError(
                    f"{type(self.model).__name__} does not continue a text from its cache "
                    f"({first_line(error)}): use transformers' own generate"
                ) from error
            self._measured_dtype = self.model.dtype

    def _measure(self, device: torch.device) -> None:
        """Find out how many tokens a call may read, and which rows may share one."""
        num_compared = sum(_CALL_LENGTHS)
        num_tokens = _NUM_PROMPT_TOKENS + num_compared
        limit = positions_before_switch(self.config)
        is_short = limit is not None and limit < num_tokens
        chooses_keys = self._has_layers(_CHOOSES_KEYS)
        ignores_state = self.config.model_type in _IGNORES_STATE
        if ignores_state:
            self._log_single_tokens("in transformers, longer calls begin with an empty state")
        elif chooses_keys:
            self._log_single_tokens("its attention may choose other keys in longer calls")
        if is_short or chooses_keys:
            return

        # The multiplier scatters the tokens over the vocabulary.
        tokens = torch.arange(1, num_tokens + 1, device=device) * 7919 % self.config.vocab_size
        expected = self._measured_logits([tokens], [1] * num_compared, num_removed=0)[0]
        whole = self.model(input_ids=tokens[None], use_cache=False).logits[0, -num_compared:]
        rounding = _relative_difference(whole, expected)
        max_tolerance = _MAX_TOLERANCES.get(self.model.dtype, _MAX_COARSE_TOLERANCE)
        tolerance = min(max(_MIN_TOLERANCE, 2 * rounding), max_tolerance)

        if not ignores_state:
            self._reads_several = self._can_read_several(tokens, expected, tolerance)
        self.joins = self._joinable_rows(tokens, tolerance)

    def _can_read_several(
        self, tokens: Int[Tensor, "T"], expected: Float[Tensor, "N V"], tolerance: float
    ) -> bool:
        """Whether calls on several tokens continue a text as calls on one token do.

        Args:
            expected: logits of calls on one token.
            tolerance: largest difference that counts as rounding.
        """
        self._reads_several = True
        several = self._measured_logits([tokens], _CALL_LENGTHS, num_removed=2)[0]
        difference = _relative_difference(several, expected)
        if difference <= tolerance:
            return True

        self._reads_several = False
        restored = self._measured_logits([tokens], [1] * len(expected), num_removed=2)[0]
        if not _relative_difference(restored, expected) <= tolerance:
            raise ValueError(
                f"{type(self.model).__name__} keeps a state that cannot be restored, so that draft "
                "tokens cannot be removed: use transformers' own generate"
            )
        self._log_single_tokens(f"its logits differ by {difference:.1e} in longer calls")
        return False

    def _joinable_rows(self, tokens: Int[Tensor, "T"], tolerance: float) -> Joins:
        """Which rows may share a call, so that each gets the logits that it gets alone.

        Args:
            tokens: of a text.
            tolerance: largest difference that counts as rounding.
        """
        state = self.init_state(1, tokens.device)
        self.read(tokens[None, :_NUM_PROMPT_TOKENS], state, None, slice(-1, None), ())
        cache: Any = state.rows[0].cache
        if not cache.can_be_joined:
            return Joins.NONE

        candidates = [Joins.ALL, Joins.EQUAL_LENGTHS]
        if self._has_layers(_COUNTS_SLOTS):
            candidates.remove(Joins.ALL)
        for joins in candidates:
            num_left_out = 3 if joins is Joins.ALL else 0
            texts = [tokens, tokens.flip(0)[num_left_out:], tokens.roll(5)[num_left_out // 2 :]]
            if self._joins_correctly(texts, joins, tolerance):
                return joins
        return Joins.NONE

    def _joins_correctly(self, texts: Sequence[Tensor], joins: Joins, tolerance: float) -> bool:
        """Whether texts have the same logits in calls for all rows as in calls for one row."""
        alone = self._measured_logits(texts, _JOINED_CALL_LENGTHS, num_removed=2)
        self.joins = joins
        try:
            together = self._measured_logits(texts, _JOINED_CALL_LENGTHS, num_removed=2)
        except Exception as error:
            # Code of a model, or of a user, may fail in any way at rows that it does not expect.
            log.debug("%s: its rows share no call: %r", type(self.model).__name__, error)
            return False
        finally:
            self.joins = Joins.NONE
        return _relative_difference(together, alone) <= tolerance

    def _has_layers(self, kinds: Sequence[str]) -> bool:
        """Whether the name of a layer's kind contains one of these."""
        return any(kind in layer for layer in self._layer_kinds for kind in kinds)

    @property
    def _layer_kinds(self) -> list[str]:
        return list(getattr(self.config, "layer_types", None) or [])

    def _log_single_tokens(self, reason: str) -> None:
        name = type(self.model).__name__
        log.warning("%s reads one token a call, so drafts save no time: %s", name, reason)

    def _measured_logits(
        self,
        texts: Sequence[Tensor],
        call_lengths: Sequence[int],
        num_removed: int,
    ) -> Float[Tensor, "B N V"]:
        """Logits of the last tokens of texts, after prompts of one call for each row.

        Args:
            call_lengths: tokens of the calls on the last tokens.
            num_removed: number of other tokens that are read after the prompt and removed again.
        """
        num_compared = sum(call_lengths)
        prompt_lengths = [len(text) - num_compared for text in texts]
        prompts = [text[:length] for text, length in zip(texts, prompt_lengths, strict=True)]
        padded_prompts = pad_sequence(prompts, batch_first=True)
        state = self.init_state(len(texts), padded_prompts.device)
        self.read(padded_prompts, state, prompt_lengths, slice(-1, None), ())
        state.commit(prompt_lengths)
        if num_removed:
            other_tokens = torch.stack([text.flip(0)[:num_removed] for text in texts])
            self.read(other_tokens, state, None, slice(-1, None), ())
            state.truncate(prompt_lengths)

        compared_tokens = torch.stack([text[-num_compared:] for text in texts])
        logits = []
        for tokens in compared_tokens.split(call_lengths, dim=1):
            logits.append(self.read(tokens, state, None, None, ()).logits)
        return torch.cat(logits, dim=1).float()


def _relative_difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected logit."""
    scale = float(expected.abs().max())
    return float((logits.float() - expected).abs().max()) / scale


def _text_mask(lengths: Int[Tensor, "B"]) -> Int[Tensor, "B S"]:
    """An attention mask for texts of these lengths, padded on the left."""
    num_slots = int(lengths.max())
    slots = torch.arange(num_slots, device=lengths.device)
    return (slots >= num_slots - lengths[:, None]).long()


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
