"""How many tokens to guess next, from what guessing has brought so far and from what calls cost.

Theory: with a_i the chance that guess i is kept when those before it were, and s_i the chance that it is made at all, a
window of k yields 1 + sum over j <= k of s_1 a_1 ... s_j a_j tokens in draft(k) + plain + sum over j <= k of
s_1 ... s_j * (round(j) - round(j - 1)) seconds (Leviathan et al. 2023, equation 1, with a rate for each place and with
measured costs). The best window has the largest ratio; 0, standard decoding, has 1 / plain. `bench/theory.py` has the
closed forms for a single rate.
"""

from __future__ import annotations

from lightning_specdec.inference.costs import Costs

PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
"""What is believed of the first guess before any was tested: a rate, and of how many tests it is worth."""
NEIGHBOUR_WEIGHT = 6.0
"""Of how many tests the rate of the place before is worth to a place: hard and easy stretches make later ones surer."""
MEMORY = 24.0
"""Tests of a place that are remembered, older ones fading: texts change."""
SURPRISE = 1e-3
"""How unlikely a run of rounds without a kept guess is, by the estimate, when the text is taken to have changed."""
SURPRISED_MEMORY = 3.0
"""Tests that are remembered then."""
RESTING_MEMORY = 2.0
"""The same where drafting was given up: a draft that has turned good is believed soon."""
FIRST_SHARE, LEAST_SHARE = 0.04, 0.01
"""The share of the time that looking again may take after giving up: each look in vain halves it, down to the least."""
MAX_LOSS = 0.02
"""The share of standard decoding's time that drafting may ever lose, by the recorded costs."""
READING_SHARE = 0.75
"""The share of that loss that the draft's reading of a prompt may take."""
FEWEST_TOKENS = 128
"""New tokens whose standard decoding the loss may be a share of from the start: the shortest text with a promise."""


class Evidence:
    """What became of the guesses at each place of the window, older rounds fading.

    Args:
        num_places: the largest window.
    """

    def __init__(self, num_places: int) -> None:
        self.accepted, self.tested = [0.0] * num_places, [0.0] * num_places
        self.made, self.asked = [0.0] * num_places, [0.0] * num_places
        # A belief that fades like what was seen, or it would keep a useless draft alive for ever.
        self.accepted[0], self.tested[0] = PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self.chance = 1.0
        """Of the rounds since the last kept guess, by the estimates of their time."""

    def record(self, asked: int, num_made: int, num_accepted: int, memory: float) -> None:
        """Count one round of one row. What lies behind the first rejection is not looked at."""
        known = min(num_made, num_accepted + 1)
        if num_accepted:
            self.chance = 1.0
        elif num_made:
            self.chance *= max(0.02, 1 - self.accepted[0] / self.tested[0])
            if self.chance < SURPRISE:
                self.fade(SURPRISED_MEMORY)
                self.chance = 1.0
        for i in range(known):
            _count(self.made, self.asked, i, 1.0, memory)
            _count(self.accepted, self.tested, i, float(i < num_accepted), memory)
        if num_accepted == num_made < asked:
            _count(self.made, self.asked, num_made, 0.0, memory)

    def fade(self, memory: float) -> None:
        """Forget all but the last `memory` tests of every place."""
        for hits, trials in ((self.accepted, self.tested), (self.made, self.asked)):
            for i, total in enumerate(trials):
                if total > memory:
                    hits[i], trials[i] = hits[i] * memory / total, memory


def _count(hits: list[float], trials: list[float], i: int, hit: float, memory: float) -> None:
    faded = min(1.0, (memory - 1) / trials[i]) if trials[i] else 1.0
    hits[i], trials[i] = hits[i] * faded + hit, trials[i] * faded + 1


