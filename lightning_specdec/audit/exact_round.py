"""The distribution of what one round of the real loop commits, compared with the target's.

It is summed over all drafts and outcomes. Of all rounds that commit the tokens s and continue after
them, the next token must have the target's distribution after s:

    P(s, t) = P(s, anything) * target_prob(t | s)

for every s that can be drafted and every token t.

P is a sum of products of intervals of uniform numbers. Draft tokens are drawn by inverse transform
sampling from the drafter's reported probabilities, which is tested at both ends of each interval.
Each decision to keep a token and each correction belongs to an interval, too. Its ends are found by
asking the rule itself (`find_shares`). A test at random numbers, also with rows of unequal windows,
checks that rounds commit what the rule decides.

A round has V^K drafts, so the sampling keeps only the most likely tokens (`top_k`), on both sides.
The rarest drafts are left out, and their probability is added to the tolerance.

Shapes: N questions, R rows of one text, K draft tokens, V vocabulary, F functions, B brackets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
"""Rows with random numbers, in addition to those of all drafts."""
MAX_LOGITS_RATIO = 8.0
"""Largest difference between the logits of a round and of a plain call / measured rounding.

The rounding is measured in a few ways to read a text, and a round is one more. A logit of another
position differs by far more."""
MAX_STEPS = 256
"""Limits on the steps of all searched functions together: a base, and an allowance for each."""
MIN_REACHED_PROB = 64 / STEPS
"""Draft tokens below this probability under the target are not followed when logits are compared.
"""
NOT_REACHED = -1
"""Replaces the correction of a row whose round has ended before."""

RowPosition = tuple[int, int]
"""A row and a position in its round."""


@dataclass(frozen=True)
class RoundLaw:
    """How far one round is from the target.

    Args:
        num_drafts: drafts that the round can have. If it is 0, nothing was drafted, and the other
            values are not measured.
        error: largest difference between the probability of a committed token and the target's; not
            measured if there are surprises.
        tolerance: how much of that rounding and the drafts that were left out explain.
        surprises: rows whose draft or outcome does not follow from their numbers.
        logits_error: largest difference between the round's logits and the target's own.
        logits_rounding: how much rounding moves the target's own.
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
        """Whether the round used the target's logits, of the right positions."""
        return self.logits_error <= MAX_LOGITS_RATIO * self.logits_rounding


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
    """Measure a round after a prompt, on a `Stage`.

    Args:
        rule: lossless, and with separate numbers for draft tokens, unlike `ExactMatch`.
        sampling: above temperature 0.
        seed: keys the numbers that nothing may depend on.
        num_top: number of most likely tokens that each side may draw.

    Raises:
        ValueError: a round has too many drafts, or the rule is not a function of its numbers.
    """
    sampling = replace(sampling, top_k=min(num_top, sampling.top_k or num_top))
    stage = Stage(
        target, drafter, prompt, rule=rule, sampling=sampling, num_draft_tokens=num_draft_tokens
    )
    paths, end_numbers, left_out_prob = draft_tree(stage)
    if not any(path.tokens for path in paths):
        return RoundLaw(0)

    # Every draft, the ends of every token's interval, and random numbers, in one round.
    generator = torch.Generator().manual_seed(seed)
    path_numbers = [path.numbers for path in paths]
    no_numbers: list[float] = []
    random_rows = [no_numbers] * NUM_RANDOM
    played = stage.play([*path_numbers, *end_numbers, *random_rows], generator)
    ragged = stage.play(random_rows, generator, ragged=True)

    surprises = _num_surprises(rule, sampling, played)
    surprises += _num_surprises(rule, sampling, ragged)
    logits_error, logits_rounding = _compare_logits(stage, played)
    law = RoundLaw(
        len(paths),
        surprises=surprises,
        logits_error=logits_error,
        logits_rounding=logits_rounding,
    )
    if surprises:
        return law

    drawn_paths, changed_prob = _drawn_paths(paths, played)
    decisions = Decisions(rule, sampling, played, generator)
    error = _largest_error(drawn_paths, decisions)
    return replace(law, error=error, tolerance=TOLERANCE + left_out_prob + changed_prob)


