"""Speculative decoding with transformers' `generate`.

As `custom_generate` of a model, and as a decoder's method.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, generation
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import logits_process

from lightning_specdec.config.kinds import described
from lightning_specdec.config.terminal import one_line
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import Request, Session
from lightning_specdec.decoding.requests import check_padding
from lightning_specdec.models.changes import ModelStamp, user_code
from lightning_specdec.models.layers import CACHE_NAMES
from lightning_specdec.models.snapshot_state import tensor_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUPPORTED_FIELDS = frozenset(
    [
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "watermarking_config",
        "num_return_sequences",
        "return_dict_in_generate",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "transformers_version",
    ]
)
"""Fields of a `GenerationConfig` that decide the output, mostly as a processor or a criterion."""
_IGNORED_FIELDS = frozenset(
    [
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "prefill_chunk_size",
        "continuous_batching_config",
        "early_stopping",
        "length_penalty",
        "low_memory",
    ]
)
"""Fields that change no token here: transformers' cache and compilation, comparison of beams."""
_EXTRA_OUTPUTS = frozenset(
    ["output_scores", "output_logits", "output_attentions", "output_hidden_states"]
)
_CALL_ARGUMENTS = frozenset(
    [
        "attention_mask",
        "position_ids",
        "cache_position",
        "use_cache",
        "logits_to_keep",
        *_EXTRA_OUTPUTS,
        *CACHE_NAMES,
    ]
)
"""Arguments of a model's forward pass that come with every call, or that are checked below."""
_WARPERS = {"Temperature": "temperature", "TopK": "top_k", "TopP": "top_p", "MinP": "min_p"}
"""The last processors of a sampled call. `Sampling` has the same filters, in this order."""
_TOKEN_PROCESSORS = frozenset(
    [
        *_WARPERS,
        "TopH",
        "Typical",
        "Epsilon",
        "Eta",
        "RepetitionPenalty",
        "NoRepeatNGram",
        "SequenceBias",
        "NoBadWords",
        "SuppressTokens",
        "InfNanRemove",
        "Watermark",
        "LogitNormalization",
    ]
)
"""Processors of transformers that read a row's tokens: they get the row without its padding."""
_CONSTRAINED = "PrefixConstrained"
_COLUMN_PROCESSORS = frozenset(
    [
        "MinLength",
        "MinNewTokensLength",
        "ForcedBOSToken",
        "ForcedEOSToken",
        "SuppressTokensAtBegin",
        "ExponentialDecayLengthPenalty",
        _CONSTRAINED,
    ]
)
"""Processors that count the columns of `input_ids`, as users' may: they get the padding as well."""

log = logging.getLogger(__name__)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    draft: Any = None,
    num_draft_tokens: Any = None,
    rule: Any = None,
    seed: int | None = None,
    **call: Any,
) -> Any:
    """Decode speculatively with `model.generate(..., custom_generate=lightning_specdec.generate)`.

    The model is not changed. Its packed weights and the draft are kept for its next call, and made
    again if anything in the model has changed.

    transformers does not pass `streamer`, `tokenizer` and `assistant_model` to such a function, so
    they have no effect here. For a streamer use `SpeculativeDecoder.as_generate`, for an assistant
    model pass `draft`.

    Args:
        model: the target, passed by transformers.
        input_ids: prompts `[B, T]`, passed by transformers.
        draft: a draft model (a name, a directory or a model), a draft file or a `Drafter`; prompt
            lookup when None.
        num_draft_tokens: draft tokens per round, "auto" or a `Window`; as of
            `SpeculativeDecoder.load` when None.
        rule: acceptance rule, as of `DecodingConfig`; `ExactMatch` when None.
        seed: seed of sampling; when None, drawn from torch's global generator, as in transformers.
        call: logits processors, stopping criteria and configuration, passed by transformers.

    Returns:
        What `model.generate` returns: ids `[B, T + N]` of the prompts and N new tokens,
            right-padded, or an output object with these `sequences` if `return_dict_in_generate` is
            set.

    Raises:
        ValueError: an argument, a logits processor or a stopping criterion is not supported; the
            message names it.
    """
    with _decoders_lock:
        decoder = _decoder_for(model, draft)
    request = _Request(decoder, input_ids, **call)
    return request.run(None, num_draft_tokens=num_draft_tokens, rule=rule, seed=seed)


