"""Target, draft and rule in one object: load, train, decode, measure."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from lightning_specdec import checkpoint, draft_file
from lightning_specdec.checks import require_int
from lightning_specdec.decoding import WindowChoice
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.measuring import Measuring
from lightning_specdec.models import LanguageModel
from lightning_specdec.pairs import get_pair
from lightning_specdec.pretrained import PretrainedOptions, Source, is_file, load_pair, pair_options
from lightning_specdec.rules import Sampling, SamplingOptions
from lightning_specdec.target_reference import forget_origin
from lightning_specdec.text.named import named_tokenizer

if TYPE_CHECKING:
    from lightning_specdec.data import TokenData

_MOST_GUESSES = 2**20


class SpeculativeDecoder(Measuring):
    """A target and what guesses for it, from their files to their figures; its arguments are those of `Decoding`."""

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        draft: str | None = None,
        drafter: Drafter | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        fuse_draft: bool = True,
        target: str | LanguageModel | None = None,
    ) -> SpeculativeDecoder:
        """The pair of a checkpoint that `fit` or `save` wrote; with a drafter, its target with that.

        Args:
            target: of a checkpoint whose target lies elsewhere, where that is now, or the target itself.
            draft: of a checkpoint with several drafts the one that guesses, by name; its main one when None.

        Raises:
            FileNotFoundError, ValueError: see `checkpoint.load`. Nothing in the file is run.
        """
        loaded = checkpoint.load(path, target=target)
        own = loaded.target.to(device, dtype)
        guessing = drafter or loaded.draft(draft)
        drafts = {name: each.to(device, dtype) for name, each in loaded.drafters.items()}
        decoder = cls(
            own,
            guessing,
            prompts=loaded.prompts,
            recipe=loaded.recipe,
            fuse_draft=fuse_draft,
            drafts=drafts if loaded.others else None,
        )
        if loaded.tokenizer is not None and decoder.tokenizer is None:
            try:
                decoder.read_text(named_tokenizer(loaded.tokenizer))
            except ValueError as error:
                raise ValueError(f"{path} was trained on the text of a tokenizer that is not here: {error}") from error
        return decoder

    @classmethod
    def from_pretrained(
        cls,
        target: Source | nn.Module,
        draft: Source | nn.Module | None = None,
        *,
        num_draft_tokens: WindowChoice | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> SpeculativeDecoder:
        """A pretrained model of transformers and what guesses for it: another model, a copy of fewer bits, n-grams.

        Args:
            target: a directory, a name on the hub, or a model (ours, or one that transformers has loaded).
            draft: the same for the draft; or a drafter, or a draft file; n-gram look-up when None.
            num_draft_tokens: see `SpeculativeDecoder`; a draft file's own when None.
            options: dtype, draft_dtype, device, quantization and draft_quantization ("int8", "int4"), drafter and
                drafter_arguments (a class of drafters by name), revision, draft_revision, trust_remote_code, pack: see
                `pretrained.load_pair`.

        Raises:
            ValueError: a model cannot be loaded, the models do not fit the memory, or do not fit each other.
        """
        return cls(*load_pair(target, draft, **options))._of_file(draft)._with_window(num_draft_tokens)

    @classmethod
    def from_pair(
        cls,
        name: str,
        draft: Source | nn.Module | None = None,
        *,
        num_draft_tokens: WindowChoice | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> SpeculativeDecoder:
        """A pair of the registry (`list_pairs()`), with its own draft, types and window where no others are given.

        The arguments and errors are those of `from_pretrained`.
        """
        pair = get_pair(name)
        own, merged = pair_options(pair, draft, options)
        try:
            loaded = load_pair(pair.target.place, own if draft is None else draft, **merged)
        except ValueError as error:
            advice = "".join(model.advice for model in pair.models if model.source in str(error))
            raise ValueError(f"{error}{advice}") from error
        return cls(*loaded)._with_window(pair.num_draft_tokens)._of_file(draft)._with_window(num_draft_tokens)

    def __repr__(self) -> str:
        window = self.num_draft_tokens
        target, drafter = type(self.target).__name__, type(self.drafter).__name__
        return f"SpeculativeDecoder({target} of {self.target.num_parameters:,} parameters, {drafter}, window {window})"

    def _with_window(self, num_draft_tokens: WindowChoice | None) -> SpeculativeDecoder:
        if num_draft_tokens is not None:
            self.num_draft_tokens = num_draft_tokens
        return self

    def _of_file(self, draft: object) -> SpeculativeDecoder:
        """With a draft file's recipe, and the window that it names."""
        if is_file(draft):
            assert isinstance(draft, str | os.PathLike)
            self.recipe = draft_file.read(draft).recipe
            if (window := self.recipe.get("num_draft_tokens")) is not None:
                self.num_draft_tokens = require_int(f"num_draft_tokens of {os.fspath(draft)}", window, 1, _MOST_GUESSES)
        return self

    def with_drafter(self, drafter: Drafter) -> SpeculativeDecoder:
        """The same target and settings with another draft."""
        return SpeculativeDecoder(
            self.target,
            drafter,
            prompts=self.prompts,
            recipe=self.recipe,
            fuse_draft=self.fuse_draft,
            num_draft_tokens=self.num_draft_tokens,
            drafts=self.drafts,
        )

    def with_exit(self, exit_layer: int) -> SpeculativeDecoder:
        """The same target, its first `exit_layer` layers guessing for it: any exit, see `exits`."""
        return self.with_drafter(self.exits([exit_layer])[exit_layer])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the pair, and what else can guess for the target, as a checkpoint for decoding."""
        checkpoint.save(
            path,
            self.target,
            self.drafter,
            prompts=self.prompts,
            recipe=self.recipe,
            others={name: each for name, each in self.drafts.items() if each is not self.drafter},
            name=next((name for name, each in self.drafts.items() if each is self.drafter), checkpoint.MAIN),
            tokenizer=None if self.tokenizer is None else self.tokenizer.name,
        )

    def save_draft(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Write what guesses as a draft file, for this target and no other: see `draft_file.save_draft`."""
        draft_file.save_draft(path, self.drafter, self.target, recipe=self.recipe, dtype=dtype)

    def compile(self, *, num_draft_tokens: int | None = None, **sampling: Unpack[SamplingOptions]) -> float:
        """Compile what can be: the layers of transformers models, target and draft alike; else the draft's roll-out.

        Returns, raises: as `compile_draft`, whose arguments these are.
        """
        target, drafter = self.ready()
        both: list[Any] = [target, getattr(drafter, "model", None)]
        models = [model for model in both if _is_of_transformers(model)]
        if not models:
            return self.compile_draft(num_draft_tokens=num_draft_tokens, **sampling)
        from lightning_specdec.models.compiled import compile_layers

        return sum((compile_layers(model) for model in models), start=0.0)

    def compile_draft(self, *, num_draft_tokens: int | None = None, **sampling: Unpack[SamplingOptions]) -> float:
        """Decode with the draft's roll-out compiled for these settings from now on.

        Args:
            num_draft_tokens: the largest window; the decoder's own when None.
            sampling: as of `decode`.

        Returns:
            the seconds that it took: some twenty for the first time on a machine, next to none after.

        Raises:
            CompilerMissing: no C++ compiler is there; decoding goes on with the fused draft.
            ValueError: this draft cannot be compiled.
        """
        from lightning_specdec.drafters.compiled import CompiledDrafter

        drafter, drawn = self.drafter, Sampling(**sampling)
        largest = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if not isinstance(drafter, ModelDrafter):
            raise ValueError(f"only a ModelDrafter can be compiled, this is a {type(drafter).__name__}")
        if not isinstance(largest, int):
            raise ValueError("a draft is compiled for a fixed window: give num_draft_tokens as an integer")

        def compiled() -> Drafter:
            return CompiledDrafter(drafter, num_draft_tokens=largest, sampling=drawn)

        started, before = time.perf_counter(), self._make_ready
        self._make_ready, self._ready = compiled, None
        try:
            self.ready_drafter()
        except BaseException:
            self._make_ready = before
            raise
        return time.perf_counter() - started

    def train(self, datamodule: TokenData, *, max_epochs: int = 100) -> dict[str, float]:
        """Train target and draft on the data, both in one run, with Lightning's Trainer.

        Theory: each learns the next token by cross-entropy. The better the draft imitates the target, the more is kept.

        Returns:
            the last losses and metrics by name.
        """
        from lightning.pytorch import Trainer

        from lightning_specdec.training import PairTraining
        from lightning_specdec.training.cli import quiet_lightning

        if not isinstance(self.drafter, ModelDrafter):
            raise ValueError(f"only a ModelDrafter is trained with its target, this is a {type(self.drafter).__name__}")
        require_int("max_epochs", max_epochs, 1)
        quiet_lightning()
        forget_origin(self.target)
        module = PairTraining(self.target, self.drafter.model)
        trainer = Trainer(max_epochs=max_epochs, logger=False, enable_checkpointing=False, enable_model_summary=False)
        trainer.fit(module.train(), datamodule=datamodule)
        self.prompts, self.recipe = datamodule.prompts(), module.recipe()
        if datamodule.tokenizer is not None:
            self.read_text(named_tokenizer(datamodule.tokenizer))
        self._ready = None  # torch does not count what a fused optimizer writes as a change
        return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _is_of_transformers(model: object) -> bool:
    """Whether this is a `HuggingFaceLM`, found out without importing transformers."""
    return type(model).__module__ == "lightning_specdec.models.huggingface"