def _drawn_paths(paths: Sequence[Path], played: Played) -> tuple[dict[int, Path], float]:
    """The drafts that their numbers have drawn in the first rows, and the others' probability.

    Rounding in a larger batch may change a draft.
    """
    drawn_paths = {}
    changed_prob = 0.0
    for row, path in enumerate(paths):
        if tuple(played.drafted[row]) == path.tokens:
            drawn_paths[row] = path
        else:
            changed_prob += path.prob
    return drawn_paths, changed_prob


def _num_surprises(rule: AcceptanceRule, sampling: Sampling, played: Played) -> int:
    """Rows whose draft does not follow from the drafter's report, or whose new tokens do not follow
    from the rule."""
    if played.draft is None or played.logits is None:
        return 0
    draft = played.draft
    noise = played.noise.to(played.logits.device)
    draft_noise = noise[..., rule.draft_purpose]
    expected_drafts = _expected_drafts(draft, draft_noise, played.drafted)

    verdict = rule.judge(draft, played.logits, sampling, noise)
    accepted_counts = verdict.num_accepted.tolist()
    next_tokens = verdict.next_tokens.tolist()

    num_surprises = 0
    for row, drafted in enumerate(played.drafted):
        num_accepted = accepted_counts[row]
        expected_tokens = [*drafted[:num_accepted], next_tokens[row]]
        is_expected = (
            drafted == expected_drafts[row]
            and num_accepted <= len(drafted)
            and played.committed[row] == expected_tokens
        )
        if not is_expected:
            num_surprises += 1
    return num_surprises


def _expected_drafts(
    draft: Draft,
    uniform: Tensor,
    drafted: Sequence[Sequence[int]],
) -> list[list[int]]:
    """The draft tokens that follow from the drafter's report and the uniform numbers `[R, K1]`."""
    expected_drafts = []
    if draft.probs is not None:
        num_draft_tokens = draft.tokens.shape[1]
        draft_uniform = uniform[:, :num_draft_tokens].contiguous()
        drawn = draw(draft.probs, draft_uniform).tolist()
        for tokens, drawn_tokens in zip(drafted, drawn, strict=True):
            expected_drafts.append(drawn_tokens[: len(tokens)])
        return expected_drafts

    # A drafter that does not draw proposes the same token after the same tokens, whatever the
    # numbers: the token that the first row with that prefix has.
    token_after: dict[Prefix, int] = {}
    for tokens in drafted:
        expected_tokens = []
        for i, token in enumerate(tokens):
            prefix = tuple(tokens[:i])
            expected_tokens.append(token_after.setdefault(prefix, token))
        expected_drafts.append(expected_tokens)
    return expected_drafts


def _compare_logits(stage: Stage, played: Played) -> tuple[float, float]:
    """How far the round's logits are from the target's own, and what rounding does to these.

    Compared at every position that follows tokens which the target can draw.
    """
    assert played.logits is not None and played.draft is not None
    round_logits = played.logits
    draft_tokens = played.draft.tokens
    num_rows, width, _ = round_logits.shape

    # The whole text in one call, and token by token.
    drafts = draft_tokens.tolist()
    full_texts = [[*stage.text, *tokens] for tokens in drafts]
    at_once, by_token = readings(stage.target, full_texts, width, (None, 1))

    texts = [stage.text] * num_rows
    at_once = stage.sampling.process(at_once, texts, drafts)
    by_token = stage.sampling.process(by_token, texts, drafts)

    # A position is reached if the target can draw every draft token before it.
    probs = stage.sampling.probs(at_once[:, :-1])
    token_probs = probs.gather(-1, draft_tokens[..., None])[..., 0]
    can_draw = token_probs > MIN_REACHED_PROB
    can_draw_all = can_draw.cumprod(1)
    # The position before the first draft token is always reached.
    is_reached = torch.nn.functional.pad(can_draw_all, (1, 0), value=1) > 0

    # The positions after a row's last draft token are padding.
    device = is_reached.device
    lengths = torch.tensor([len(tokens) for tokens in played.drafted], device=device)
    is_in_row = torch.arange(width, device=device) <= lengths[:, None]
    is_compared = is_reached & is_in_row

    error = difference(round_logits[is_compared], at_once[is_compared])
    target_rounding = rounding(stage.target, [at_once[is_compared], by_token[is_compared]])
    return error, target_rounding


