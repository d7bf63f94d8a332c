"""Causal language models of transformers as `LanguageModel`, with a static KV cache per row."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.models.base import (
    ExitStates,
    LanguageModel,
    ModelOutput,
    eval_copy,
    select,
)
from lightning_specdec.models.changes import (
    UserCode,
    check_in_memory,
    compiled_part,
    user_code,
)
from lightning_specdec.models.graphs import MOST_TOKENS, Outputs
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet, to_config, to_values
from lightning_specdec.models.packed import PackedLinear, pack_linears
from lightning_specdec.models.prefill import (
    NOTHING,
    JoinedOutputs,
    Part,
    call_cost,
    longest_part,
    parts_of,
)
from lightning_specdec.models.snapshot_state import SnapshotState
from lightning_specdec.models.state import (
    DecodeState,
    KVState,
    KVStorage,
    Lengths,
    Slots,
    StoragePool,
    as_list,
)
from lightning_specdec.models.weights import fixed_tensors
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer

# transformers writes to stderr while it is imported.
with quiet():
    from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

    from lightning_specdec.models import attention
    from lightning_specdec.models.attention import (
        StateCache,
        attention_windows,
        continued_mask,
        max_positions,
        needs_row_caches,
        position_switch,
        positions_before_switch,
    )
    from lightning_specdec.models.layers import (
        Entered,
        LayerStack,
        accepts,
        additive,
        cache_name,
        scoring_only,
    )
    from lightning_specdec.models.longrope import on_sides
    from lightning_specdec.models.row_reader import RowReader

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Places = Int[Tensor, "B N"] | slice | None

_PIECES = (3, 1, 2)
"""Tokens of the calls that a model with code of a user is checked with."""


@dataclass(frozen=True)
class HuggingFaceSettings(Settings):
    model: Mapping[str, Any] = setting(
        help="config of transformers with a model_type, as {model_type: llama}"
    )
    vocab_size: int | None = setting(
        None, "vocabulary size, if the config has none", minimum=2, maximum=2**20
    )


class HuggingFaceLM(LanguageModel):
    """A causal language model of transformers, run by its own code over a `KVState`.

    Each call passes the model the positions of each row, a mask `key_position <= query_position`
    and a cache that writes at these positions. So rows of different lengths share a call. Every
    architecture that accepts the three works unchanged.

    Recurrent and hybrid models do not, nor do those with masks of their own: they run over a
    `SnapshotState`, whose rows have separate caches.

    A call runs the model's parts one by one (embedding, layers, final norm, output head) if that
    computes the same. It runs the model's own forward pass if it does not, and always if a user has
    added code to the model, such as hooks.

    Args:
        model: a loaded model; or a config (transformers' own, or a mapping with a `model_type`) for
            a new model with random weights. A wrapper of PEFT or `torch.compile` is unwrapped.
        vocab_size: vocabulary size of a new model whose config has none; for others it must be the
            model's own.
        tokenizer: the model's tokenizer, ours or of transformers.
        replace_attention: whether to replace a loaded model's "sdpa" attention in place by an equal
            one with fewer copies.

    Raises:
        ValueError: the model is not a decoder, or has no cache.
    """

    Settings = HuggingFaceSettings

    def __init__(
        self,
        model: Mapping[str, Any] | PreTrainedModel | PreTrainedConfig,
        *,
        vocab_size: int | None = None,
        tokenizer: Any = None,
        replace_attention: bool = True,
    ) -> None:
        super().__init__()
        self.model = _as_model(model, vocab_size)
        self._parts: LayerStack | str | None = None
        self._accepts_continued_mask: bool | None = None
        """Whether attention accepts `continued_mask`; None if that was not tried."""
        self._pool: StoragePool | None = None
        self._row_reader: RowReader | None = None
        """Reads each row with a separate cache, if the model needs that."""
        self._user_code: list[UserCode] = []
        """What `refresh` has checked last."""
        self._code_of_parts: list[UserCode] = []
        """What the model had when `_parts` was determined."""
        self._tied_weight: tuple[Tensor, int] | None = None
        """An embedding whose weight the output head holds packed, and the count of its writes."""
        self._is_private = False
        """Whether this is a copy made for decoding, whose modules no user changes."""

        self._read_config()
        if vocab_size not in (None, self.config.vocab_size):
            raise ValueError(
                f"the model has {self.config.vocab_size} tokens, not {vocab_size}: "
                "leave vocab_size out"
            )
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = TextTokenizer(tokenizer, generation_config=self.model.generation_config)
        self.tokenizer = tokenizer
        self.vocabulary = None if tokenizer is None else tokenizer.vocabulary

        _ = self.num_parameters  # packed layers have no parameters to count
        if replace_attention:
            self._replace_attention()

    def _read_config(self) -> None:
        """Read the sizes and attention windows that the model has now."""
        self.config = self.model.config.get_text_config(decoder=True)
        self.windows = attention_windows(self.model, self.config)
        self.max_positions = max_positions(self.config)
        self.position_switch = position_switch(self.config)
        if not needs_row_caches(self.model, self.config):
            self._row_reader = None
        else:
            # Row caches do not remember sides.
            self.max_positions = positions_before_switch(self.config)
            self.position_switch = None
            self._update_row_reader()

        head = self.model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or self.config.vocab_size)
        self.hidden_size = getattr(head, "in_features", None)
        if self.hidden_size is None:
            self.hidden_size = getattr(self.config, "hidden_size", None)

    def _update_row_reader(self) -> None:
        if self._row_reader is None:
            self._row_reader = RowReader(self.model, self.config)
        else:
            self._row_reader.config = self.config

    def _replace_attention(self) -> None:
        # A model that makes its masks may test the name of its attention.
        if self._row_reader is not None:
            return
        if self.model.config._attn_implementation == "sdpa":
            self.model.set_attn_implementation(attention.NAME)

    # Changes by the user

    def refresh(self) -> None:
        """Notice a changed config, and code that a user has added to the model or removed.

        Raises:
            ValueError: the model cannot be decoded exactly any more; the message names the reason.
        """
        if self._is_private:
            return
        check_generation(self.model)
        self._check_tied_weight()

        windows = self.windows
        num_tokens = self.vocab_size
        self._read_config()
        if self.vocab_size != num_tokens and not self._is_packed:
            self.__dict__.pop("num_parameters", None)

        code = user_code(self.model)
        if code != self._user_code or self.windows != windows:
            self._parts = None
            self._accepts_continued_mask = None
        if code != self._user_code:
            if code:
                self._check_user_code(code)
            self._user_code = code

    def _check_tied_weight(self) -> None:
        if self._tied_weight is None:
            return
        weight, num_writes = self._tied_weight
        embedding: Any = self.model.get_input_embeddings()
        if embedding.weight is not weight or weight._version != num_writes:
            raise ValueError(
                "the embedding changed after the output head that is tied to it was packed: load "
                "the model with pack=False"
            )

    def _check_user_code(self, code: Sequence[UserCode]) -> None:
        """Raise ValueError if a model with this code cannot be decoded exactly.

        Decoding reads several tokens and several rows in one call, where transformers reads one
        token of one row. A hook may depend on either.
        """
        name = type(self.model).__name__
        if self.backend != "torch":
            raise ValueError(
                f"{self.backend} does not run {code[0]} of {name}: use backend='torch'"
            )
        for part in code:
            if "adapter_names" in getattr(part.function, "keywords", {}):
                raise ValueError(
                    "adapter_names of PEFT is not supported: set one adapter with set_adapter"
                )
        check_in_memory(self)
        if not self._same_in_pieces():
            raise ValueError(
                f"{name} has {code[0]}, and its output depends on how many tokens or rows share a "
                "call: remove it, or use transformers' own generate"
            )

    @torch.no_grad()
    def _same_in_pieces(self) -> bool:
        """Whether calls on pieces of a text give the logits of one call on two equal rows of it."""
        tokens = torch.arange(sum(_PIECES), device=self.device)[None] % self.vocab_size
        state: SnapshotState | KVState
        if self._row_reader is not None:
            state = self._row_state(self._row_reader, 1)
        else:
            state = KVState(1, tokens.shape[1], device=self.device)
        piece_logits = []
        with _in_eval_mode(self.model):
            whole_logits = self._whole(tokens.expand(2, -1), None, None, ()).logits
            for piece in tokens.split(_PIECES, dim=1):
                if isinstance(state, SnapshotState):
                    piece_logits.append(self._read_rows(piece, state, None, None, ()).logits)
                    continue
                cache = _cache(state, piece.shape[1])
                piece_logits.append(self._whole(piece, cache, None, ()).logits)
                state.advance(piece.shape[1], None)
        difference = (torch.cat(piece_logits, dim=1) - whole_logits).abs().max()
        return bool(difference <= self._tolerance * whole_logits.abs().max())

    @property
    def _tolerance(self) -> float:
        """Largest difference of logits that rounding explains, relative to the largest logit."""
        return 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.05

    # Forms for decoding

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        for weight in self.model.parameters():
            # Weights of eight bits are stored in such a type, and computed in another one.
            if weight.is_floating_point() and weight.dtype.itemsize > 1:
                return weight.dtype
        raise ValueError(f"{type(self.model).__name__} has no floating-point weights")

    def arguments(self) -> dict[str, Any]:
        return {"model": to_values(self.model.config)}

    def init_state(self, batch_size: int, max_length: int) -> DecodeState:
        self.refresh()
        if self._row_reader is not None:
            return self._row_state(self._row_reader, batch_size)
        return KVState(
            batch_size,
            max_length,
            device=self.device,
            pool=self._pool,
            position_switch=self.position_switch,
        )

    def _row_state(self, row_reader: RowReader, batch_size: int) -> SnapshotState:
        """An empty state of row caches, for a model that is measured before its first use."""
        with _in_eval_mode(self.model):
            row_reader.measure(self.device)
        return row_reader.init_state(batch_size, self.device)

    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of a row's recurrent layers; 0 if the model has none."""
        if self._row_reader is None:
            return 0
        with _in_eval_mode(self.model):
            return self._row_reader.snapshot_bytes(self.device)

    def in_float32(self) -> HuggingFaceLM:
        """This model, or a copy of it in float32."""
        return self if self.dtype == torch.float32 else deepcopy(self).float()

    def in_eval_mode(self) -> LanguageModel:
        return self if self._runs_own_modules else eval_copy(self)

    @property
    def _runs_own_modules(self) -> bool:
        """Whether no copy of the model may decode, so that each call sets the model's mode.

        Code of a user may depend on any module. Models with a cache for each row may change
        their modules: RWKV rescales its weights in place when its mode changes.
        """
        return bool(self._user_code) or self._row_reader is not None

    @property
    def _is_packed(self) -> bool:
        return any(isinstance(layer, PackedLinear) for layer in self.modules())

    def packed(self) -> HuggingFaceLM:
        """The model in its fastest form, for inference only.

        On a CPU a copy with packed linear layers, on a GPU a copy that records its calls. The copy
        shares all other weights. A model with code of a user runs unchanged, and so does one that
        has a cache for each row.
        """
        if self._pool is not None or self._is_packed:
            return self
        self.refresh()
        self._parts = None  # the modules may have changed since they were checked
        if self._runs_own_modules:
            return self

        shared: dict[int, Any] = {id(self.tokenizer): self.tokenizer}
        # What a forward pass overwrites is not shared: the user may run the model meanwhile.
        for tensor in fixed_tensors(self):
            shared[id(tensor)] = tensor
        copy = deepcopy(self, shared).eval()
        copy._is_private = True
        copy._replace_attention()
        return copy.pack() if self.device.type == "cpu" else copy.record()

    fused = packed

    def pack(self) -> HuggingFaceLM:
        """Pack the linear layers' weights for a CPU, in place. For inference only; irreversible."""
        if self.device.type != "cpu" or self._row_reader is not None:
            return self
        table = self.embedding_table
        head: Any = self.model.get_output_embeddings()
        is_tied = table is not None and head.weight is table
        pack_linears(self.model)

        # The packed head is a copy of the embedding, which stays.
        is_copied = isinstance(self.model.get_output_embeddings(), PackedLinear)
        if table is not None and is_tied and is_copied and not table.is_inference():
            self._tied_weight = (table, table._version)
        return self

    def record(self) -> HuggingFaceLM:
        """Record calls on few tokens as CUDA graphs from now on, if `takes_apart`.

        A recorded call's output is overwritten by the next call over the same state.
        """
        if self.takes_apart:
            self._pool = StoragePool()
        return self

    def with_layers(self, layers: Sequence[int]) -> HuggingFaceLM:
        """A float32 copy with some of the layers, as a draft model to train.

        This is how DistilBERT is initialized (Sanh et al. 2019).

        Args:
            layers: numbers of the layers to keep, from 0, ascending.

        Raises:
            ValueError: there are no such layers, or no model can be built from them.
        """
        stack = LayerStack(self.model)
        chosen = [require_int("a layer", layer, 0, stack.num_layers - 1) for layer in layers]
        if not chosen or sorted(set(chosen)) != chosen:
            raise ValueError(
                f"layers must ascend, each once, got {list(layers)}: as [0, {stack.num_layers - 1}]"
            )

        # Some settings are lists with a value for each layer. A model that also reads images has a
        # separate config for texts, and the draft is a model of that one.
        values = to_values(self.config)
        for name, value in vars(self.config).items():
            if "layer" in name and isinstance(value, list) and len(value) == stack.num_layers:
                values[name] = [value[layer] for layer in chosen]
        names = self.config.attribute_map
        values[names.get("num_hidden_layers", "num_hidden_layers")] = len(chosen)

        draft = HuggingFaceLM(values, tokenizer=self.tokenizer).float()
        chosen_layers = nn.ModuleList(stack.layers[layer] for layer in chosen)
        try:
            decoder = deepcopy(stack.inner, {id(stack.layers): chosen_layers})
            LayerStack(draft.model).inner.load_state_dict(decoder.state_dict())
            head: Any = draft.model.get_output_embeddings()
            head.load_state_dict(self.model.get_output_embeddings().state_dict())
        except RuntimeError as error:
            # The weights are quantized, or the layers are of several kinds.
            name = type(self.model).__name__
            raise ValueError(
                f"{name} with the layers {chosen} cannot be built: {first_line(error)}"
            ) from error
        return draft.eval()

    # The model taken apart

    @property
    def stack(self) -> LayerStack:
        """The model's parts: embedding, layers, final norm, head. Checked at first use.

        Raises:
            ValueError: the model cannot be taken apart.
        """
        if self._parts is None:
            try:
                self._code_of_parts = self._present_code()
                if self._code_of_parts:
                    raise ValueError(f"it has {self._code_of_parts[0]}")
                if self._row_reader is not None:
                    raise ValueError("its layers depend on caches that only its own code fills")
                if len(self.windows) > 1:
                    raise ValueError("its layers differ in their attention span")
                self._parts = LayerStack(self.model)
                self._check_parts(self._parts)
            except FOREIGN as error:
                self._parts = (
                    f"{type(self.model).__name__} cannot be taken apart: {first_line(error)}"
                )
        if isinstance(self._parts, str):
            raise ValueError(self._parts)
        return self._parts

    def _present_code(self) -> list[UserCode]:
        return [] if self._is_private else user_code(self.model)

    @torch.no_grad()
    def _check_parts(self, stack: LayerStack) -> None:
        """Compare the parts, called in turn, with the model's own forward pass.

        Both the input of the output head and the logits must agree. The head's output is replaced
        by numbers as large as trained logits: a cap changes nothing in the small logits of an
        untrained model.

        Raises:
            ValueError: they differ.
        """

        caller = threading.get_ident()

        def large_logits(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            # Another thread may run the user's model at the same time.
            if threading.get_ident() != caller:
                return output
            return torch.linspace(-100, 100, output.shape[-1]).to(output).expand_as(output)

        tokens = torch.tensor([[3, 1, 2, 0]], device=self.device) % self.vocab_size
        last_layer = stack.num_layers - 1
        handle = self.model.get_output_embeddings().register_forward_hook(large_logits)
        try:
            with _in_eval_mode(self.model):
                model_output = self._whole(tokens, None, None, (last_layer,))
                parts_output = self._by_parts(self.begin(tokens), 0, None, (last_layer,))
        finally:
            handle.remove()

        for expected, actual in (
            (model_output.logits, parts_output.logits),
            (model_output.features[last_layer], parts_output.features[last_layer]),
        ):
            # Written so that NaN is a difference.
            if not (actual - expected).abs().max() <= self._tolerance * expected.abs().max():
                raise ValueError("its own forward pass does more than its parts in turn")

    @property
    def num_layers(self) -> int | None:  # type: ignore[override]
        """Number of layers: of `stack` if the model can be taken apart, else of its config."""
        if self.takes_apart:
            return self.stack.num_layers
        return getattr(self.config, "num_hidden_layers", None)

    @property
    def takes_apart(self) -> bool:
        """Whether the model's parts can be called one by one.

        Early exits, recording and `stack` need this.
        """
        if self._parts is None:
            with suppress(ValueError):
                _ = self.stack
        return isinstance(self._parts, LayerStack)

    def check_exit(self, num_layers: int) -> None:
        require_int("exit_layer", num_layers, 1, self.stack.num_layers - 1)

    def check_output_head(self) -> None:
        _ = self.stack

    def exit_logits(self, hidden: Tensor) -> Tensor:
        return self.stack.head(self.stack.norm(hidden))

    def output_logits(self, hidden: Tensor) -> Tensor:
        return self.stack.head(hidden)

    def embeddings(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)

    @property
    def embedding_table(self) -> Tensor | None:
        embedding = self.model.get_input_embeddings()
        return embedding.weight if type(embedding) is nn.Embedding else None

    @property
    @torch.no_grad()
    def output_weight(self) -> Tensor:
        """The output head's weight matrix.

        Computed from the head's output, since its weight may be packed or quantized.
        """
        head = self.model.get_output_embeddings()
        assert self.hidden_size is not None
        units = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)
        bias = head(torch.zeros_like(units[:1]))
        return (head(units) - bias).T

    # Forward passes

    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Places = None,
        features: Sequence[int] = (),
        exit_states: ExitStates | None = None,
    ) -> ModelOutput:
        """Score tokens, as of `LanguageModel.forward`.

        The feature of a layer is its output. That of the last layer includes the final norm: it is
        the input of the output head.

        Args:
            exit_states: hidden states of the lower layers for a prefix of these tokens, of a given
                length for each row. The lower layers then read only the remaining tokens. It needs
                a state.
        """
        if state is None:
            # With a state, `init_state` has already looked for changes. Without one, look now.
            if self._parts is not None and self._present_code() != self._code_of_parts:
                self._parts = None
            if not self.takes_apart:
                return self._whole(tokens, None, logits_for, features)
            return self._by_parts(self.begin(tokens), 0, logits_for, features)

        if isinstance(state, SnapshotState):
            assert exit_states is None, "these layers cannot be called one by one"
            with torch.autocast(tokens.device.type, enabled=False):
                return self._read_rows(tokens, state, valid_lengths, logits_for, features)
        assert isinstance(state, KVState), (
            f"{type(self.model).__name__} needs a KVState, got {type(state).__name__}"
        )
        if torch.is_autocast_enabled(tokens.device.type):
            # Decode in the dtype of the weights, even inside the caller's autocast.
            with torch.autocast(tokens.device.type, enabled=False):
                return self._read(tokens, state, valid_lengths, logits_for, features, exit_states)
        return self._read(tokens, state, valid_lengths, logits_for, features, exit_states)

    def _read(
        self,
        tokens: Int[Tensor, "B T"],
        state: KVState,
        valid_lengths: Lengths | None,
        logits_for: Places,
        features: Sequence[int],
        exit_states: ExitStates | None,
    ) -> ModelOutput:
        """Continue a state, in the fastest way that this call allows."""
        num_tokens = tokens.shape[1]
        if state.position_switch is not None and exit_states is None:
            # With exit states, the lower layers have begun these texts.
            lengths = [num_tokens] * len(tokens)
            if valid_lengths is not None:
                lengths = as_list(valid_lengths)
            state.begin_texts(lengths, state.consumed)

        # A recorded call has one shape: the lower layers have read all tokens but the last.
        has_one_shape = exit_states is None
        if exit_states is not None and valid_lengths is None:
            has_one_shape = all(length == num_tokens - 1 for length in exit_states.lengths)

        if has_one_shape and self.records(state, num_tokens):
            output = self._recorded(tokens, state, logits_for, features, exit_states)
        else:
            given = tokens
            first_layer = 0
            if exit_states is not None:
                given = self._completed(tokens, state, valid_lengths, exit_states)
                first_layer = exit_states.num_layers
            output = self._read_given(
                given, state, valid_lengths, logits_for, features, first_layer
            )
        state.advance(num_tokens, valid_lengths)
        return output

    def _read_given(
        self,
        given: Tensor,
        state: KVState,
        valid_lengths: Lengths | None,
        logits_for: Places,
        features: Sequence[int],
        first_layer: int,
    ) -> ModelOutput:
        """Continue a state by tokens `[B, T]`, or by the input `[B, T, D]` of `first_layer`."""
        batch_size, num_tokens = given.shape[:2]
        lengths = [num_tokens] * batch_size
        if valid_lengths is not None:
            lengths = as_list(valid_lengths)
        parts = parts_of(lengths, longest_part(self.device), call_cost(self.device))
        if len(parts) == 1 and parts[0].row is None:
            cache = _cache(state, num_tokens)
            if not self.takes_apart:
                return self._whole(given, cache, logits_for, features)
            return self._by_parts(self._enter(cache, given), first_layer, logits_for, features)

        joined = JoinedOutputs(batch_size, num_tokens, logits_for, given.device)
        with Activity("reading the prompt", sum(lengths), unit="tokens") as activity:
            for part in parts:
                cache = _part_cache(state, part, state.consumed)
                scored = joined.scored_in(part)
                if self.takes_apart:
                    entered = self._enter(cache, part.cut(given), continues=True)
                    output = self._by_parts(entered, first_layer, scored, features)
                else:
                    output = self._whole(part.cut(given), cache, scored, features)
                joined.add_logits(part, output.logits)
                for layer, hidden in output.features.items():
                    joined.add_hidden(layer, part, hidden)
                activity.advance(sum(part.lengths))
        return ModelOutput(joined.logits, joined.hidden, logits_for)

    def _read_rows(
        self,
        tokens: Int[Tensor, "B T"],
        state: SnapshotState,
        valid_lengths: Lengths | None,
        logits_for: Places,
        features: Sequence[int],
    ) -> ModelOutput:
        """Continue a state whose rows have caches of their own."""
        assert self._row_reader is not None
        with _in_eval_mode(self.model):
            return self._row_reader.read(tokens, state, valid_lengths, logits_for, features)

    def _completed(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        valid_lengths: Lengths | None,
        exit_states: ExitStates,
    ) -> Float[Tensor, "B T D"]:
        """The lower layers' output for all tokens; it is computed where `exit_states` lacks it."""
        num_tokens = tokens.shape[1]
        exit_lengths = exit_states.lengths
        if valid_lengths is None:
            lengths = [num_tokens] * len(tokens)
        else:
            lengths = as_list(valid_lengths)
        num_missing = 0
        for length, exit_length in zip(lengths, exit_lengths, strict=True):
            num_missing = max(num_missing, length - exit_length)

        # Unread positions become zeros: through the mask, a NaN in them would reach real tokens.
        starts = torch.tensor(exit_lengths, device=tokens.device)[:, None]
        is_unread = torch.arange(exit_states.hidden.shape[1], device=tokens.device) >= starts
        hidden = exit_states.hidden.masked_fill(is_unread[..., None], 0)
        hidden = nn.functional.pad(hidden, (0, 0, 0, num_tokens + num_missing))

        if num_missing:
            positions = starts + torch.arange(num_missing, device=tokens.device)
            missing_tokens = tokens.gather(1, positions.clamp(max=num_tokens - 1))
            missing_starts = []
            for consumed, exit_length in zip(state.consumed, exit_lengths, strict=True):
                missing_starts.append(consumed + exit_length)
            missing_hidden = self.lower(
                missing_tokens, state, missing_starts, exit_states.num_layers
            )
            index = positions[..., None].expand_as(missing_hidden)
            hidden = hidden.scatter(1, index, missing_hidden)
        return hidden[:, :num_tokens]

    def lower(
        self,
        tokens: Tensor,
        state: DecodeState,
        starts: Sequence[int],
        num_layers: int,
    ) -> Tensor:
        assert isinstance(state, KVState)
        batch_size, num_tokens = tokens.shape
        if state.position_switch is not None:
            state.begin_texts([num_tokens] * batch_size, starts)
        most_tokens = longest_part(self.device)
        if num_tokens <= most_tokens:
            hidden, call = self._enter(_cache(state, num_tokens, starts), tokens)
            return self.stack.run(hidden, call, 0, num_layers)

        last_layer = num_layers - 1
        joined = JoinedOutputs(batch_size, num_tokens, NOTHING, tokens.device)
        for part in parts_of([num_tokens] * batch_size, most_tokens, call_cost(self.device)):
            cache = _part_cache(state, part, starts)
            hidden, call = self._enter(cache, part.cut(tokens), continues=True)
            hidden = self.stack.run(hidden, call, 0, num_layers)
            joined.add_hidden(last_layer, part, hidden)
        return joined.hidden[last_layer]

    def begin(self, tokens: Int[Tensor, "B T"]) -> Entered:
        """The first layer's input for whole sequences, and the keyword arguments of all layers."""
        num_tokens = tokens.shape[1]
        positions = torch.arange(num_tokens, device=tokens.device)[None]
        window = self._window or num_tokens
        mask = None
        # Without a mask, every attention but the eager one is causal.
        if num_tokens > window or self.model.config._attn_implementation == "eager":
            distances = positions[0, :, None] - positions
            is_visible = (distances >= 0) & (distances < window)
            mask = additive(is_visible[None], self.dtype)
        hidden = self.stack.embed(tokens, positions)
        return hidden, self.stack.begin(hidden, positions, mask, None)

    @property
    def _window(self) -> int | None:
        """Attention window of a model whose layers are all of one kind; None if unlimited."""
        (window,) = self.windows.values()
        return window

    def _enter(self, cache: StateCache, given: Tensor, *, continues: bool = False) -> Entered:
        """A layer's input, from tokens or hidden states, and the arguments of all layers.

        Args:
            continues: whether this is a part of a long call. Its attention needs no mask if its
                rows have the same length.
        """
        positions = self._positions(cache)
        hidden = given if given.is_floating_point() else self.stack.embed(given, positions)
        mask = self._layers_mask(cache, continues=continues)
        call = self.stack.begin(hidden, positions, mask, cache, cache.slots.is_long)
        return hidden, call

    def _layers_mask(self, cache: StateCache, *, continues: bool) -> Tensor | None:
        """The mask of layers that are called one by one; None if causal attention needs none."""
        slots = cache.slots
        is_eager = self.model.config._attn_implementation == "eager"
        exceeds_window = self._window is not None and slots.span > self._window
        if slots.first is None or is_eager or exceeds_window:
            return self._mask(cache, self._window)

        # All rows have the same length, and every query attends to all tokens before it.
        if slots.first == 0:
            return None
        if continues and self._continues_without_mask:
            return continued_mask(slots.positions, self.dtype)
        return self._mask(cache, self._window)

    @property
    def _continues_without_mask(self) -> bool:
        """Whether attention to earlier tokens accepts `continued_mask`. Tried at the first use."""
        is_replaced = self.model.config._attn_implementation == attention.NAME
        if not is_replaced or self.device.type != "cpu":
            return False
        if self._accepts_continued_mask is None:
            self._accepts_continued_mask = self._same_with_continued_mask()
        return self._accepts_continued_mask

    @torch.no_grad()
    def _same_with_continued_mask(self) -> bool:
        """Whether the layers return the same for two tokens after two others under
        `continued_mask` as under the whole mask."""
        tokens = torch.tensor([[3, 1, 2, 0]], device=self.device) % self.vocab_size
        outputs = []
        for is_whole in (True, False):
            state = KVState(1, tokens.shape[1], device=self.device)
            with _in_eval_mode(self.model):
                hidden, call = self._enter(_cache(state, 2), tokens[:, :2])
                self.stack.run(hidden, call, 0, self.stack.num_layers)
                state.advance(2)

                cache = _cache(state, 2)
                positions = self._positions(cache)
                mask = continued_mask(positions, self.dtype)
                if is_whole:
                    mask = self._mask(cache, self._window)
                hidden = self.stack.embed(tokens[:, 2:], positions)
                call = self.stack.begin(hidden, positions, mask, cache)
                try:
                    hidden = self.stack.run(hidden, call, 0, self.stack.num_layers)
                except FOREIGN:
                    return False
                outputs.append(hidden)

        expected, actual = outputs
        difference = (actual - expected).abs().max()
        return bool(difference <= self._tolerance * expected.abs().max())

    def _positions(self, cache: StateCache) -> Int[Tensor, "B T"]:
        """Positions of a call's tokens."""
        positions = cache.slots.positions
        if self.max_positions is not None:
            # Padding may lie beyond the context, where a table of positions has no entry.
            positions = positions.clamp(max=self.max_positions - 1)
        return positions

    def _mask(self, cache: StateCache, window: int | None) -> Float[Tensor, "B 1 T S"]:
        """The whole mask of a call."""
        return additive(cache.storage.mask(cache.slots, window), self.dtype)

    def _by_parts(
        self,
        entered: Entered,
        first_layer: int,
        logits_for: Places,
        features: Sequence[int],
    ) -> ModelOutput:
        """The layers from `first_layer` on, the final norm, the output head."""
        stack = self.stack
        last_layer = stack.num_layers - 1
        hidden, call = entered
        layer_outputs: dict[int, Tensor] = {}
        next_layer = first_layer
        for layer in sorted({*features, last_layer}):
            hidden = stack.run(hidden, call, next_layer, layer + 1)
            next_layer = layer + 1
            layer_outputs[layer] = hidden

        if last_layer in features:
            hidden = stack.norm(hidden)
            layer_outputs[last_layer] = hidden
            normed = select(hidden, logits_for)
        else:
            # Only the scored positions need the norm.
            last_hidden = layer_outputs.pop(last_layer)
            normed = stack.norm(select(last_hidden, logits_for))

        if normed.shape[1] == 0:
            # Most parts of a prompt are not scored, and some kernels accept no empty input.
            logits = normed.new_empty(len(normed), 0, self.vocab_size)
        else:
            logits = stack.head(normed)
        return ModelOutput(logits, layer_outputs, logits_for)

    def _whole(
        self,
        tokens: Int[Tensor, "B T"],
        cache: StateCache | None,
        logits_for: Places,
        features: Sequence[int],
    ) -> ModelOutput:
        """One call of the model's own forward pass; its head reads only the scored positions."""
        last_layer = (self.num_layers or 0) - 1
        options: dict[str, Any] = {"use_cache": False}
        if any(layer != last_layer for layer in features):
            options["output_hidden_states"] = True
        if accepts(type(self.model).forward, "return_dict"):
            options["return_dict"] = True
        if cache is not None:
            options.update(self._cache_options(cache))

        def scored(hidden: Tensor) -> Tensor:
            return select(hidden, logits_for)

        is_long = None if cache is None else cache.slots.is_long
        with on_sides(self.model, is_long), scoring_only(self.model, scored) as head_inputs:
            if self._user_code and cache is not None:
                # The user's own model runs, which may be in training mode.
                with _in_eval_mode(self.model):
                    output = self.model(input_ids=tokens, **options)
            else:
                output = self.model(input_ids=tokens, **options)

        logits = output.logits
        if not head_inputs:
            # A replaced forward function may compute logits without the output head.
            logits = select(logits, logits_for)
        layer_outputs: dict[int, Tensor] = {}
        for layer in features:
            if layer == last_layer:
                layer_outputs[layer] = head_inputs[0]
            else:
                layer_outputs[layer] = output.hidden_states[layer + 1]
        return ModelOutput(logits, layer_outputs, logits_for)

    def _cache_options(self, cache: StateCache) -> dict[str, Any]:
        """Arguments of the model's own forward pass that continue a state."""
        masks: dict[str, Tensor] = {}
        for kind, window in self.windows.items():
            masks[kind] = self._mask(cache, window)
        options: dict[str, Any] = {"position_ids": self._positions(cache), "use_cache": True}

        # A model with several kinds of layers takes a mask for each kind.
        options["attention_mask"] = masks if len(masks) > 1 else masks[kind]
        options[cache_name(type(self.model).forward) or "past_key_values"] = cache
        return options

    # Recorded calls

    def records(self, state: DecodeState, num_tokens: int) -> bool:
        # The first call reads prompts of any length and creates the buffers: it is not recorded.
        if not isinstance(state, KVState) or state.graphs is None or num_tokens > MOST_TOKENS:
            return False
        return len(state.storage.layers) == self.stack.num_layers and min(state.consumed) > 0

    def read_at(
        self,
        state: KVStorage,
        span: int,
        tokens: Tensor,
        starts: Tensor,
        num_layers: int | None,
    ) -> Tensor:
        end_layer = self.stack.num_layers if num_layers is None else num_layers
        hidden, call = self._enter(_recorded_cache(state, span, tokens, starts), tokens)
        return self.stack.run(hidden, call, 0, end_layer)

    def _recorded(
        self,
        tokens: Int[Tensor, "B T"],
        state: KVState,
        logits_for: Places,
        features: Sequence[int],
        exit_states: ExitStates | None,
    ) -> ModelOutput:
        """The call's kernels, launched together. They are recorded at the first such call."""
        assert state.graphs is not None
        storage = state.storage
        span = state.recorded_span(tokens.shape[1])
        layers = sorted(features)
        first_layer = 0
        lower_hidden = None
        if exit_states is not None:
            first_layer = exit_states.num_layers
            lower_hidden = exit_states.hidden[:, : tokens.shape[1] - 1]
        position_table = logits_for if isinstance(logits_for, Tensor) else None

        def read(
            tokens: Tensor,
            starts: Tensor,
            positions: Tensor | None,
            lower: Tensor | None,
        ) -> Outputs:
            layer_input = tokens
            if lower is not None:
                # The lower layers have not read the last draft token.
                last_starts = starts + tokens.shape[1] - 1
                last_hidden = self.read_at(storage, span, tokens[:, -1:], last_starts, first_layer)
                layer_input = torch.cat((lower, last_hidden), dim=1)
            entered = self._enter(_recorded_cache(storage, span, tokens, starts), layer_input)
            scored = logits_for if positions is None else positions
            output = self._by_parts(entered, first_layer, scored, layers)
            return output.logits, *(output.features[layer] for layer in layers)

        positions_key = str(logits_for) if position_table is None else None
        key = ("read", span, first_layer, positions_key, tuple(layers))
        logits, *hidden = state.graphs.run(
            key, read, tokens, state.lengths, position_table, lower_hidden
        )
        assert logits is not None
        layer_outputs: dict[int, Tensor] = {}
        for layer, layer_output in zip(layers, hidden, strict=True):
            if layer_output is not None:
                layer_outputs[layer] = layer_output
        return ModelOutput(logits, layer_outputs, logits_for)


