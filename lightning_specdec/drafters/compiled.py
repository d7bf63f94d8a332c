"""A recurrent draft whose whole roll-out is one compiled call.

Knows nothing of sessions; it guesses what `ModelDrafter` guesses, with fewer launches.

Theory: a small draft spends its time on launching operations. Ahead-of-time compilation turns the roll-out of one row
(read two tokens, guess K) into one native function, without the guards that `torch.compile` checks at each call and
that cost more here than the arithmetic. Weights are arguments, so one compiled file serves every checkpoint of a shape.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_specdec.drafters.base import Context
from lightning_specdec.drafters.model import ModelDrafter
from lightning_specdec.models import DecodeState, FusedRNN, RecurrentState
from lightning_specdec.rules import Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

log = logging.getLogger(__name__)

FORMAT = 1
"""Counted up when the compiled function changes, so that files of another version are not loaded."""


class CompilerMissing(RuntimeError):
    """There is no C++ compiler on this machine; decoding works without one, more slowly."""


class _Program(nn.Module):
    """The roll-out as the compiler sees it: tensors in, tensors out."""

    def __init__(self, model: FusedRNN, num_tokens: int, sampling: Sampling) -> None:
        super().__init__()
        self.model, self.num_tokens, self.sampling = model, num_tokens, sampling

    def forward(
        self, weights: list[Tensor], tokens: Tensor, hidden: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        all_logits: list[Tensor] = []
        all_probs: list[Tensor] = []

        def choose(logits: Tensor, i: int) -> Tensor:
            token, probs = self.sampling.sample_with_probs(logits, uniform[:, i])
            all_logits.append(logits)
            all_probs.append(logits if probs is None else probs)
            return token

        chosen, states = self.model.with_weights(weights).unroll(tokens, hidden, self.num_tokens, choose)
        return chosen, states, torch.stack(all_logits, dim=1), torch.stack(all_probs, dim=1)


class CompiledDrafter(ModelDrafter):
    """A `ModelDrafter` over a recurrent network, compiled for single rows; batches take the uncompiled way.

    Args:
        drafter: what to compile: its model must have a fused recurrent form, on a CPU.
        num_draft_tokens: guesses per compiled call; shorter windows use its first ones.
        sampling: how guesses are drawn; compiled in.
        cache_dir: where compiled files are kept, `~/.cache/lightning_specdec` when None.

    Raises:
        CompilerMissing: no C++ compiler was found.
        ValueError: the draft is of a kind that this cannot compile.
    """

    def __init__(
        self, drafter: ModelDrafter, *, num_draft_tokens: int, sampling: Sampling, cache_dir: Path | None = None
    ) -> None:
        fused = drafter.model.fused()
        if not isinstance(fused, FusedRNN) or fused.device.type != "cpu":
            kind = f"{type(drafter.model).__name__} on {drafter.model.device}"
            raise ValueError(f"only a recurrent draft on a CPU can be compiled ahead of time, this one is {kind}")
        super().__init__(fused, sampling=drafter.sampling)
        self.num_draft_tokens = num_draft_tokens
        self.compiled_sampling = drafter.sampling or sampling
        self._weights = fused.weights()
        self._no_noise = torch.zeros(1, num_draft_tokens)
        self._hidden_size = fused.num_layers * fused.hidden_size
        program = _Program(fused, num_draft_tokens, self.compiled_sampling)
        path = self._path(cache_dir or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser())
        started = time.perf_counter()
        if not path.exists():
            self._compile(program, path)
        package = torch._inductor.aoti_load_package(str(path))
        # The loader itself: the package's own call checks and flattens its arguments anew each time.
        self._run = package.loader.run
        self.warmup_seconds = time.perf_counter() - started

    def _example(self) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        hidden = torch.zeros(1, self._hidden_size, dtype=self._weights[0].dtype)
        return self._weights, torch.zeros(1, 2, dtype=torch.long), hidden, torch.zeros(1, self.num_draft_tokens)

    def _path(self, cache_dir: Path) -> Path:
        """A name that changes with everything that the compiled code depends on."""
        shapes = [(tuple(weight.shape), str(weight.dtype)) for weight in self._weights]
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
        key = repr((FORMAT, machine, shapes, self.num_draft_tokens, self.compiled_sampling))
        return cache_dir / "lightning_specdec" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt2"

    def _compile(self, program: _Program, path: Path) -> None:
        if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
            raise CompilerMissing("no C++ compiler was found (g++, clang++ or $CXX): the draft runs uncompiled")
        log.info("compiling the draft, once for this machine: about 15 seconds")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.pt2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with torch.no_grad():
                exported = torch.export.export(program, self._example())
                torch._inductor.aoti_compile_and_package(exported, package_path=str(unfinished))
        unfinished.replace(path)

    def fused(self) -> CompiledDrafter:
        return self

    def roll(
        self,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        valid_lengths: Sequence[int] | None,
        num_guesses: int,
        context: Context,
        sampling: Sampling,
    ) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K V"] | None, Float[Tensor, "B K V"] | None]:
        num_rows, num_tokens = tokens.shape
        fits = num_rows == 1 and num_tokens >= 2 and num_guesses <= self.num_draft_tokens
        if not fits or (self.sampling or sampling) != self.compiled_sampling:
            return super().roll(state, tokens, valid_lengths, num_guesses, context, sampling)
        assert isinstance(state, RecurrentState)
        if num_tokens > 2:
            self.model(tokens[:, :-2], state, logits_for=slice(0, 0))
            tokens = tokens[:, -2:]
        uniform = self._no_noise if context.uniform is None else context.uniform
        if (missing := self.num_draft_tokens - uniform.shape[1]) > 0:
            uniform = nn.functional.pad(uniform, (0, missing))
        # Compiled code takes the strides of its example for granted.
        guesses, states, logits, probs = self._run([*self._weights, tokens, state.hidden(), uniform.contiguous()])
        state.append(states)
        return (
            guesses[:, :num_guesses],
            None if self.compiled_sampling.greedy else probs[:, :num_guesses],
            logits[:, :num_guesses] if context.wants_logits else None,
        )
