"""One round of the real loop, played with given uniform numbers, and all drafts that it can have.

Shapes: R rows of one text, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_specdec.audit.identity import readings
from lightning_specdec.decoding import Session
from lightning_specdec.decoding.requests import Request
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, Verdict

if TYPE_CHECKING:
    from jaxtyping import Float

Prefix = tuple[int, ...]
STEPS = 2**24
"""Number of different uniform numbers that torch draws in float32."""
LARGEST = 1 - 1 / STEPS
"""The largest of them."""
NEAR = 6 / STEPS
"""Distance from the ends of its interval at which a draft token is drawn."""
MIN_PATH_PROB = 2**-18
"""Drafts below this probability are left out: rounding would replace them by other drafts."""
MAX_PATHS = 4096


class Played(NamedTuple):
    """One round: its uniform numbers, the arguments of the rule, and each row's tokens.

    Args:
        draft: what the rule judged; None if nothing was drafted.
        logits: the target's at K + 1 positions, as the rule received them; None without a draft.
        drafted: each row's draft tokens.
        committed: each row's new tokens.
    """

    noise: Float[Tensor, "R K1 3"]
    draft: Draft | None
    logits: Float[Tensor, "R K1 V"] | None
    drafted: list[list[int]]
    committed: list[list[int]]


class Stage:
    """A pair of models with a rule and a prompt, on which one round is played with different noise.

    It is the second round. In the first round all draft tokens are rejected, and the target's most
    likely token follows. So the states have been rolled back once, drafters have read the target,
    and the text is the same whatever rounding does.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        prompt: Sequence[int],
        *,
        rule: AcceptanceRule,
        sampling: Sampling,
        num_draft_tokens: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.prompt = list(prompt)
        self.rule = rule
        self.sampling = sampling
        self.width = num_draft_tokens + 1

        (logits,) = readings(target, [prompt], 1)
        logits = sampling.process(logits, [prompt])
        probs = sampling.probs(logits)[0, 0].cpu()
        self._first_token = int(probs.argmax())

        # The middle of the token's interval, which draws it even if the round has other logits.
        interval_middles = probs.cumsum(0) - probs / 2
        middle = interval_middles[self._first_token]
        self._first_number = float(middle / probs.sum())
        self.text = [*prompt, self._first_token]
        """The tokens that the round continues."""

    def play(
        self,
        rows: Sequence[Sequence[float]],
        generator: torch.Generator | None = None,
        *,
        ragged: bool = False,
    ) -> Played:
        """Play one round.

        Args:
            rows: for each row, the uniform numbers of its first draft tokens.
            generator: for all other numbers; they are 0.5 when None.
            ragged: give the rows windows of 1 to K draft tokens.
        """
        noise = self._noise(rows, generator)
        # A copy, since its `judge` is replaced.
        rule = copy(self.rule)
        session, requests = self._open_session(rule, len(rows), ragged=ragged)
        noise_table = session._batch.noise
        assert noise_table is not None, "nothing is drawn at random"

        # The first round, which ends with the same token in every row.
        noise_table[:, : self.width] = self._first_number
        rule.judge = self._reject  # type: ignore[assignment, method-assign]
        session.step()

        judged: list[tuple[Draft, Tensor]] = []

        def record_and_judge(draft: Draft, logits: Tensor, *arguments: Any) -> Verdict:
            judged.append((draft, logits))
            return self.rule.judge(draft, logits, *arguments)

        # The second round, which is the one to play.
        position = requests[0].num_new
        noise_table[:, position : position + self.width] = noise.to(session.device)
        rule.judge = record_and_judge  # type: ignore[assignment, method-assign]
        committed = [tokens for _, tokens in session.step()]

        if not judged:
            return Played(noise, None, None, [[] for _ in requests], committed)
        draft, logits = judged[0]
        # Only the numbers of the positions that were judged.
        noise = noise[:, : logits.shape[1]]
        return Played(noise, draft, logits, _drafted_tokens(draft), committed)

    def _open_session(
        self,
        rule: AcceptanceRule,
        num_rows: int,
        *,
        ragged: bool,
    ) -> tuple[Session, list[Request]]:
        """A session with the prompt in every row, and its rows. Arguments as of `play`."""
        num_draft_tokens = self.width - 1
        longest = 2 * self.width
        max_new_tokens = [longest] * num_rows
        if ragged:
            # The first round commits one token, and the last token is never drafted: this leaves
            # room for 1 to K draft tokens.
            max_new_tokens = [3 + i % num_draft_tokens for i in range(num_rows)]

        session = Session(
            self.target,
            self.drafter,
            max_length=len(self.prompt) + longest,
            rule=rule,
            sampling=self.sampling,
            num_draft_tokens=num_draft_tokens,
            batch_size=num_rows,
        )
        requests = [session.add(self.prompt, max_new_tokens=length) for length in max_new_tokens]
        return session, requests

    def _noise(
        self,
        rows: Sequence[Sequence[float]],
        generator: torch.Generator | None,
    ) -> Float[Tensor, "R K1 3"]:
        """Uniform numbers in which the first draft tokens of each row have those of `rows`."""
        size = (len(rows), self.width, len(Purpose))
        if generator is None:
            noise = torch.full(size, 0.5)
        else:
            noise = torch.rand(size, generator=generator)
        for row_noise, numbers in zip(noise, rows, strict=True):
            row_noise[: len(numbers), self.rule.draft_purpose] = torch.tensor(numbers)
        return noise

    def _reject(self, draft: Draft, logits: Tensor, *arguments: Any) -> Verdict:
        """Reject all draft tokens and let the same token follow in every row."""
        none_accepted = torch.zeros_like(draft.tokens, dtype=torch.bool)
        endings = torch.full(logits.shape[:2], self._first_token, device=none_accepted.device)
        # A lossy rule also reports which tokens it changed: none.
        changed = None if self.rule.lossless else none_accepted
        return Verdict(none_accepted, endings, changed)


