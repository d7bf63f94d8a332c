"""`SpeculativeDecoder`: a target and its drafter in one object.

It loads, trains, decodes and measures the pair.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch

from lightning_specdec.checkpoints import checkpoint, load_pair
from lightning_specdec.checkpoints.checkpoint import DraftOrigin
from lightning_specdec.checkpoints.loading import wrap_model
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.models import MOST_SMALL, PRETRAINED_ONLY, PairSource
from lightning_specdec.config.pairs import MOST_THREADS, get_pair
from lightning_specdec.config.settings import accepts_fields
from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    DecodeResult,
    Session,
    TextPieces,
    Window,
    autoregressive_decode,
    open_session,
    run,
    stream,
)
from lightning_specdec.decoding.requests import (
    Prompts,
    as_prompts,
    check_batch,
    check_padding,
    power_of_two,
)
from lightning_specdec.decoding.windows import DEFAULT_WINDOW
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.agreement import agreement_of
from lightning_specdec.models.base import ModuleType, eval_copy
from lightning_specdec.models.changes import ModelStamp, check_in_memory, copied_weights
from lightning_specdec.models.weights import weights_checksum
from lightning_specdec.rules import AcceptanceRule, Sampling, make_rule
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer, named_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_specdec.audit.auditor import Auditor
    from lightning_specdec.bench.records import Comparison
    from lightning_specdec.data import TokenData
    from lightning_specdec.hf_generate import BoundGenerate
    from lightning_specdec.text.tokenizer import Message

log = logging.getLogger(__name__)

TextPrompts = Prompts | str | Sequence[str]
"""Prompts as tokens or as text."""
Config = DecodingConfig | None
"""How to decode; None for the defaults."""
WindowChoice = int | str | Window
"""Draft tokens per round: a number, "auto" for the fastest on this machine, or a `Window`."""
AnyDrafter = Drafter | LanguageModel | torch.nn.Module | str | Mapping[str, Any] | None
"""A drafter, a draft model, a path of one, or the name of a drafter class with its settings."""


@dataclass(frozen=True)
class _Form(Generic[ModuleType]):
    """A target or drafter in the form that decodes, and what it was made from.

    Args:
        module: what decodes.
        stamp: the original's modules at that time.
        copied: weights of the original whose values the form holds as copies.
        checksum: of these weights.
    """

    module: ModuleType
    stamp: ModelStamp
    copied: list[Tensor]
    checksum: list[int]

    def is_current(self, stamp: ModelStamp) -> bool:
        """Whether nothing in the original has changed since; `stamp` is its stamp now."""
        return stamp == self.stamp and weights_checksum(self.copied) == self.checksum


def _default_num_draft_tokens(
    target: LanguageModel, recommended: int | str | None = None
) -> WindowChoice:
    """Draft tokens per round if nobody chooses.

    Args:
        recommended: the number in the draft's file, which was chosen on another machine.
    """
    if target.num_parameters > MOST_SMALL:
        return "auto"
    return recommended or DEFAULT_WINDOW


def _target_form(target: LanguageModel) -> _Form[LanguageModel]:
    if target.backend == "torch":
        check_in_memory(target)
    eval_target = target.in_eval_mode()
    packed = eval_target.packed()
    # A model that records its calls on a GPU is measured before it records any.
    measured = eval_target if packed.device.type == "cuda" else packed
    packed.agreement = agreement_of(measured)
    # A converted target compares its weights itself.
    copied = copied_weights(target, packed) if target.backend == "torch" else []
    return _Form(packed, _target_stamp(target), copied, weights_checksum(copied))


def _drafter_form(drafter: Drafter, target: LanguageModel) -> _Form[Drafter]:
    fused = eval_copy(drafter).fused(target)
    copied = copied_weights(drafter, fused)
    return _Form(fused, ModelStamp(drafter), copied, weights_checksum(copied))


def _target_stamp(target: LanguageModel) -> ModelStamp:
    # A converted target compares its weights itself, with its own message.
    return ModelStamp(target, count_writes=target.backend == "torch")


class SpeculativeDecoder:
    """A target model with its drafter: loads, trains, decodes and measures the pair.

    Threads may share a decoder. Each call follows the changes since the last one: a changed
    weight, hook, adapter or setting is used from the next call on.

    Args:
        target: the model whose output is wanted: a `LanguageModel`, or a causal language model of
            transformers.
        drafter: proposes draft tokens. Pass a `Drafter`, a draft model (it is wrapped in a
            `ModelDrafter`), the path of a draft file or of a draft model's directory, or the name
            or import path of a drafter class, with settings as
            `{"class_path": NAME, "init_args": {...}}`. None selects prompt lookup (`NGramDrafter`).
        tokenizer: the target's tokenizer (ours or of transformers), if the target has none yet.
        prompts: held-out prompts as tokens. `benchmark`, `sweep` and `audit` use them by default.
        recipe: how the pair was trained, as plain values; saved with it.
        num_draft_tokens: draft tokens per round if a call sets none. "auto" chooses the fastest
            number, see `window`. None is "auto" for targets of more than 10 million parameters,
            whose calls take long enough to be worth measuring, and 3 for others.
        drafts: all drafters of the target by name, if there are several; `save` writes them all.

    Attributes:
        draft_origin: the file of the drafter, if `load` was called with `mapped=False`.

    Raises:
        ValueError: the drafter cannot draft for this target, or no drafter has that name or these
            settings.
    """

    def __init__(
        self,
        target: LanguageModel | torch.nn.Module,
        drafter: AnyDrafter = None,
        *,
        tokenizer: Any = None,
        prompts: Sequence[Sequence[int]] = (),
        recipe: dict[str, Any] | None = None,
        num_draft_tokens: WindowChoice | None = None,
        drafts: Mapping[str, Drafter] | None = None,
    ) -> None:
        self.target: LanguageModel = wrap_model(target)
        if tokenizer is not None:
            if not isinstance(tokenizer, Tokenizer):
                # EOS tokens may be named only there. A `HuggingFaceLM` holds the model.
                model = getattr(self.target, "model", self.target)
                generation_config = getattr(model, "generation_config", None)
                tokenizer = TextTokenizer(tokenizer, generation_config=generation_config)
            self.read_text(tokenizer)
        self.drafter = _as_drafter(drafter, self.target)
        self.prompts = [list(prompt) for prompt in prompts]
        self.recipe = recipe or {}
        self.drafts = dict(drafts or {})
        if num_draft_tokens is None:
            num_draft_tokens = _default_num_draft_tokens(self.target)
        self.num_draft_tokens = num_draft_tokens
        self.draft_origin: DraftOrigin | None = None
        self._reported_templates: set[tuple[str, str]] = set()
        self._ready_target: _Form[LanguageModel] | None = None
        self._ready_drafter: _Form[Drafter] | None = None
        # Held for a round, or for a whole call of standard decoding: threads take turns.
        self._lock = threading.RLock()

    # Loading and saving

    @classmethod
    def load(
        cls,
        source: PairSource,
        *,
        num_draft_tokens: WindowChoice | None = None,
        threads: int | None = None,
        pack: bool = True,
        mapped: bool = True,
    ) -> SpeculativeDecoder:
        """Load the models that a `PairSource` names.

        Args:
            num_draft_tokens: draft tokens per round. If None, those that the pair names. Without
                one, "auto" for targets of more than 10 million parameters, and for others the
                number that the draft stores, or else 3.
            threads: CPU threads of torch, set for this process. If None, the number that the pair
                stores; without one, torch's number is left unchanged.
            pack: whether to lay out pretrained weights for this CPU, which makes them faster and
                unfit for training.
            mapped: whether a draft file or checkpoint may be used as mapped memory. It must then
                not be written to as long as the decoder lives. Otherwise the decoder has its
                `draft_origin`.

        Raises:
            FileNotFoundError, ValueError: a model cannot be loaded, exceeds the memory, or does not
                fit the other.
        """
        if threads is None and source.pair is not None:
            threads = get_pair(source.pair).threads
        if threads is not None:
            require_int("threads", threads, 1, MOST_THREADS)
            # Before the models are loaded: OpenVINO keeps the number that it was compiled with.
            torch.set_num_threads(threads)
        loaded = load_pair(source, pack=pack, mapped=mapped)
        # The number of a pair belongs to its own draft.
        if num_draft_tokens is None and source.pair is not None and source.draft is None:
            num_draft_tokens = loaded.num_draft_tokens
        if num_draft_tokens is None:
            num_draft_tokens = _default_num_draft_tokens(loaded.target, loaded.num_draft_tokens)
        decoder = cls(
            loaded.target,
            loaded.drafter,
            prompts=loaded.prompts,
            recipe=loaded.recipe,
            num_draft_tokens=num_draft_tokens,
            drafts=loaded.drafts if len(loaded.drafts) > 1 else None,
        )
        decoder.draft_origin = loaded.draft_origin
        return decoder

    @classmethod
    @accepts_fields(PairSource, skip=("ckpt", "pair", *PRETRAINED_ONLY))
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        num_draft_tokens: WindowChoice | None = None,
        pack: bool = True,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Load the pair of a checkpoint (`.safetensors`) that `fit`, `export` or `save` wrote.

        Args:
            num_draft_tokens: as of `load`, like `pack`.
            options: fields of `PairSource`: `device`, `dtype`, `draft` (the name of one of its
                drafts), `drafter` (a name or import path), `target` (the directory of a target
                outside the file).
        """
        source = _source(ckpt=os.fspath(path), **options)
        return cls.load(source, num_draft_tokens=num_draft_tokens, pack=pack)

    @classmethod
    @accepts_fields(PairSource, skip=("ckpt", "pair", "target", "draft"))
    def from_pretrained(
        cls,
        target: Any,
        draft: Any = None,
        *,
        num_draft_tokens: WindowChoice | None = None,
        pack: bool = True,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Load a pretrained model of transformers with a draft model, a draft file or lookup.

        Args:
            target: a directory, a name on the Hub, or a loaded model (a `LanguageModel` or one of
                transformers).
            draft: a draft model, named the same way; a draft file (`.safetensors`); or a `Drafter`.
                None selects prompt lookup.
            num_draft_tokens: as of `load`, like `pack`.
            options: fields of `PairSource`, such as `device`, `dtype` and `drafter`.
        """
        source = _source(target=target, draft=draft, **options)
        return cls.load(source, num_draft_tokens=num_draft_tokens, pack=pack)

    @classmethod
    @accepts_fields(PairSource, skip=("ckpt", "pair", "draft"))
    def from_pair(
        cls,
        name: str,
        draft: Any = None,
        *,
        num_draft_tokens: WindowChoice | None = None,
        threads: int | None = None,
        pack: bool = True,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Load a pair of the registry, see `list_pairs`.

        Args:
            draft: replaces the pair's draft.
            num_draft_tokens: as of `load`, like `threads` and `pack`.
            options: replace the pair's settings; as of `from_pretrained`.
        """
        source = _source(pair=name, draft=draft, **options)
        return cls.load(source, num_draft_tokens=num_draft_tokens, threads=threads, pack=pack)

    def with_drafter(self, drafter: AnyDrafter) -> SpeculativeDecoder:
        """A decoder of the same target and settings with another drafter.

        Args:
            drafter: as for the constructor.
        """
        decoder = copy(self)
        decoder._lock = self._lock  # both use the target
        decoder.drafter = _as_drafter(drafter, self.target)
        decoder.draft_origin = None
        return decoder

    def with_exit(self, exit_layer: int) -> SpeculativeDecoder:
        """A decoder that drafts with the target's first `exit_layer` layers.

        Trained output heads for exits are kept.
        """
        if isinstance(self.drafter, EarlyExitDrafter):
            return self.with_drafter(self.drafter.at(exit_layer))
        return self.with_drafter(EarlyExitDrafter(exit_layer))

    def save(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write target and drafters as a checkpoint for decoding (`X.safetensors`).

        Args:
            dtype: as of `save_draft`.
        """
        main_name = checkpoint.MAIN
        for name, drafter in self.drafts.items():
            if drafter is self.drafter:
                main_name = name
                break
        checkpoint.save(
            path,
            self.target,
            {main_name: self.drafter, **self.drafts},
            prompts=self.prompts,
            recipe=self.recipe,
            tokenizer=None if self.tokenizer is None else self.tokenizer.name,
            dtype=dtype,
        )

    def save_draft(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write only the drafter as a draft file (`X.safetensors`), for use with this target.

        Args:
            dtype: store weights as "float16" or another floating-point type, or as "int8", for a
                smaller file. A loaded draft still computes in its present dtype.

        Raises:
            ValueError: the drafter cannot be stored, a weight does not fit the dtype, or the path
                cannot be written.
        """
        target = TargetReference.of(self.target)
        checkpoint.save(path, target, self.drafter, recipe=self.recipe, dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles make their own lock and their own forms for decoding.
        return {**self.__dict__, "_ready_target": None, "_ready_drafter": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        model = getattr(self.target, "model", self.target)
        num_millions = self.target.num_parameters / 1e6
        window = getattr(self.num_draft_tokens, "largest", self.num_draft_tokens)
        return (
            f"SpeculativeDecoder({type(model).__name__} of {num_millions:.1f}M parameters, "
            f"{type(self.drafter).__name__}, num_draft_tokens={window})"
        )

    # Text

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None if prompts and output are tokens only."""
        return self.target.tokenizer

    def read_text(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer that the target was trained with, so that prompts may be text."""
        self.target.tokenizer = tokenizer
        self.target.vocabulary = tokenizer.vocabulary

    @property
    def eos(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the tokenizer: they end a row if a call sets no `eos`."""
        if self.tokenizer is None:
            return ()
        return tuple(sorted(t for t in self.tokenizer.eos if t < self.target.vocab_size))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt, with the special tokens that the model expects."""
        return self._require_tokenizer().encode(text)

    def encode_chat(
        self,
        messages: str | Sequence[Message],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation, by the target's chat template.

        Args:
            messages: `[{"role": "user", "content": TEXT}, ...]`, or the text of one user message.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking":
                False}`. A draft that was trained with other ones is reported once.

        Raises:
            ValueError: the target has no tokenizer, or no chat template.
        """
        turns: Sequence[Any] = messages
        if isinstance(messages, str):
            turns = [{"role": "user", "content": messages}]
        self.check_template(chat_template_kwargs or {})
        return self._require_tokenizer().encode_chat(
            turns, chat_template_kwargs=chat_template_kwargs
        )

    def check_template(self, chat_template_kwargs: Mapping[str, Any]) -> None:
        """Report a draft that was trained with other variables of the chat template, once."""
        data_arguments = self.recipe.get("data_arguments") or {}
        if "tokenizer" not in data_arguments:
            return
        trained_with = data_arguments.get("chat_template_kwargs") or {}
        difference = (repr(trained_with), repr(dict(chat_template_kwargs)))
        if difference[0] != difference[1] and difference not in self._reported_templates:
            self._reported_templates.add(difference)
            log.warning(
                "the draft was trained with chat_template_kwargs %s, and prompts use %s: it may "
                "predict worse",
                *difference,
            )

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "the target has no tokenizer: pass prompts as tokens, or load it with its tokenizer"
            )
        return self.tokenizer

    def _tokens(self, prompts: TextPrompts | None) -> list[list[int]]:
        """The prompts as tokens; the pair's own prompts when None."""
        if prompts is None:
            return self.prompts
        batch: Any = [prompts] if isinstance(prompts, str) else prompts
        is_nonempty_list = isinstance(batch, list | tuple) and len(batch) > 0
        if is_nonempty_list and all(isinstance(prompt, str) for prompt in batch):
            return [self.encode(prompt) for prompt in batch]

        rows = as_prompts(batch)
        # A mapping comes with an attention mask, which marks the padding.
        if self.target.vocabulary is not None and not isinstance(batch, Mapping):
            check_padding(rows, self.target.vocabulary.special.get("pad"))
        return rows

    def _add_text(self, result: DecodeResult) -> DecodeResult:
        """Set each row's new text, which ends before a stop string."""
        if self.tokenizer is not None:
            for row in result.rows:
                text_stream = self.tokenizer.stream()
                text = text_stream.push(row.tokens, hold=row.num_hidden)
                row.text = text + text_stream.finish(drop=row.num_hidden)
        return result

    # Decoding

    def ready(self) -> tuple[LanguageModel, Drafter]:
        """Target and drafter in the forms that decode: in evaluation mode, packed and fused.

        They are made again if anything in the pair has changed that decides its output. A form may
        hold weights as copies, so these are compared byte by byte with each call.

        Raises:
            ValueError: the target cannot be decoded after a change; the message names the reason.
        """
        with self._lock:
            self.target.refresh()
            stamp = _target_stamp(self.target)
            target = self._ready_target
            if target is None or not target.is_current(stamp):
                if target is not None:
                    self._check_converted(target, stamp)
                target = _target_form(self.target)
                self._ready_target = target
                # A drafter may share parts of the target's form.
                self._ready_drafter = None

            drafter = self._ready_drafter
            if drafter is None or not drafter.is_current(ModelStamp(self.drafter)):
                drafter = _drafter_form(self.drafter, target.module)
                self._ready_drafter = drafter
            return target.module, drafter.module

    def _check_converted(self, form: _Form[LanguageModel], stamp: ModelStamp) -> None:
        """Raise ValueError if the target changed and another library runs a conversion of it."""
        if self.target.backend != "torch" and stamp != form.stamp:
            raise ValueError(
                "the weights changed after the model was converted: convert it again with "
                "OpenVINOLM.of"
            )

    def config(self, config: Config = None, **changes: Any) -> DecodingConfig:
        """The config with `changes` applied, completed by the decoder's window and its EOS."""
        config = DecodingConfig.of(config, **changes)
        defaults: dict[str, Any] = {"num_draft_tokens": self.num_draft_tokens, "eos": self.eos}
        missing: dict[str, Any] = {}
        for name, value in defaults.items():
            if getattr(config, name) is None:
                missing[name] = value
        return config.changed(**missing) if missing else config

    def window(
        self,
        config: Config = None,
        *,
        batch_size: int | Sequence[int] = 1,
        **changes: Any,
    ) -> int | Window:
        """The draft tokens per round that a call with these arguments uses.

        For "auto" it is an `AdaptiveWindow`. Its costs are measured once for each pair, machine,
        settings and batch size. This takes seconds (minutes for large models); the result is kept
        in the cache directory.

        Args:
            batch_size: rows whose costs are measured. Several sizes are for a batch whose number of
                rows changes, as in a server. Where the output depends on the number of draft
                tokens, the costs are always those of one row.
        """
        config = self.config(config, **changes)
        if config.num_draft_tokens != "auto":
            return config.num_draft_tokens
        sizes = list(batch_size) if isinstance(batch_size, Sequence) else [batch_size]
        return self._adaptive_window(self.ready(), config, sizes)

    def _adaptive_window(
        self,
        pair: tuple[LanguageModel, Drafter],
        config: DecodingConfig,
        batch_sizes: Sequence[int],
    ) -> Window:
        from lightning_specdec.decoding.calibration import load_or_measure

        # The rows of a batch are a power of two, some of them empty.
        sizes = {power_of_two(require_int("batch_size", size, 1)) for size in batch_sizes}
        if not make_rule(config.rule).keeps_tokens(greedy=config.sampling.greedy):
            # The output depends on the windows, so these must not depend on the batch.
            sizes = {1}

        target, drafter = pair
        calibrations: dict[int, Calibration] = {}
        for size in sorted(sizes):
            calibrations[size] = load_or_measure(target, drafter, config, batch_size=size)
        return AdaptiveWindow(calibrations)

    def decode(
        self,
        prompts: TextPrompts,
        config: Config = None,
        *,
        indices: Sequence[int] | None = None,
        **changes: Any,
    ) -> DecodeResult:
        """Decode speculatively. Returns new tokens, their text if possible, counts and seconds.

        Args:
            prompts: tokens of one prompt, or of several of any lengths, as lists or a tensor `[T]`
                or `[B, T]`; a tokenizer's output with its attention mask; or one text or several,
                used without a chat template.
            config: how to decode. `changes` are fields of `DecodingConfig`, such as
                `max_new_tokens`, and override it.
            indices: the prompts' numbers; 0, 1, ... when None. A row's random numbers depend on
                seed and number only.

        Raises:
            ValueError: a setting or a prompt is wrong, or a row seems padded and there is no
                attention mask.
            DecodeInterrupted: on Ctrl-C; its `result` holds the tokens so far.
        """
        return self._add_text(run(self.session(prompts, config, indices=indices, **changes)))

    def decode_standard(
        self,
        prompts: TextPrompts,
        config: Config = None,
        *,
        indices: Sequence[int] | None = None,
        **changes: Any,
    ) -> DecodeResult:
        """Decode with the target only, one call per token: the baseline.

        Arguments and errors as of `decode`.
        """
        config = self.config(config, **changes)
        tokens = self._tokens(prompts)
        with self._lock:
            target, _ = self.ready()
            result = autoregressive_decode(target, tokens, config, indices=indices)
            return self._add_text(result)

    def stream(
        self,
        prompts: TextPrompts,
        config: Config = None,
        **changes: Any,
    ) -> Iterator[tuple[int, int]]:
        """Decode speculatively; yields (prompt number, token) after each round.

        Arguments as of `decode`.
        """
        return stream(self.session(prompts, config, **changes))

    def stream_text(
        self,
        prompts: TextPrompts,
        config: Config = None,
        **changes: Any,
    ) -> TextPieces:
        """Decode speculatively; yields text after each round.

        For a list of prompts it yields (prompt number, text). A prompt's pieces add up to its
        `RowResult.text`: text that may turn out to begin a stop string is held back. To end early,
        call `cancel` of the returned iterator from any thread. Arguments as of `decode`.
        """
        session = self.session(prompts, config, **changes)
        is_list = not isinstance(prompts, str)
        return TextPieces(session, self._require_tokenizer(), numbered=is_list)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        streamer: Any = None,
        **options: Any,
    ) -> Any:
        """Decode speculatively with the arguments and the result of transformers' `generate`.

        Rows may be padded on either side, as `attention_mask` marks it; padding without a mask is
        refused. In float32 a row's greedy tokens do not depend on its padding.

        Args:
            options: arguments of transformers' `generate`, and `num_draft_tokens`, `rule` and
                `seed` as of `lightning_specdec.generate`.

        Raises:
            ValueError: the target is not a transformers model, or an argument is not supported; the
                message names it.
        """
        from lightning_specdec.hf_generate import generate_with

        return generate_with(self, inputs, generation_config, streamer, options)

    def as_generate(
        self,
        *,
        streamer: Any = None,
        stop_strings: str | Sequence[str] = (),
    ) -> BoundGenerate:
        """This decoder as the argument `custom_generate` of its target's `generate`.

        Useful in a pipeline, for example. Pass the streamer and the strings that end a row here:
        transformers does not pass them to such a function.
        """
        from lightning_specdec.hf_generate import BoundGenerate

        return BoundGenerate(self, streamer, stop_strings, knows_mask=False)

    def session(
        self,
        prompts: TextPrompts,
        config: Config = None,
        *,
        indices: Sequence[int] | None = None,
        **changes: Any,
    ) -> Session:
        """Open a `Session` with these prompts, ready for its first `step`.

        Arguments and errors as of `decode`.
        """
        with self._lock:
            tokens = self._tokens(prompts)
            config = self.config(config, **changes)
            pair = self.ready()
            if config.num_draft_tokens == "auto":
                # Wrong prompts are refused before the costs are measured.
                target, drafter = pair
                check_batch(tokens, target, config, indices=indices, drafter=drafter)
                window = self._adaptive_window(pair, config, [len(tokens)])
                config = config.changed(num_draft_tokens=window)
            session = open_session(*pair, tokens, config, indices=indices)
        session.lock = self._lock
        return session

    # Measuring

    def benchmark(
        self,
        prompts: TextPrompts | None = None,
        config: Config = None,
        *,
        repeats: int = 10,
        warmup: int = 3,
        batch_size: int = 1,
        mode: str = "both",
        **changes: Any,
    ) -> Comparison:
        """Time speculative and standard decoding in turn; returns speedup, rates and seconds.

        Args:
            prompts: as of `decode`, like `config` and `changes`; the pair's own prompts when None.
            repeats: timed runs of each method, after `warmup` untimed ones.
            batch_size: prompts that are decoded together.
            mode: "both", or "standard" or "speculative" to time one method only.
        """
        from lightning_specdec.bench.measure import benchmark

        return benchmark(
            *self.ready(),
            self._tokens(prompts),
            self.config(config, **changes),
            repeats=repeats,
            warmup=warmup,
            batch_size=batch_size,
            mode=mode,
        )

    def sweep(
        self,
        prompts: TextPrompts | None = None,
        config: Config = None,
        *,
        drafters: Mapping[str, Drafter] | None = None,
        windows: Sequence[int] = (2, 4, 6, 8),
        repeats: int = 5,
        warmup: int = 1,
        batch_size: int = 1,
        **changes: Any,
    ) -> Iterator[Comparison]:
        """Time every drafter with every window against standard decoding.

        Yields each comparison once it is measured. Arguments that are not listed are those of
        `benchmark`.

        Args:
            drafters: drafters by name; all of the pair's drafts and early exits when None.
            windows: numbers of draft tokens per round to try.
        """
        from lightning_specdec.bench.measure import sweep

        target, _ = self.ready()
        return sweep(
            target,
            self._all_drafters(drafters),
            self._tokens(prompts),
            self.config(config, **changes),
            windows=windows,
            repeats=repeats,
            warmup=warmup,
            batch_size=batch_size,
        )

    def audit(
        self,
        prompts: TextPrompts | None = None,
        config: Config = None,
        *,
        rules: Mapping[str, AcceptanceRule],
        samplings: Mapping[str, Sampling],
        drafters: Mapping[str, Drafter] | None = None,
        num_places: int = 3,
        **changes: Any,
    ) -> Auditor:
        """Prepare an audit of whether speculative output follows the target's distribution.

        `Auditor.run` performs it.

        Args:
            prompts: as of `decode`, like `config` and `changes`; the pair's own prompts when None.
            rules: acceptance rules to audit, by name.
            samplings: samplings to audit each rule with, by name.
            drafters: drafters by name; all of the pair's drafts and early exits when None.
            num_places: positions in the texts where whole rounds are compared with the target's
                exact distribution.
        """
        from lightning_specdec.audit.auditor import Auditor

        config = DecodingConfig.of(config, **changes)
        if config.num_draft_tokens is None and self.num_draft_tokens == "auto":
            # Each round of an audit has the same number.
            config = config.changed(num_draft_tokens=DEFAULT_WINDOW)
        target, _ = self.ready()
        return Auditor(
            target,
            self._all_drafters(drafters),
            self._tokens(prompts),
            self.config(config),
            rules=rules,
            samplings=samplings,
            num_places=num_places,
        )

    def _all_drafters(self, drafters: Mapping[str, Drafter] | None) -> dict[str, Drafter]:
        """The drafters by name, ready to decode; all candidates when None."""
        from lightning_specdec.bench.candidates import candidates

        if drafters is None:
            drafters = {name: entry.drafter for name, entry in candidates(self).items()}
        target, _ = self.ready()
        return {name: eval_copy(drafter).fused(target) for name, drafter in drafters.items()}

    def compile(self) -> float:
        """Compile the layers of target and draft on a GPU; returns the seconds that it took.

        Raises:
            ValueError: neither is a transformers model.
        """
        from lightning_specdec.models.compiled import compile_layers
        from lightning_specdec.models.huggingface import HuggingFaceLM

        target, drafter = self.ready()
        models = [target, getattr(drafter, "model", None)]
        compilable = [model for model in models if isinstance(model, HuggingFaceLM)]
        if not compilable:
            raise ValueError(
                "only the layers of transformers models are compiled, and this pair has none"
            )
        return sum(compile_layers(model) for model in compilable)

    # Training

    def train(self, datamodule: TokenData, *, max_epochs: int = 100) -> dict[str, float]:
        """Train target and draft (of a `ModelDrafter`) in one run.

        Returns the last losses and metrics by name.
        """
        from lightning.pytorch import Trainer

        from lightning_specdec.training import PairTraining
        from lightning_specdec.training.cli import quiet_lightning

        if not isinstance(self.drafter, ModelDrafter):
            raise ValueError(
                "only a ModelDrafter is trained with its target, this is a "
                f"{type(self.drafter).__name__}"
            )
        if self.target.backend != "torch":
            raise ValueError(
                f"{self.target.backend} cannot train: load the pair with backend='torch'"
            )
        quiet_lightning()
        self.target.origin = None  # training changes its weights

        module = PairTraining(self.target, self.drafter.model)
        trainer = Trainer(
            max_epochs=max_epochs,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(module.train(), datamodule=datamodule)

        self.prompts = datamodule.prompts()
        self.recipe = module.training_record()
        if datamodule.tokenizer is not None:
            self.read_text(named_tokenizer(datamodule.tokenizer))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _source(**options: Any) -> PairSource:
    """The source with these fields, which may be a torch.dtype or a torch.device."""
    plain_options: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, torch.dtype | torch.device):
            value = str(value).removeprefix("torch.")
        plain_options[name] = value
    return PairSource.from_dict(plain_options)


def _as_drafter(drafter: AnyDrafter, target: LanguageModel) -> Drafter:
    """The drafter for a target that a user passes as a drafter, a model or a name.

    Raises:
        ValueError: it cannot draft for this target.
    """
    if drafter is None:
        drafter = NGramDrafter()
    drafter = wrap_model(drafter)
    if isinstance(drafter, LanguageModel):
        drafter = ModelDrafter(drafter)
    if isinstance(drafter, Drafter):
        drafter.check_target(target)
        return drafter
    if isinstance(drafter, str) and Path(drafter).expanduser().exists():
        source = PairSource(target=target, draft=drafter)
        return load_pair(source, target=target, pack=False).drafter
    choice = Choice.read(drafter, "drafter")
    return DRAFTERS.load(choice.name).for_target(target, **choice.settings)
