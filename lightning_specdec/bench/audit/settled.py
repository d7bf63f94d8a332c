"""With what probabilities a round settles its tokens, and how far that is from what the target gives them.

Knows nothing of sessions: drafts with their chances and the rule's decisions in, probabilities out.
"""

from __future__ import annotations

from collections import defaultdict

from lightning_specdec.bench.audit.decisions import NOT_REACHED, Decisions, Place
from lightning_specdec.bench.audit.draft_tree import Prefix, Tree

NUM_FORGED = 4
"""Likeliest tokens of the target that are put in a guess's place, and rows in which they are."""


def sums(tree: Tree, decisions: Decisions) -> tuple[float, float, float]:
    """Error and total variation of a round, summed over the tree's drafts, which are the first rows; what was left out.

    Drafts that came out as others, which rounding does to the rarest, are left out too.
    """
    left_out = tree.left_out
    rows = []
    for row, path in enumerate(tree.paths):
        if tuple(decisions.guesses[row]) == path.tokens:
            rows.append(row)
        else:
            left_out += path.share
    places = [(row, i) for row in rows for i in range(len(tree.paths[row].tokens) + 1)]
    guessed = [(row, i) for row, i in places if i < len(tree.paths[row].tokens)]
    both = decisions.kept_and_following(guessed, places)
    kept, following = (dict(zip(*each, strict=True)) for each in zip((guessed, places), both, strict=True))
    settled: dict[Prefix, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    seen: dict[Prefix, Place] = {}
    for row in rows:
        path = tree.paths[row]
        reached = path.share
        for i in range(len(path.tokens) + 1):
            prefix = path.tokens[:i]
            seen.setdefault(prefix, (row, i))
            stays = kept[row, i].share(1) if i < len(path.tokens) else 0.0
            for token, size in following[row, i].sizes:
                if token != NOT_REACHED and stays < 1:
                    settled[prefix][token] += reached * (1 - stays) * size
            reached *= stays
            if i < len(path.tokens):
                settled[prefix][path.tokens[i]] += reached
            if not reached:
                break
    worst, apart, total = 0.0, 0.0, 0.0
    for prefix, tokens in settled.items():
        reached = sum(tokens.values())
        differences = _differences(tokens, decisions, seen[prefix], reached)
        worst, apart, total = max(worst, *differences), apart + sum(differences) / 2, total + reached
    return worst, apart / total, left_out


def own_draws(decisions: Decisions) -> tuple[float, float, int]:
    """Error and total variation where each settled token is the target's own draw; the number of drafts.

    Whatever is guessed, so the target's likeliest tokens are put in the guesses' place too.
    """
    first: dict[Prefix, int] = {}
    for row, guesses in enumerate(decisions.guesses):
        first.setdefault(tuple(guesses), row)
    places = [place for place in decisions.places() if place[0] in first.values()]
    laws = [*zip(places, decisions.settled(places), strict=True)]
    firsts = [place for place in places if place[1] == 0][:NUM_FORGED]
    for rank in range(min(NUM_FORGED, decisions.target_probs.shape[-1])):
        laws += zip(firsts, decisions.with_guesses_of_rank(rank).settled(firsts), strict=True)
    worst, apart = 0.0, 0.0
    for place, steps in laws:
        tokens: dict[int, float] = defaultdict(float)
        for token, size in steps.sizes:
            tokens[token] += size
        differences = _differences(tokens, decisions, place, 1.0)
        worst, apart = max(worst, *differences), apart + sum(differences) / 2
    return worst, apart / len(laws), len(first)


def _differences(tokens: dict[int, float], decisions: Decisions, place: Place, reached: float) -> list[float]:
    """How far each settled token's probability is from what the target gives it there."""
    probs = decisions.target_probs[place]
    wanted = dict(zip(decisions.names[probs > 0].tolist(), probs[probs > 0].tolist(), strict=True))
    total = sum(wanted.values())
    return [abs(tokens.get(t, 0.0) - reached * wanted.get(t, 0.0) / total) for t in tokens.keys() | wanted.keys()]
