"""What one round of the real loop commits, summed over its drafts and outcomes, against the target.

Of all rounds that commit the tokens s and continue behind them, the next token must have the target's distribution
behind s: P(s, t) = P(s, anything) * target_prob(t | s) for every s that can be drafted and every token t. Draft tokens
are drawn by inverse transform sampling from what the drafter reports, which is tested at both ends of each interval.
Each decision to keep a token and each correction belongs to an interval of uniform numbers, whose ends are asked of the
rule itself (`find_shares`). So P is a sum of products of intervals. That rounds commit what the rule decides, also in
rows of unequal windows, is tested at random numbers.

A round has V^K drafts, so the sampling keeps only the likeliest tokens (`top_k`), on both sides. The rarest drafts are
left out, and their probability is added to what may be rounding.

Shapes: N places, R rows of one text, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_specdec.audit.identity import difference, readings, rounding
from lightning_specdec.audit.stage import LARGEST, STEPS, Path, Played, Prefix, Stage, draft_tree
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, draw

TOLERANCE = 4e-6
"""What float32 does to a probability, and to a product of K + 1 of them."""
NUM_RANDOM = 16
"""Rows with random numbers, besides those of all drafts."""
MOST_OFF = 8.0
"""How many times what rounding does to a logit may lie between those of a round and those of a plain call: the measured
rounding is that of a few ways to read a text, and a round is one more. A logit of another place is off by far more."""
MOST_STEPS = 256
"""Steps that the functions searched together may have: so many, and so many more for each."""
NOT_REACHED = -1

Place = tuple[int, int]
"""A row and a position."""


@dataclass(frozen=True)
class RoundLaw:
    """How far one round is from the target.

    Args:
        num_drafts: drafts that the round can have; 0 where nothing was drafted, and then there is nothing else.
        error: largest difference between the probability of a committed token and what the target gives it; not
            measured where there are surprises.
        tolerance: what of that is rounding, or due to drafts too rare to be looked at.
        surprises: rows whose draft or outcome does not follow from their numbers.
        logits_error: largest difference of the round's logits from the target's own.
        logits_rounding: by how much rounding moves the target's own.
    """

    num_drafts: int
    error: float = 0.0
    tolerance: float = TOLERANCE
    surprises: int = 0
    logits_error: float = 0.0
    logits_rounding: float = 0.0

    @property
    def is_the_targets(self) -> bool:
        """Whether nothing distinguishes the round from standard decoding."""
        return not self.surprises and self.error <= self.tolerance and self.reads_right

    @property
    def reads_right(self) -> bool:
        """Whether the round judged by the target's own logits, of the right places."""
        return self.logits_error <= MOST_OFF * self.logits_rounding


@torch.inference_mode()
def measure_round(
    target: LanguageModel,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    rule: AcceptanceRule,
    sampling: Sampling,
    num_draft_tokens: int = 2,
    num_top: int = 4,
    seed: int = 0,
) -> RoundLaw:
    """The law of a round behind a prompt, on a `Stage`.

    Args:
        rule: a lossless one whose draft tokens are drawn with numbers for them alone, unlike those of `ExactMatch`.
        sampling: above temperature 0.
        seed: keys the numbers that nothing may depend on.
        num_top: likeliest tokens that each side may draw.

    Raises:
        ValueError: a round has too many drafts, or the rule is no function of its numbers.
    """
    few = replace(
        sampling, top_k=num_top if sampling.top_k is None else min(num_top, sampling.top_k)
    )
    stage = Stage(
        target, drafter, prompt, rule=rule, sampling=few, num_draft_tokens=num_draft_tokens
    )
    paths, ends, left_out = draft_tree(stage)
    if not any(path.tokens for path in paths):
        return RoundLaw(0)
    generator = torch.Generator().manual_seed(seed)
    random: list[list[float]] = [[]] * NUM_RANDOM
    played = stage.play([*(path.numbers for path in paths), *ends, *random], generator)
    ragged = stage.play(random, generator, ragged=True)
    surprises = _surprises(rule, few, played) + _surprises(rule, few, ragged)
    logits_error, logits_rounding = _logits(stage, played)
    law = RoundLaw(len(paths), 0.0, TOLERANCE, surprises, logits_error, logits_rounding)
    if surprises:
        return law
    right = {
        row: path for row, path in enumerate(paths) if tuple(played.drafted[row]) == path.tokens
    }
    left_out += sum(
        path.share for row, path in enumerate(paths) if row not in right
    )  # rounding made them others
    return replace(
        law,
        error=_error(right, Decisions(rule, few, played, generator)),
        tolerance=TOLERANCE + left_out,
    )