class BoundGenerate:
    """The function that `SpeculativeDecoder.as_generate` returns."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        streamer: Any,
        stop_strings: Any,
        *,
        knows_mask: bool,
    ) -> None:
        self.decoder = decoder
        self.streamer = streamer
        self.knows_mask = knows_mask
        self.criteria: list[Any] = []
        if stop_strings:
            tokenizer = getattr(decoder.tokenizer, "tokenizer", None)
            if tokenizer is None:
                raise ValueError(
                    "stop_strings need the target's tokenizer: "
                    "SpeculativeDecoder(..., tokenizer=...)"
                )
            self.criteria = [generation.StopStringCriteria(tokenizer, stop_strings)]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        num_draft_tokens: Any = None,
        rule: Any = None,
        seed: int | None = None,
        **call: Any,
    ) -> Any:
        """As `lightning_specdec.generate`, with the decoder's own draft."""
        if model is not getattr(self.decoder.target, "model", None):
            raise ValueError(
                "as_generate() is for its decoder's own target: call decoder.target.model.generate"
            )
        call["stopping_criteria"] = [*call["stopping_criteria"], *self.criteria]
        request = _Request(self.decoder, input_ids, **call, knows_mask=self.knows_mask)
        return request.run(self.streamer, num_draft_tokens=num_draft_tokens, rule=rule, seed=seed)


def generate_with(
    decoder: SpeculativeDecoder,
    inputs: Tensor | None,
    config: GenerationConfig | None,
    streamer: Any,
    options: dict[str, Any],
) -> Any:
    """`SpeculativeDecoder.generate`: transformers prepares the call as for its own methods."""
    model: Any = getattr(decoder.target, "model", None)
    if not callable(getattr(model, "generate", None)):
        raise ValueError(
            "generate needs a target of transformers, this is a "
            f"{type(decoder.target).__name__}: use decode"
        )
    _check_options(decoder, options)

    configs = [model.generation_config] if config is None else [config, model.generation_config]
    stop_strings = options.get("stop_strings") or _first_value(configs, "stop_strings")
    if stop_strings:
        # transformers would build a criterion with a tokenizer, which it does not pass on.
        options["stop_strings"] = None

    if options.get("attention_mask") is None:
        input_ids = options.get("input_ids") if inputs is None else inputs
        if isinstance(input_ids, Tensor) and input_ids.dim() == 2:
            pad_token = _pad_token(decoder, options, configs)
            check_padding(input_ids.tolist(), pad_token)

    bound = BoundGenerate(decoder, streamer, stop_strings, knows_mask=True)
    return model.generate(inputs, config, custom_generate=bound, **options)


