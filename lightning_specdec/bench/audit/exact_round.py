"""What one round of the real loop settles, summed over its drafts and outcomes, against the target.

Theory: of all rounds that settle the tokens s and go on behind them, the next token must be drawn from the target's
distribution behind s; by induction on the length of s, the whole text then is, as far as the rounds behind other texts
do as this one. So for every s that can be guessed and every token t, P(s, t) = P(s, anything) * target_prob(t | s),
where P is the probability of what a round settles. Each guess, each decision to keep one and each correction belongs to
an interval of uniform numbers, so P is a sum of products of intervals. Their ends are asked of the code itself
(`find_steps`): the drafter's in rounds of a session, the rule's on the guesses, reported probabilities and logits that
it was given in a session's round.

That each decision depends on its own number alone is not assumed: it is tested at some random numbers, and so is that
rounds settle what the rule decides, and that drafter and rule do the same with the same numbers. Rules whose output is
the same whatever is guessed (`ExactMatch`) have a simpler law: they settle the target's own draw, so each token's
interval is the target's probability, behind every draft.

A round has V^K drafts, so the sampling keeps only the likeliest tokens (`top_k`), on both sides. That is a setting like
any other, under which a lossless rule is lossless. The rarest drafts are left out, and their chance is added to what
may be rounding.

Shapes: R rows of one text, K guesses, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lightning_specdec.bench.audit.decisions import Decisions, Place
from lightning_specdec.bench.audit.draft_tree import RESOLUTION, Prefix, Tree, draft_tree
from lightning_specdec.bench.audit.intervals import STEPS, NoFunction, Steps
from lightning_specdec.bench.audit.scores import difference, rounding, several_scores
from lightning_specdec.bench.audit.scripted import Played, Stage
from lightning_specdec.bench.audit.settled import own_draws, sums
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Purpose, Sampling

TOLERANCE = 4e-6
"""What float32 does to a probability, and to a product of K + 1 of them."""
NUM_RANDOM, NUM_COUPLED = 16, 48
"""Rows with random numbers, besides those of all drafts; and where the drafts are not gone through."""
MOST_OFF = 8.0
"""How many times what rounding does to a logit may lie between those of a round and those of a plain call: the measured
rounding is that of a few ways to read a text, and a round is one more. A logit of another place is off by far more."""


Trees = dict[tuple[Drafter, Sampling, int, Purpose, Prefix], Tree]
"""By drafter, sampling, width of a round, what draws, and the text that the round goes on from."""


@dataclass(frozen=True)
class RoundLaw:
    """How far one round is from the target.

    Args:
        num_drafts: drafts that the round can have; 0 where nobody guessed, and then there is nothing else.
        error: largest difference between the probability of a settled token and what the target gives it.
        tolerance: what of that is rounding, or due to drafts too rare to be looked at.
        total_variation: between the distribution of a settled token and the target's, on the average token of a round.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


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
    if not stage.play(torch.full((1, stage.width, len(Purpose)), 0.5)).guesses[0]:
        return RoundLaw(0)
    tree = Tree() if rule.ignores_windows else _tree(stage, {} if trees is None else trees, seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows = NUM_COUPLED if rule.ignores_windows else len(tree.paths) + NUM_RANDOM
    noise = torch.rand(num_rows, stage.width, len(Purpose), generator=generator)
    for numbers, path in zip(noise, tree.paths, strict=False):
        numbers[: len(path.numbers), rule.draft_purpose] = torch.tensor(path.numbers)
    played = stage.play(noise)
    decisions = Decisions(rule, few, played, compact=rule.lossless)
    spread = _spread(decisions)
    surprises = _unlike_the_rule(Decisions(rule, few, played, compact=False), played, noise)
    surprises |= decisions.changes(decisions.places(), generator)
    if rule.ignores_windows:
        error, variation, num_drafts, left_out = *own_draws(decisions), 0.0
    else:
        surprises |= _unlike_the_tree(tree, played, noise, rule, slack=2 * spread + 2 * RESOLUTION / STEPS)
        error, variation, left_out = sums(tree, decisions)
        num_drafts = len(tree.paths)
    logits_error, logits_rounding = _logits(stage, played, decisions, few)
    return RoundLaw(
        num_drafts=num_drafts,
        error=error,
        tolerance=TOLERANCE + left_out + 2 * stage.width * spread,
        total_variation=variation,
        surprises=len(surprises),
        logits_error=logits_error,
        logits_rounding=logits_rounding,
    )


def _tree(stage: Stage, trees: Trees, seed: int) -> Tree:
    """The drafts of a stage's round, which may be known."""
    key = stage.drafter, stage.sampling, stage.width, stage.rule.draft_purpose, tuple(stage.text)
    if key not in trees:
        trees[key] = draft_tree(stage, seed)
    return trees[key]


def _spread(decisions: Decisions) -> float:
    """How far rows that should have the same distributions have them apart: what rounding does."""
    groups: dict[Prefix, list[Place]] = defaultdict(list)
    for row, i in decisions.places():
        groups[tuple(decisions.guesses[row][:i])].append((row, i))
    widest = 0.0
    for places in groups.values():
        rows, at = (torch.tensor(each) for each in zip(*places, strict=True))
        tables = [decisions.target_probs[rows, at]]
        if decisions.probs is not None and places[0][1] < decisions.probs.shape[1]:
            guessing = torch.tensor([i < len(decisions.guesses[row]) for row, i in places])
            tables.append(decisions.probs[rows[guessing], at[guessing]])
        for table in tables:
            if len(table) > 1:
                widest = max(widest, float((table.amax(0) - table.amin(0)).max()))
    return widest


def _unlike_the_rule(decisions: Decisions, played: Played, noise: torch.Tensor) -> set[int]:
    """Rows that settled other tokens than the rule decides with their numbers."""
    rows = torch.arange(len(noise))
    (accepted, following), again = (decisions.outcomes(rows, noise) for _ in range(2))
    if not (torch.equal(accepted, again[0]) and torch.equal(following, again[1])):
        raise NoFunction(decisions.name)
    return {
        row
        for row, (num, token) in enumerate(zip(accepted.tolist(), following.tolist(), strict=True))
        if played.settled[row] != [*played.guesses[row][:num], token]
    }


def _unlike_the_tree(
    tree: Tree, played: Played, noise: torch.Tensor, rule: AcceptanceRule, *, slack: float
) -> set[int]:
    """Rows whose guesses are not those that the drafter's intervals foretell for their numbers."""
    found = set()
    for row, guesses in enumerate(played.guesses):
        for i, token in enumerate(guesses):
            steps: Steps | None = tree.steps.get(tuple(guesses[:i]))
            number = float(noise[row, i, rule.draft_purpose])
            if steps is None or steps.is_near(number, slack):  # too rare to be known, or rounding decides
                break
            if steps.value(number) != token:
                found.add(row)
                break
    return found


def _logits(stage: Stage, played: Played, decisions: Decisions, sampling: Sampling) -> tuple[float, float]:
    """How far the round's logits are from the target's own, and what rounding does to these."""
    assert played.logits is not None and played.draft is not None
    both = zip(played.guesses, played.draft.tokens.tolist(), strict=True)
    known = {tuple(guesses): tokens for guesses, tokens in both}
    which, guesses = {guesses: i for i, guesses in enumerate(known)}, [list(each) for each in known]
    texts, num_places = [[*stage.text, *tokens] for tokens in known.values()], played.logits.shape[1]
    ways = several_scores(stage.target, texts, num_places, widths=(None, 1))
    ways = [sampling.process(way, [stage.text] * len(guesses), guesses) for way in ways]
    counted = decisions.reachable().cpu()
    counted = (counted > 0) & (torch.arange(num_places) <= torch.tensor([[len(each)] for each in played.guesses]))
    own = torch.tensor([which[tuple(each)] for each in played.guesses])
    one, other = (way[own][counted] for way in ways)
    return difference(played.logits[counted], one), rounding(stage.target, [one, other])
