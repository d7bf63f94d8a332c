"""Any causal language model of transformers as a `LanguageModel`: static per-row state, no padding, no cropping."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lightning_specdec.checks import require_int
from lightning_specdec.models import attention
from lightning_specdec.models.base import ExitStates, LanguageModel, ModelOutput, select
from lightning_specdec.models.config_file import FOREIGN, first_line
from lightning_specdec.models.config_values import to_config, to_values
from lightning_specdec.models.graphs import MOST_TOKENS, Outputs
from lightning_specdec.models.layers import Call, LayerStack, take_apart
from lightning_specdec.models.packed import PackedLinear, pack_linears
from lightning_specdec.models.state import DecodeState, KVState, KVStorage, Lengths, Slots, StoragePool, as_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int

    from lightning_specdec.models.identity import Origin
    from lightning_specdec.text.base import Tokenizer

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
"""Families that see both ways; as decoders, some of them count positions from another number than 0."""
_OWN_MASKS = ("doge", "gpt_neo")
"""Families whose layers mask by themselves, besides the mask that they are given."""


class HuggingFaceState(KVState):
    """A `KVState` that transformers' layers write to as to a cache of their own."""

    def _use(self, storage: KVStorage) -> None:
        super()._use(storage)
        self.cache = _Cache(storage)


