"""A recurrent draft whose whole roll-out is one compiled call.

Theory: a small draft spends its time on launching operations. Ahead-of-time compilation turns the roll-out of one row
(read what is new, guess K) into one native function, without the guards that `torch.compile` checks at each call and
that cost more here than the arithmetic. Weights are arguments, so one compiled file serves every checkpoint of a shape.
Two forms are compiled: for the two tokens that a round reads, and for up to `MOST_READ` of a prompt, padded on the left
with tokens that leave the state as it is.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.compiler import CompilerMissing, require_compiler
from lightning_specdec.drafters.base import Context
from lightning_specdec.drafters.model import ModelDrafter
from lightning_specdec.files import cache_home
from lightning_specdec.models import DecodeState, FusedRNN, LanguageModel, RecurrentState
from lightning_specdec.rules import Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["CompiledDrafter", "CompilerMissing"]

MOST_READ = 8
"""Tokens that the compiled roll-out can read before it guesses; what comes before them is read uncompiled."""

log = logging.getLogger(__name__)

FORMAT = 2
"""Counted up when the compiled function changes, so that files of another version are not loaded."""


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

        model = self.model.with_weights(weights)
        read: list[Tensor] = []
        for token in tokens[:, :-1].unbind(1):
            after = model.unroll(token[:, None].clamp(min=0), hidden, 1, lambda logits, i: token)[1][:, 0]  # noqa: B023
            hidden = torch.where(token[:, None] < 0, hidden, after)
            read.append(hidden)
        chosen, states = model.unroll(tokens[:, -1:], hidden, self.num_tokens, choose)
        states = torch.cat((torch.stack(read, dim=1), states), dim=1)
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
        if self.compiled_sampling.processors:
            raise ValueError("a roll-out with logits processors cannot be compiled: decode with the draft uncompiled")
        self._weights = fused.weights()
        self._no_noise = torch.zeros(1, num_draft_tokens, dtype=torch.float64)
        self._hidden_size = fused.num_layers * fused.hidden_size
        program = _Program(fused, num_draft_tokens, self.compiled_sampling)
        directory = cache_home() if cache_dir is None else cache_dir / "lightning_specdec"
        self._run = {num_read: self._load(program, num_read, directory) for num_read in (2, MOST_READ)}

    def _load(self, program: _Program, num_read: int, directory: Path) -> Callable[[list[Tensor]], list[Tensor]]:
        """The compiled function for `num_read` tokens, compiled now if this machine has not done so before."""
        # The name changes with everything that the compiled code depends on.
        shapes = [(tuple(weight.shape), str(weight.dtype)) for weight in self._weights]
        machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
        key = repr((_source_hash(), machine, shapes, num_read, self.num_draft_tokens, self.compiled_sampling))
        path = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt2"
        if not path.exists():
            hidden = torch.zeros(1, self._hidden_size, dtype=self._weights[0].dtype)
            tokens = torch.zeros(1, num_read, dtype=torch.long)
            _compile(program, (self._weights, tokens, hidden, self._no_noise), path)
        # The loader itself: the package's own call checks and flattens its arguments anew each time.
        run: Callable[[list[Tensor]], list[Tensor]] = torch._inductor.aoti_load_package(str(path)).loader.run
        return run

    def fused(self) -> CompiledDrafter:
        return self

    def roll(
        self,
        model: LanguageModel,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        valid_lengths: Sequence[int] | None,
        num_guesses: int,
        context: Context,
        sampling: Sampling,
    ) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K V"] | None, Float[Tensor, "B K V"] | None]:
        num_rows, num_tokens = tokens.shape
        fits = num_rows == 1 and num_guesses <= self.num_draft_tokens
        fits = fits and context.vocab_size in (None, self.model.vocab_size)
        if not fits or (self.sampling or sampling) != self.compiled_sampling:
            return super().roll(model, state, tokens, valid_lengths, num_guesses, context, sampling)
        assert isinstance(state, RecurrentState)
        if num_tokens > MOST_READ:
            self.model(tokens[:, :-MOST_READ], state, logits_for=slice(0, 0))
            tokens, num_tokens = tokens[:, -MOST_READ:], MOST_READ
        num_padded = 0 if num_tokens == 2 else MOST_READ - num_tokens
        if num_padded:
            tokens = nn.functional.pad(tokens, (num_padded, 0), value=-1)
        uniform = self._no_noise if context.uniform is None else context.uniform
        if (missing := self.num_draft_tokens - uniform.shape[1]) > 0:
            uniform = nn.functional.pad(uniform, (0, missing))
        # Compiled code takes the strides of its example for granted.
        inputs = [*self._weights, tokens, state.hidden(), uniform.double().contiguous()]
        guesses, states, logits, probs = self._run[tokens.shape[1]](inputs)
        state.append(states[:, num_padded:])
        return (
            guesses[:, :num_guesses],
            None if self.compiled_sampling.greedy else probs[:, :num_guesses],
            logits[:, :num_guesses] if context.wants_logits else None,
        )


@cache
def _source_hash() -> str:
    """Changes with the code that is compiled, so that files of another version are not loaded."""
    sources = (Path(inspect.getfile(part)).read_bytes() for part in (_Program, FusedRNN, Sampling))
    return hashlib.sha256(b"".join(sources)).hexdigest()


def _compile(program: _Program, example: tuple[Any, ...], path: Path) -> None:
    """Compile the program for inputs like the example's, into a file that is there whole or not at all."""
    require_compiler()
    log.info("compiling a roll-out, once for this machine and these settings: ten seconds or more")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.pt2")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(program, example)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(unfinished))
    unfinished.replace(path)