def _check_options(decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
    """Remove arguments that a decoder has itself; raise ValueError if they are set."""
    for name in (
        "assistant_model",
        "assistant_tokenizer",
        "custom_generate",
        "negative_prompt_ids",
        "synced_gpus",
    ):
        if options.pop(name, None) is not None:
            raise ValueError(
                f"generate does not accept {name}: a SpeculativeDecoder decodes with its own "
                "drafter"
            )
    if options.pop("tokenizer", None) is not None and decoder.tokenizer is None:
        raise ValueError(
            "the decoder has no tokenizer: pass it to SpeculativeDecoder(..., tokenizer=...)"
        )


def _pad_token(
    decoder: SpeculativeDecoder,
    options: Mapping[str, Any],
    configs: Sequence[GenerationConfig],
) -> int | None:
    pad_token = options.get("pad_token_id")
    if pad_token is None:
        pad_token = _first_value(configs, "pad_token_id")
    if pad_token is None and decoder.target.vocabulary is not None:
        pad_token = decoder.target.vocabulary.special.get("pad")
    return pad_token


def _first_value(configs: Sequence[GenerationConfig], name: str) -> Any:
    """The value of a field in the first config that sets it."""
    for config in configs:
        value = getattr(config, name)
        if value is not None and value != []:
            return value
    return None


# Decoders of the models that `generate` was called on.


class _Entry(NamedTuple):
    """A decoder with the model and the draft that it was made from, as they were then."""

    draft: Any
    model_stamp: ModelStamp
    draft_stamp: ModelStamp | None
    decoder: SpeculativeDecoder


_decoders: WeakKeyDictionary[Any, _Entry] = WeakKeyDictionary()
"""By model. No entry refers to its model, so that it is freed with the model."""
_decoders_lock = threading.Lock()


def _decoder_for(model: PreTrainedModel, draft: Any) -> SpeculativeDecoder:
    """The decoder of a model with this draft: that of the last call if nothing has changed.

    Values of weights are left to the decoder, which shares them with the model.
    """
    from lightning_specdec.models.huggingface import check_generation

    check_generation(model)
    if user_code(model):
        # Only the model itself runs all code of its user. A decoder that is kept would
        # keep the model, too.
        _decoders.pop(model, None)
        return _new_decoder(model, draft)

    model_stamp = ModelStamp(model, count_writes=False)
    draft_stamp = _draft_stamp(draft)
    entry = _decoders.get(model)
    if entry is not None:
        is_same_draft = entry.draft is draft
        if isinstance(draft, str):
            is_same_draft = entry.draft == draft
        is_unchanged = entry.model_stamp == model_stamp and entry.draft_stamp == draft_stamp
        if is_same_draft and is_unchanged:
            return entry.decoder

    decoder = _new_decoder(model, draft)
    _decoders[model] = _Entry(draft, model_stamp, draft_stamp, decoder)
    return decoder


def _new_decoder(model: PreTrainedModel, draft: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        _shared_copy(model), _shared_copy(draft), device=model.device
    )


def _draft_stamp(draft: Any) -> ModelStamp | None:
    return ModelStamp(draft, count_writes=False) if isinstance(draft, nn.Module) else None


def _shared_copy(model: Any) -> Any:
    """A copy of a model's modules over the same weights, so that the model stays unchanged.

    The copy gets another attention function. A model with code of its user is not copied.
    """
    # `fit` imports this module to read its signatures, and needs no models for that.
    from transformers import PreTrainedModel

    from lightning_specdec.models.huggingface import HuggingFaceLM

    if not isinstance(model, PreTrainedModel):
        return model
    if user_code(model):
        target = HuggingFaceLM(model, replace_attention=False)
        target.refresh()
        return target
    shared: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shared[id(tensor)] = tensor
    return deepcopy(model, shared)


class _PaddedProcessor:
    """A logits processor that reads a row with its padding, as in `input_ids`.

    Args:
        row_index: number of the row in the call.
        columns: the row of `input_ids`.
        is_real: for each column, whether it holds a token of the text.
    """

    def __init__(
        self,
        processor: Any,
        row_index: int,
        columns: Tensor,
        is_real: Sequence[bool],
    ) -> None:
        if _kind(processor) == _CONSTRAINED:
            # This processor counts rows; here it gets a single one.
            allowed_tokens = processor._prefix_allowed_tokens_fn
            processor = type(processor)(lambda _, tokens: allowed_tokens(row_index, tokens), 1)
        self.processor = processor
        self.columns = columns
        self.is_real = torch.tensor(is_real)
        self.num_real = sum(is_real)

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        if prefix.shape[1] < self.num_real:
            # A text from outside of the call, whose cost is measured.
            return self.processor(prefix, scores)
        columns = self.columns.to(prefix.device, copy=True)
        columns[self.is_real.to(prefix.device)] = prefix[0, : self.num_real]
        padded_prefix = torch.cat((columns[None], prefix[:, self.num_real :]), dim=1)
        return self.processor(padded_prefix, scores)


class _Request:
    """One call of `generate`: its prompts, how to decode them, and the tokens so far."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        knows_mask: bool = False,
        **arguments: Any,
    ) -> None:
        self.decoder = decoder
        self.ids = ids
        self.config = generation_config
        mask = arguments.get("attention_mask")
        _check_config(generation_config, arguments)
        _check_call(arguments, ids, mask)
        decoder.target.refresh()  # the vocabulary may have been resized

        # Each row's tokens without its padding.
        self.columns: list[list[int]] = ids.tolist()
        is_real = torch.ones_like(ids) if mask is None else mask
        self.is_real: list[list[bool]] = is_real.bool().tolist()
        self.texts: list[list[int]] = []
        for columns, flags in zip(self.columns, self.is_real, strict=True):
            self.texts.append([token for token, real in zip(columns, flags, strict=True) if real])

        has_ties = getattr(decoder.target, "dtype", None) != torch.float32
        self.sampling, processors = _translated(
            logits_processor, bool(generation_config.do_sample), has_ties
        )
        self.processors = [self._per_row(processor) for processor in processors]
        self._read_criteria(stopping_criteria)
        self._read_pad_token(is_mask_missing=mask is None and not knows_mask)

        self.new_tokens: list[list[int]] = [[] for _ in self.texts]
        self.has_ended = [False] * len(self.texts)
        self.num_streamed = 0

    def _read_criteria(self, stopping_criteria: Sequence[Any]) -> None:
        """Set `max_new_tokens`, `eos`, and `criteria` for those that are called with each token."""
        max_lengths: list[int] = []
        eos_tokens: set[int] = set()
        self.criteria: list[Any] = []
        for criterion in stopping_criteria:
            if type(criterion) is generation.MaxLengthCriteria:
                max_lengths.append(criterion.max_length)
            elif type(criterion) is generation.EosTokenCriteria:
                eos_tokens.update(criterion.eos_token_id.flatten().tolist())
            else:
                self.criteria.append(criterion)

        max_length = min(max_lengths, default=self.config.max_length)
        self.max_new_tokens = max(max_length - self.ids.shape[1], 1)
        vocab_size = self.decoder.target.vocab_size
        self.eos = tuple(token for token in sorted(eos_tokens) if 0 <= token < vocab_size)
        self.may_end_early = bool(eos_tokens or self.criteria)

    def _read_pad_token(self, *, is_mask_missing: bool) -> None:
        pad_tensor = getattr(self.config, "_pad_token_tensor", None)
        self.pad_token = None if pad_tensor is None else int(pad_tensor)
        if self.pad_token is None and len(self.texts) > 1 and self.may_end_early:
            raise ValueError(
                "rows may end at different lengths, and there is no pad token: pass pad_token_id"
            )
        # In the other cases transformers has built the mask from the pad token.
        if is_mask_missing and self.pad_token in self.eos:
            check_padding(self.columns, self.pad_token)

    def _per_row(self, processor: Any) -> Any:
        """The processor for rows one by one, without their padding."""
        ignored_lengths = getattr(processor, "prompt_ignore_length", None)
        is_penalty = _kind(processor) == "RepetitionPenalty"
        if not is_penalty or not isinstance(ignored_lengths, Tensor):
            return processor

        # transformers ignores each row's left padding, which does not exist here.
        padding_lengths = [row.index(True) if True in row else 0 for row in self.is_real]
        if ignored_lengths.tolist() != padding_lengths:
            raise ValueError(
                "RepetitionPenaltyLogitsProcessor: prompt_ignore_length must be one number here"
            )
        return logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty)

    def _groups(self) -> Iterator[tuple[list[int], list[Any]]]:
        """Rows that are decoded together, with their processors.

        Rows can share a processor that counts columns only if their padding is equal, and one that
        depends on the row not at all.
        """
        padded_kinds = set()
        for processor in self.processors:
            if _kind(processor) not in _TOKEN_PROCESSORS:
                padded_kinds.add(_kind(processor))

        # Row indices by what the rows of a group have in common.
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for row_index, is_real in enumerate(self.is_real):
            if _CONSTRAINED in padded_kinds:
                groups[row_index].append(row_index)
            elif padded_kinds:
                groups[tuple(is_real)].append(row_index)
            else:
                groups[None].append(row_index)
        for row_indices in groups.values():
            yield row_indices, self._processors_for(row_indices[0])

    def _processors_for(self, row_index: int) -> list[Any]:
        processors: list[Any] = []
        for processor in self.processors:
            if _kind(processor) not in _TOKEN_PROCESSORS:
                processor = _PaddedProcessor(
                    processor, row_index, self.ids[row_index], self.is_real[row_index]
                )
            processors.append(processor)
        return processors

    def run(self, streamer: Any, *, seed: int | None, **decoding: Any) -> Any:
        """Decode, and return what transformers returns."""
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ())) if self.config.do_sample else 0
        options: dict[str, Any] = {
            **{name: value for name, value in decoding.items() if value is not None},
            **self.sampling,
            "eos": self.eos,
            "seed": seed,
            "max_new_tokens": self.max_new_tokens,
        }
        if streamer is not None:
            streamer.put(self.ids.cpu())

        for row_indices, processors in self._groups():
            prompts = {"input_ids": [self.texts[row_index] for row_index in row_indices]}
            session = self.decoder.session(
                prompts, indices=row_indices, **options, processors=tuple(processors)
            )
            while events := session.step():
                for row, tokens in events:
                    self._take(session, row, tokens)
                self._stream(streamer)

        if streamer is not None:
            streamer.end()
        sequences = torch.cat((self.ids, self._padded_tokens()), dim=1)
        if self.config.return_dict_in_generate:
            return generation.GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _padded_tokens(self) -> Tensor:
        """The new tokens of all rows, right-padded."""
        num_columns = max(map(len, self.new_tokens))
        pad_token = self.pad_token or 0
        rows = [row + [pad_token] * (num_columns - len(row)) for row in self.new_tokens]
        return torch.tensor(rows, dtype=self.ids.dtype, device=self.ids.device)

    def _take(self, session: Session, row: Request, tokens: Sequence[int]) -> None:
        """Add a row's new tokens, up to and including the first that meets a criterion."""
        new_tokens = self.new_tokens[row.index]
        for token in tokens:
            new_tokens.append(token)
            if any(self._is_met(criterion, row.index) for criterion in self.criteria):
                session.cancel(row)
                self.has_ended[row.index] = True
                return
        self.has_ended[row.index] = not row.live

    def _is_met(self, criterion: Any, row_index: int) -> bool:
        """Whether a stopping criterion ends a row. Those of users read its padding as well."""
        is_stop_string = type(criterion) is generation.StopStringCriteria
        prompt = self.texts[row_index] if is_stop_string else self.columns[row_index]
        text = torch.tensor([prompt + self.new_tokens[row_index]], device=self.ids.device)
        name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
        try:
            is_met = criterion(text, None)
        except (AttributeError, TypeError) as error:
            # None is all that a criterion gets for the scores.
            if "NoneType" not in str(error):
                raise
            raise ValueError(
                f"the stopping criterion {name} reads `scores`, which speculative decoding does "
                f"not keep ({one_line(error)}): use the tokens, or transformers"
            ) from error
        try:
            return bool(torch.as_tensor(is_met).any())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the stopping criterion {name} must return a boolean or a tensor of them, "
                f"got {described(is_met)}"
            ) from error

    def _stream(self, streamer: Any) -> None:
        """Pass the streamer each column of tokens that every row has reached."""
        if streamer is None:
            return
        live_lengths: list[int] = []
        for new_tokens, has_ended in zip(self.new_tokens, self.has_ended, strict=True):
            if not has_ended:
                live_lengths.append(len(new_tokens))
        num_columns = min(live_lengths, default=max(map(len, self.new_tokens)))

        for i in range(self.num_streamed, num_columns):
            column = [row[i] if i < len(row) else self.pad_token for row in self.new_tokens]
            streamer.put(torch.tensor(column))
            self.num_streamed = i + 1


