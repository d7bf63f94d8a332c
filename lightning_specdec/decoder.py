"""Target, draft and rule in one object: train, decode, measure.

Knows nothing of how any of them works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lightning_specdec import checkpoint
from lightning_specdec.bench.pair import compare
from lightning_specdec.bench.runner import Benchmark
from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.inference import (
    DecodeResult,
    autoregressive_decode,
    open_session,
    run,
    stream,
)
from lightning_specdec.inference.rows import Prompts
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling, SamplingOptions

if TYPE_CHECKING:
    from lightning_specdec.data import SequenceData


class SpeculativeDecoder:
    """A target and what guesses for it.

    Theory: the draft guesses several tokens cheaply, the target checks them in one call, and the rule keeps what leaves
    the output as it would have been. Everything that decodes here goes through `Session` and `autoregressive_decode`.

    Args:
        target: the model whose output is wanted.
        drafter: what guesses; a `LanguageModel` is wrapped in a `ModelDrafter`.
        prompts: held-out prompts that belong to the pair, used where none are given.
        recipe: how the pair was made, as plain values; saved with it.
        fuse_draft: whether to decode with the drafter's fused form. The output is the same; only the time differs.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | LanguageModel,
        *,
        prompts: Sequence[Sequence[int]] = (),
        recipe: dict[str, Any] | None = None,
        fuse_draft: bool = True,
    ) -> None:
        self.target = target
        self.drafter = ModelDrafter(drafter) if isinstance(drafter, LanguageModel) else drafter
        self.drafter.check_target(target)
        self.prompts = [list(prompt) for prompt in prompts]
        self.recipe = recipe or {}
        self.fuse_draft = fuse_draft
        self._make_ready: Callable[[], Drafter] = self._fused
        self._ready: tuple[object, Drafter] | None = None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        fuse_draft: bool = True,
    ) -> SpeculativeDecoder:
        """The pair of a checkpoint that `fit` or `save` wrote.

        Raises:
            FileNotFoundError, ValueError: see `checkpoint.load`. Nothing in the file is run.
        """
        loaded = checkpoint.load(path)
        target, drafter = loaded.target.to(device, dtype), loaded.drafter.to(device, dtype)
        return cls(target, drafter, prompts=loaded.prompts, recipe=loaded.recipe, fuse_draft=fuse_draft)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the pair as a checkpoint for decoding."""
        checkpoint.save(path, self.target, self.drafter, prompts=self.prompts, recipe=self.recipe)

    def ready_drafter(self) -> Drafter:
        """The drafter as decoding uses it: fused or compiled, and made anew when its weights have changed."""
        weights = [(id(weight), weight._version) for weight in self.drafter.parameters()]
        if self._ready is None or self._ready[0] != weights:
            self.target.eval()
            self.drafter.eval()
            self._ready = weights, self._make_ready()
        return self._ready[1]

    def _fused(self) -> Drafter:
        return self.drafter.fused() if self.fuse_draft else self.drafter

    def decode(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> DecodeResult:
        """Decode speculatively.

        Args:
            prompts: tokens of one prompt, of several of any lengths, or a tensor `[T]` or `[B, T]`.
            max_new_tokens: new tokens of each row at most.
            num_draft_tokens: guesses per round.
            rule: what keeps or rejects them; `ExactMatch()` when None.
            eos: tokens that stop a row; kept in the output.
            seed: the same seed gives the same tokens.
            logprobs: whether each token's log probability under the target is wanted.
            sampling: temperature (0, greedy, when not given), top_k, top_p, min_p: see `Sampling`.
        """
        session = open_session(
            self.target,
            self.ready_drafter(),
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=Sampling(**sampling),
            eos=eos,
            seed=seed,
            logprobs=logprobs,
        )
        return run(session)

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[tuple[int, int]]:
        """Decode speculatively and yield (prompt number, token) as tokens are settled; arguments as of `decode`."""
        session = open_session(
            self.target,
            self.ready_drafter(),
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=Sampling(**sampling),
            eos=eos,
            seed=seed,
        )
        return stream(session)

    def decode_standard(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> DecodeResult:
        """Decode with the target alone, one call for each token; the arguments are those of `decode`."""
        self.target.eval()
        return autoregressive_decode(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(**sampling),
            eos=eos,
            seed=seed,
            logprobs=logprobs,
        )

    def compile_draft(self, *, num_draft_tokens: int = 3, **sampling: Unpack[SamplingOptions]) -> float:
        """Decode with the draft's roll-out compiled for these settings from now on.

        Returns:
            the seconds that it took: some twenty for the first time on a machine, next to none after.

        Raises:
            CompilerMissing: no C++ compiler is there; decoding goes on with the fused draft.
            ValueError: this draft cannot be compiled.
        """
        from lightning_specdec.drafters.compiled import CompiledDrafter

        drafter, drawn = self.drafter, Sampling(**sampling)
        if not isinstance(drafter, ModelDrafter):
            raise ValueError(f"only a ModelDrafter can be compiled, this is a {type(drafter).__name__}")

        def compiled() -> Drafter:
            return CompiledDrafter(drafter, num_draft_tokens=num_draft_tokens, sampling=drawn)

        started, before = time.perf_counter(), self._make_ready
        self._make_ready, self._ready = compiled, None
        try:
            self.ready_drafter()
        except BaseException:
            self._make_ready = before
            raise
        return time.perf_counter() - started

    def benchmark(
        self,
        prompts: Prompts | None = None,
        *,
        max_new_tokens: int = 7,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
        repeats: int = 10,
        warmup: int = 3,
        batch_size: int = 1,
        mode: str = "both",
        equal_treatment: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Benchmark:
        """Decode both ways again and again, interleaved, and measure; see `Benchmark` for the figures.

        Args:
            prompts: those that belong to the pair when None.
            repeats: runs that are timed each way, after `warmup` that are not.
            batch_size: prompts that are decoded together.
            mode: "both", "standard" or "speculative".
            equal_treatment: whether to measure with the target fused on both sides too.

        The rest are those of `decode`.
        """
        drafter = self.ready_drafter()
        return compare(
            self.target,
            drafter,
            self.prompts if prompts is None else prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=Sampling(**sampling),
            eos=eos,
            seed=seed,
            logprobs=logprobs,
            repeats=repeats,
            warmup=warmup,
            batch_size=batch_size,
            mode=mode,
            equal_treatment=equal_treatment,
        )

    def train(self, datamodule: SequenceData, *, max_epochs: int = 100) -> dict[str, float]:
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
        module = PairTraining(self.target, self.drafter.model)
        trainer = Trainer(max_epochs=max_epochs, logger=False, enable_checkpointing=False, enable_model_summary=False)
        trainer.fit(module.train(), datamodule=datamodule)
        self.prompts, self.recipe = datamodule.prompts(), module.recipe()
        self._ready = None  # torch does not count what a fused optimizer writes as a change
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
