"""`SpeculativeDecoder`: a target and its drafter in one object that loads, trains, decodes and measures them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec.checkpoints import checkpoint, load_pair
from lightning_specdec.checkpoints.loading import wrapped
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.decoding import (
    AdaptiveWindow,
    DecodeResult,
    Session,
    TextPieces,
    Window,
    autoregressive_decode,
    open_session,
    run,
    stream,
)
from lightning_specdec.decoding.rows import Prompts, as_prompts, check_padding
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.agreement import agreement_of
from lightning_specdec.models.base import weights_stamp
from lightning_specdec.rules import AcceptanceRule, Sampling
from lightning_specdec.text.tokenizer import TextTokenizer, Tokenizer, named_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_specdec.audit.auditor import Auditor
    from lightning_specdec.bench.rows import Comparison
    from lightning_specdec.data import TokenData
    from lightning_specdec.hf_generate import BoundGenerate
    from lightning_specdec.text.tokenizer import Message

TextPrompts = Prompts | str | Sequence[str]
"""Prompts as tokens or as text."""
Config = DecodingConfig | None
WindowChoice = int | str | Window
"""Draft tokens per round; "auto" for as many as pay on this machine; or a `Window` that chooses."""
AnyDrafter = Drafter | LanguageModel | torch.nn.Module | str | Mapping[str, Any] | None


def _made(drafter: AnyDrafter, target: LanguageModel) -> Drafter:
    """The drafter that a model or a kind's name means; ValueError where it cannot draft for that target."""
    drafter = NGramDrafter() if drafter is None else wrapped(drafter)
    if isinstance(drafter, LanguageModel):
        drafter = ModelDrafter(drafter)
    if isinstance(drafter, Drafter):
        drafter.check_target(target)
        return drafter
    choice = Choice.read(drafter, "drafter")
    return DRAFTERS.load(choice.name).for_target(target, **choice.settings)