class Course:
    """The windows of one row, or of rows that share one window: estimates, a rest, and an account of losses.

    Theory: three devices. The best window by the estimates is used. Where none beats standard decoding, it rests, and
    looks again with one guess after as many rounds as make that look a small share of the time, smaller after each
    look in vain. And an account keeps the promise whatever the estimates say: every round's seconds beyond what
    standard decoding takes for its tokens, the draft's reading included, are a debt, and a window is taken only while
    the debt with it stays within `MAX_LOSS` of standard decoding's time. Gains pay debts off, and are saved up to as
    much again.

    Args:
        costs: the recorded seconds.
        largest: most guesses of a round.
    """

    def __init__(self, costs: Costs, largest: int) -> None:
        self.evidence = Evidence(largest)
        self.debt = self.standard_seconds = self.prompt_seconds = 0.0
        self.num_rested = self.num_failed = self.rest = 0
        self.set_costs(costs)
        self.resting = self._best == 0

    def set_costs(self, costs: Costs) -> None:
        """Plan with these from now on."""
        self.costs = costs
        self.largest = len(self.evidence.tested)
        self.plain = costs.round_seconds(0)
        self.rounds = [costs.round_seconds(i) for i in range(self.largest + 1)]
        self.hopeless = self._window(self.largest, perfect=True) == 0
        self._best = self.best(self.largest)

    def round_seconds(self, window: int) -> float:
        """A whole round in which that many guesses are made."""
        return self.costs.draft_seconds + window * self.costs.draft_step_seconds + self.rounds[window]

    def best(self, most: int) -> int:
        """The window up to `most` with the largest expected tokens per second; 0 where none beats standard decoding."""
        return self._window(most, perfect=False)

    def _window(self, most: int, *, perfect: bool) -> int:
        evidence, best, best_ratio = self.evidence, 0, 1 / self.plain
        rate = 0.0
        tokens, kept, made = 1.0, 1.0, 1.0
        draft, seconds = self.costs.draft_seconds, self.plain
        for i in range(most):
            weight = NEIGHBOUR_WEIGHT if i else 0.0
            rate = (evidence.accepted[i] + weight * rate) / (evidence.tested[i] + weight)
            offered = (evidence.made[i] + 1) / (evidence.asked[i] + 1)
            if perfect:
                rate = offered = 1.0
            made *= offered
            kept *= rate * offered
            tokens += kept
            draft += self.costs.draft_step_seconds
            seconds += made * (self.rounds[i + 1] - self.rounds[i])
            if tokens / (draft + seconds) > best_ratio:
                best, best_ratio = i + 1, tokens / (draft + seconds)
        return best

    def allowance(self) -> float:
        """Seconds that may be lost by now."""
        return MAX_LOSS * (self.prompt_seconds + max(self.standard_seconds, FEWEST_TOKENS * self.plain))

    def readable(self, num_tokens: int) -> int:
        """How many tokens of a prompt the draft may read within its share of the allowance."""
        cost = self.costs.draft_token_seconds
        standard = num_tokens * self.costs.target_token_seconds + FEWEST_TOKENS * self.plain
        return num_tokens if not cost else min(num_tokens, int(READING_SHARE * MAX_LOSS * standard / cost))

    def choose(self, remaining: int, unread: int) -> int:
        """The next window for a text of which `remaining` tokens are wanted, and `unread` ones new to the draft."""
        most = min(self.largest, remaining - 1)  # the target adds one itself
        if most <= 0 or self.hopeless or self.num_rested < self.rest:
            return 0
        window = 1 if self.resting else self._best if most == self.largest else self.best(most)
        reading = unread * self.costs.draft_token_seconds - self.plain
        if self.resting and remaining * FIRST_SHARE * self.plain < reading + self.round_seconds(window):
            return 0  # too little is left for a look to pay
        room = self.allowance() - self.debt - reading
        while window and self.round_seconds(window) > room:
            window -= 1
        return window

    def learn(self, window: int, unread: int, outcomes: list[tuple[int, int, int]]) -> None:
        """Take in a round: its window, what the draft had to read, and each row's guesses asked for, made, accepted."""
        gained = self.plain * sum(1 + accepted for *_, accepted in outcomes) / len(outcomes)
        self.standard_seconds += gained
        if not window:
            self.num_rested += 1
            return
        seconds = self.round_seconds(window) + unread * self.costs.draft_token_seconds
        if not any(made for _, made, _ in outcomes):  # the target's call was a plain one
            seconds += self.plain - self.rounds[window]
        self.debt = max(-self.allowance(), self.debt + seconds - gained)
        memory = RESTING_MEMORY if self.resting else MEMORY
        for asked, made, accepted in outcomes:
            self.evidence.record(asked, made, accepted, memory)
        self._best = self.best(self.largest)
        good = self._best > 0
        if self.resting and any(accepted for *_, accepted in outcomes):
            self.resting, self.rest = not good, 0
            if good:
                self.num_failed = 0
        elif self.resting or not good:
            if not self.resting:
                self.evidence.fade(RESTING_MEMORY)
            self.resting, self.num_rested = True, 0
            share = max(LEAST_SHARE, FIRST_SHARE * 0.5**self.num_failed)
            self.rest = max(0, round((seconds - gained) / (share * self.plain)))
            self.num_failed += 1
