"""Any causal language model of transformers as a `LanguageModel`: static per-row state, no padding, no cropping.

Knows nothing of drafts, rules, text, or where a model comes from (loading.py).
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lightning_specdec.models import attention
from lightning_specdec.models.base import LanguageModel, ModelOutput, Plain
from lightning_specdec.models.packed import PackedLinear, pack_linears
from lightning_specdec.models.state import DecodeState, KVState, Lengths, Slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Int

    from lightning_specdec.text.tokenizer import TextTokenizer

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
"""Families that see both ways; as decoders, some of them count positions from another number than 0."""
_OWN_MASKS = ("doge", "gpt_neo")
"""Families whose layers mask by themselves, besides the mask that they are given."""


class HuggingFaceState(KVState):
    """A `KVState` that transformers' layers write to as to a cache of their own."""

    def __init__(self, batch_size: int, max_length: int, *, device: torch.device, whole_span: bool = False) -> None:
        super().__init__(batch_size, max_length, device=device, whole_span=whole_span)
        self.cache = _Cache(self)


class _Cache(Cache):
    """What transformers' layers take for a cache: it sends their keys and values to the state's current slots."""

    def __init__(self, state: KVState) -> None:
        super().__init__(layers=[])
        self.state = state
        self.slots: Slots | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.slots is not None, "a layer wrote outside a call"
        return self.state.update(layer_idx, self.slots, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.state.consumed)


class HuggingFaceLM(LanguageModel):
    """A causal language model of transformers, scored through its own code over a `KVState`.

    Theory: a transformers model takes positions, masks and a cache from outside. Given each row's own positions, a mask
    `key_position <= query_position` for each kind of attention layer, and a cache whose `update` writes at these
    positions, rows of any lengths share a call, and going back is a smaller length. The model's own forward pass runs
    unchanged, so every architecture that lets these three be given works as it is.

    Args:
        model: a loaded model; or a config (transformers' own, or a mapping with a `model_type`) for a new, random one.
            Of a loaded model the attention implementation is set to one that does the same with fewer copies.
        tokenizer: turns text to tokens, where text is wanted: a `TextTokenizer`, or one of transformers.

    Raises:
        ValueError: for a model whose state cannot go back (recurrent and linear-attention layers), or that is no
            decoder, or that does not let its positions be given.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig | Mapping[str, Any],
        *,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.model = model if isinstance(model, PreTrainedModel) else _from_config(model)
        self.config = self.model.config.get_text_config(decoder=True)
        self.windows = _attention_windows(self.model, self.config)
        head = self.model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or self.config.vocab_size)
        self.max_positions = _max_positions(self.config)
        self.tokenizer = _wrapped(tokenizer, self.model)
        self.vocabulary = None if self.tokenizer is None else self.tokenizer.vocabulary
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
    def memory_bytes(self) -> int:
        packed = sum(layer.memory_bytes for layer in self.model.modules() if isinstance(layer, PackedLinear))
        return packed + super().memory_bytes

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return next(weight.dtype for weight in self.model.parameters() if weight.is_floating_point())

    def arguments(self) -> dict[str, Plain]:
        return {"config": json.dumps(self.model.config.to_diff_dict(), sort_keys=True)}

    def init_state(self, batch_size: int, max_length: int) -> HuggingFaceState:
        return HuggingFaceState(batch_size, max_length, device=self.device)

    def fused(self) -> HuggingFaceLM:
        """This model with packed linear layers, on a CPU: a copy that shares the other weights, for decoding only."""
        if self.device.type != "cpu" or any(isinstance(layer, PackedLinear) for layer in self.modules()):
            return self
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        shared[id(self.tokenizer)] = self.tokenizer  # type: ignore[assignment]
        return deepcopy(self, shared).pack()

    def pack(self) -> HuggingFaceLM:
        """Lay out the linear layers' weights for this processor, in place: for decoding only, and for good."""
        if self.device.type == "cpu":
            pack_linears(self.model)
        return self

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
        options: dict[str, Any] = {"use_cache": False}
        if state is not None:
            assert isinstance(state, HuggingFaceState), f"{self._name} needs a HuggingFaceState, got {state}"
            options = self._through(state, tokens.shape[1])
        if features:
            options["output_hidden_states"] = True
        with self._scored(logits_for):
            output = self.model(input_ids=tokens, **options)
        if state is not None:
            state.advance(tokens.shape[1], valid_lengths)
        hidden = {layer: output.hidden_states[layer + 1] for layer in features}
        return ModelOutput(output.logits, hidden)

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _through(self, state: HuggingFaceState, num_tokens: int) -> dict[str, Any]:
        """The arguments that make the model's next call read and write the state."""
        slots = state.slots(num_tokens)
        state.cache.slots = slots
        masks = {}
        for kind, window in self.windows.items():
            seen = state.mask(slots, window=window)[:, None]
            masks[kind] = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        positions = slots.positions
        if self.max_positions is not None:  # of padding behind the end: a table of positions has no entry there
            positions = positions.clamp(max=self.max_positions - 1)
        return {
            "position_ids": positions,
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "past_key_values": state.cache,
            "use_cache": True,
        }

    @contextmanager
    def _scored(self, places: Tensor | slice | None) -> Iterator[None]:
        """While it lasts the output head sees only the wanted places; what the model does behind it stays its own."""
        head = self.model.get_output_embeddings()
        if places is None or head is None:
            yield
            return

        def select(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = inputs[0]
            if isinstance(places, slice):
                return (hidden[:, places],)
            return (hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])),)

        handle = head.register_forward_pre_hook(select)
        try:
            yield
        finally:
            handle.remove()


def _wrapped(tokenizer: Any, model: PreTrainedModel) -> TextTokenizer | None:
    """A tokenizer of transformers as one of ours, which knows the model's stop tokens."""
    from lightning_specdec.text.tokenizer import TextTokenizer

    if tokenizer is None or isinstance(tokenizer, TextTokenizer):
        return tokenizer
    return TextTokenizer(tokenizer, generation_config=model.generation_config)


def _from_config(config: PreTrainedConfig | Mapping[str, Any]) -> PreTrainedModel:
    """A new model with random weights."""
    if not isinstance(config, PreTrainedConfig):
        values = dict(config)
        kind = values.pop("model_type", None)
        if not isinstance(kind, str):
            raise ValueError("a model's config needs a model_type, as llama or gpt2")
        try:
            config = AutoConfig.for_model(kind, **values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"this is no config of a {kind!r} model: {str(error).splitlines()[0]}") from error
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
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