def _surprises(rule: AcceptanceRule, sampling: Sampling, played: Played) -> int:
    """Rows whose draft was not drawn from what the drafter reports, or that commit others than the rule decides."""
    if played.draft is None or played.logits is None:
        return 0
    draft, noise = played.draft, played.noise.to(played.logits.device)
    verdict = rule.judge(draft, played.logits, sampling, noise)
    drawn = draft.tokens
    if draft.probs is not None:
        drawn = draw(draft.probs, noise[:, : drawn.shape[1], rule.draft_purpose].contiguous())
    found, certain = 0, dict[Prefix, int]()
    ends = verdict.num_accepted.tolist(), verdict.next_tokens.tolist()
    rows = zip(played.drafted, drawn.tolist(), played.committed, *ends, strict=True)
    for drafted, own, committed, accepted, following in rows:
        if draft.probs is None:  # the same tokens, whatever the numbers
            own = [certain.setdefault(tuple(drafted[:i]), token) for i, token in enumerate(drafted)]
        decided = [*drafted[:accepted], following]
        found += drafted != own[: len(drafted)] or accepted > len(drafted) or committed != decided
    return found


def _logits(stage: Stage, played: Played) -> tuple[float, float]:
    """How far the round's logits are from the target's own, and what rounding does to these.

    Compared at every place that follows tokens which the target can draw.
    """
    assert played.logits is not None and played.draft is not None
    drafts, width = played.draft.tokens.tolist(), played.logits.shape[1]
    both = readings(stage.target, [[*stage.text, *tokens] for tokens in drafts], width, (None, 1))
    one, other = (stage.sampling.process(way, [stage.text] * len(drafts), drafts) for way in both)
    odds = stage.sampling.probs(one[:, :-1]).gather(-1, played.draft.tokens[..., None])[..., 0]
    reached = torch.nn.functional.pad((odds > 64 / STEPS).cumprod(1), (1, 0), value=1) > 0
    lengths = torch.tensor([[len(drafted)] for drafted in played.drafted], device=reached.device)
    reached &= torch.arange(width, device=reached.device) <= lengths
    error = difference(played.logits[reached], one[reached])
    return error, rounding(stage.target, [one[reached], other[reached]])


class Decisions:
    """What the rule decides on the drafts of a round, as a function of each of its uniform numbers.

    It sees only the tokens that either side can draw, since a large vocabulary takes long.
    """

    def __init__(
        self, rule: AcceptanceRule, sampling: Sampling, played: Played, generator: torch.Generator
    ) -> None:
        assert played.draft is not None and played.logits is not None, "nothing was drafted"
        self.rule, self.sampling, self.generator = rule, sampling, generator
        draft, logits = played.draft, played.logits
        used = (sampling.probs(logits) > 0).flatten(0, 1).any(0)
        used[draft.tokens.flatten()] = True
        if draft.probs is not None:
            used |= (draft.probs > 0).flatten(0, 1).any(0)  # a NaN behind a row's draft is no mass
        self.names = used.nonzero()[:, 0]
        self.tokens, self.lengths = (
            torch.searchsorted(self.names, draft.tokens.contiguous()),
            draft.lengths,
        )
        self.probs, self.draft_logits = (
            None if part is None else part[..., self.names] for part in (draft.probs, draft.logits)
        )
        self.logits = logits[..., self.names]
        self.target_probs = sampling.probs(self.logits).double()
        """`[R, K + 1, V]`, what the target's tokens are drawn from."""

    def search(self, places: Sequence[Place], purpose: Purpose) -> dict[Place, dict[int, float]]:
        """What is decided at each place, with its share of the numbers of that purpose.

        Of `ACCEPT`: 1 where the token there is kept. Of `CORRECT`: the token that follows where it is rejected, or
        `NOT_REACHED`. All numbers that must not matter are random.
        """
        rows, positions = torch.tensor(places).unbind(1)

        def ask(which: Tensor, uniform: Tensor) -> Tensor:
            row, position, each = rows[which], positions[which], torch.arange(len(which))
            noise = torch.rand(
                len(which), self.logits.shape[1], len(Purpose), generator=self.generator
            )
            noise[..., Purpose.ACCEPT][torch.arange(noise.shape[1]) < position[:, None]] = 0.0
            if purpose is Purpose.CORRECT:
                noise[each, position, Purpose.ACCEPT] = LARGEST
            noise[each, position, purpose] = uniform
            parts = (self.lengths, self.probs, self.draft_logits)
            lengths, probs, logits = (None if part is None else part[row] for part in parts)
            draft = Draft(self.tokens[row], lengths, probs, logits)
            verdict = self.rule.judge(
                draft, self.logits[row], self.sampling, noise.to(self.logits.device)
            )
            accepted, following = verdict.num_accepted.cpu(), self.names[verdict.next_tokens].cpu()
            if purpose is Purpose.ACCEPT:
                return (accepted > position).long()
            return torch.where(accepted == position, following, NOT_REACHED)

        name = type(self.rule).__name__
        return dict(
            zip(places, find_shares(ask, len(places), name=name) if places else [], strict=True)
        )