class Decisions:
    """What the rule decides on the drafts of a round, as a function of each of its uniform numbers.

    The rule receives only the tokens that either side can draw: a large vocabulary would take long.
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        sampling: Sampling,
        played: Played,
        generator: torch.Generator,
    ) -> None:
        assert played.draft is not None and played.logits is not None, "nothing was drafted"
        self.rule = rule
        self.sampling = sampling
        self.generator = generator

        # Tokens that the target can draw anywhere, draft tokens, and those that the draft can draw.
        draft = played.draft
        target_can_draw = sampling.probs(played.logits) > 0
        is_used = target_can_draw.flatten(0, 1).any(0)
        is_used[draft.tokens.flatten()] = True
        if draft.probs is not None:
            # A comparison with NaN, which may follow a row's draft, is false.
            draft_can_draw = draft.probs > 0
            is_used |= draft_can_draw.flatten(0, 1).any(0)
        self.used_tokens = is_used.nonzero()[:, 0]
        """`[V]`, the token of the whole vocabulary for each index used here."""

        self.logits = played.logits[..., self.used_tokens]
        self.target_probs = sampling.probs(self.logits).double()
        """`[R, K + 1, V]`, what the target's tokens are drawn from."""

        # The used tokens ascend, so a token's index among them is its place in that order.
        used_indices = torch.searchsorted(self.used_tokens, draft.tokens.contiguous())
        self.draft = Draft(used_indices, draft.lengths)
        if draft.probs is not None:
            self.draft.probs = draft.probs[..., self.used_tokens]
        if draft.logits is not None:
            self.draft.logits = draft.logits[..., self.used_tokens]

    def search(
        self,
        row_positions: Sequence[RowPosition],
        purpose: Purpose,
    ) -> dict[RowPosition, dict[int, float]]:
        """What is decided at each position, with its share of the uniform numbers of that purpose.

        For `ACCEPT`: 1 if the token there is kept. For `CORRECT`: the token that follows if it is
        rejected, or `NOT_REACHED`. All numbers that must not matter are random.
        """
        if not row_positions:
            return {}
        all_rows, all_positions = torch.tensor(row_positions).unbind(1)

        # Function i is the decision at row position i, as a function of one uniform number.
        def decide(functions: Tensor, uniform: Tensor) -> Tensor:
            rows = all_rows[functions]
            positions = all_positions[functions]
            noise = self._noise(positions, purpose, uniform)
            return self._decide(rows, positions, purpose, noise)

        shares = find_shares(decide, len(row_positions), name=type(self.rule).__name__)
        return dict(zip(row_positions, shares, strict=True))

    def _noise(self, positions: Tensor, purpose: Purpose, uniform: Tensor) -> Tensor:
        """Noise `[N, K1, 3]` with which a round reaches the position, and decides there with the
        uniform number."""
        num_questions = len(positions)
        width = self.logits.shape[1]
        noise = torch.rand(num_questions, width, len(Purpose), generator=self.generator)

        # The number 0 keeps every token that can be kept.
        is_before = torch.arange(width) < positions[:, None]
        noise[..., Purpose.ACCEPT][is_before] = 0.0
        questions = torch.arange(num_questions)
        if purpose is Purpose.CORRECT:
            # The largest number rejects every token that can be rejected.
            noise[questions, positions, Purpose.ACCEPT] = LARGEST
        noise[questions, positions, purpose] = uniform
        return noise.to(self.logits.device)

    def _decide(self, rows: Tensor, positions: Tensor, purpose: Purpose, noise: Tensor) -> Tensor:
        """What the rule decides at the positions of these rows `[N]`."""
        draft = Draft(self.draft.tokens[rows])
        if self.draft.lengths is not None:
            draft.lengths = self.draft.lengths[rows]
        if self.draft.probs is not None:
            draft.probs = self.draft.probs[rows]
        if self.draft.logits is not None:
            draft.logits = self.draft.logits[rows]

        verdict = self.rule.judge(draft, self.logits[rows], self.sampling, noise)
        num_accepted = verdict.num_accepted.cpu()
        if purpose is Purpose.ACCEPT:
            return (num_accepted > positions).long()
        next_tokens = self.used_tokens[verdict.next_tokens].cpu()
        return torch.where(num_accepted == positions, next_tokens, NOT_REACHED)


