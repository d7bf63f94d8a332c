"""Speculative decoding behind transformers' `generate`: as `custom_generate` of a model, and as a decoder's method."""

from __future__ import annotations

import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, generation
from transformers.generation import logits_process

from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import Row, Session
from lightning_specdec.decoding.rows import check_padding
from lightning_specdec.models.layers import CACHE_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HONOURED = frozenset(
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
"""Fields of a `GenerationConfig` that decide the output, most of them as a processor or a criterion."""
_WITHOUT_EFFECT = frozenset(
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
"""Fields that change no token here: how transformers keeps its cache and compiles, and how beams are compared."""
_OUTPUTS = frozenset(
    ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
)
_ARRIVE = _OUTPUTS | {
    *["attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"],
    *CACHE_NAMES,
}
"""Arguments of a model's forward pass that come with every call, or are looked at."""
_WARPERS = {"Temperature": "temperature", "TopK": "top_k", "TopP": "top_p", "MinP": "min_p"}
"""The last processors of a sampled call, in the order of `Sampling`'s filters: decoding has them built in."""
_OF_TOKENS = {
    *_WARPERS,
    *[
        "TopH",
        "Typical",
        "Epsilon",
        "Eta",
        "RepetitionPenalty",
        "NoRepeatNGram",
        "SequenceBias",
        "NoBadWords",
    ],
}
_OF_TOKENS |= {"SuppressTokens", "InfNanRemove", "Watermark", "LogitNormalization"}
"""Processors of transformers that look at a row's tokens: they see it without its padding."""
_CONSTRAINED = "PrefixConstrained"
_OF_COLUMNS = {
    "MinLength",
    "MinNewTokensLength",
    "ForcedBOSToken",
    "ForcedEOSToken",
    "SuppressTokensAtBegin",
}
_OF_COLUMNS |= {"ExponentialDecayLengthPenalty", _CONSTRAINED}
"""Those that count the columns of `input_ids`, as those of users may: they see a row with its padding."""
_decoders: WeakKeyDictionary[Any, tuple[Any, list[int], SpeculativeDecoder]] = WeakKeyDictionary()
"""By model: the draft of its last call, its weights, and the decoder that was made of these."""
_lock = threading.Lock()
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
    """Decode speculatively inside transformers: `model.generate(..., custom_generate=lightning_specdec.generate)`.

    The model is not changed. Its packed weights and the draft are kept for its next call. transformers passes no
    `streamer`, `tokenizer` or `assistant_model` to a function: use `SpeculativeDecoder.as_generate` for these.

    Args:
        model: the target, passed by transformers.
        input_ids: prompts `[B, T]`, passed by transformers.
        draft: a draft model (a name, a directory or a model), a draft file or a `Drafter`; prompt lookup when None.
        num_draft_tokens: draft tokens per round, "auto" or a `Window`; the draft's own when None, else 3.
        rule: acceptance rule, as of `DecodingConfig`; `ExactMatch` when None.
        seed: seed of sampling; when None, drawn from torch's global generator, which transformers samples from.
        call: logits processors, stopping criteria and configuration, passed by transformers.

    Returns:
        What `model.generate` returns: ids `[B, T + N]` of the prompts and N new tokens, right-padded, or an output
            object with these `sequences` if `return_dict_in_generate` is set.

    Raises:
        ValueError: an argument, a logits processor or a stopping criterion is not supported; the message names it.
    """
    with _lock:
        decoder = _decoder_of(model, draft)
    return _Request(decoder, input_ids, **call).run(
        None, num_draft_tokens=num_draft_tokens, rule=rule, seed=seed
    )


class BoundGenerate:
    """The function that `SpeculativeDecoder.as_generate` returns."""

    def __init__(
        self, decoder: SpeculativeDecoder, streamer: Any, stop_strings: Any, *, knows_mask: bool
    ) -> None:
        self.decoder, self.streamer, self.knows_mask = decoder, streamer, knows_mask
        self.criteria = []
        if stop_strings:
            tokenizer = getattr(decoder.tokenizer, "tokenizer", None)
            if tokenizer is None:
                raise ValueError(
                    "stop_strings need the target's tokenizer: SpeculativeDecoder(..., tokenizer=...)"
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
    options: Any,
) -> Any:
    """`SpeculativeDecoder.generate`: transformers prepares the call as one of its own model."""
    model: Any = getattr(decoder.target, "model", None)
    if not callable(getattr(model, "generate", None)):
        raise ValueError(
            f"generate needs a target of transformers, this is a {type(decoder.target).__name__}: decode"
        )
    for name in (
        "assistant_model",
        "assistant_tokenizer",
        "custom_generate",
        "negative_prompt_ids",
        "synced_gpus",
    ):
        if options.pop(name, None) is not None:
            raise ValueError(
                f"generate takes no {name}: a SpeculativeDecoder decodes with its own drafter"
            )
    if options.pop("tokenizer", None) is not None and decoder.tokenizer is None:
        raise ValueError(
            "the decoder has no tokenizer: give it to SpeculativeDecoder(..., tokenizer=...)"
        )
    configs = [each for each in (config, model.generation_config) if each is not None]
    strings = options.get("stop_strings") or next(
        (each.stop_strings for each in configs if each.stop_strings), None
    )
    if strings:  # transformers would make a criterion by a tokenizer that it does not hand on
        options["stop_strings"] = None
    if options.get("attention_mask") is None:
        ids, special = (
            options.get("input_ids") if inputs is None else inputs,
            decoder.target.vocabulary,
        )
        pads = [options.get("pad_token_id"), *(each.pad_token_id for each in configs)]
        pads += [special.special.get("pad")] if special is not None else []
        if isinstance(ids, Tensor) and ids.dim() == 2:
            check_padding(ids.tolist(), next((pad for pad in pads if pad is not None), None))
    bound = BoundGenerate(decoder, streamer, strings, knows_mask=True)
    return model.generate(inputs, config, custom_generate=bound, **options)


def _decoder_of(model: Any, draft: Any) -> SpeculativeDecoder:
    """The decoder of a model with that draft: that of its last call where it serves again."""
    weights = [id(weight) for weight in (*model.parameters(), *model.buffers())]
    before, known, decoder = _decoders.get(model, (None, None, None))
    if (
        decoder is None
        or known != weights
        or not (before is draft or isinstance(draft, str) and before == draft)
    ):
        decoder = SpeculativeDecoder.from_pretrained(
            _apart(model), _apart(draft), device=model.device
        )
        _decoders[model] = draft, weights, decoder
    return decoder


def _apart(model: Any) -> Any:
    """Another structure over the same weights: attention is replaced in it, and not in the model."""
    # Not above: `fit` reads all signatures of the package, and needs no models.
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return model
    return deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


class _Placed:
    """A processor that sees a row with its padding, as it stands in `input_ids`."""

    def __init__(self, processor: Any, row: int, columns: Tensor, real: Sequence[bool]) -> None:
        if _kind(processor) == _CONSTRAINED:  # it counts the rows that it is asked about
            allowed = processor._prefix_allowed_tokens_fn
            processor = type(processor)(lambda _, tokens: allowed(row, tokens), 1)
        self.processor, self.columns, self.length = processor, columns, sum(real)
        self.places = torch.tensor(real)

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        if prefix.shape[1] < self.length:  # a text that is none of the call's, to measure costs
            return self.processor(prefix, scores)
        columns = self.columns.to(prefix.device, copy=True)
        columns[self.places.to(prefix.device)] = prefix[0, : self.length]
        shown = torch.cat((columns[None], prefix[:, self.length :]), dim=1)
        return self.processor(shown, scores)


class _Request:
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
        self.decoder, self.ids, self.config = decoder, ids, generation_config
        mask = arguments.get("attention_mask")
        _check(generation_config, arguments, ids, mask)
        self.columns: list[list[int]] = ids.tolist()
        self.real = (torch.ones_like(ids) if mask is None else mask).bool().tolist()
        pairs = zip(self.columns, self.real, strict=True)
        self.texts = [
            [token for token, seen in zip(row, each, strict=True) if seen] for row, each in pairs
        ]
        ties = getattr(decoder.target, "dtype", None) != torch.float32
        self.sampling, self.processors = _translated(
            logits_processor, bool(generation_config.do_sample), ties
        )
        self.processors = [self._of_rows(each) for each in self.processors]
        lengths, eos, self.criteria = list[int](), set[int](), list[Any]()
        for each in stopping_criteria:
            if type(each) is generation.MaxLengthCriteria:
                lengths.append(each.max_length)
            elif type(each) is generation.EosTokenCriteria:
                eos |= {*each.eos_token_id.flatten().tolist()}
            else:
                self.criteria.append(each)
        self.max_new_tokens = max(
            min(lengths, default=generation_config.max_length) - ids.shape[1], 1
        )
        self.eos = tuple(token for token in sorted(eos) if 0 <= token < decoder.target.vocab_size)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.pad = None if pad is None else int(pad)
        if self.pad is None and len(self.texts) > 1 and (eos or self.criteria):
            raise ValueError(
                "rows may end at different lengths, and there is no pad token: give pad_token_id"
            )
        if (
            mask is None and not knows_mask and self.pad in eos
        ):  # else transformers has made the mask
            check_padding(self.columns, self.pad)
        self.new: list[list[int]] = [[] for _ in self.texts]
        self.ended, self.num_shown = [False] * len(self.texts), 0

    def _of_rows(self, processor: Any) -> Any:
        """The processor for rows one by one, without their padding."""
        ignored = getattr(processor, "prompt_ignore_length", None)
        if _kind(processor) != "RepetitionPenalty" or not isinstance(ignored, Tensor):
            return processor
        if ignored.tolist() != [each.index(True) if True in each else 0 for each in self.real]:
            raise ValueError(
                "RepetitionPenaltyLogitsProcessor: prompt_ignore_length must be one number here"
            )
        return logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty)

    def _groups(self) -> Iterator[tuple[list[int], list[Any]]]:
        """Rows that are decoded together, with their processors: all of them, where none asks where a row begins."""
        placed = [each for each in self.processors if _kind(each) not in _OF_TOKENS]
        alone = any(_kind(each) == _CONSTRAINED for each in placed)
        groups = defaultdict(list)
        for row, real in enumerate(self.real):
            groups[row if alone else tuple(real) if placed else None].append(row)
        for rows in groups.values():
            shown = rows[0], self.ids[rows[0]], self.real[rows[0]]
            yield (
                rows,
                [
                    each if _kind(each) in _OF_TOKENS else _Placed(each, *shown)
                    for each in self.processors
                ],
            )

    def run(self, streamer: Any, *, seed: int | None, **decoding: Any) -> Any:
        """Decode, and return what transformers returns."""
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ())) if self.config.do_sample else 0
        options = {
            name: value for name, value in decoding.items() if value is not None
        } | self.sampling
        options |= {"eos": self.eos, "seed": seed, "max_new_tokens": self.max_new_tokens}
        if streamer is not None:
            streamer.put(self.ids.cpu())
        for rows, processors in self._groups():
            prompts = {"input_ids": [self.texts[row] for row in rows]}
            session = self.decoder.session(
                prompts, indices=rows, **options, processors=tuple(processors)
            )
            while events := session.step():
                for row, tokens in events:
                    self._take(session, row, tokens)
                self._show(streamer)
        new = [row + [self.pad or 0] * (max(map(len, self.new)) - len(row)) for row in self.new]
        sequences = torch.cat(
            (self.ids, torch.tensor(new, dtype=self.ids.dtype, device=self.ids.device)), dim=1
        )
        if streamer is not None:
            streamer.end()
        if self.config.return_dict_in_generate:
            return generation.GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _take(self, session: Session, row: Row, tokens: Sequence[int]) -> None:
        """Add a row's new tokens, up to and with the first that meets a criterion."""
        new = self.new[row.index]
        for token in tokens:
            new.append(token)
            for each in self.criteria:
                theirs = type(each) is generation.StopStringCriteria
                text = (self.texts if theirs else self.columns)[row.index] + new
                if torch.as_tensor(each(torch.tensor([text], device=self.ids.device), None)).any():
                    session.cancel(row)
                    self.ended[row.index] = True
                    return
        self.ended[row.index] = not row.live

    def _show(self, streamer: Any) -> None:
        """Give the streamer, column by column, what every row has by now."""
        if streamer is None:
            return
        lengths = [len(new) for new, ended in zip(self.new, self.ended, strict=True) if not ended]
        for i in range(self.num_shown, min(lengths, default=max(map(len, self.new)))):
            streamer.put(torch.tensor([row[i] if i < len(row) else self.pad for row in self.new]))
            self.num_shown = i + 1


