"""With what probabilities a round settles its tokens, and how far that is from what the target gives them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

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
    laws = [(seen[prefix], tokens) for prefix, tokens in settled.items()]
    return *_apart(laws, decisions), left_out


def own_draws(decisions: Decisions) -> tuple[float, float, int]:
    """Error and total variation where each settled token is the target's own draw; the number of drafts.

    Whatever is guessed, so the target's likeliest tokens are put in the guesses' place too.
    """
    first: dict[Prefix, int] = {}
    for row, guesses in enumerate(decisions.guesses):
        first.setdefault(tuple(guesses), row)
    places = [place for place in decisions.places() if place[0] in first.values()]
    steps = [*zip(places, decisions.settled(places), strict=True)]
    firsts = [place for place in places if place[1] == 0][:NUM_FORGED]
    for rank in range(min(NUM_FORGED, decisions.target_probs.shape[-1])):
        steps += zip(firsts, decisions.with_guesses_of_rank(rank).settled(firsts), strict=True)
    laws = [(place, {token: each.share(token) for token in each.values}) for place, each in steps]
    return *_apart(laws, decisions), len(first)


def _apart(laws: Sequence[tuple[Place, Mapping[int, float]]], decisions: Decisions) -> tuple[float, float]:
    """How far the probabilities of settled tokens are from what the target gives them, as often as a round comes to
    each place: the largest difference, and the total variation on the average of the places."""
    worst, apart, total = 0.0, 0.0, 0.0
    for place, tokens in laws:
        probs, reached = decisions.target_probs[place], sum(tokens.values())
        wanted = dict(zip(decisions.names[probs > 0].tolist(), probs[probs > 0].tolist(), strict=True))
        scale = reached / sum(wanted.values())
        differences = [abs(tokens.get(t, 0.0) - scale * wanted.get(t, 0.0)) for t in tokens.keys() | wanted.keys()]
        worst, apart, total = max(worst, *differences), apart + sum(differences) / 2, total + reached
    return worst, apart / total