@dataclass
class _EvalBlocks:
    """The blocks that run a model in evaluation mode at present, in all threads.

    Args:
        num_open: blocks that have begun and not ended.
        training_modules: modules that were in training mode when the first of them began.
    """

    num_open: int
    training_modules: list[nn.Module]


_eval_blocks: weakref.WeakKeyDictionary[nn.Module, _EvalBlocks] = weakref.WeakKeyDictionary()
_eval_blocks_lock = threading.Lock()


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode inside the block, and leave each module in its own mode.

    Threads may run the same model at the same time: the last one to leave restores the modes.
    """
    with _eval_blocks_lock:
        blocks = _eval_blocks.get(model)
        if blocks is None:
            training_modules = [module for module in model.modules() if module.training]
            blocks = _EvalBlocks(0, training_modules)
            _eval_blocks[model] = blocks
        blocks.num_open += 1
        for module in blocks.training_modules:
            module.training = False
    try:
        yield
    finally:
        with _eval_blocks_lock:
            blocks.num_open -= 1
            if blocks.num_open == 0:
                del _eval_blocks[model]
                for module in blocks.training_modules:
                    module.training = True


def check_generation(model: PreTrainedModel) -> None:
    """Raise ValueError if `generate` of transformers would not run this model's forward pass."""
    name = type(model).__name__
    part = compiled_part(model)
    if part is not None:
        raise ValueError(
            f"{name} is compiled in part ({part}): pass it without torch.compile; on a GPU, "
            "SpeculativeDecoder.compile() compiles its layers"
        )
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__self__", None) is not model:
        raise ValueError(
            f"{name} reads inputs of another object, as prompt tuning of PEFT does: only adapters "
            "inside the model are supported, such as LoRA"
        )


