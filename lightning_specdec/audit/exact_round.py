"""What one round of the real loop commits, summed over its drafts and outcomes, against the target.

Of all rounds that commit the tokens s and go on behind them, the next token must be drawn from the target's
distribution behind s: P(s, t) = P(s, anything) * target_prob(t | s) for every s that can be drafted and every token t.
Each draft token, each decision to keep one and each correction belongs to an interval of uniform numbers, so P is a sum
of products of intervals, whose ends are asked of the code itself (`find_steps`). That each decision depends on its own
number alone, and that rounds commit what the rule decides, in rows of unequal windows too, is tested at random numbers.
Rules whose output is the same whatever is drafted (`ExactMatch`) commit the target's own draw behind every draft.

A round has V^K drafts, so the sampling keeps only the likeliest tokens (`top_k`), on both sides. The rarest drafts are
left out, and their chance is added to what may be rounding.

Shapes: N places, R rows of one text, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.audit.identity import difference, readings, rounding
from lightning_specdec.audit.intervals import LARGEST, STEPS, NoFunction, Steps, find_steps
from lightning_specdec.audit.stage import RESOLUTION, Played, Prefix, Stage, Tree, draft_tree
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

TOLERANCE = 4e-6
"""What float32 does to a probability, and to a product of K + 1 of them."""
NUM_RANDOM, NUM_COUPLED = 16, 48
"""Rows with random numbers, besides those of all drafts; and where the drafts are not gone through."""
NUM_FORGED = 4
"""Likeliest tokens of the target that are put in a draft token's place, and rows in which they are."""
MOST_OFF = 8.0
"""How many times what rounding does to a logit may lie between those of a round and those of a plain call: the measured
rounding is that of a few ways to read a text, and a round is one more. A logit of another place is off by far more."""
NOT_REACHED = -1

Place = tuple[int, int]
"""A row and a position."""
Trees = dict[tuple[Drafter, Sampling, int, Purpose, Prefix], Tree]
"""By drafter, sampling, width of a round, what draws, and the text that the round goes on from."""


@dataclass(frozen=True)
class RoundLaw:
    """How far one round is from the target.

    Args:
        num_drafts: drafts that the round can have; 0 where nothing was drafted, and then there is nothing else.
        error: largest difference between the probability of a committed token and what the target gives it.
        tolerance: what of that is rounding, or due to drafts too rare to be looked at.
        total_variation: between the distribution of a committed token and the target's, on the average token of a
            round.
        surprises: rows with random numbers that came out otherwise than the intervals foretell.
        logits_error: largest difference of the round's logits from the target's own.
        logits_rounding: by how much rounding moves the target's own.
    """

    num_drafts: int
    error: float = 0.0
    tolerance: float = TOLERANCE
    total_variation: float = 0.0
    surprises: int = 0
    logits_error: float = 0.0
    logits_rounding: float = 0.0

    @property
    def is_the_targets(self) -> bool:
        """Whether nothing tells the round from standard decoding."""
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
    trees: Trees | None = None,
) -> RoundLaw:
    """The law of a round behind a prompt, on a `Stage`.

    Args:
        sampling: above temperature 0.
        seed: keys the numbers of those rows that have random ones.
        num_top: likeliest tokens that each side may draw.
        trees: what is known of the drafts, and will be: most rules leave a drafter with the same ones.

    Raises:
        NoFunction: drafter or rule did otherwise with the same numbers.
        ValueError: a round has too many drafts, which a drafter with a sampling of its own may lead to.
    """
    few = replace(sampling, top_k=num_top if sampling.top_k is None else min(num_top, sampling.top_k))
    stage = Stage(target, drafter, prompt, rule=rule, sampling=few, num_draft_tokens=num_draft_tokens)
    if not stage.play(torch.full((1, stage.width, len(Purpose)), 0.5)).drafted[0]:
        return RoundLaw(0)
    generator, tree, num_rows = torch.Generator().manual_seed(seed), Tree(), NUM_COUPLED
    if not rule.ignores_windows:
        trees, key = {} if trees is None else trees, (drafter, few, stage.width, rule.draft_purpose, tuple(stage.text))
        tree = trees[key] = trees.get(key) or draft_tree(stage, seed)
        num_rows = len(tree.paths) + NUM_RANDOM
    noise = torch.rand(num_rows, stage.width, len(Purpose), generator=generator)
    for numbers, path in zip(noise, tree.paths, strict=False):
        numbers[: len(path.numbers), rule.draft_purpose] = torch.tensor(path.numbers)
    played, ragged = stage.play(noise), stage.play(noise[-NUM_RANDOM:], ragged=True)
    decisions = Decisions(rule, few, played)
    spread = decisions.spread()
    surprises = _unlike_the_rule(rule, few, played, noise) | decisions.changes(generator)
    surprises |= _unlike_the_rule(rule, few, ragged, noise[-NUM_RANDOM:])
    if rule.ignores_windows:
        laws, left_out = _own_draws(decisions), 0.0
    else:
        surprises |= _unlike_the_tree(tree, played, noise[..., rule.draft_purpose], 2 * spread + 2 * RESOLUTION / STEPS)
        laws, left_out = _sums(tree, decisions)
    error, variation = _apart(laws, decisions)
    logits_error, logits_rounding = _logits(stage, played, decisions)
    return RoundLaw(
        num_drafts=len(tree.paths) or len(set(map(tuple, played.drafted))),
        error=error,
        tolerance=TOLERANCE + left_out + 2 * stage.width * spread,
        total_variation=variation,
        surprises=len(surprises),
        logits_error=logits_error,
        logits_rounding=logits_rounding,
    )


