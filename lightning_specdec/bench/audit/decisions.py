"""What a rule decides on guesses that it was given in a round, as a function of each of its uniform numbers.

Shapes: R rows, K guesses, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.bench.audit.intervals import LARGEST, STEPS, Steps, find_steps
from lightning_specdec.bench.audit.scripted import Played
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Place = tuple[int, int]
"""A row and a position."""
NOT_REACHED = -1


class Decisions:
    """The rule's verdicts on the rows of a round, with any noise.

    Args:
        rule, sampling: as in the round.
        played: a round with guesses.
        compact: whether to leave out the tokens that neither side can draw: a large vocabulary takes long. Rules
            that look beyond the distributions that are drawn from need all of them.
    """

    def __init__(self, rule: AcceptanceRule, sampling: Sampling, played: Played, *, compact: bool) -> None:
        assert played.draft is not None and played.logits is not None, "nobody guessed"
        self.rule, self.sampling, self.name = rule, sampling, type(rule).__name__
        self.guesses = played.guesses
        self.tokens, self.probs, self.draft_logits = played.draft.tokens, played.draft.probs, played.draft.logits
        self.lengths, self.logits = played.draft.lengths, played.logits
        self.names = torch.arange(self.logits.shape[-1], device=self.logits.device)
        if compact:
            self._leave_out()
        self.target_probs = sampling.probs(self.logits).double()
        """`[R, K + 1, V]`, what the target's tokens are drawn from."""

    def _leave_out(self) -> None:
        used = (self.sampling.probs(self.logits) > 0).flatten(0, 1).any(0)
        used[self.tokens.flatten()] = True
        if self.probs is not None:
            used |= (self.probs > 0).flatten(0, 1).any(0)  # a NaN behind a row's guesses is no mass
        self.names = used.nonzero()[:, 0]
        self.tokens = torch.searchsorted(self.names, self.tokens.contiguous())
        self.logits = self.logits[..., self.names]
        self.probs = None if self.probs is None else self.probs[..., self.names]
        self.draft_logits = None if self.draft_logits is None else self.draft_logits[..., self.names]

    def outcomes(
        self, rows: Int[Tensor, "N"], noise: Float[Tensor, "N K1 3"]
    ) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
        """How many guesses of each of these rows are kept with this noise, and which token follows them; on the CPU."""
        draft = Draft(
            self.tokens[rows],
            None if self.lengths is None else self.lengths[rows],
            None if self.probs is None else self.probs[rows],
            None if self.draft_logits is None else self.draft_logits[rows],
        )
        verdict = self.rule.judge(draft, self.logits[rows], self.sampling, noise.to(self.logits.device))
        return verdict.num_accepted.cpu(), self.names[verdict.next_tokens].cpu()

    def noise(self, rows: Int[Tensor, "N"], positions: Int[Tensor, "N"], *, rejected: bool) -> Float[Tensor, "N K1 3"]:
        """Numbers with which all guesses before a position are kept, and none at it if it is to be `rejected`, as far
        as numbers can do that; 0.5 elsewhere."""
        width = self.logits.shape[1]
        noise = torch.full((len(rows), width, len(Purpose)), 0.5)
        noise[..., Purpose.ACCEPT][self.before(positions)] = 0.0
        if rejected:
            noise[torch.arange(len(rows)), positions, Purpose.ACCEPT] = LARGEST
        if self.rule.ignores_windows:
            noise[..., Purpose.CORRECT] = torch.where(self.before(positions), self._own_numbers[rows], 0.5)
        return noise

    def before(self, positions: Int[Tensor, "N"]) -> Bool[Tensor, "N K1"]:
        """Which positions come before each of these."""
        return torch.arange(self.logits.shape[1]) < positions[:, None]

    @cached_property
    def _own_numbers(self) -> Float[Tensor, "R K1"]:
        """Numbers with which the target itself draws the rows' guesses."""
        probs, tokens = self.target_probs[:, :-1], self.tokens[..., None]
        middles = (probs.cumsum(-1) - probs / 2).gather(-1, tokens)[..., 0] / probs.sum(-1)
        return torch.nn.functional.pad(middles, (0, 1)).float().cpu()

    def kept_and_following(self, guessed: list[Place], ends: list[Place]) -> tuple[list[Steps], list[Steps]]:
        """At each guessed place whether the guess is kept (1), by the number that decides on it; and at each of `ends`
        the token that follows where the guess is not kept, or there is none, by the number that draws it
        (`NOT_REACHED` where it cannot be rejected)."""
        rows, positions = torch.tensor([*guessed, *ends]).unbind(1)
        parts = zip(rows.split([len(guessed), len(ends)]), positions.split([len(guessed), len(ends)]), strict=True)
        noise = torch.cat([self.noise(*part, rejected=i == 1) for i, part in enumerate(parts)])
        purposes = torch.tensor([Purpose.ACCEPT] * len(guessed) + [Purpose.CORRECT] * len(ends))

        def ask(which: Tensor, uniform: Tensor) -> Tensor:
            at = rows[which], positions[which], purposes[which]
            kept, following = self._decided(*at, noise[which], uniform)
            return torch.where(at[2] == Purpose.ACCEPT, kept.long(), following)

        found = find_steps(ask, len(rows), name=self.name)
        return found[: len(guessed)], found[len(guessed) :]

    def settled(self, places: list[Place]) -> list[Steps]:
        """The token that each place ends up with, kept or not, by the number that the target draws with."""
        rows, positions = torch.tensor(places).unbind(1)
        noise = self.noise(rows, positions, rejected=False)
        purposes = torch.full_like(rows, Purpose.CORRECT)
        guesses = torch.nn.functional.pad(self.names[self.tokens].cpu(), (0, 1), value=NOT_REACHED)

        def ask(which: Tensor, uniform: Tensor) -> Tensor:
            row, at = rows[which], positions[which]
            kept, following = self._decided(row, at, purposes[which], noise[which], uniform)
            return torch.where(kept, guesses[row, at], following)

        return find_steps(ask, len(rows), name=self.name)

    def changes(self, places: list[Place], generator: torch.Generator) -> set[int]:
        """Rows where a decision at one of these places changes while the number that it should be made by stays, and
        the others are another time the smallest, the largest and random ones: whether the guess is kept, and which
        token follows where it is not."""
        rows, positions = torch.tensor(places).unbind(1)
        found: set[int] = set()
        coupled = self.rule.ignores_windows
        for purpose in (Purpose.CORRECT,) if coupled else (Purpose.ACCEPT, Purpose.CORRECT):
            base = self.noise(rows, positions, rejected=purpose is Purpose.CORRECT)
            earlier, own = Purpose.CORRECT if coupled else Purpose.ACCEPT, torch.rand(len(rows), generator=generator)
            verdicts = []
            for scale, shift in ((0.0, 0.0), (0.0, LARGEST), (1.0, 0.0), (1.0, 0.0)):
                noise = torch.rand(base.shape, generator=generator) * scale + shift
                noise[..., earlier] = torch.where(self.before(positions), base[..., earlier], noise[..., earlier])
                if purpose is Purpose.CORRECT and not coupled:
                    noise[torch.arange(len(rows)), positions, Purpose.ACCEPT] = LARGEST
                kept, following = self._decided(rows, positions, torch.full_like(rows, purpose), noise, own)
                verdicts.append(kept.long() if purpose is Purpose.ACCEPT else following)
            found |= set(rows[(torch.stack(verdicts) != verdicts[0]).any(0)].tolist())
        return found

    def _decided(
        self,
        rows: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        purposes: Int[Tensor, "N"],
        noise: Float[Tensor, "N K1 3"],
        uniform: Float[Tensor, "N"],
    ) -> tuple[Bool[Tensor, "N"], Int[Tensor, "N"]]:
        """Of each place, with this number in its noise: whether the guess is kept, and the token that follows where the
        round ends there (`NOT_REACHED` where it does not)."""
        noise = noise.clone()
        noise[torch.arange(len(rows)), positions, purposes] = uniform
        accepted, token = self.outcomes(rows, noise)
        return accepted > positions, torch.where(accepted == positions, token, NOT_REACHED)

    def with_guesses_of_rank(self, rank: int) -> Decisions:
        """The same with the target's likeliest tokens (0), or its second ones, in the place of the guesses."""
        other = copy(self)
        other.tokens = self.target_probs[:, :-1].argsort(-1, descending=True)[..., rank]
        return other

    def places(self) -> list[Place]:
        """All places that a round may come to: those of each row's guesses that are reachable, and that behind them."""
        reachable = self.reachable().tolist()
        rows = enumerate(self.guesses)
        return [(row, i) for row, guesses in rows for i in range(len(guesses) + 1) if reachable[row][i]]

    def reachable(self, least: float = 64 / STEPS) -> Int[Tensor, "R K1"]:
        """Whether the target can draw all guesses before a position, with more than a vanishing chance."""
        drawn = self.target_probs[:, :-1].gather(-1, self.tokens[..., None])[..., 0] > least
        return torch.nn.functional.pad(drawn.cumprod(1), (1, 0), value=1)