def _kind(processor: Any) -> str:
    """The name of a processor of transformers, shortened; empty for others."""
    kind = type(processor)
    name = kind.__name__ if kind.__module__ == logits_process.__name__ else ""
    return name.removesuffix("LogitsWarper").removesuffix("LogitsProcessor")


def _translated(
    processors: Sequence[Any], sampled: bool, ties: bool
) -> tuple[dict[str, Any], list[Any]]:
    """How tokens are drawn: the settings that the last processors amount to, and the processors before these.

    Args:
        ties: whether equal logits are to be expected: `Sampling` keeps k of them, `TopKLogitsWarper` all.
    """
    kept = list(processors)
    for each in kept:
        if (
            type(each).__module__.startswith("transformers.")
            and _kind(each) not in _OF_TOKENS | _OF_COLUMNS
        ):
            raise ValueError(
                f"{type(each).__name__} is not supported: it keeps state, or is not for texts"
            )
    if not sampled:
        return {"temperature": 0.0}, kept
    if kept and _kind(kept[-1]) == "LogitNormalization":
        kept.pop()  # it leaves the distribution as it is
    settings: dict[str, Any] = {"temperature": 1.0}
    order = [name for name in _WARPERS if not (ties and name == "TopK")]
    while kept and (name := _kind(kept[-1])) in order:
        last, order = kept[-1], order[: order.index(name)]
        plain = getattr(last, "filter_value", -torch.inf), getattr(last, "min_tokens_to_keep", 1)
        if plain != (-torch.inf, 1) or getattr(last, _WARPERS[name]) < 1e-6:
            break
        settings[_WARPERS[name]] = getattr(kept.pop(), _WARPERS[name])
    return settings, kept


