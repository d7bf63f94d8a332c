"""Target, drafter and rule in one object: load, train, decode, measure; text in, text out."""

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
    made: Drafter = DRAFTERS.load(choice.name).for_target(target, **choice.settings)
    return made


class SpeculativeDecoder:
    """A target with its drafter.

    Args:
        target: the model whose output is wanted: a `LanguageModel`, or one that transformers has loaded.
        drafter: proposes draft tokens: a `Drafter`; a model, ours or of transformers, which is wrapped in a
            `ModelDrafter`; or a kind by name or import path, `{class_path: NAME, init_args: {...}}` where it has
            settings. Prompt lookup when None.
        tokenizer: the target's, ours or of transformers, where it has none yet.
        prompts: held-out prompts that belong to the pair, used where none are given.
        recipe: how the pair was made, as plain values; saved with it.
        num_draft_tokens: draft tokens per round where a call names none; "auto" for as many as pay, or a `Window`.
        drafts: all drafters of the target by name, where there are several.
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
        """The models that a source names; arguments and errors as of `checkpoints.load_pair` and of this class.

        Args:
            num_draft_tokens: the pair's or draft's own when None, else 3.
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
        """The pair of a file that `fit`, `export` or `save` wrote.

        Args:
            options: fields of `PairSource`, as `draft` (the name of one of its drafts), `drafter` (a name or an import
                path), `dtype`, `target` (where a target that lies elsewhere is now); and the arguments of `load`.
        """
        return cls._named(ckpt=os.fspath(path), **options)

    @classmethod
    def from_pretrained(cls, target: Any, draft: Any = None, **options: Any) -> SpeculativeDecoder:
        """A pretrained model of transformers with a draft model, a draft file, or prompt lookup.

        Args:
            target: a directory, a name on the hub, or a model (ours, or one that transformers has loaded).
            draft: the same for the draft; or a draft file.
            options: as of `from_checkpoint`.
        """
        return cls._named(target=target, draft=draft, **options)

    @classmethod
    def from_pair(cls, name: str, draft: Any = None, **options: Any) -> SpeculativeDecoder:
        """A pair of the registry (`list_pairs()`), with its own draft, types and window where no others are given."""
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
        """The same target and settings with another drafter, given as to the constructor."""
        other = copy(self)
        other.drafter, other._ready = _made(drafter, self.target), None
        return other

    def with_exit(self, exit_layer: int) -> SpeculativeDecoder:
        """The same target, its first `exit_layer` layers drafting; an `EarlyExitDrafter` keeps its output heads."""
        own = self.drafter if isinstance(self.drafter, EarlyExitDrafter) else None
        return self.with_drafter(EarlyExitDrafter(exit_layer) if own is None else own.at(exit_layer))

    def save(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write the pair, and the target's other drafters, as a checkpoint for decoding (`X.safetensors`)."""
        name = next((name for name, each in self.drafts.items() if each is self.drafter), checkpoint.MAIN)
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
        """Write the drafter as a draft file (`X.safetensors`), for this target and no other.

        Args:
            dtype: store weights in this type, for a smaller file, as of `checkpoints.save`.
        """
        checkpoint.save(path, TargetReference.of(self.target), self.drafter, recipe=self.recipe, dtype=dtype)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's; None where prompts and output are tokens alone."""
        return self.target.tokenizer

    def read_text(self, tokenizer: Tokenizer) -> None:
        """From now on, take prompts and give output as text by the tokenizer that the target was trained with."""
        self.target.tokenizer, self.target.vocabulary = tokenizer, tokenizer.vocabulary

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokenizer's tokens that end a row, where a call names none."""
        tokens = () if self.tokenizer is None else self.tokenizer.eos
        return tuple(sorted(token for token in tokens if token < self.target.vocab_size))

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, as `decode` takes it: with the special tokens that the model expects."""
        return self._tokenizer().encode(text)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """A chat's tokens, by the target's chat template, up to where the answer begins; a string is its only message.

        Raises:
            ValueError: the target has no tokenizer, or no chat template.
        """
        turns: Sequence[Any] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self._tokenizer().encode_chat(turns)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer: give prompts as tokens, or load it with its tokenizer")
        return self.tokenizer

    def _tokens(self, prompts: TextPrompts | None) -> list[list[int]]:
        """The prompts as tokens, text encoded; the pair's own when None."""
        if prompts is None:
            return self.prompts
        listed: Any = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(listed, list | tuple) and listed and all(isinstance(prompt, str) for prompt in listed):
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
                row.text = text.push(row.tokens, hold=row.num_hidden) + text.finish(drop=row.num_hidden)
        return result

    def ready(self) -> tuple[LanguageModel, Drafter]:
        """Target and drafter as decoding uses them: packed and fused, and made anew when weights have changed."""
        with self._lock:
            weights = weights_stamp(self.target, self.drafter)
            if self._ready is None or self._ready[0] != weights:
                self.target.eval()
                self.drafter.eval()
                target = self.target.packed()
                self._ready = weights, target, self.drafter.fused(target)
            return self._ready[1:]

    def config(self, config: Config = None, **changes: Any) -> DecodingConfig:
        """The config with these changes, and with this decoder's window and the tokenizer's EOS where it names none."""
        config = DecodingConfig.of(config, **changes)
        own: dict[str, Any] = {"num_draft_tokens": self.num_draft_tokens, "eos": self.eos}
        missing = {name: value for name, value in own.items() if getattr(config, name) is None}
        return config.changed(**missing) if missing else config

    def window(self, config: Config = None, *, batch_size: int = 1, **changes: Any) -> int | Window:
        """The window that a call decodes with; "auto" measures costs, once for each pair, machine and settings."""
        config = self.config(config, **changes)
        if config.num_draft_tokens != "auto":
            chosen: int | Window = config.num_draft_tokens
            return chosen
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
        """Decode speculatively.

        Args:
            prompts: tokens of one prompt, of several of any lengths, a tensor `[T]` or `[B, T]`; a tokenizer's output
                with its attention mask; or text, as it is.
            config: how to decode; `changes` replace fields of it. The window is the decoder's, EOS the tokenizer's,
                where it names none.
            indices: the prompts' numbers, which their noise is keyed by; 0, 1, ... when None.

        Raises:
            ValueError: a setting or a prompt is wrong, or a row is padded and no attention mask says where.
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
        """Decode with the target alone, one call for each token; the arguments are those of `decode`."""
        config, tokens = self.config(config, **changes), self._tokens(prompts)
        with self._lock:
            return self._with_text(autoregressive_decode(self.ready()[0], tokens, config, indices=indices))

    def stream(self, prompts: TextPrompts, config: Config = None, **changes: Any) -> Iterator[tuple[int, int]]:
        """Decode speculatively and yield (prompt number, token) as tokens are committed; arguments as of `decode`."""
        return stream(self.session(prompts, config, **changes))

    def stream_text(self, prompts: TextPrompts, config: Config = None, **changes: Any) -> TextPieces:
        """Decode speculatively and yield pieces of text, of several prompts pairs (prompt number, piece).

        A prompt's pieces add up to its `RowResult.text`: what may become a stop string waits until it is none. Call
        `cancel` of what is returned, from any thread, to end it early. Arguments are those of `decode`.
        """
        session = self.session(prompts, config, **changes)
        return TextPieces(session, self._tokenizer(), numbered=not isinstance(prompts, str))

    def generate(
        self, inputs: Tensor | None = None, generation_config: Any = None, *, streamer: Any = None, **options: Any
    ) -> Any:
        """`generate` of transformers with its arguments, decoded speculatively, for a target of transformers.

        Rows padded on either side are read by their `attention_mask`; padding without one is refused. Greedy float32
        tokens are those of the row alone. `options` may hold `num_draft_tokens`, `rule` and `seed`, too; these, the
        result and errors are as of `lightning_specdec.generate`.
        """
        from lightning_specdec.hf_generate import generate_with

        return generate_with(self, inputs, generation_config, streamer, options)

    def as_generate(self, *, streamer: Any = None, stop_strings: str | Sequence[str] = ()) -> BoundGenerate:
        """This decoder as `custom_generate` of its target's own `generate`, in a pipeline of transformers too.

        It carries what transformers hands no function: a streamer, and strings that end a row.
        """
        from lightning_specdec.hf_generate import BoundGenerate

        return BoundGenerate(self, streamer, stop_strings, knows_mask=False)

    def session(
        self, prompts: TextPrompts, config: Config = None, *, indices: Sequence[int] | None = None, **changes: Any
    ) -> Session:
        """A session with these prompts in it, before its first round; arguments as of `decode`."""
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
        """Measure speculative beside standard decoding, in turn: `walltime_speedup`, rates, phases.

        Args:
            prompts: those that belong to the pair when None.
            config, changes: as of `decode`.
            repeats: timed runs of each method, after `warmup` others.
            batch_size: prompts that are decoded together.
            mode: "both", "standard" or "speculative".
        """
        from lightning_specdec.bench.measure import benchmark

        options: dict[str, Any] = {"repeats": repeats, "warmup": warmup, "batch_size": batch_size, "mode": mode}
        return benchmark(*self.ready(), self._tokens(prompts), self.config(config, **changes), **options)

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
        """Measure every drafter with every window, each beside standard decoding; gives each as it is measured.

        Args:
            prompts: those that belong to the pair when None.
            drafters: by name; all `candidates` when None.
            windows: draft tokens per round.
            repeats, warmup, batch_size: as of `benchmark`.
        """
        from lightning_specdec.bench.measure import sweep

        options: dict[str, Any] = {"windows": windows, "repeats": repeats, "warmup": warmup, "batch_size": batch_size}
        target, ready = self.ready()[0], self._all_drafters(drafters)
        return sweep(target, ready, self._tokens(prompts), self.config(config, **changes), **options)

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
        """Finds out whether every draft's output is the target's, as both decode here: see `Auditor`.

        Args:
            prompts: those that belong to the pair when None.
            drafters: by name; all `candidates` when None.
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
        """The drafters by name, ready to decode; all `candidates` when None."""
        from lightning_specdec.bench.candidates import candidates

        if drafters is None:
            drafters = {name: each.drafter for name, each in candidates(self).items()}
        return {name: drafter.eval().fused(self.target) for name, drafter in drafters.items()}

    def compile(self) -> float:
        """Compile the layers of transformers models, target and draft alike; gives the seconds that it took.

        Raises:
            ValueError: neither is a transformers model on a GPU.
        """
        from lightning_specdec.models.compiled import compile_layers
        from lightning_specdec.models.huggingface import HuggingFaceLM

        target, drafter = self.ready()
        models = [each for each in (target, getattr(drafter, "model", None)) if isinstance(each, HuggingFaceLM)]
        if not models:
            raise ValueError("only the layers of transformers models are compiled, and this pair has none")
        return sum((compile_layers(model) for model in models), start=0.0)

    def train(self, datamodule: TokenData, *, max_epochs: int = 100) -> dict[str, float]:
        """Train target and draft on the data, both in one run; gives the last losses and metrics by name."""
        from lightning.pytorch import Trainer

        from lightning_specdec.training import PairTraining
        from lightning_specdec.training.cli import quiet_lightning

        if not isinstance(self.drafter, ModelDrafter):
            raise ValueError(f"only a ModelDrafter is trained with its target, this is a {type(self.drafter).__name__}")
        if self.target.backend != "torch":
            raise ValueError(f"{self.target.backend} cannot train: load the pair with backend='torch'")
        quiet_lightning()
        self.target.origin = None  # training changes its weights
        module = PairTraining(self.target, self.drafter.model)
        trainer = Trainer(max_epochs=max_epochs, logger=False, enable_checkpointing=False, enable_model_summary=False)
        trainer.fit(module.train(), datamodule=datamodule)
        self.prompts, self.recipe = datamodule.prompts(), module.recipe()
        if datamodule.tokenizer is not None:
            self.read_text(named_tokenizer(datamodule.tokenizer))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