def _drafted_tokens(draft: Draft) -> list[list[int]]:
    """Each row's draft tokens, without the padding after them."""
    token_rows = draft.tokens.tolist()
    if draft.lengths is None:
        return token_rows
    lengths = draft.lengths.tolist()
    return [tokens[:length] for tokens, length in zip(token_rows, lengths, strict=True)]


class Path(NamedTuple):
    """A draft, or the beginning of one.

    Args:
        tokens: draft tokens.
        numbers: uniform numbers that draw them.
        prob: probability of the draft.
    """

    tokens: Prefix
    numbers: list[float]
    prob: float


class TokenInterval(NamedTuple):
    """The interval [low, high) of uniform numbers that draw a token."""

    token: int
    low: float
    high: float


def draft_tree(stage: Stage) -> tuple[list[Path], list[list[float]], float]:
    """The drafts of a round according to the drafter's report, one token after the other.

    Returns:
        All drafts but the rarest; for each of their tokens, numbers just inside both ends of its
        interval; the probability of the rarest drafts.

    Raises:
        ValueError: there are too many drafts.
    """
    finished_paths: list[Path] = []
    end_numbers: list[list[float]] = []
    left_out_prob = 0.0

    paths = [Path((), [], 1.0)]
    while paths:
        played = stage.play([path.numbers for path in paths])
        longer_paths: list[Path] = []
        for row, path in enumerate(paths):
            drafted = played.drafted[row]
            position = len(path.tokens)
            if len(drafted) <= position:
                finished_paths.append(path)
                continue

            for interval in _next_tokens(played, row, position):
                prob = path.prob * (interval.high - interval.low)
                if prob < MIN_PATH_PROB:
                    left_out_prob += prob
                    continue
                middle = (interval.low + interval.high) / 2
                tokens = (*path.tokens, interval.token)
                longer_paths.append(Path(tokens, [*path.numbers, middle], prob))
                end_numbers.append([*path.numbers, interval.low + NEAR])
                end_numbers.append([*path.numbers, interval.high - NEAR])

        paths = longer_paths
        if len(paths) + len(finished_paths) > MAX_PATHS:
            raise ValueError(
                f"a round has more than {MAX_PATHS} drafts: draft fewer tokens, or from fewer "
                "(top_k)"
            )
    return finished_paths, end_numbers, left_out_prob


def _next_tokens(played: Played, row: int, position: int) -> list[TokenInterval]:
    """The tokens that can be drafted at a position of a row."""
    if played.draft is None or played.draft.probs is None:
        # The drafter does not draw: it proposes this token with certainty.
        return [TokenInterval(played.drafted[row][position], 0.0, 1.0)]
    return _intervals(played.draft.probs[row, position])


def _intervals(probs: Float[Tensor, "V"]) -> list[TokenInterval]:
    """Each token that can be drawn, with its interval of uniform numbers."""
    tokens = (probs > 0).nonzero()[:, 0]
    cumulative = probs[tokens].double().cumsum(0)
    interval_ends = (cumulative / cumulative[-1]).tolist()

    intervals = []
    low = 0.0
    for token, high in zip(tokens.tolist(), interval_ends, strict=True):
        intervals.append(TokenInterval(token, low, high))
        low = high
    return intervals