class Decisions:
    """What the rule decides on the drafts of a round, as a function of each of its uniform numbers.

    A lossless rule sees only the tokens that either side can draw: a large vocabulary takes long. Others look beyond
    the distributions that are drawn from, and see all of them.
    """

    def __init__(self, rule: AcceptanceRule, sampling: Sampling, played: Played) -> None:
        assert played.draft is not None and played.logits is not None, "nothing was drafted"
        self.rule, self.sampling, self.drafted = rule, sampling, played.drafted
        draft, logits = played.draft, played.logits
        self.names = torch.arange(logits.shape[-1], device=logits.device)
        if rule.lossless:
            used = (sampling.probs(logits) > 0).flatten(0, 1).any(0)
            used[draft.tokens.flatten()] = True
            if draft.probs is not None:
                used |= (draft.probs > 0).flatten(0, 1).any(0)  # a NaN behind a row's draft is no mass
            self.names = used.nonzero()[:, 0]
            draft = Draft(
                torch.searchsorted(self.names, draft.tokens.contiguous()),
                draft.lengths,
                None if draft.probs is None else draft.probs[..., self.names],
                None if draft.logits is None else draft.logits[..., self.names],
            )
            logits = logits[..., self.names]
        self.draft, self.logits = draft, logits
        self.target_probs = sampling.probs(logits).double()
        """`[R, K + 1, V]`, what the target's tokens are drawn from."""
        odds = self.target_probs[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
        reachable = (odds > 64 / STEPS).cumprod(1)
        self.reachable = torch.nn.functional.pad(reachable, (1, 0), value=1).cpu()
        """`[R, K + 1]`, whether the target can draw all tokens before a position, with more than a vanishing chance."""
        ends = self.target_probs[:, :-1].cumsum(-1) - self.target_probs[:, :-1] / 2
        middles = ends.gather(-1, draft.tokens[..., None])[..., 0] / self.target_probs[:, :-1].sum(-1)
        self._own_numbers = torch.nn.functional.pad(middles, (0, 1)).float().cpu()
        """`[R, K + 1]`, numbers with which the target itself draws the rows' draft tokens."""

    @property
    def places(self) -> list[Place]:
        """All places that a round may come to: each row's reachable draft tokens, and the end behind them."""
        return [
            (row, i) for row, each in enumerate(self.drafted) for i in range(len(each) + 1) if self.reachable[row][i]
        ]

    def spread(self) -> float:
        """How far rows that should have the same distributions have them apart: what rounding does."""
        groups: dict[Prefix, list[Place]] = defaultdict(list)
        for row, i in self.places:
            groups[tuple(self.drafted[row][:i])].append((row, i))
        widest = 0.0
        for places in groups.values():
            drafting = [(row, i) for row, i in places if i < len(self.drafted[row])]
            for probs, some in ((self.target_probs, places), (self.draft.probs, drafting)):
                if probs is not None and len(some) > 1:
                    rows, at = torch.tensor(some).unbind(1)
                    widest = max(widest, float((probs[rows, at].amax(0) - probs[rows, at].amin(0)).max()))
        return widest

    def search(
        self,
        places: Sequence[Place],
        purpose: Purpose,
        value: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        rejected: bool = False,
        tokens: Int[Tensor, "R K"] | None = None,
    ) -> list[Steps]:
        """At each place what is decided there, by the number of that purpose.

        Args:
            value: of what `decided` gives, and the places' draft tokens.
            rejected: whether the draft token there is rejected, where numbers can do that.
            tokens: in the place of the draft's.
        """
        if not places:
            return []
        rows, positions = torch.tensor(places).unbind(1)
        noise, drafted = (
            self._noise(rows, positions, rejected=rejected),
            self.draft.tokens if tokens is None else tokens,
        )
        there = torch.nn.functional.pad(self.names[drafted].cpu(), (0, 1), value=NOT_REACHED)[rows, positions]

        def ask(which: Tensor, uniform: Tensor) -> Tensor:
            found = self._decided(rows[which], positions[which], purpose, noise[which], uniform, drafted)
            return value(*found, there[which])

        return find_steps(ask, len(places), name=type(self.rule).__name__)

    def changes(self, generator: torch.Generator) -> set[int]:
        """Rows where a decision changes while the number that it should be made by stays, and the others are another
        time the smallest, the largest and random ones: whether the token is kept, and which one follows if not."""
        rows, positions = torch.tensor(self.places).unbind(1)
        found: set[int] = set()
        coupled = self.rule.ignores_windows
        for purpose in (Purpose.CORRECT,) if coupled else (Purpose.ACCEPT, Purpose.CORRECT):
            base = self._noise(rows, positions, rejected=purpose is Purpose.CORRECT)
            earlier, own = Purpose.CORRECT if coupled else Purpose.ACCEPT, torch.rand(len(rows), generator=generator)
            verdicts = []
            for scale, shift in ((0.0, 0.0), (0.0, LARGEST), (1.0, 0.0), (1.0, 0.0)):
                noise = torch.rand(base.shape, generator=generator) * scale + shift
                noise[..., earlier] = torch.where(self._before(positions), base[..., earlier], noise[..., earlier])
                if purpose is Purpose.CORRECT and not coupled:
                    noise[torch.arange(len(rows)), positions, Purpose.ACCEPT] = LARGEST
                kept, following = self._decided(rows, positions, purpose, noise, own, self.draft.tokens)
                verdicts.append(kept.long() if purpose is Purpose.ACCEPT else following)
            found |= set(rows[(torch.stack(verdicts) != verdicts[0]).any(0)].tolist())
        return found

    def _before(self, positions: Int[Tensor, "N"]) -> Bool[Tensor, "N K1"]:
        """Which positions come before each of these."""
        return torch.arange(self.logits.shape[1]) < positions[:, None]

    def _noise(self, rows: Int[Tensor, "N"], positions: Int[Tensor, "N"], *, rejected: bool) -> Float[Tensor, "N K1 3"]:
        """Numbers with which all draft tokens before a position are kept, and none at it if it is to be `rejected`, as
        far as numbers can do that; 0.5 elsewhere."""
        noise = torch.full((len(rows), self.logits.shape[1], len(Purpose)), 0.5)
        noise[..., Purpose.ACCEPT][self._before(positions)] = 0.0
        if rejected:
            noise[torch.arange(len(rows)), positions, Purpose.ACCEPT] = LARGEST
        if self.rule.ignores_windows:
            noise[..., Purpose.CORRECT] = torch.where(self._before(positions), self._own_numbers[rows], 0.5)
        return noise

    def _decided(
        self,
        rows: Int[Tensor, "N"],
        positions: Int[Tensor, "N"],
        purpose: Purpose,
        noise: Float[Tensor, "N K1 3"],
        uniform: Float[Tensor, "N"],
        tokens: Int[Tensor, "R K"],
    ) -> tuple[Bool[Tensor, "N"], Int[Tensor, "N"]]:
        """Of each place, with this number in its noise: whether the token there is kept, and the token that follows
        where the round ends there (`NOT_REACHED` where it does not)."""
        noise = noise.clone()
        noise[torch.arange(len(rows)), positions, purpose] = uniform
        whole = self.draft.lengths, self.draft.probs, self.draft.logits
        lengths, probs, logits = (None if part is None else part[rows] for part in whole)
        draft = Draft(tokens[rows], lengths, probs, logits)
        verdict = self.rule.judge(draft, self.logits[rows], self.sampling, noise.to(tokens.device))
        accepted, following = verdict.num_accepted.cpu(), self.names[verdict.next_tokens].cpu()
        return accepted > positions, torch.where(accepted == positions, following, NOT_REACHED)


def _unlike_the_rule(rule: AcceptanceRule, sampling: Sampling, played: Played, noise: Tensor) -> set[int]:
    """Rows that committed other tokens than the rule decides with their numbers."""
    if played.draft is None or played.logits is None:
        return set()
    one, two = (rule.judge(played.draft, played.logits, sampling, noise.to(played.logits.device)) for _ in range(2))
    both = [(each.num_accepted.tolist(), each.next_tokens.tolist()) for each in (one, two)]
    if both[0] != both[1]:
        raise NoFunction(type(rule).__name__)
    rows = enumerate(zip(played.drafted, played.committed, *both[0], strict=True))
    return {i for i, (drafted, new, num, token) in rows if num > len(drafted) or new != [*drafted[:num], token]}


def _unlike_the_tree(tree: Tree, played: Played, numbers: Tensor, slack: float) -> set[int]:
    """Rows whose drafts are not those that the drafter's intervals foretell for their numbers."""
    found = set()
    for row, drafted in enumerate(played.drafted):
        for i, token in enumerate(drafted):
            steps, number = tree.steps.get(tuple(drafted[:i])), float(numbers[row, i])
            if steps is None or steps.is_near(number, slack):  # too rare to be known, or rounding decides
                break
            if steps.value(number) != token:
                found.add(row)
                break
    return found


def _logits(stage: Stage, played: Played, decisions: Decisions) -> tuple[float, float]:
    """How far the round's logits are from the target's own, and what rounding does to these."""
    assert played.logits is not None and played.draft is not None
    both = zip(played.drafted, played.draft.tokens.tolist(), strict=True)
    known = {tuple(drafted): [*stage.text, *tokens] for drafted, tokens in both}
    places, drafts = torch.arange(stage.width), [list(each) for each in known]
    read = readings(stage.target, [*known.values()], stage.width, (None, 1))
    read = [stage.sampling.process(way, [stage.text] * len(drafts), drafts) for way in read]
    counted = (decisions.reachable > 0) & (places <= torch.tensor([[len(each)] for each in played.drafted]))
    which = {drafted: i for i, drafted in enumerate(known)}
    own = torch.tensor([which[tuple(each)] for each in played.drafted])
    one, other = (way[own][counted] for way in read)
    return difference(played.logits[counted], one), rounding(stage.target, [one, other])


Laws = list[tuple[Place, Mapping[int, float]]]
"""Places, each with the probability of every token that is committed there."""


def _sums(tree: Tree, decisions: Decisions) -> tuple[Laws, float]:
    """What a round commits, summed over the tree's drafts, which are the first rows; and what was left out.

    Drafts that came out as others, which rounding does to the rarest, are left out too.
    """
    right = {row: path for row, path in enumerate(tree.paths) if tuple(decisions.drafted[row]) == path.tokens}
    left_out = tree.left_out + sum(path.share for row, path in enumerate(tree.paths) if row not in right)
    places = [(row, i) for row, path in right.items() for i in range(len(path.tokens) + 1)]
    drafted = [(row, i) for row, i in places if i < len(right[row].tokens)]
    stays = decisions.search(drafted, Purpose.ACCEPT, lambda kept, following, token: kept.long())
    ends = decisions.search(places, Purpose.CORRECT, lambda kept, following, token: following, rejected=True)
    kept, following = dict(zip(drafted, stays, strict=True)), dict(zip(places, ends, strict=True))
    committed: dict[Prefix, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    seen: dict[Prefix, Place] = {}
    for row, path in right.items():
        reached = path.share
        for i in range(len(path.tokens) + 1):
            prefix, stay = path.tokens[:i], kept[row, i].share(1) if (row, i) in kept else 0.0
            seen.setdefault(prefix, (row, i))
            for token, size, _ in following[row, i].parts:
                if token != NOT_REACHED and stay < 1:
                    committed[prefix][token] += reached * (1 - stay) * size
            reached *= stay
            if not reached:
                break
            committed[prefix][path.tokens[i]] += reached
    return [(seen[prefix], tokens) for prefix, tokens in committed.items()], left_out


def _own_draws(decisions: Decisions) -> Laws:
    """What is committed where each token is the target's own draw, whatever is drafted; so the target's likeliest
    tokens are put in the draft's place too."""
    first = {tuple(drafted): row for row, drafted in reversed([*enumerate(decisions.drafted)])}.values()
    places = [place for place in decisions.places if place[0] in first]
    begins = [place for place in places if place[1] == 0][:NUM_FORGED]
    ranked = decisions.target_probs[:, :-1].argsort(-1, descending=True)
    forged = [ranked[..., rank] for rank in range(min(NUM_FORGED, ranked.shape[-1]))]
    laws: Laws = []
    for some, tokens in [(places, None), *((begins, each) for each in forged)]:
        steps = decisions.search(
            some, Purpose.CORRECT, lambda kept, following, token: torch.where(kept, token, following), tokens=tokens
        )
        laws += [
            (at, {token: each.share(token) for token in each.values}) for at, each in zip(some, steps, strict=True)
        ]
    return laws


def _apart(laws: Laws, decisions: Decisions) -> tuple[float, float]:
    """How far the probabilities of committed tokens are from what the target gives them, as often as a round comes to
    each place: the largest difference, and the total variation on the average of the places."""
    worst, apart, total = 0.0, 0.0, 0.0
    for place, tokens in laws:
        probs, reached = decisions.target_probs[place], sum(tokens.values())
        wanted = dict(zip(decisions.names[probs > 0].tolist(), probs[probs > 0].tolist(), strict=True))
        scale = reached / sum(wanted.values())
        differences = [abs(tokens.get(t, 0.0) - scale * wanted.get(t, 0.0)) for t in tokens.keys() | wanted.keys()]
        worst, apart, total = max(worst, *differences), apart + sum(differences) / 2, total + reached
    return worst, apart / total
