"""How many draft tokens a round has: always the same number, or as many as pay by measured costs."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.files import replaced
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.decoding.rows import Row

DEFAULT_WINDOW = 3
"""Draft tokens per round where nobody chooses."""
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
"""Believed acceptance rate of the first draft token before any was tested, and of how many tests that is worth."""
NEIGHBOUR_WEIGHT = 6.0
"""Of how many tests the rate of the position before is worth to a position."""
MEMORY, SHORT_MEMORY = 24.0, 2.0
"""Tests of a position that are remembered, older ones fading; and those remembered where drafting does not pay."""
FIRST_SHARE, LATER_SHARE = 0.04, 0.02
"""Share of the time that trials take where drafting does not pay: before the second one, and before later ones."""
MAX_LOSS, FEWEST_TOKENS = 0.02, 128
"""Share of standard decoding's time that drafting may ever lose, by the recorded costs; a text counts as that long."""


@dataclass(frozen=True)
class Costs(Settings):
    """Seconds of the calls for one batch size.

    Args:
        widths: numbers of tokens that the target's call was measured with; rising, the first one 1.
        target_seconds, loop_seconds: the target's call, and what a round costs besides its calls, at each width.
        draft_seconds, draft_step_seconds: a draft of any length, and each of its tokens.
        draft_token_seconds: each token that the draft reads beyond those that a round leaves behind.
        target_token_seconds: each token of the prompt that the target reads.
    """

    batch_size: int = setting(minimum=1)
    widths: tuple[int, ...] = setting(minimum=1)
    target_seconds: tuple[float, ...] = setting(above=0)
    loop_seconds: tuple[float, ...] = setting(minimum=0)
    draft_seconds: float = setting(minimum=0)
    draft_step_seconds: float = setting(minimum=0)
    draft_token_seconds: float = setting(minimum=0)
    target_token_seconds: float = setting(minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.widths[:1] != (1,) or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths must rise from 1, got {list(self.widths)}: measure again")
        if not len(self.widths) == len(self.target_seconds) == len(self.loop_seconds):
            raise ValueError(f"seconds must be given for each of the {len(self.widths)} widths: measure again")

    def round_seconds(self, num_draft_tokens: int) -> float:
        """A round (of 0 draft tokens: a standard step) without its draft, linear between the measured widths."""
        width = num_draft_tokens + 1
        right = bisect_left(self.widths, width)
        if right == len(self.widths):
            raise ValueError(f"a call on {width} tokens was not measured, {self.widths[-1]} at most: measure again")
        high, seconds = self.widths[right], self.target_seconds[right] + self.loop_seconds[right]
        if high == width:
            return seconds
        low, before = self.widths[right - 1], self.target_seconds[right - 1] + self.loop_seconds[right - 1]
        return before + (seconds - before) * (width - low) / (high - low)


@dataclass(frozen=True)
class Calibration(Settings):
    """The costs of a target with its drafter on a machine, by batch size.

    Args:
        costs: in rising order of batch size.
        context_length: tokens of text at which the calls were measured.
        target, drafter, device, dtype, threads: what was measured, and on what.
    """

    costs: tuple[Costs, ...] = setting()
    context_length: int = setting(minimum=1)
    target: str = ""
    drafter: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = setting(1, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [costs.batch_size for costs in self.costs]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"the batch sizes of a calibration must rise, got {sizes}: measure again")

    @property
    def largest_window(self) -> int:
        """Draft tokens that the widest call verifies which was measured with every batch size."""
        return min(costs.widths[-1] for costs in self.costs) - 1

    def at(self, batch_size: int) -> Costs:
        """The costs of the smallest measured batch that holds so many rows; of the largest one where none does."""
        return next((costs for costs in self.costs if costs.batch_size >= batch_size), self.costs[-1])

    @classmethod
    def from_dict(cls, values: object, where: str = "") -> Calibration:
        """The inverse of `to_dict`; earlier versions wrote a format number too."""
        if not isinstance(values, dict) or not isinstance(values.get("costs"), list):
            raise ValueError(f"{where or 'a calibration'} must be a mapping with a list of costs: measure again")
        known = {key: value for key, value in values.items() if key != "format"}
        return super().from_dict(known | {"costs": tuple(map(Costs.from_dict, known["costs"]))}, where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is there whole or not at all."""
        with replaced(Path(path)) as file:
            file.write(json.dumps(self.to_dict(), indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file that `save` wrote; ValueError for one that holds something else."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no calibration at {path}: check the path") from None
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be used as a calibration: {error}") from None


@dataclass
class Outcome:
    """A live row's round: how many draft tokens it was asked for, made, and saw accepted."""

    row: Row
    window: int
    num_made: int
    num_accepted: int


class Plan(ABC):
    """The windows of one session, round by round."""

    @abstractmethod
    def windows(self, rows: Sequence[Row]) -> list[int]:
        """How many draft tokens each row gets next; 0 for rows that are not live."""

    def first_token(self, row: Row) -> int:
        """Where the part of the row's text begins that the drafter sees."""
        return 0

    def learn(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027
        """Take in a round, in which these rows were live."""

    def resume(self, row: Row, former: Row, num_shared: int) -> None:  # noqa: B027
        """A row continues from the first `num_shared` tokens of a former one's text. Windows are planned as if the
        drafter still had what it read of them: they must not depend on which rows came between."""


class Window(ABC):
    """How a session chooses its windows. It holds settings only, so one serves any number of sessions."""

    largest: int

    @abstractmethod
    def plan(self, *, jointly: bool) -> Plan:
        """The windows of a new session; `jointly` where they change no output, so that rows may share them."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a record from which `window_from_dict` makes it again."""


class FixedWindow(Window, Plan):
    """The same number of draft tokens in every round, fewer where a row wants fewer."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.largest = require_int("num_draft_tokens", num_draft_tokens, 1)

    def plan(self, *, jointly: bool) -> Plan:
        return self

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [min(self.largest, row.remaining - 1) if row.live else 0 for row in rows]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "FixedWindow", "num_draft_tokens": self.largest}


class AdaptiveWindow(Window):
    """As many draft tokens as make the expected tokens per second largest; none where standard decoding is faster.

    The same seed and calibration give the same windows. Where a rule's output does not depend on windows, all rows have
    one, planned from what all have shown. Elsewhere each row is planned by its own history and the costs of the largest
    measured batch, so that it decodes as it would alone. The drafter sees only as much of a long prompt's end as
    `MAX_LOSS` allows for.

    Args:
        calibration: measured costs, recorded with every result.
        max_draft_tokens: largest window; the largest one that was measured when None.
    """

    def __init__(self, calibration: Calibration, *, max_draft_tokens: int | None = None) -> None:
        known = calibration.largest_window
        most = known if max_draft_tokens is None else max_draft_tokens
        self.calibration, self.largest = calibration, require_int("max_draft_tokens", most, 1, known)

    def plan(self, *, jointly: bool) -> Plan:
        return _AdaptivePlan(self.calibration, self.largest, jointly=jointly)

    def to_dict(self) -> dict[str, Any]:
        calibration = self.calibration.to_dict()
        return {"kind": "AdaptiveWindow", "max_draft_tokens": self.largest, "calibration": calibration}


def as_window(num_draft_tokens: int | str | Window | None) -> Window:
    """The window of a config: an integer is a fixed one, and "auto" needs a `SpeculativeDecoder`."""
    if isinstance(num_draft_tokens, str):
        raise ValueError('num_draft_tokens "auto" needs measured costs: use SpeculativeDecoder, or an AdaptiveWindow')
    if isinstance(num_draft_tokens, Window):
        return num_draft_tokens
    return FixedWindow(DEFAULT_WINDOW if num_draft_tokens is None else num_draft_tokens)


def window_from_dict(values: dict[str, Any]) -> Window:
    """The inverse of `Window.to_dict`, to decode again as a record says."""
    if values.get("kind") == "FixedWindow":
        return FixedWindow(values["num_draft_tokens"])
    if values.get("kind") == "AdaptiveWindow":
        calibration = Calibration.from_dict(values["calibration"])
        return AdaptiveWindow(calibration, max_draft_tokens=values["max_draft_tokens"])
    raise ValueError(f"a window is a FixedWindow or an AdaptiveWindow, got {values.get('kind')!r}")


class Estimate:
    """Acceptance rates by position in the window, older rounds fading."""

    def __init__(self, num_positions: int) -> None:
        self.accepted, self.tested = [0.0] * num_positions, [0.0] * num_positions
        self.made, self.asked = [0.0] * num_positions, [0.0] * num_positions
        # The prior fades like what was seen: a useless draft would be kept alive by it otherwise.
        self.accepted[0], self.tested[0] = PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT

    def record(self, asked: int, num_made: int, num_accepted: int, memory: float) -> None:
        """Count one round of one row, up to the first rejection: the noise behind it is drawn from again."""
        for i in range(min(num_made, num_accepted + 1)):
            _count(self.made, self.asked, i, 1.0, memory)
            _count(self.accepted, self.tested, i, float(i < num_accepted), memory)
        if num_accepted == num_made < asked:
            _count(self.made, self.asked, num_made, 0.0, memory)

    def rates(self, most: int) -> list[tuple[float, float]]:
        """For the first positions: the chance that a draft token is made, and the chance that one made is kept."""
        rate, found = 0.0, []
        for i in range(most):
            weight = NEIGHBOUR_WEIGHT if i else 0.0
            rate = (self.accepted[i] + weight * rate) / (self.tested[i] + weight)
            found.append(((self.made[i] + 1) / (self.asked[i] + 1), rate))
        return found


def _count(hits: list[float], trials: list[float], i: int, hit: float, memory: float) -> None:
    faded = min(1.0, (memory - 1) / trials[i]) if trials[i] else 1.0
    hits[i], trials[i] = hits[i] * faded + hit, trials[i] * faded + 1


class Controller:
    """The windows of one row, or of rows that share a window.

    The best window by the estimate is used (Leviathan et al. 2023, equation 1, with a rate for each position and
    measured costs). Where none beats standard decoding, one draft token is tried now and then. A regret budget holds
    whatever the estimate says: the seconds lost so far, and those that a window loses if nothing is accepted, stay
    within `MAX_LOSS` of standard decoding's time. Gains pay losses off.
    """

    def __init__(self, costs: Costs, largest: int) -> None:
        self.estimate, self.largest = Estimate(largest), largest
        self.lost = self.standard_seconds = self.prompt_seconds = 0.0
        self.wait, self.share = 0, FIRST_SHARE
        """Rounds of standard decoding before the next trial, and the share of the time that one may take."""
        self.set_costs(costs)

    def set_costs(self, costs: Costs) -> None:
        """Plan with these from now on."""
        self.costs = costs
        self.verify_seconds = [costs.round_seconds(i) for i in range(self.largest + 1)]
        self.plain = self.verify_seconds[0]
        self.hopeless = self._best([(1.0, 1.0)] * self.largest) == 0

    def best(self, most: int) -> int:
        """The window up to `most` with the largest expected tokens per second; 0 where none beats standard decoding."""
        return self._best(self.estimate.rates(most))

    def _best(self, rates: Sequence[tuple[float, float]]) -> int:
        best, best_ratio = 0, 1 / self.plain
        tokens, kept, made, seconds = 1.0, 1.0, 1.0, self.costs.draft_seconds + self.plain
        for i, (offered, rate) in enumerate(rates):
            made *= offered
            kept *= rate * offered
            tokens += kept
            seconds += self.costs.draft_step_seconds + made * (self.verify_seconds[i + 1] - self.verify_seconds[i])
            if tokens / seconds > best_ratio:
                best, best_ratio = i + 1, tokens / seconds
        return best

    def round_seconds(self, window: int, unread: int) -> float:
        """A round with that many draft tokens, before which the drafter reads `unread` tokens."""
        draft = self.costs.draft_seconds + window * self.costs.draft_step_seconds
        return draft + unread * self.costs.draft_token_seconds + self.verify_seconds[window]

    @property
    def budget(self) -> float:
        """Seconds that may be lost by now."""
        return MAX_LOSS * (self.prompt_seconds + max(self.standard_seconds, FEWEST_TOKENS * self.plain))

    def readable(self, num_tokens: int) -> int:
        """How many tokens of a prompt the drafter may read: most of the budget that the prompt brings."""
        cost = self.costs.draft_token_seconds
        seconds = 0.75 * MAX_LOSS * (num_tokens * self.costs.target_token_seconds + FEWEST_TOKENS * self.plain)
        return min(num_tokens, int(seconds / cost)) if cost else num_tokens

    def choose(self, remaining: int, unread: int) -> int:
        """The next window for a text of which `remaining` tokens are wanted, and `unread` ones new to the drafter."""
        most = min(self.largest, remaining - 1)  # the target adds one itself
        if most <= 0 or self.hopeless:
            return 0
        window = self.best(most) or int(self.wait <= 0)
        room = self.budget - self.lost + self.plain
        while window and self.round_seconds(window, unread) > room:
            window -= 1
        return window

    def learn(self, window: int, unread: int, outcomes: Sequence[Outcome]) -> None:
        """Take in a round of these rows."""
        gained = self.plain * sum(1 + each.num_accepted for each in outcomes) / len(outcomes)
        self.standard_seconds += gained
        if not window:
            self.wait -= 1
            return
        seconds = self.round_seconds(window, unread)
        if not any(each.num_made for each in outcomes):  # the target's call was a plain one
            seconds += self.plain - self.verify_seconds[window]
        self.lost = max(-self.budget, self.lost + seconds - gained)
        memory = MEMORY if self.best(self.largest) else SHORT_MEMORY
        for each in outcomes:
            self.estimate.record(each.window, each.num_made, each.num_accepted, memory)
        if self.best(self.largest):
            self.share = FIRST_SHARE
        else:
            self.wait = round((seconds - gained) / (self.share * self.plain))
            self.share = LATER_SHARE


@dataclass
class _Reader:
    """How far the drafter has read a row's text, from its first token on."""

    first: int
    read: int
    unread: int = 0


class _AdaptivePlan(Plan):
    def __init__(self, calibration: Calibration, largest: int, *, jointly: bool) -> None:
        self.calibration, self.largest = calibration, largest
        self.shared = Controller(calibration.costs[-1], largest) if jointly else None
        self._controllers: WeakKeyDictionary[Row, Controller] = WeakKeyDictionary()
        self._readers: WeakKeyDictionary[Row, _Reader] = WeakKeyDictionary()

    def _groups(self, rows: Iterable[Row]) -> dict[Controller, list[Row]]:
        """The rows that share a window."""
        groups: dict[Controller, list[Row]] = {}
        for row in rows:
            if (controller := self.shared or self._controllers.get(row)) is None:
                controller = self._controllers[row] = Controller(self.calibration.costs[-1], self.largest)
            groups.setdefault(controller, []).append(row)
        return groups

    def first_token(self, row: Row) -> int:
        reader = self._readers.get(row)
        return 0 if reader is None else reader.first

    def resume(self, row: Row, former: Row, num_shared: int) -> None:
        reader = self._readers.get(former)
        if reader is not None and reader.first < min(num_shared, row.prompt_length - 1):
            self._readers[row] = _Reader(reader.first, min(reader.read, num_shared))
        if former in self._controllers:
            self._controllers[row] = self._controllers[former]

    def windows(self, rows: Sequence[Row]) -> list[int]:
        if self.shared is not None and (costs := self.calibration.at(len(rows))) is not self.shared.costs:
            self.shared.set_costs(costs)
        chosen: dict[Row, int] = {}
        for controller, group in self._groups(row for row in rows if row.live).items():
            unread = max(self._look(row, controller) for row in group)
            window = controller.choose(max(row.remaining for row in group), unread)
            chosen |= {row: min(window, row.remaining - 1) for row in group}
        return [chosen.get(row, 0) for row in rows]

    def _look(self, row: Row, controller: Controller) -> int:
        """Tokens that the drafter would have to read of the row now, besides those that every round leaves behind."""
        if (reader := self._readers.get(row)) is None:
            length = row.prompt_length
            controller.prompt_seconds += length * controller.costs.target_token_seconds
            first = length - max(min(2, length), controller.readable(length))
            reader = self._readers[row] = _Reader(first, first)
        reader.unread = len(row.text) - reader.read
        return reader.unread

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        by_row = {each.row: each for each in outcomes if each.row.stop_reason != "failed"}
        for controller, group in self._groups(by_row).items():
            window, unread = max(by_row[row].window for row in group), max(self._readers[row].unread for row in group)
            controller.learn(window, unread, [by_row[row] for row in group])
            for row in group if window else ():
                self._readers[row].read = len(row.text)