def _check(
    config: GenerationConfig, arguments: dict[str, Any], ids: Tensor, mask: Tensor | None
) -> None:
    """Raise ValueError for what cannot be honoured; name in the log what has no effect."""
    caller: FrameType | None = sys._getframe(
        1
    )  # transformers' own call knows what it does not hand on
    while (
        caller is not None
        and caller.f_globals.get("__name__") != generation.GenerationMixin.__module__
    ):
        caller = caller.f_back
    for name, instead in (
        ("streamer", "as_generate(streamer=...)"),
        ("assistant_model", "draft=..."),
    ):
        if caller is not None and caller.f_locals.get(name) is not None:
            raise ValueError(
                f"transformers passes no {name} to custom_generate: give it as {instead}"
            )
    defaults = (
        dict.fromkeys(vars(GenerationConfig())) | GenerationConfig._get_default_generation_params()
    )
    outputs = _OUTPUTS if config.return_dict_in_generate else set[str]()
    changed = []
    for name in sorted(defaults.keys() - _HONOURED - _OUTPUTS | outputs):
        value, usual = getattr(config, name, None), defaults.get(name)
        if (
            not name.startswith("_")
            and value != usual
            and (value is not False or usual is not None)
        ):
            changed.append(name)
    refused = [name for name in changed if name not in _WITHOUT_EFFECT]
    refused += [
        name for name, value in arguments.items() if name not in _ARRIVE and value is not None
    ]
    if refused:
        raise ValueError(
            f"speculative decoding does not support {', '.join(refused)}: drop it, or use transformers"
        )
    if changed:
        log.warning("without effect in speculative decoding: %s", ", ".join(changed))
    for name in CACHE_NAMES:
        cache: Any = arguments.get(name)
        if cache is not None and (
            getattr(cache, "_is_user_defined", False) or cache.get_seq_length()
        ):
            raise ValueError(
                f"{name} is not supported: give the whole text instead, or use Session.resume"
            )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} and input_ids {list(ids.shape)}: they must match"
        )
    positions = arguments.get("position_ids")
    if positions is not None:
        seen = (torch.ones_like(ids) if mask is None else (mask != 0).long())[: len(positions)]
        if positions.shape[-1] != ids.shape[1] or ((positions - seen.cumsum(-1) + 1) * seen).any():
            raise ValueError("position_ids is not supported: each row counts from 0")