def _kind(processor: Any) -> str:
    """The short name of a processor of transformers; empty for others."""
    processor_class = type(processor)
    if processor_class.__module__ != logits_process.__name__:
        return ""
    name = processor_class.__name__.removesuffix("LogitsWarper")
    return name.removesuffix("LogitsProcessor")


def _translated(
    processors: Sequence[Any],
    is_sampled: bool,
    has_ties: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """How tokens are drawn: settings of `Sampling`, and the processors that run before it.

    The settings replace the last processors.

    Args:
        has_ties: whether equal logits are likely. `Sampling` keeps k of them, `TopKLogitsWarper`
            all.
    """
    remaining = list(processors)
    for processor in remaining:
        is_of_transformers = type(processor).__module__.startswith("transformers.")
        if is_of_transformers and _kind(processor) not in _TOKEN_PROCESSORS | _COLUMN_PROCESSORS:
            raise ValueError(
                f"{type(processor).__name__} is not supported: it keeps state, or is not for texts"
            )
    if not is_sampled:
        return {"temperature": 0.0}, remaining

    # Normalizing logits does not change the distribution.
    if remaining and _kind(remaining[-1]) == "LogitNormalization":
        remaining.pop()

    settings: dict[str, Any] = {"temperature": 1.0}
    possible_names = [name for name in _WARPERS if not (has_ties and name == "TopK")]
    while remaining and _kind(remaining[-1]) in possible_names:
        processor = remaining[-1]
        name = _kind(processor)
        value = getattr(processor, _WARPERS[name])
        if not _has_usual_options(processor) or value < 1e-6:
            break
        settings[_WARPERS[name]] = value
        # Filters before this one come before it in `Sampling` as well.
        possible_names = possible_names[: possible_names.index(name)]
        remaining.pop()
    return settings, remaining


def _has_usual_options(warper: Any) -> bool:
    filter_value = getattr(warper, "filter_value", -torch.inf)
    min_tokens_to_keep = getattr(warper, "min_tokens_to_keep", 1)
    return filter_value == -torch.inf and min_tokens_to_keep == 1


def _check_config(config: GenerationConfig, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for settings and arguments that are not supported.

    Settings without effect are named in the log.
    """
    changed_fields = _changed_fields(config)
    unsupported = [name for name in changed_fields if name not in _IGNORED_FIELDS]
    for name, value in arguments.items():
        if name not in _CALL_ARGUMENTS and not _is_empty(value):
            unsupported.append(name)
    if unsupported:
        names = ", ".join(unsupported)
        raise ValueError(
            f"speculative decoding does not support {names}: drop it, or use transformers"
        )
    if changed_fields:
        log.warning("without effect in speculative decoding: %s", ", ".join(changed_fields))


def _changed_fields(config: GenerationConfig) -> list[str]:
    """Fields outside of `_SUPPORTED_FIELDS` whose values are not the default."""
    defaults: dict[str, Any] = {
        **dict.fromkeys(vars(GenerationConfig())),
        **GenerationConfig._get_default_generation_params(),
    }
    names = defaults.keys() - _SUPPORTED_FIELDS

    changed_fields: list[str] = []
    for name in sorted(names):
        value = getattr(config, name, None)
        default = defaults.get(name)
        is_unset = value == default or (value is False and default is None)
        if not name.startswith("_") and not is_unset:
            changed_fields.append(name)
    return changed_fields


def _is_empty(value: Any) -> bool:
    """Whether an argument is None or an empty collection, as multimodal models add for a text."""
    if isinstance(value, Mapping | list | tuple):
        return len(value) == 0
    return value is None


def _holds_text(cache: Any) -> bool:
    """Whether a cache of transformers has read tokens, in whatever kind of layers it has.

    `Cache.get_seq_length` raises an error for a cache that has recurrent layers only.
    """
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, CacheLayerMixin):
            holds_text = int(layer.get_seq_length()) > 0
        else:
            # A recurrent layer has states from its first token on.
            states = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
            holds_text = tensor_bytes(states) > 0
        if holds_text:
            return True
    return False


def _check_call(arguments: Mapping[str, Any], ids: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError for a cache, a mask or positions that are not supported."""
    for name in CACHE_NAMES:
        cache: Any = arguments.get(name)
        if cache is None:
            continue
        if getattr(cache, "_is_user_defined", False) or _holds_text(cache):
            raise ValueError(
                f"{name} is not supported: pass the whole text instead, or use Session.resume"
            )

    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} and input_ids {list(ids.shape)}: they must match"
        )

    positions = arguments.get("position_ids")
    if positions is None:
        return
    is_real = torch.ones_like(ids) if mask is None else (mask != 0).long()
    is_real = is_real[: len(positions)]
    has_other_shape = positions.shape[-1] != ids.shape[1]
    expected_positions = is_real.cumsum(-1) - 1
    if has_other_shape or ((positions - expected_positions) * is_real).any():
        raise ValueError("position_ids is not supported: each row counts from 0")