class SpeculativeDecoder:
    """A target model with its drafter: loads, trains, decodes and measures the pair. Threads may share one.

    Args:
        target: the model whose output is wanted: a `LanguageModel`, or a causal language model of transformers.
        drafter: proposes draft tokens. Give a `Drafter`, a draft model (it is wrapped in a `ModelDrafter`), or the
            name or import path of a drafter class, with settings as `{"class_path": NAME, "init_args": {...}}`. None
            selects prompt lookup (`NGramDrafter`).
        tokenizer: the target's tokenizer (ours or of transformers), if the target has none yet.
        prompts: held-out prompts as tokens. `benchmark`, `sweep` and `audit` use them if they are given none.
        recipe: how the pair was trained, as plain values; saved with it.
        num_draft_tokens: draft tokens per round if a call sets none. "auto" chooses as many as pay, see `window`.
        drafts: all drafters of the target by name, if there are several; `save` writes them all.

    Raises:
        ValueError: the drafter cannot draft for this target, or no drafter has that name or these settings.
    """

    def __init__(
        self,
        target: LanguageModel | torch.nn.Module,
        drafter: AnyDrafter = None,
        *,
        tokenizer: Any = None,
        prompts: Sequence[Sequence[int]] = (),
        recipe: dict[str, Any] | None = None,
        num_draft_tokens: WindowChoice = 3,
        drafts: Mapping[str, Drafter] | None = None,
    ) -> None:
        self.target: LanguageModel = wrapped(target)
        if tokenizer is not None:
            if not isinstance(tokenizer, Tokenizer):
                own = getattr(target, "generation_config", None)
                tokenizer = TextTokenizer(tokenizer, generation_config=own)
            self.read_text(tokenizer)
        self.drafter = _made(drafter, self.target)
        self.prompts = [list(prompt) for prompt in prompts]
        self.recipe, self.drafts = recipe or {}, dict(drafts or {})
        self.num_draft_tokens = num_draft_tokens
        self._ready: tuple[object, LanguageModel, Drafter] | None = None
        self._lock = threading.RLock()
        """Held for a round, or a whole call of standard decoding: threads that share a decoder take turns."""

    @classmethod
    def load(
        cls, source: PairSource, *, num_draft_tokens: WindowChoice | None = None, pack: bool = True
    ) -> SpeculativeDecoder:
        """Load the models that a `PairSource` names.

        Args:
            num_draft_tokens: draft tokens per round; None takes the pair's or draft's own, else 3.
            pack: whether to lay out pretrained weights for this CPU, which makes them faster and unfit for training.

        Raises:
            FileNotFoundError, ValueError: a model cannot be loaded, exceeds the memory, or does not fit the other.
        """
        loaded = load_pair(source, pack=pack)
        if num_draft_tokens is None:
            num_draft_tokens = loaded.num_draft_tokens or 3
        return cls(
            loaded.target,
            loaded.drafter,
            prompts=loaded.prompts,
            recipe=loaded.recipe,
            num_draft_tokens=num_draft_tokens,
            drafts=loaded.drafts if len(loaded.drafts) > 1 else None,
        )

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], **options: Any) -> SpeculativeDecoder:
        """Load the pair of a checkpoint (`.safetensors`) that `fit`, `export` or `save` wrote.

        Args:
            options: arguments of `load`, and fields of `PairSource`: `device`, `dtype`, `draft` (the name of one of its
                drafts), `drafter` (a name or import path), `target` (the directory of a target outside the file).
        """
        return cls._named(ckpt=os.fspath(path), **options)

    @classmethod
    def from_pretrained(cls, target: Any, draft: Any = None, **options: Any) -> SpeculativeDecoder:
        """Load a pretrained model of transformers with a draft model, a draft file, or prompt lookup.

        Args:
            target: a directory, a name on the hub, or a loaded model (a `LanguageModel` or one of transformers).
            draft: a draft model, named likewise; a draft file (`.safetensors`); or a `Drafter`. None: prompt lookup.
            options: arguments of `load`, and fields of `PairSource`, such as `device`, `dtype` and `drafter`.
        """
        return cls._named(target=target, draft=draft, **options)

    @classmethod
    def from_pair(cls, name: str, draft: Any = None, **options: Any) -> SpeculativeDecoder:
        """Load a pair of the registry (see `list_pairs`); `draft` and `options` replace its own draft and settings."""
        return cls._named(pair=name, draft=draft, **options)

    @classmethod
    def _named(cls, **options: Any) -> SpeculativeDecoder:
        own = {name: options.pop(name) for name in ("num_draft_tokens", "pack") if name in options}
        for name, value in options.items():
            if isinstance(value, torch.dtype | torch.device):
                options[name] = str(value).removeprefix("torch.")
        return cls.load(PairSource.from_dict(options), **own)

    def __repr__(self) -> str:
        target = f"{type(getattr(self.target, 'model', self.target)).__name__}"
        target += f" of {self.target.num_parameters / 1e6:.1f}M parameters"
        window = getattr(self.num_draft_tokens, "largest", self.num_draft_tokens)
        return f"SpeculativeDecoder({target}, {type(self.drafter).__name__}, num_draft_tokens={window})"

    def with_drafter(self, drafter: AnyDrafter) -> SpeculativeDecoder:
        """A decoder of the same target and settings with another drafter, given as to the constructor."""
        other = copy(self)
        other.drafter, other._ready = _made(drafter, self.target), None
        return other

    def with_exit(self, exit_layer: int) -> SpeculativeDecoder:
        """A decoder that drafts with the target's first `exit_layer` layers; trained output heads for them are kept."""
        own = self.drafter if isinstance(self.drafter, EarlyExitDrafter) else None
        return self.with_drafter(
            EarlyExitDrafter(exit_layer) if own is None else own.at(exit_layer)
        )

    def save(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write target and drafters as a checkpoint for decoding (`X.safetensors`); `dtype` as of `save_draft`."""
        name = next(
            (name for name, each in self.drafts.items() if each is self.drafter), checkpoint.MAIN
        )
        checkpoint.save(
            path,
            self.target,
            {name: self.drafter, **self.drafts},
            prompts=self.prompts,
            recipe=self.recipe,
            tokenizer=None if self.tokenizer is None else self.tokenizer.name,
            dtype=dtype,
        )

    def save_draft(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write the drafter alone as a draft file (`X.safetensors`), which is for this target only.

        Args:
            dtype: store weights as "float16" or another floating-point type, or as "int8", for a smaller file. A
                loaded draft still computes in its present dtype.

        Raises:
            ValueError: the drafter cannot be stored, a weight does not fit the dtype, or the path cannot be written.
        """
        checkpoint.save(
            path, TargetReference.of(self.target), self.drafter, recipe=self.recipe, dtype=dtype
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None if prompts and output are tokens only."""
        return self.target.tokenizer

    def read_text(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer that the target was trained with: prompts and output may be text from then on."""
        self.target.tokenizer, self.target.vocabulary = tokenizer, tokenizer.vocabulary

    @property
    def eos(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the tokenizer: they end a row if a call sets no `eos`."""
        tokens = () if self.tokenizer is None else self.tokenizer.eos
        return tuple(sorted(token for token in tokens if token < self.target.vocab_size))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt as `decode` makes them, with the special tokens that the model expects."""
        return self._tokenizer().encode(text)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Tokens of `[{"role": "user", "content": TEXT}, ...]`, or of one user message, by the target's chat template.

        Raises:
            ValueError: the target has no tokenizer, or no chat template.
        """
        turns: Sequence[Any] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        return self._tokenizer().encode_chat(turns)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "the target has no tokenizer: give prompts as tokens, or load it with its tokenizer"
            )
        return self.tokenizer

    def _tokens(self, prompts: TextPrompts | None) -> list[list[int]]:
        """The prompts as tokens, text encoded; the pair's own when None."""
        if prompts is None:
            return self.prompts
        listed: Any = [prompts] if isinstance(prompts, str) else prompts
        if (
            isinstance(listed, list | tuple)
            and listed
            and all(isinstance(prompt, str) for prompt in listed)
        ):
            return [self.encode(prompt) for prompt in listed]
        rows = as_prompts(listed)
        if self.target.vocabulary is not None and not isinstance(listed, Mapping):
            check_padding(rows, self.target.vocabulary.special.get("pad"))
        return rows

    def _with_text(self, result: DecodeResult) -> DecodeResult:
        """The result with every row's new text, which ends before a stop string."""
        if self.tokenizer is not None:
            for row in result.rows:
                text = self.tokenizer.stream()
                row.text = text.push(row.tokens, hold=row.num_hidden) + text.finish(
                    drop=row.num_hidden
                )
        return result

    def ready(self) -> tuple[LanguageModel, Drafter]:
        """Target and drafter in the form that decodes, packed and fused; remade once weights have changed."""
        with self._lock:
            weights = weights_stamp(self.target, self.drafter)
            if self._ready is None or self._ready[0] != weights:
                self.target.eval()
                self.drafter.eval()
                target = self.target.packed()
                # A model that records its calls on a GPU is measured before it records any.
                measured = self.target if target.device.type == "cuda" else target
                target.agreement = agreement_of(measured)
                self._ready = weights, target, self.drafter.fused(target)
            return self._ready[1:]

    def config(self, config: Config = None, **changes: Any) -> DecodingConfig:
        """The config with `changes` applied, and the decoder's window and the tokenizer's EOS where it has none."""
        config = DecodingConfig.of(config, **changes)
        own: dict[str, Any] = {"num_draft_tokens": self.num_draft_tokens, "eos": self.eos}
        missing = {name: value for name, value in own.items() if getattr(config, name) is None}
        return config.changed(**missing) if missing else config

    def window(self, config: Config = None, *, batch_size: int = 1, **changes: Any) -> int | Window:
        """The draft tokens per round that a call with these arguments uses.

        For "auto" it is an `AdaptiveWindow`. Its costs are measured for `batch_size` rows, once for each pair, machine
        and settings, which takes seconds (minutes for large models), and kept in the cache directory.
        """
        config = self.config(config, **changes)
        if config.num_draft_tokens != "auto":
            return config.num_draft_tokens
        from lightning_specdec.decoding.calibration import load_or_measure

        return AdaptiveWindow(load_or_measure(*self.ready(), config, batch_size=batch_size))

    def decode(
        self,
        prompts: TextPrompts,
        config: Config = None,
        *,
        indices: Sequence[int] | None = None,
        **changes: Any,
    ) -> DecodeResult:
        """Decode speculatively. Returns the new tokens, their text if there is a tokenizer, counts and seconds.

        Args:
            prompts: tokens of one prompt, or of several of any lengths, as lists or a tensor `[T]` or `[B, T]`; a
                tokenizer's output with its attention mask; or one text or several, used without a chat template.
            config: how to decode. `changes` are fields of `DecodingConfig`, such as `max_new_tokens`, and win over it.
            indices: the prompts' numbers; 0, 1, ... when None. A row's random numbers depend on seed and number only.

        Raises:
            ValueError: a setting or a prompt is wrong, or a row seems padded and there is no attention mask.
            DecodeInterrupted: on Ctrl-C; its `result` holds the tokens so far.
        """
        return self._with_text(run(self.session(prompts, config, indices=indices, **changes)))

    def decode_standard(
        self,
        prompts: TextPrompts,
        config: Config = None,
        *,
        indices: Sequence[int] | None = None,
        **changes: Any,
    ) -> DecodeResult:
        """Decode with the target alone, one call per token: the baseline. Arguments and errors as of `decode`."""
        config, tokens = self.config(config, **changes), self._tokens(prompts)
        with self._lock:
            return self._with_text(
                autoregressive_decode(self.ready()[0], tokens, config, indices=indices)
            )

    def stream(
        self, prompts: TextPrompts, config: Config = None, **changes: Any
    ) -> Iterator[tuple[int, int]]:
        """Decode speculatively; yields (prompt number, token) after each round. Arguments as of `decode`."""
        return stream(self.session(prompts, config, **changes))

    def stream_text(
        self, prompts: TextPrompts, config: Config = None, **changes: Any
    ) -> TextPieces:
        """Decode speculatively; yields text after each round, for a list of prompts as (prompt number, text).

        A prompt's pieces add up to its `RowResult.text`: text that may turn out to begin a stop string is held back.
        To end early, call `cancel` of the returned iterator from any thread. Arguments as of `decode`.
        """
        session = self.session(prompts, config, **changes)
        return TextPieces(session, self._tokenizer(), numbered=not isinstance(prompts, str))

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        streamer: Any = None,
        **options: Any,
    ) -> Any:
        """Decode speculatively with the arguments and the result of transformers' `generate`.

        Rows may be padded on either side where `attention_mask` says so; padding without a mask is refused. In float32
        a row's greedy tokens do not depend on its padding. `options` are arguments of transformers' `generate`, and
        `num_draft_tokens`, `rule` and `seed` as of `lightning_specdec.generate`.

        Raises:
            ValueError: the target is not a transformers model, or an argument is not supported; the message names it.
        """
        from lightning_specdec.hf_generate import generate_with

        return generate_with(self, inputs, generation_config, streamer, options)

    def as_generate(
        self, *, streamer: Any = None, stop_strings: str | Sequence[str] = ()
    ) -> BoundGenerate:
        """This decoder as the argument `custom_generate` of its target's `generate`, for example in a pipeline.

        Give the streamer and the strings that end a row here: transformers does not pass them to such a function.
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
        """Open a `Session` with these prompts, ready for its first `step`. Arguments and errors as of `decode`."""
        with self._lock:
            tokens, config = self._tokens(prompts), self.config(config, **changes)
            config = config.changed(num_draft_tokens=self.window(config, batch_size=len(tokens)))
            session = open_session(*self.ready(), tokens, config, indices=indices)
        session.lock = self._lock
        return session

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
        """Time speculative and standard decoding in turn; returns speedup, rates and seconds of both.

        Args:
            prompts: as of `decode`, like `config` and `changes`; the pair's own prompts when None.
            repeats: timed runs of each method, after `warmup` untimed ones.
            batch_size: prompts that are decoded together.
            mode: "both", or "standard" or "speculative" to time one method alone.
        """
        from lightning_specdec.bench.measure import benchmark

        options: dict[str, Any] = {
            "repeats": repeats,
            "warmup": warmup,
            "batch_size": batch_size,
            "mode": mode,
        }
        return benchmark(
            *self.ready(), self._tokens(prompts), self.config(config, **changes), **options
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
        """Time every drafter with every window beside standard decoding; yields each comparison once it is measured.

        Arguments that are not listed are those of `benchmark`.

        Args:
            drafters: drafters by name; all of the pair's drafts and early exits when None.
            windows: numbers of draft tokens per round to try.
        """
        from lightning_specdec.bench.measure import sweep

        options: dict[str, Any] = {
            "windows": windows,
            "repeats": repeats,
            "warmup": warmup,
            "batch_size": batch_size,
        }
        target, ready = self.ready()[0], self._all_drafters(drafters)
        return sweep(
            target, ready, self._tokens(prompts), self.config(config, **changes), **options
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
        """Prepare an audit of whether speculative output follows the target's distribution; `Auditor.run` performs it.

        Args:
            prompts: as of `decode`, like `config` and `changes`; the pair's own prompts when None.
            rules: acceptance rules to audit, by name.
            samplings: samplings to audit each rule with, by name.
            drafters: drafters by name; all of the pair's drafts and early exits when None.
            num_places: places in the texts where whole rounds are compared with the target's exact distribution.
        """
        from lightning_specdec.audit.auditor import Auditor

        return Auditor(
            self.ready()[0],
            self._all_drafters(drafters),
            self._tokens(prompts),
            self.config(config, **changes),
            rules=rules,
            samplings=samplings,
            num_places=num_places,
        )

    def _all_drafters(self, drafters: Mapping[str, Drafter] | None) -> dict[str, Drafter]:
        """The drafters by name, ready to decode; all candidates when None."""
        from lightning_specdec.bench.candidates import candidates

        if drafters is None:
            drafters = {name: each.drafter for name, each in candidates(self).items()}
        return {name: drafter.eval().fused(self.target) for name, drafter in drafters.items()}

    def compile(self) -> float:
        """Compile the layers of target and draft, transformers models on a GPU; returns the seconds that it took."""
        from lightning_specdec.models.compiled import compile_layers
        from lightning_specdec.models.huggingface import HuggingFaceLM

        target, drafter = self.ready()
        models = [
            each
            for each in (target, getattr(drafter, "model", None))
            if isinstance(each, HuggingFaceLM)
        ]
        if not models:
            raise ValueError(
                "only the layers of transformers models are compiled, and this pair has none"
            )
        return sum((compile_layers(model) for model in models), start=0.0)

    def train(self, datamodule: TokenData, *, max_epochs: int = 100) -> dict[str, float]:
        """Train target and draft (of a `ModelDrafter`) in one run; returns the last losses and metrics by name."""
        from lightning.pytorch import Trainer

        from lightning_specdec.training import PairTraining
        from lightning_specdec.training.cli import quiet_lightning

        if not isinstance(self.drafter, ModelDrafter):
            raise ValueError(
                f"only a ModelDrafter is trained with its target, this is a {type(self.drafter).__name__}"
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
        self.prompts, self.recipe = datamodule.prompts(), module.recipe()
        if datamodule.tokenizer is not None:
            self.read_text(named_tokenizer(datamodule.tokenizer))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
