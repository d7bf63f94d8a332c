"""Target, draft and rule in one object: train, decode, measure.

Knows nothing of how any of them works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_specdec import checkpoint
from lightning_specdec.bench.rolled import rolled_decode
from lightning_specdec.bench.runner import Benchmark, Way, interleave
from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.inference import (
    DecodeResult,
    Session,
    autoregressive_decode,
    open_session,
    run,
    speculative_decode,
    stream,
)
from lightning_specdec.inference.rows import Prompts, check_batch
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling

if TYPE_CHECKING:
    from lightning_specdec.data import SequenceData
    from lightning_specdec.drafters.compiled import CompiledDrafter


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
        self._ready: Drafter | None = None

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
        """The drafter as decoding uses it: fused once, at first use."""
        if self._ready is None:
            self.target.eval()
            self.drafter.eval()
            self._ready = self.drafter.fused() if self.fuse_draft else self.drafter
        return self._ready

    def session(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> Session:
        """A session with these prompts in it; see `open_session` for the arguments."""
        return open_session(
            self.target,
            self.ready_drafter(),
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=sampling,
            eos=eos,
            seed=seed,
            logprobs=logprobs,
        )

    def decode(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> DecodeResult:
        """Decode speculatively.

        Args:
            prompts: tokens of one prompt, of several of any lengths, or a tensor `[T]` or `[B, T]`.
            max_new_tokens: new tokens of each row at most.
            num_draft_tokens: guesses per round.
            rule: what keeps or rejects them; `ExactMatch()` when None.
            temperature, top_k, top_p, min_p: see `Sampling`.
            eos: tokens that stop a row; kept in the output.
            seed: the same seed gives the same tokens.
            logprobs: whether each token's log probability under the target is wanted.
        """
        return run(
            self.session(
                prompts,
                max_new_tokens=max_new_tokens,
                num_draft_tokens=num_draft_tokens,
                rule=rule,
                sampling=Sampling(temperature, top_k, top_p, min_p),
                eos=eos,
                seed=seed,
                logprobs=logprobs,
            )
        )

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> Iterator[tuple[int, int]]:
        """Decode speculatively and yield (prompt number, token) as tokens are settled; `session` has the arguments."""
        session = self.session(
            prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            sampling=sampling,
            eos=eos,
            seed=seed,
        )
        return stream(session)

    def decode_standard(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> DecodeResult:
        """Decode with the target alone, one call for each token; the arguments are those of `decode`."""
        self.target.eval()
        return autoregressive_decode(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, min_p),
            eos=eos,
            seed=seed,
            logprobs=logprobs,
        )

    def compile_draft(self, *, num_draft_tokens: int = 3, sampling: Sampling | None = None) -> float:
        """Decode with the draft's roll-out compiled for these settings from now on.

        Returns:
            the seconds that it took: some ten for the first time on a machine, next to none after.

        Raises:
            CompilerMissing: no C++ compiler is there; decoding goes on with the fused draft.
            ValueError: this draft cannot be compiled.
        """
        compiled = self._compiled(self.drafter, num_draft_tokens=num_draft_tokens, sampling=sampling)
        self._ready = compiled
        return compiled.warmup_seconds

    def _compiled(self, drafter: Drafter, *, num_draft_tokens: int, sampling: Sampling | None) -> CompiledDrafter:
        from lightning_specdec.drafters.compiled import CompiledDrafter

        if not isinstance(drafter, ModelDrafter):
            raise ValueError(f"only a ModelDrafter can be compiled, this is a {type(drafter).__name__}")
        return CompiledDrafter(drafter, num_draft_tokens=num_draft_tokens, sampling=sampling or Sampling())

    def benchmark(
        self,
        prompts: Prompts | None = None,
        *,
        max_new_tokens: int = 7,
        num_draft_tokens: int = 3,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
        repeats: int = 10,
        warmup: int = 3,
        batch_size: int = 1,
        mode: str = "both",
        equal_treatment: bool = False,
    ) -> Benchmark:
        """Decode both ways again and again, interleaved, and measure.

        Two figures stand side by side. `walltime_speedup`: the target is called the same way on both sides, once for
        each token against once a round, and the draft is fused or compiled. `equal_treatment_speedup`: the standard
        side is as fused as the draft's roll-out is, compiled if that is compiled, and speculation verifies with the
        fused target.

        Args:
            prompts: those that belong to the pair when None.
            repeats: runs that are timed each way, after `warmup` that are not.
            batch_size: prompts that are decoded together.
            mode: "both", "standard" or "speculative".
            equal_treatment: whether to measure the second figure too.

        The rest are those of `session`.
        """
        if mode not in ("both", "standard", "speculative"):
            raise ValueError(f"mode must be both, standard or speculative, got {mode!r}")
        given = self.prompts if prompts is None else prompts
        batch = check_batch(given, self.target.vocab_size, max_new_tokens=max_new_tokens, indices=None)
        texts = [text for _, text in batch]
        drafter, sampling, started = self.ready_drafter(), sampling or Sampling(), time.perf_counter()
        shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos": eos, "seed": seed}
        guessing = {**shared, "num_draft_tokens": num_draft_tokens, "rule": rule, "logprobs": logprobs}
        ways: dict[str, Way] = {}
        if mode != "speculative":
            ways["standard"] = lambda batch, indices: autoregressive_decode(
                self.target, batch, indices=indices, logprobs=logprobs, **shared
            )
        if mode != "standard":
            ways["speculative"] = lambda batch, indices: speculative_decode(
                self.target, drafter, batch, indices=indices, **guessing
            )
        if mode == "both" and equal_treatment:
            fused, rollout = self.target.fused(), ModelDrafter(self.target).fused()
            if type(drafter) is not type(rollout):
                rollout = self._compiled(rollout, num_draft_tokens=num_draft_tokens + 1, sampling=sampling)
            ways["rolled_standard"] = lambda batch, indices: rolled_decode(
                rollout, batch, indices=indices, chunk=num_draft_tokens + 1, **shared
            )
            ways["rolled_speculative"] = lambda batch, indices: speculative_decode(
                fused, drafter, batch, indices=indices, **guessing
            )
        prepared = time.perf_counter() - started
        runs, warmup_seconds, interrupted = interleave(
            ways, texts, repeats=repeats, warmup=warmup, batch_size=batch_size
        )
        return Benchmark(
            standard=runs.get("standard"),
            speculative=runs.get("speculative"),
            rolled_standard=runs.get("rolled_standard"),
            rolled_speculative=runs.get("rolled_speculative"),
            warmup_seconds=prepared + warmup_seconds,
            num_draft_tokens=num_draft_tokens,
            interrupted=interrupted,
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
        self.prompts, self.recipe, self._ready = datamodule.prompts(), module.recipe(), None
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
