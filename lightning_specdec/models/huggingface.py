"""Causal language models of transformers as `LanguageModel`, over a static state with a length for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.models.base import ExitStates, LanguageModel, ModelOutput, select
from lightning_specdec.models.graphs import MOST_TOKENS, Outputs
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet, to_config, to_values
from lightning_specdec.models.packed import PackedLinear, pack_linears
from lightning_specdec.models.state import (
    DecodeState,
    KVState,
    KVStorage,
    Lengths,
    Slots,
    StoragePool,
    as_list,
)
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer

with quiet():  # whoever imports this first
    from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

    from lightning_specdec.models import attention
    from lightning_specdec.models.attention import StateCache, attention_windows, max_positions
    from lightning_specdec.models.layers import Entered, LayerStack, additive, cache_name

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Places = Int[Tensor, "B N"] | slice | None


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

    It passes the model each row's positions, a mask `key_position <= query_position` and a cache that writes at these
    positions, so rows of any lengths share a call. Every architecture that accepts the three works unchanged.

    Args:
        model: a loaded model; or a config (transformers' own, or a mapping with a `model_type`) for a new model with
            random weights. A loaded model's "sdpa" attention is replaced in place by an equal one with fewer copies.
        vocab_size: vocabulary size of a new model whose config has none; for others it must be the model's own.
        tokenizer: the model's tokenizer, ours or of transformers.

    Raises:
        ValueError: the model is not a decoder, its state cannot go back (recurrent or linear-attention layers), or it
            does not accept positions.
    """

    Settings = HuggingFaceSettings

    def __init__(
        self,
        model: Mapping[str, Any] | PreTrainedModel | PreTrainedConfig,
        *,
        vocab_size: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.model = (
            model if isinstance(model, PreTrainedModel) else _from_config(model, vocab_size)
        )
        self.config = self.model.config.get_text_config(decoder=True)
        if vocab_size not in (None, self.config.vocab_size):
            raise ValueError(
                f"the model has {self.config.vocab_size} tokens, not {vocab_size}: leave vocab_size out"
            )
        self.windows = attention_windows(self.model, self.config)
        head = self.model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", None) or self.config.vocab_size)
        self.hidden_size = getattr(head, "in_features", None) or getattr(
            self.config, "hidden_size", None
        )
        self.max_positions = max_positions(self.config)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = TextTokenizer(tokenizer, generation_config=self.model.generation_config)
        self.tokenizer = tokenizer
        self.vocabulary = None if tokenizer is None else tokenizer.vocabulary
        self._parts: LayerStack | str | None = None
        self._pool: StoragePool | None = None
        _ = self.num_parameters  # before layers are packed
        if self.model.config._attn_implementation == "sdpa":
            self.model.set_attn_implementation(attention.NAME)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return next(
            weight.dtype for weight in self.model.parameters() if weight.is_floating_point()
        )

    def arguments(self) -> dict[str, Any]:
        return {"model": to_values(self.model.config)}

    def init_state(self, batch_size: int, max_length: int) -> KVState:
        return KVState(batch_size, max_length, device=self.device, pool=self._pool)

    def in_float32(self) -> HuggingFaceLM:
        """This model, or a copy of it in float32."""
        return self if self.dtype == torch.float32 else deepcopy(self).float()

    def packed(self) -> HuggingFaceLM:
        """The model in its fastest form, for inference only: a copy with packed linear layers on a CPU, or one that
        records its calls on a GPU. The copy shares all other weights."""
        if self._pool is not None or any(
            isinstance(layer, PackedLinear) for layer in self.modules()
        ):
            return self
        shared: dict[int, Any] = {
            id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())
        }
        shared[id(self.tokenizer)] = self.tokenizer
        other = deepcopy(self, shared)
        return other.pack() if self.device.type == "cpu" else other.record()

    fused = packed

    def pack(self) -> HuggingFaceLM:
        """Lay out the linear layers' weights for a CPU. Irreversible, in place; inference only. Returns the model."""
        if self.device.type == "cpu":
            pack_linears(self.model)
        return self

    def record(self) -> HuggingFaceLM:
        """Record calls on few tokens as CUDA graphs from now on, if `takes_apart`. Returns the model.

        A recorded call's output is overwritten by the next call over the same state.
        """
        if self.takes_apart:
            self._pool = StoragePool()
        return self

    def with_layers(self, layers: Sequence[int]) -> HuggingFaceLM:
        """A float32 copy with some of the layers, as a draft model to train (as DistilBERT, Sanh et al. 2019).

        Args:
            layers: numbers of the layers to keep, from 0, ascending.

        Raises:
            ValueError: there are no such layers, or no model can be built from them.
        """
        stack, config, values = (
            LayerStack(self.model),
            self.model.config,
            to_values(self.model.config),
        )
        chosen = [require_int("a layer", layer, 0, stack.num_layers - 1) for layer in layers]
        if not chosen or sorted(set(chosen)) != chosen:
            raise ValueError(
                f"layers must ascend, each once, got {list(layers)}: as [0, {stack.num_layers - 1}]"
            )
        for name, value in vars(config).items():  # lists with a value for each layer
            if "layer" in name and isinstance(value, list) and len(value) == stack.num_layers:
                values[name] = [value[layer] for layer in chosen]
        values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(chosen)
        made = HuggingFaceLM(values, tokenizer=self.tokenizer).float()
        try:
            parts = deepcopy(
                self.model,
                {id(stack.layers): nn.ModuleList(stack.layers[layer] for layer in chosen)},
            )
            made.model.load_state_dict(parts.state_dict())
        except RuntimeError as error:  # quantized weights, or layers of several kinds
            raise ValueError(
                f"{type(self.model).__name__} with the layers {chosen} cannot be built: {first_line(error)}"
            ) from error
        return made.eval()

    @property
    def stack(self) -> LayerStack:
        """The model's parts: embedding, layers, final norm, head. Checked against the whole model at first use.

        Raises:
            ValueError: the model cannot be taken apart.
        """
        if self._parts is None:
            try:
                if len(self.windows) > 1:
                    raise ValueError("its layers differ in their attention span")
                self._parts = LayerStack(self.model)
                self._check_parts()
            except FOREIGN as error:
                self._parts = (
                    f"{type(self.model).__name__} cannot be taken apart: {first_line(error)}"
                )
        if isinstance(self._parts, str):
            raise ValueError(self._parts)
        return self._parts

    @torch.no_grad()
    def _check_parts(self) -> None:
        """Compare the parts in turn with the model's own forward pass: what reaches the output head, and the logits.

        The head's output is replaced by numbers as large as logits become: a cap is not seen in the small ones of an
        untrained model.

        Raises:
            ValueError: they differ.
        """

        def replaced(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return torch.linspace(-100, 100, output.shape[-1]).to(output).expand_as(output)

        tokens = torch.tensor([[3, 1, 2, 0]], device=self.device) % self.vocab_size
        last = self.stack.num_layers - 1
        training = [module for module in self.modules() if module.training]
        handle = self.model.get_output_embeddings().register_forward_hook(replaced)
        self.model.eval()
        try:
            whole = self._whole(tokens, None, None, (last,))
            parts = self._by_parts(self.begin(tokens), 0, None, (last,))
        finally:
            handle.remove()
            for module in training:
                module.training = True
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.05
        for wanted, got in (
            (whole.logits, parts.logits),
            (whole.features[last], parts.features[last]),
        ):
            if not (got - wanted).abs().max() <= tolerance * wanted.abs().max():
                raise ValueError("its own forward pass does more than its parts in turn")

    @property
    def num_layers(self) -> int | None:  # type: ignore[override]
        """Number of layers: of `stack` if the model can be taken apart, else as its config counts them."""
        return (
            self.stack.num_layers
            if self.takes_apart
            else getattr(self.config, "num_hidden_layers", None)
        )

    @property
    def takes_apart(self) -> bool:
        """Whether the model's parts can be called one by one, which `stack`, early exits and recording need."""
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
        found = self.model.get_input_embeddings()
        return found.weight if type(found) is torch.nn.Embedding else None

    @property
    @torch.no_grad()
    def output_weight(self) -> Tensor:
        """The output head's weight matrix, computed from its output, since the weight may be packed or quantized."""
        head = self.model.get_output_embeddings()
        assert self.hidden_size is not None
        units = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)
        return (head(units) - head(torch.zeros_like(units[:1]))).T

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
        """As `LanguageModel.forward`. Feature i is the output of layer i, from 0; the last layer's includes the final
        norm, as the output head reads it.

        Args:
            exit_states: output of `lower` for the first of these tokens; the lower layers then read only the rest.
        """
        if state is None:
            if not self.takes_apart:
                return self._whole(tokens, None, logits_for, features)
            return self._by_parts(self.begin(tokens), 0, logits_for, features)
        assert isinstance(state, KVState), (
            f"{type(self.model).__name__} needs a KVState, got {state}"
        )
        num_tokens = tokens.shape[1]
        ready = exit_states is None or (
            valid_lengths is None and {*exit_states.lengths} == {num_tokens - 1}
        )
        if ready and self.records(state, num_tokens):
            output = self._recorded(tokens, state, logits_for, features, exit_states)
        elif not self.takes_apart:
            output = self._whole(tokens, state, logits_for, features)
        else:
            first, given = 0, tokens
            if exit_states is not None:
                first, given = (
                    exit_states.num_layers,
                    self._completed(tokens, state, valid_lengths, exit_states),
                )
            output = self._by_parts(
                self._enter(_cache(state, num_tokens), given), first, logits_for, features
            )
        state.advance(num_tokens, valid_lengths)
        return output

    def _completed(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState,
        valid_lengths: Lengths | None,
        done: ExitStates,
    ) -> Float[Tensor, "B T D"]:
        """The lower layers' output for all tokens: what they have made already, and now the rest."""
        num_tokens, known = tokens.shape[1], done.lengths
        lengths = [num_tokens] * len(tokens) if valid_lengths is None else as_list(valid_lengths)
        width = max(0, *(length - each for length, each in zip(lengths, known, strict=True)))
        first = torch.tensor(known, device=tokens.device)[:, None]
        # Zeros where nothing was read: NaN in garbage would reach the rows' own tokens through the mask.
        unknown = torch.arange(done.hidden.shape[1], device=tokens.device) >= first
        hidden = done.hidden.masked_fill(unknown[..., None], 0)
        hidden = nn.functional.pad(hidden, (0, 0, 0, num_tokens + width))
        if width:
            starts = [length + each for length, each in zip(state.consumed, known, strict=True)]
            places = first + torch.arange(width, device=tokens.device)
            rest = self.lower(
                tokens.gather(1, places.clamp(max=num_tokens - 1)), state, starts, done.num_layers
            )
            hidden = hidden.scatter(1, places[..., None].expand_as(rest), rest)
        return hidden[:, :num_tokens]

    def lower(
        self, tokens: Tensor, state: DecodeState, starts: Sequence[int], num_layers: int
    ) -> Tensor:
        assert isinstance(state, KVState)
        return self.stack.run(
            *self._enter(_cache(state, tokens.shape[1], starts), tokens), 0, num_layers
        )

    def begin(self, tokens: Int[Tensor, "B T"]) -> Entered:
        """The first layer's input for whole sequences, and the keyword arguments of all layers."""
        positions, mask = torch.arange(tokens.shape[1], device=tokens.device)[None], None
        window = self._window or tokens.shape[1]
        # Without a mask, all but the eager attention are causal by themselves.
        if tokens.shape[1] > window or self.model.config._attn_implementation == "eager":
            apart = positions[0, :, None] - positions
            mask = additive(((apart >= 0) & (apart < window))[None], self.dtype)
        hidden = self.stack.embed(tokens, positions)
        return hidden, self.stack.begin(hidden, positions, mask, None)

    @property
    def _window(self) -> int | None:
        """How far back the layers look, of a model with layers of one kind."""
        (window,) = self.windows.values()
        return window

    def _enter(self, cache: StateCache, given: Tensor) -> Entered:
        """A layer's input, from tokens or as it is, and the arguments that all layers of the call share."""
        positions, mask = self._placed(cache, self._window)
        hidden = given if given.is_floating_point() else self.stack.embed(given, positions)
        return hidden, self.stack.begin(hidden, positions, mask, cache)

    def _placed(
        self, cache: StateCache, window: int | None
    ) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B 1 T S"]]:
        """Positions and mask of a call. Padding behind the end is clamped: a table of positions has no entry there."""
        positions = cache.slots.positions
        if self.max_positions is not None:
            positions = positions.clamp(max=self.max_positions - 1)
        return positions, additive(cache.storage.mask(cache.slots, window), self.dtype)

    def _by_parts(
        self, entered: Entered, first: int, logits_for: Places, features: Sequence[int]
    ) -> ModelOutput:
        """The layers from the first on, the final norm, the head."""
        stack, (hidden, call), last = self.stack, entered, self.stack.num_layers - 1
        kept: dict[int, Tensor] = {}
        for layer in sorted({*features, last}):
            hidden, first = stack.run(hidden, call, first, layer + 1), layer + 1
            kept[layer] = hidden
        if last in features:
            hidden = kept[last] = stack.norm(hidden)
            logits = stack.head(select(hidden, logits_for))
        else:
            logits = stack.head(stack.norm(select(kept.pop(last), logits_for)))
        return ModelOutput(logits, kept, logits_for)

    def _whole(
        self,
        tokens: Int[Tensor, "B T"],
        state: KVState | None,
        logits_for: Places,
        features: Sequence[int],
    ) -> ModelOutput:
        """One call of the model's own forward pass; its output head sees only the wanted places."""
        last, seen = (self.num_layers or 0) - 1, []
        options: dict[str, Any] = {
            "use_cache": False,
            "output_hidden_states": any(layer != last for layer in features),
        }
        if state is not None:
            cache = _cache(state, tokens.shape[1])
            placed = {kind: self._placed(cache, window) for kind, window in self.windows.items()}
            positions, mask = next(iter(placed.values()))
            masks = {kind: mask for kind, (_, mask) in placed.items()} if len(placed) > 1 else mask
            options |= {"position_ids": positions, "attention_mask": masks, "use_cache": True}
            options[cache_name(type(self.model).forward) or "past_key_values"] = cache

        def narrowed(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            seen.append(inputs[0])
            return (select(inputs[0], logits_for),)

        handle = self.model.get_output_embeddings().register_forward_pre_hook(narrowed)
        try:
            output = self.model(input_ids=tokens, **options)
        finally:
            handle.remove()
        hidden = {
            layer: seen[0] if layer == last else output.hidden_states[layer + 1]
            for layer in features
        }
        return ModelOutput(output.logits, hidden, logits_for)

    def records(self, state: DecodeState, num_tokens: int) -> bool:
        # Not the first call, which reads prompts of any length and makes the buffers.
        if not isinstance(state, KVState) or state.graphs is None or num_tokens > MOST_TOKENS:
            return False
        return len(state.storage.layers) == self.stack.num_layers and min(state.consumed) > 0

    def read_at(
        self, state: KVStorage, span: int, tokens: Tensor, starts: Tensor, num_layers: int | None
    ) -> Tensor:
        last = self.stack.num_layers if num_layers is None else num_layers
        return self.stack.run(
            *self._enter(_recorded_cache(state, span, tokens, starts), tokens), 0, last
        )

    def _recorded(
        self,
        tokens: Int[Tensor, "B T"],
        state: KVState,
        logits_for: Places,
        features: Sequence[int],
        exit_states: ExitStates | None,
    ) -> ModelOutput:
        """The call's kernels launched together; recorded when they are first needed."""
        assert state.graphs is not None
        storage, span, layers = (
            state.storage,
            state.recorded_span(tokens.shape[1]),
            sorted(features),
        )
        first, lower = 0, None
        if exit_states is not None:
            first, lower = exit_states.num_layers, exit_states.hidden[:, : tokens.shape[1] - 1]
        places = logits_for if isinstance(logits_for, Tensor) else None

        def read(
            tokens: Tensor, starts: Tensor, places: Tensor | None, lower: Tensor | None
        ) -> Outputs:
            given = tokens
            if lower is not None:  # the last draft token has not been through the lower layers
                rest = self.read_at(
                    storage, span, tokens[:, -1:], starts + tokens.shape[1] - 1, first
                )
                given = torch.cat((lower, rest), dim=1)
            entered = self._enter(_recorded_cache(storage, span, tokens, starts), given)
            output = self._by_parts(
                entered, first, logits_for if places is None else places, layers
            )
            return output.logits, *(output.features[layer] for layer in layers)

        key = "read", span, first, str(logits_for) if places is None else None, tuple(layers)
        logits, *hidden = state.graphs.run(key, read, tokens, state.lengths, places, lower)
        assert logits is not None
        return ModelOutput(
            logits, {i: h for i, h in zip(layers, hidden, strict=True) if h is not None}, logits_for
        )


def _cache(state: KVState, num_tokens: int, starts: Sequence[int] | None = None) -> StateCache:
    return StateCache(state.storage, state.slots(num_tokens, starts))


def _recorded_cache(
    storage: KVStorage, span: int, tokens: Tensor, starts: Int[Tensor, "B"]
) -> StateCache:
    """The cache of a call whose places only the device knows."""
    positions = starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)
    return StateCache(storage, Slots(positions, None, span), recorded=True)


def _from_config(
    config: PreTrainedConfig | Mapping[str, Any], vocab_size: int | None
) -> PreTrainedModel:
    if not isinstance(config, PreTrainedConfig):
        settings = HuggingFaceSettings(config, vocab_size)
        config = to_config(
            {**({} if vocab_size is None else {"vocab_size": vocab_size}), **settings.model}
        )
    try:
        return AutoModelForCausalLM.from_config(config)
    except FOREIGN as error:
        raise ValueError(
            f"no {config.model_type!r} model can be built so: {first_line(error)}"
        ) from error