def _largest_error(paths: dict[int, Path], decisions: Decisions) -> float:
    """The largest difference between the probability of a committed token and the target's.

    Args:
        paths: the drafts, by their rows.
    """
    committed_probs = _committed_probs(paths, decisions)
    position_of_prefix: dict[Prefix, RowPosition] = {}
    for row, path in paths.items():
        for position in range(len(path.tokens) + 1):
            prefix = path.tokens[:position]
            position_of_prefix.setdefault(prefix, (row, position))

    used_tokens = decisions.used_tokens.tolist()
    largest_error = 0.0
    for prefix, probs_by_token in committed_probs.items():
        token_probs = [probs_by_token.get(token, 0.0) for token in used_tokens]
        round_probs = torch.tensor(token_probs, dtype=torch.float64)

        # P(s, anything) * target_prob(t | s)
        target_probs = decisions.target_probs[position_of_prefix[prefix]].cpu()
        prefix_prob = round_probs.sum() / target_probs.sum()
        expected_probs = target_probs * prefix_prob
        largest_error = max(largest_error, difference(round_probs, expected_probs))
    return largest_error


def _committed_probs(
    paths: dict[int, Path], decisions: Decisions
) -> dict[Prefix, dict[int, float]]:
    """P(s, t): the probability that a round commits the prefix s and then the token t."""
    # A round ends at a draft token that is rejected, or after the last one.
    draft_positions: list[RowPosition] = []
    end_positions: list[RowPosition] = []
    for row, path in paths.items():
        for position in range(len(path.tokens)):
            draft_positions.append((row, position))
            end_positions.append((row, position))
        end_positions.append((row, len(path.tokens)))
    keep_shares = decisions.search(draft_positions, Purpose.ACCEPT)
    correction_shares = decisions.search(end_positions, Purpose.CORRECT)

    committed_probs: dict[Prefix, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row, path in paths.items():
        reached_prob = path.prob
        for position in range(len(path.tokens) + 1):
            row_position = (row, position)
            prefix = path.tokens[:position]

            # The round ends here. After the last draft token it always does.
            keep_prob = keep_shares.get(row_position, {}).get(1, 0.0)
            if keep_prob < 1:
                rejected_prob = reached_prob * (1 - keep_prob)
                for token, share in correction_shares[row_position].items():
                    if token != NOT_REACHED:
                        committed_probs[prefix][token] += rejected_prob * share

            # The draft token is kept, and the round goes on.
            reached_prob *= keep_prob
            if not reached_prob:
                break
            committed_probs[prefix][path.tokens[position]] += reached_prob
    return committed_probs


class _Brackets(NamedTuple):
    """Pairs of uniform numbers between which a function changes its value, as columns `[B]`.

    The numbers are integers below `STEPS`.
    """

    functions: Tensor
    low: Tensor
    high: Tensor
    low_values: Tensor
    high_values: Tensor

    def select(self, mask: Tensor) -> _Brackets:
        return _Brackets(*(column[mask] for column in self))

    def split(self, evaluate: Callable[[Tensor, Tensor], Tensor], num_pieces: int) -> _Brackets:
        """Cut each bracket into pieces.

        Args:
            evaluate: returns the values `[N]` of functions `[N]` at integer numbers `[N]`.
        """
        # Column i of the points is where piece i begins and piece i - 1 ends.
        cuts = torch.arange(num_pieces + 1)
        lengths = self.high - self.low
        points = self.low[:, None] + lengths[:, None] * cuts // num_pieces

        # The values at the first and the last point are known.
        inner_points = points[:, 1:-1]
        inner_functions = self.functions.repeat_interleave(num_pieces - 1)
        inner_values = evaluate(inner_functions, inner_points.flatten())
        first_column = self.low_values[:, None]
        inner_columns = inner_values.unflatten(0, inner_points.shape)
        last_column = self.high_values[:, None]
        values = torch.cat((first_column, inner_columns, last_column), dim=1)

        return _Brackets(
            functions=self.functions.repeat_interleave(num_pieces),
            low=points[:, :-1].flatten(),
            high=points[:, 1:].flatten(),
            low_values=values[:, :-1].flatten(),
            high_values=values[:, 1:].flatten(),
        )


def find_shares(
    ask: Callable[[Tensor, Tensor], Tensor],
    num_functions: int,
    *,
    name: str,
    pieces: int = 8,
) -> list[dict[int, float]]:
    """For each function, the share of the uniform numbers that each of its values has.

    Intervals between numbers with different values are cut into pieces again and again. A value
    that begins and ends between two numbers with one other value is not seen. If values ascend,
    there is none.

    Args:
        ask: returns the values `[N]` of functions `[N]`, by index, at uniform numbers `[N]`.
        name: names the functions in errors.
        pieces: many pieces need few calls of `ask`, each with many numbers.

    Raises:
        ValueError: there are too many steps, as for a function that depends on something else too.
    """

    def evaluate(functions: Tensor, numbers: Tensor) -> Tensor:
        uniform = numbers.double() / STEPS
        return ask(functions, uniform.float())

    functions = torch.arange(num_functions)
    low = torch.zeros_like(functions)
    high = torch.full_like(functions, STEPS - 1)
    high_values = evaluate(functions, high)
    low_values = evaluate(functions, low)
    # For each function, where its values end: the number after the last one with the value.
    value_ends = [[(STEPS, value)] for value in high_values.tolist()]

    brackets = _Brackets(functions, low, high, low_values, high_values)
    brackets = brackets.select(low_values != high_values)
    max_brackets = MAX_STEPS * (1 + num_functions)
    while len(brackets.functions):
        if len(brackets.functions) > max_brackets:
            raise ValueError(
                f"{name} is not a function of its random numbers, or one of too many steps"
            )

        # Between neighboring numbers the step is found.
        is_narrow = brackets.high - brackets.low <= 1
        narrow = brackets.select(is_narrow)
        steps = torch.stack((narrow.functions, narrow.high, narrow.low_values), dim=1)
        for function, end, value in steps.tolist():
            value_ends[function].append((end, value))

        # The others are cut, and only pieces with a step inside are searched further.
        brackets = brackets.select(~is_narrow).split(evaluate, pieces)
        brackets = brackets.select(brackets.low_values != brackets.high_values)

    return [_shares(function_ends) for function_ends in value_ends]


def _shares(value_ends: Sequence[tuple[int, int]]) -> dict[int, float]:
    """The share of each value, from the numbers at which values end."""
    shares: dict[int, float] = {}
    start = 0
    for end, value in sorted(value_ends):
        shares[value] = shares.get(value, 0.0) + (end - start) / STEPS
        start = end
    return shares