def _cache(state: KVState, num_tokens: int, starts: Sequence[int] | None = None) -> StateCache:
    return StateCache(state.storage, state.slots(num_tokens, starts))


def _part_cache(state: KVState, part: Part, call_starts: Sequence[int]) -> StateCache:
    """The cache of a part of a call whose rows begin at these positions."""
    starts = []
    for row, start in zip(part.rows, part.starts, strict=True):
        starts.append(call_starts[row] + start)
    return StateCache(state.storage, state.slots(part.num_tokens, starts, part.row))


def _recorded_cache(
    storage: KVStorage,
    span: int,
    tokens: Tensor,
    starts: Int[Tensor, "B"],
) -> StateCache:
    """The cache of a call whose positions only the device has."""
    positions = starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)
    slots = Slots(positions, None, span, is_long=storage.is_long)
    return StateCache(storage, slots, recorded=True)


def _as_model(model: Any, vocab_size: int | None) -> PreTrainedModel:
    """The model of transformers that a user means: loaded, inside a wrapper, or a new one."""
    if not isinstance(model, nn.Module):
        return _from_config(model, vocab_size)

    if "_orig_mod" in model._modules:  # of torch.compile
        model = model._orig_mod
    if callable(getattr(model, "get_base_model", None)) and hasattr(model, "peft_config"):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                "prompt tuning of PEFT is not supported: only adapters inside the model are, such "
                "as LoRA"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a model of transformers: pass a causal language model "
            "that from_pretrained returns, or a LanguageModel"
        )
    return model


def _from_config(
    config: PreTrainedConfig | Mapping[str, Any], vocab_size: int | None
) -> PreTrainedModel:
    if not isinstance(config, PreTrainedConfig):
        settings = HuggingFaceSettings(config, vocab_size)
        values = dict(settings.model)
        if vocab_size is not None:
            values.setdefault("vocab_size", vocab_size)
        config = to_config(values)
    try:
        return AutoModelForCausalLM.from_config(config)
    except FOREIGN as error:
        raise ValueError(
            f"no {config.model_type!r} model can be built from this: {first_line(error)}"
        ) from error