def _error(paths: dict[int, Path], decisions: Decisions) -> float:
    """How far the probability of a committed token is from what the target gives it, at most.

    Args:
        paths: the drafts, by their rows.
    """
    places = [(row, i) for row, path in paths.items() for i in range(len(path.tokens) + 1)]
    drafted = [(row, i) for row, i in places if i < len(paths[row].tokens)]
    stays, ends = (
        decisions.search(drafted, Purpose.ACCEPT),
        decisions.search(places, Purpose.CORRECT),
    )
    committed: dict[Prefix, Counter[int]] = defaultdict(Counter)
    seen: dict[Prefix, Place] = {}
    for row, path in paths.items():
        reached = path.share
        for i in range(len(path.tokens) + 1):
            prefix, stay = path.tokens[:i], stays.get((row, i), {}).get(1, 0.0)
            seen.setdefault(prefix, (row, i))
            for token, size in ends[row, i].items():
                if token != NOT_REACHED and stay < 1:
                    committed[prefix][token] += reached * (1 - stay) * size  # type: ignore[assignment]
            reached *= stay
            if not reached:
                break
            committed[prefix][path.tokens[i]] += reached  # type: ignore[assignment]
    worst = 0.0
    for prefix, tokens in committed.items():
        probs = decisions.target_probs[seen[prefix]]
        own = torch.tensor([tokens[name] for name in decisions.names.tolist()], dtype=torch.float64)
        worst = max(worst, difference(own, probs.cpu() * (own.sum() / probs.sum().cpu())))
    return worst


def find_shares(
    ask: Callable[[Tensor, Tensor], Tensor], num_functions: int, *, name: str, pieces: int = 8
) -> list[dict[int, float]]:
    """The share of the uniform numbers that each function gives each of its values.

    What lies between numbers with different values is cut into pieces again and again. A value that begins and ends
    between two numbers with one other value is not seen: where values ascend there is none.

    Args:
        ask: called with functions `[N]`, by number, and a uniform number `[N]` for each; gives their values `[N]`.
        name: of what is asked, for errors.
        pieces: many mean few calls of `ask` with many numbers each.

    Raises:
        ValueError: there are too many steps, as where the function depends on something else too.
    """

    def values_at(which: Tensor, numbers: Tensor) -> Tensor:
        return ask(which, numbers.double().div(STEPS).float())

    which, cuts = torch.arange(num_functions), torch.arange(pieces + 1)
    low, high = torch.zeros_like(which), torch.full_like(which, STEPS - 1)
    last = values_at(which, high)
    ends = [[(STEPS, value)] for value in last.tolist()]
    brackets = torch.stack((which, low, high, values_at(which, low), last))
    while (brackets := brackets[:, brackets[3] != brackets[4]]).numel():
        if brackets.shape[1] > MOST_STEPS * (1 + num_functions):
            raise ValueError(
                f"{name} is not a function of its random numbers, or one of too many steps"
            )
        narrow = brackets[2] - brackets[1] <= 1
        for i, _, end, before, _ in brackets[:, narrow].T.tolist():
            ends[i].append((end, before))
        which, low, high, before, after = brackets[:, ~narrow]
        points = low[:, None] + (high - low)[:, None] * cuts // pieces
        inner = values_at(which.repeat_interleave(pieces - 1), points[:, 1:-1].flatten()).unflatten(
            0, (-1, pieces - 1)
        )
        values = torch.cat((before[:, None], inner, after[:, None]), dim=1)
        parts = (
            which[:, None].expand(-1, pieces),
            points[:, :-1],
            points[:, 1:],
            values[:, :-1],
            values[:, 1:],
        )
        brackets = torch.stack([part.flatten() for part in parts])
    found = []
    for each in ends:
        shares, start = dict[int, float](), 0
        for end, value in sorted(each):
            shares[value] = shares.get(value, 0.0) + (end - start) / STEPS
            start = end
        found.append(shares)
    return found