class _Cache(Cache):
    """What transformers' layers take for a cache: it sends their keys and values to a call's slots."""

    def __init__(self, storage: KVStorage, slots: Slots | None = None, *, recorded: bool = False) -> None:
        super().__init__(layers=[])
        self.storage, self.slots, self.recorded, self.longest = storage, slots, recorded, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.slots is not None, "a layer wrote outside a call"
        return self.storage.update(layer_idx, self.slots, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest


class HuggingFaceLM(LanguageModel):
    """A causal language model of transformers, scored through its own code over a `KVState`.

    Theory: a transformers model takes positions, masks and a cache from outside. Given each row's own positions, a mask
    `key_position <= query_position` for each kind of attention layer, and a cache whose `update` writes at these
    positions, rows of any lengths share a call, and going back is a smaller length. The model's own forward pass runs
    unchanged, so every architecture that lets these three be given works as it is.

    Args:
        model: a loaded model; or a config (transformers' own, or a mapping with a `model_type`) for a new, random one.
            Of a loaded model the attention implementation is set to one that does the same with fewer copies.
        vocab_size: of a new model, where its config does not say it; of a loaded one it must be what it has.
        tokenizer: turns text to tokens, where text is wanted: a `Tokenizer`, or one of transformers.

    Attributes:
        origin: the files that its weights were read from; None where it was made or trained here.

    Raises:
        ValueError: for a model whose state cannot go back (recurrent and linear-attention layers), or that is no
            decoder, or that does not let its positions be given.
    """

    origin: Origin | None = None

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig | Mapping[str, Any],
        *,
        vocab_size: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        if vocab_size is not None:
            model = _with_vocabulary(model, require_int("vocab_size", vocab_size, 2, 2**20))
        self.model = model if isinstance(model, PreTrainedModel) else _from_config(model)
        self.config = self.model.config.get_text_config(decoder=True)
        self.windows = _attention_windows(self.model, self.config)
        head = self.model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or self.config.vocab_size)
        self.hidden_size = getattr(head, "in_features", None) or getattr(self.config, "hidden_size", None)
        self.max_positions = _max_positions(self.config)
        self.tokenizer = _wrapped(tokenizer, self.model)
        self.vocabulary = None if self.tokenizer is None else self.tokenizer.vocabulary
        self._parts: LayerStack | str | None = None
        self._pool: StoragePool | None = None
        self._num_parameters = sum(weight.numel() for weight in self.model.parameters())
        implementation = self.model.config._attn_implementation
        if implementation not in ("eager", "sdpa", attention.NAME):
            raise ValueError(
                f"{self._name} runs on {implementation}, which takes no mask for rows of different lengths: "
                'load it with attn_implementation="sdpa"'
            )
        if implementation == "sdpa":
            self.model.set_attn_implementation(attention.NAME)

    @property
    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def num_layers(self) -> int | None:  # type: ignore[override]
        """How many layers, as `features` counts them."""
        return self.stack.num_layers if self.takes_apart else getattr(self.config, "num_hidden_layers", None)

    @property
    def memory_bytes(self) -> int:
        packed = sum(layer.memory_bytes for layer in self.model.modules() if isinstance(layer, PackedLinear))
        return packed + super().memory_bytes

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return next(weight.dtype for weight in self.model.parameters() if weight.is_floating_point())

    def arguments(self) -> dict[str, Any]:
        return {"model": to_values(self.model.config)}

    def init_state(self, batch_size: int, max_length: int) -> HuggingFaceState:
        return HuggingFaceState(batch_size, max_length, device=self.device, pool=self._pool)

    def packed(self) -> HuggingFaceLM:
        """This model as it decodes fastest, for decoding only: a copy with packed linear layers on a CPU, one that
        records its calls on a GPU. The copy shares the other weights."""
        if self._pool is not None or any(isinstance(layer, PackedLinear) for layer in self.modules()):
            return self
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        shared[id(self.tokenizer)] = self.tokenizer  # type: ignore[assignment]
        other = deepcopy(self, shared)
        return other.pack() if self.device.type == "cpu" else other.record()

    def record(self) -> HuggingFaceLM:
        """Record calls on a few tokens over its states and replay them from then on, where its parts lie open.

        A recorded call's output is overwritten by the next one over the same state.
        """
        if self.takes_apart:
            self._pool = StoragePool()
        return self

    def rollout(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        num_tokens: int,
        choose: Callable[[Float[Tensor, "B V"], int], Int[Tensor, "B"]],
        *,
        valid_lengths: Lengths | None = None,
    ) -> Int[Tensor, "B num_tokens"]:
        if self._pool is None:
            return super().rollout(tokens, state, num_tokens, choose, valid_lengths=valid_lengths)

        def keep(logits: Float[Tensor, "B V"], i: int) -> Int[Tensor, "B"]:
            return choose(logits.clone(), i).clone()

        return super().rollout(tokens, state, num_tokens, keep, valid_lengths=valid_lengths)

    def fused(self) -> HuggingFaceLM:
        return self.packed()

    def pack(self) -> HuggingFaceLM:
        """Lay out the linear layers' weights for this processor, in place: for decoding only, and for good."""
        if self.device.type == "cpu":
            pack_linears(self.model)
        return self

    @property
    def stack(self) -> LayerStack:
        """The model's parts. They are checked when they are first asked for.

        Raises:
            ValueError: it cannot be taken apart.
        """
        if isinstance(self._parts, str):
            raise ValueError(self._parts)
        if self._parts is None:
            try:
                if len(self.windows) > 1:
                    raise ValueError(f"{self._name} cannot be taken apart: its layers differ in how far they look back")
                self._parts = take_apart(self.model, self._window)
            except ValueError as error:
                self._parts = str(error)
                raise
        return self._parts

    @property
    def takes_apart(self) -> bool:
        """Whether the model's parts can be called one by one."""
        if self._parts is None:
            with suppress(ValueError):
                return bool(self.stack)
        return isinstance(self._parts, LayerStack)

    def check_exit(self, num_layers: int) -> None:
        total = self.stack.num_layers
        if total < 2:
            raise ValueError(f"{self._name} has a single layer: there is nothing to exit from before its end")
        require_int("exit_layer", num_layers, 1, total - 1)

    def lower(
        self, tokens: Int[Tensor, "B T"], state: DecodeState, starts: Sequence[int], num_layers: int
    ) -> Float[Tensor, "B T D"]:
        assert isinstance(state, HuggingFaceState)
        positions, mask = self._placed(state, tokens.shape[1], starts)
        hidden = self.stack.embed(tokens, positions)
        call = self.stack.begin(hidden, positions, mask, state.cache)
        return self.stack.run(hidden, call, 0, num_layers)

    def exit_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        return self.stack.head(self.stack.norm(hidden))

    def check_output_head(self) -> None:
        _ = self.stack

    def output_logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        return self.stack.head(hidden)

    def embeddings(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    @property
    @torch.no_grad()
    def output_weight(self) -> Float[Tensor, "V D"]:
        """Read off what the head makes of unit vectors, since its weight may be packed or quantized."""
        head = self.model.get_output_embeddings()
        assert self.hidden_size is not None
        units = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)
        made: Tensor = head(units) - head(torch.zeros_like(units[:1]))
        return made.T

    def begin(self, tokens: Int[Tensor, "B T"]) -> tuple[Float[Tensor, "B T D"], Call]:
        """What the first layer reads of whole sequences, and what all layers share; the same for any rows of them."""
        positions, mask = self._free(tokens)
        hidden = self.stack.embed(tokens, positions)
        return hidden, self.stack.begin(hidden, positions, mask, None)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
        parents: Int[Tensor, "B T"] | None = None,
    ) -> ModelOutput:
        """See `LanguageModel.forward`. A feature is the output of layer i, counted from 0; the last layer's is taken
        behind the final norm, as the output head sees it."""
        if parents is not None:
            raise ValueError(f"{self._name} reads one path of tokens: draft without a tree")
        assert state is None or isinstance(state, HuggingFaceState), (
            f"{self._name} needs a HuggingFaceState, got {state}"
        )
        if state is not None and self.records(state, tokens.shape[1]):
            output = self._recorded(tokens, state, logits_for, features)
        elif self.takes_apart:
            positions, mask = self._free(tokens) if state is None else self._placed(state, tokens.shape[1])
            hidden = self.stack.embed(tokens, positions)
            call = self.stack.begin(hidden, positions, mask, None if state is None else state.cache)
            output = self._by_parts(hidden, 0, call, logits_for, features)
        else:
            output = self._whole(tokens, state, logits_for, features)
        if state is not None:
            state.advance(tokens.shape[1], valid_lengths)
        return output

    def finish(
        self,
        exit_states: ExitStates,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
    ) -> ModelOutput:
        assert isinstance(state, HuggingFaceState)
        assert all(layer >= exit_states.num_layers - 1 for layer in features), (
            f"of the first {exit_states.num_layers} layers only the last one's output was kept, not all of {features}"
        )
        num_tokens, known = tokens.shape[1], exit_states.lengths
        if valid_lengths is None and max(known) == min(known) == num_tokens - 1 and self.records(state, num_tokens):
            output = self._recorded(tokens, state, logits_for, features, exit_states)
        else:
            hidden = self._completed(tokens, state, valid_lengths, exit_states)
            positions, mask = self._placed(state, num_tokens)
            call = self.stack.begin(hidden, positions, mask, state.cache)
            output = self._by_parts(hidden, exit_states.num_layers, call, logits_for, features)
        state.advance(num_tokens, valid_lengths)
        return output

    def records(self, state: DecodeState, num_tokens: int) -> bool:
        # Not the first call, which reads prompts of any length and makes the buffers.
        if not isinstance(state, KVState) or state.graphs is None or num_tokens > MOST_TOKENS:
            return False
        return len(state.buffers) == self.stack.num_layers and min(state.consumed) > 0

    def read_at(
        self, state: KVStorage, span: int, tokens: Int[Tensor, "B T"], starts: Int[Tensor, "B"], num_layers: int | None
    ) -> Float[Tensor, "B T D"]:
        cache, positions, mask = self._at(state, span, tokens.shape[1], starts)
        hidden = self.stack.embed(tokens, positions)
        call = self.stack.begin(hidden, positions, mask, cache)
        return self.stack.run(hidden, call, 0, self.stack.num_layers if num_layers is None else num_layers)

    def _at(
        self, storage: KVStorage, span: int, num_tokens: int, starts: Int[Tensor, "B"]
    ) -> tuple[_Cache, Tensor, Tensor]:
        """Cache, positions and mask of a call whose places are known to the device alone."""
        slots = Slots(starts[:, None] + torch.arange(num_tokens, device=starts.device), None, span)
        mask = self._additive(storage.mask(slots, self._window))
        return _Cache(storage, slots, recorded=True), self._clamped(slots.positions), mask

    def _recorded(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        logits_for: Int[Tensor, "B N"] | slice | None,
        features: Sequence[int],
        exit_states: ExitStates | None = None,
    ) -> ModelOutput:
        """The call's kernels launched together; recorded when they are first needed."""
        assert isinstance(state, KVState) and state.graphs is not None
        storage, span, layers = state.storage, state.recorded_span(tokens.shape[1]), sorted(features)
        first = 0 if exit_states is None else exit_states.num_layers
        given = None if exit_states is None else exit_states.hidden
        places = logits_for if isinstance(logits_for, Tensor) else None

        def read(tokens: Tensor, starts: Tensor, places: Tensor | None, given: Tensor | None) -> Outputs:
            if given is None:
                cache, positions, mask = self._at(storage, span, tokens.shape[1], starts)
                hidden = self.stack.embed(tokens, positions)
            else:  # the last guess has not been through the lower layers
                rest = self.read_at(storage, span, tokens[:, -1:], starts + tokens.shape[1] - 1, first)
                hidden = torch.cat((given, rest), dim=1)
                cache, positions, mask = self._at(storage, span, tokens.shape[1], starts)
            call = self.stack.begin(hidden, positions, mask, cache)
            wanted = logits_for if places is None else places
            output = self._by_parts(hidden, first, call, wanted, layers)
            return output.logits, *(output.features[layer] for layer in layers)

        kind = (logits_for.start, logits_for.stop) if isinstance(logits_for, slice) else None
        key = "read", span, first, kind, tuple(layers)
        logits, *hidden = state.graphs.run(key, read, tokens, state.lengths, places, given)
        assert logits is not None
        return ModelOutput(logits, {i: h for i, h in zip(layers, hidden, strict=True) if h is not None}, logits_for)

    def _by_parts(
        self,
        hidden: Float[Tensor, "B T D"],
        first: int,
        call: Call,
        logits_for: Int[Tensor, "B N"] | slice | None,
        features: Sequence[int],
    ) -> ModelOutput:
        """The layers from the first on, the final norm, the head."""
        stack = self.stack
        kept: dict[int, Tensor] = {}
        for layer in sorted(features):
            if layer < stack.num_layers - 1:
                hidden, first = stack.run(hidden, call, first, layer + 1), layer + 1
                kept[layer] = hidden
        hidden = stack.run(hidden, call, first, stack.num_layers)
        if stack.num_layers - 1 in features:
            hidden = kept[stack.num_layers - 1] = stack.norm(hidden)
            logits = stack.head(select(hidden, logits_for))
        else:
            logits = stack.head(stack.norm(select(hidden, logits_for)))
        return ModelOutput(logits, kept, logits_for)

    def _completed(
        self, tokens: Int[Tensor, "B T"], state: HuggingFaceState, valid_lengths: Lengths | None, done: ExitStates
    ) -> Float[Tensor, "B T D"]:
        """The lower layers' output for all tokens: what they have made already, and now the rest."""
        num_tokens, known = tokens.shape[1], done.lengths
        lengths = [num_tokens] * len(tokens) if valid_lengths is None else as_list(valid_lengths)
        width = max(0, *(length - each for length, each in zip(lengths, known, strict=True)))
        starts = [length + each for length, each in zip(state.consumed, known, strict=True)]
        if min(known) == max(known) == num_tokens - width:
            if not width:
                return done.hidden[:, :num_tokens]
            rest = self.lower(tokens[:, known[0] :], state, starts, done.num_layers)
            return torch.cat((done.hidden[:, : known[0]], rest), dim=1)
        first = torch.tensor(known, device=tokens.device)[:, None]
        # Zeros where nothing was read: garbage that is no number would reach the rows' own tokens through the mask.
        unknown = (torch.arange(done.hidden.shape[1], device=tokens.device) >= first)[..., None]
        missing = max(num_tokens, done.hidden.shape[1]) + width - done.hidden.shape[1]
        hidden = nn.functional.pad(done.hidden.masked_fill(unknown, 0), (0, 0, 0, missing))
        if width:
            places = first + torch.arange(width, device=tokens.device)
            rest = self.lower(tokens.gather(1, places.clamp(max=num_tokens - 1)), state, starts, done.num_layers)
            hidden = hidden.scatter(1, places[..., None].expand(-1, -1, hidden.shape[-1]), rest)
        return hidden[:, :num_tokens]

    def _whole(
        self,
        tokens: Int[Tensor, "B T"],
        state: HuggingFaceState | None,
        logits_for: Int[Tensor, "B N"] | slice | None,
        features: Sequence[int],
    ) -> ModelOutput:
        """One call of the model's own forward pass."""
        options: dict[str, Any] = {"use_cache": False}
        if state is not None:
            options = self._through(state, tokens.shape[1])
        last = (self.num_layers or 0) - 1
        if any(layer != last for layer in features):
            options["output_hidden_states"] = True
        with self._scored(logits_for) as seen:
            output = self.model(input_ids=tokens, **options)
        hidden = {layer: seen[0] if layer == last else output.hidden_states[layer + 1] for layer in features}
        return ModelOutput(output.logits, hidden, logits_for)

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    @property
    def _window(self) -> int | None:
        """How far back the layers look, of a model with layers of one kind."""
        (window,) = self.windows.values()
        return window

    def _free(self, tokens: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor | None]:
        """Positions and mask of whole sequences; without one, all but the eager attention are causal by themselves."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        window = tokens.shape[1] if self._window is None else self._window
        if tokens.shape[1] <= window and self.model.config._attn_implementation != "eager":
            return positions, None
        apart = positions[0, :, None] - positions
        seen = (apart >= 0) & (apart < window)
        return positions, self._additive(seen[None])

    def _placed(
        self, state: HuggingFaceState, num_tokens: int, starts: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Positions and mask of the state's next tokens, for a model of one kind of layers."""
        slots = state.cache.slots = state.slots(num_tokens, starts)
        state.cache.longest = max(state.consumed)
        mask = self._additive(state.mask(slots, window=self._window))
        return self._clamped(slots.positions), mask

    def _additive(self, seen: Bool[Tensor, "B T S"]) -> Float[Tensor, "B 1 T S"]:
        """0 where a query may look, -inf elsewhere."""
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]

    def _clamped(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Of padding behind the end: a table of positions has no entry there."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def _through(self, state: HuggingFaceState, num_tokens: int) -> dict[str, Any]:
        """The arguments that make the model's next call read and write the state."""
        slots = state.cache.slots = state.slots(num_tokens)
        state.cache.longest = max(state.consumed)
        masks = {kind: self._additive(state.mask(slots, window=window)) for kind, window in self.windows.items()}
        return {
            "position_ids": self._clamped(slots.positions),
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "past_key_values": state.cache,
            "use_cache": True,
        }

    @contextmanager
    def _scored(self, places: Tensor | slice | None) -> Iterator[list[Tensor]]:
        """While it lasts the output head sees only the wanted places; what the model does behind it stays its own.

        Gives what reaches the head, of all places.
        """
        seen: list[Tensor] = []

        def narrowed(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            seen[:] = inputs
            return (select(inputs[0], places),)

        handle = self.model.get_output_embeddings().register_forward_pre_hook(narrowed)
        try:
            yield seen
        finally:
            handle.remove()


def _wrapped(tokenizer: Any, model: PreTrainedModel) -> Tokenizer | None:
    """A tokenizer of transformers as one of ours, which knows the model's stop tokens."""
    from lightning_specdec.text import base
    from lightning_specdec.text.tokenizer import TextTokenizer

    if tokenizer is None or isinstance(tokenizer, base.Tokenizer):
        return tokenizer
    return TextTokenizer(tokenizer, generation_config=model.generation_config)


def _with_vocabulary(
    model: PreTrainedModel | PreTrainedConfig | Mapping[str, Any], vocab_size: int
) -> PreTrainedModel | PreTrainedConfig | Mapping[str, Any]:
    """A config with that vocabulary; what has one already must have that."""
    if isinstance(model, Mapping) and "vocab_size" not in model:
        return {**model, "vocab_size": vocab_size}
    own = model["vocab_size"] if isinstance(model, Mapping) else getattr(model, "config", model).vocab_size
    if own != vocab_size:
        raise ValueError(
            f"the model has a vocabulary of {own} tokens, {vocab_size} are wanted: leave vocab_size out of its config"
        )
    return model


def _from_config(config: PreTrainedConfig | Mapping[str, Any]) -> PreTrainedModel:
    """A new model with random weights."""
    if not isinstance(config, PreTrainedConfig):
        if not isinstance(config, Mapping):
            raise ValueError(f"a new model is made of a config, as {{model_type: llama}}, got {config!r}")
        config = to_config(config)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (*FOREIGN, AssertionError) as error:
        raise ValueError(f"no {config.model_type!r} model can be built so: {first_line(error)}") from error
    return model


def _attention_windows(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int | None]:
    """The kinds of attention layers that the model has, and how far back each looks (None: to the start)."""
    name = type(model).__name__
    two_sided = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if config.is_encoder_decoder or two_sided or config.model_type in _ENCODERS:
        raise ValueError(f"{name} is no causal language model of its own: use a decoder-only one")
    if getattr(config, "alibi", False) or config.model_type in _OWN_MASKS:
        raise ValueError(
            f"{name} derives masks from places in its cache, so rows of different lengths cannot share a call: "
            "use a model that lets its positions be given"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = window is not None and getattr(config, "use_sliding_window", True) and _builds_windows(model)
        kinds = [_SLIDING if sliding else _FULL]
    foreign = sorted({kind for kind in kinds if kind not in (_FULL, _SLIDING)})
    if foreign or getattr(model, "_is_stateful", False):
        what = f"layers of {', '.join(foreign)}" if foreign else "a recurrent state"
        raise ValueError(f"{name} has {what}, and such a state cannot go back: speculative decoding needs attention")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} takes no position_ids, so rows of different lengths cannot share a call")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output head over a vocabulary: use a causal language model")
    return {kind: window if kind == _SLIDING else None for kind in dict.fromkeys(kinds)}


def _builds_windows(model: PreTrainedModel) -> bool:
    """Whether the model's code masks by a sliding window: a config of transformers' own models may name one that no
    layer heeds. Code from elsewhere is taken at its config's word."""
    sources = {type(part).__module__ for part in model.modules() if isinstance(part, PreTrainedModel)}
    builder = "create_sliding_window_causal_mask"
    return any(not name.startswith("transformers.") or hasattr(sys.modules[name], builder) for name in sources)


def _max_positions(config: PreTrainedConfig) -> int | None:
    """Most tokens of a text. Rotary scalings that change with the text's length stay below the change."""
    scaling = getattr(config, "rope_parameters", None) or {}
    original = scaling.get("original_max_position_embeddings") if isinstance(scaling, Mapping) else None
    if original is not None and scaling.get("rope_type") in ("longrope", "dynamic"):
        return int(original)
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)
