"""What draft, target and loop cost on this machine: a few rounds of each width, timed.

Theory: the rounds of a real session are timed, whose window follows a script, so that whatever a round does besides its
calls is counted, each call finds the machine as it will find it, and every kind of draft can be measured. The draft's
guesses are cut or filled up to the script's window, so that the target sees that width whatever was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Context, Draft, Drafter, DraftState, Host, LookupFirstDrafter
from lightning_specdec.inference import PHASES, Calibration, Costs, Row, Session
from lightning_specdec.inference.windows import Plan, Window
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import AcceptanceRule, Sampling

WIDTHS = (1, 2, 3, 5, 9, 17)
"""Numbers of tokens that the target's call is measured with; between them, costs are nearly straight."""
FEWEST_REPEATS, MOST_REPEATS = 4, 12
"""Rounds of each width: as many as the time allows, between these."""
PERIOD = 24
"""Tokens after which the text that is measured on repeats itself, so that a look-up finds something."""

_Seconds = dict[str, float]


class _Script(Window, Plan):
    """The windows that are to be measured, one after the other."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.script, self.largest = list(windows), max(windows)

    def plan(self, *, jointly: bool) -> Plan:
        return _Script(self.script)

    def windows(self, rows: Sequence[Row]) -> list[int]:
        return [self.script.pop(0)] * len(rows)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "measured"}


class _Filled(Drafter):
    """A drafter whose guesses are as many as the window, whatever it found."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    @property
    def gives_logits(self) -> bool:  # type: ignore[override]
        return self.drafter.gives_logits

    @property
    def inside_target(self) -> bool:  # type: ignore[override]
        return self.drafter.inside_target

    def check_target(self, target: LanguageModel) -> None:
        self.drafter.check_target(target)

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> DraftState:
        return self.drafter.init_state(batch_size, max_length, host)

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.drafter.features(target)

    def needs_noise(self, sampling: Sampling) -> bool:
        return self.drafter.needs_noise(sampling)

    def arguments(self) -> dict[str, Any]:
        return self.drafter.arguments()

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        draft = self.drafter.propose(state, context, windows, sampling)
        missing = max(windows) - draft.tokens.shape[1]
        if missing <= 0:
            return draft
        probs, logits = (
            None if each is None else torch.nn.functional.pad(each, (0, 0, 0, missing))
            for each in (draft.probs, draft.logits)
        )
        tokens = torch.nn.functional.pad(draft.tokens, (0, missing))
        return replace(draft, tokens=tokens, probs=probs, logits=logits)

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        self.drafter.observe(state, output, num_accepted)


def calibrate(
    target: LanguageModel,
    drafter: Drafter,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_length: int = 128,
    widths: Sequence[int] = WIDTHS,
    seconds: float = 2.0,
    rule: AcceptanceRule | None = None,
    sampling: Sampling | None = None,
) -> Calibration:
    """Measure the costs of this pair, at sizes and settings like those that it will decode with.

    Args:
        drafter: as it will guess: fused or compiled. Of one that looks up first, what it asks where it finds nothing is
            measured, which is the dearer part.
        batch_sizes: numbers of rows, in any order.
        context_length: tokens of text before the first call; fewer where a model holds fewer.
        widths: numbers of tokens in the target's call, 1 and at least one more.
        seconds: about as long as the timing of each size may take, if four rounds of each width fit; a third as much
            again goes to warming up.
        rule, sampling: as those of `Session`.

    Raises:
        ValueError: a model's context has no room for the calls.
    """
    widths = sorted({1, *(require_int("widths", width, 1) for width in widths)})
    if len(widths) < 2:
        raise ValueError("widths must have one above 1: there is nothing to choose from otherwise")
    windows = [width - 1 for width in widths[1:]]
    # A round without a draft leaves it behind, so the next one reads more: that one is not counted.
    one_pass = [0, 0, windows[0], *windows]
    pass_tokens, first_tokens = sum(window + 1 for window in one_pass), windows[0] + 2
    num_new = pass_tokens * (FEWEST_REPEATS + 1) + first_tokens
    limits = [limit for limit in (target.max_positions, drafter.max_positions) if limit is not None]
    length = min([context_length, *(limit - num_new for limit in limits)])
    if length < 2:
        raise ValueError(f"measuring takes {num_new} tokens and the models hold {min(limits)}: measure fewer widths")
    name = _name(drafter)
    if isinstance(drafter, LookupFirstDrafter):
        drafter = drafter.fallback
    costs = []
    for size in sorted(set(batch_sizes)):
        texts = _texts(size, length, target.vocab_size)
        options: dict[str, Any] = {"rule": rule, "sampling": sampling}
        # The first session warms up allocators, caches and compilers, so that the second one's prompt is timed fairly.
        rounds = _run(target, drafter, texts, [windows[0], *one_pass, *one_pass], **options)
        pass_seconds = sum(sum(each.values()) for each in rounds[-len(one_pass) :])
        repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, int(seconds / pass_seconds)))
        repeats = min([repeats, *((limit - length - first_tokens) // pass_tokens - 1 for limit in limits)])
        script = [windows[0], *one_pass * (repeats + 1)]
        rounds = _run(target, drafter, texts, script, **options)
        costs.append(_costs(size, length, widths, script, rounds, inside_target=drafter.inside_target))
    return Calibration(
        tuple(costs),
        length,
        target=_name(target),
        drafter=name,
        device=torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else str(target.device),
        dtype=_dtype(target),
        threads=torch.get_num_threads(),
    )


def _texts(num_rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Texts of no meaning that repeat themselves."""
    generator = torch.Generator().manual_seed(0)
    period = torch.randint(vocab_size, (num_rows, PERIOD), generator=generator)
    return period.repeat(1, length // PERIOD + 1)[:, :length].tolist()


def _run(
    target: LanguageModel,
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    script: Sequence[int],
    *,
    rule: AcceptanceRule | None,
    sampling: Sampling | None,
) -> list[_Seconds]:
    """The seconds of each round of the script, by phase."""
    num_new = sum(script) + len(script) + 1
    session = Session(
        target,
        _Filled(drafter),
        max_length=len(texts[0]) + num_new,
        rule=rule,
        sampling=sampling,
        num_draft_tokens=_Script(script),
        batch_size=len(texts),
    )
    for text in texts:
        session.add(text, max_new_tokens=num_new)
    session.timer.lap("rest")
    rounds, before = [], session.timer.seconds()
    for _ in script:
        session.step()
        after = session.timer.seconds()
        rounds.append({phase: after[phase] - before[phase] for phase in PHASES})
        before = after
    return rounds


def _costs(
    batch_size: int,
    length: int,
    widths: Sequence[int],
    script: Sequence[int],
    rounds: Sequence[_Seconds],
    *,
    inside_target: bool,
) -> Costs:
    """Medians of the rounds; the first one read the prompt, and the first pass warmed up."""
    one_pass = len(widths) + 2
    by_window: dict[int, list[_Seconds]] = {width - 1: [] for width in widths}
    for i, (window, seconds) in enumerate(zip(script[1:], rounds[1:], strict=True)):
        if i >= one_pass and i % one_pass != 2:
            by_window[window].append(seconds)
    call = {window: median(each["verify"] for each in several) for window, several in by_window.items()}
    loop = {window: median(each["accept"] + each["rest"] for each in several) for window, several in by_window.items()}
    draft = {window: median(each["draft"] for each in several) for window, several in by_window.items()}
    both = _rising([call[window] + loop[window] for window in call])
    for window, whole in zip(call, both, strict=True):
        loop[window] = min(loop[window], whole / 2)  # more is an interruption's, and the call cannot take less than 0
        call[window] = whole - loop[window]
    fixed, step = _line({window: seconds - draft[0] for window, seconds in draft.items() if window})
    first = script[0]
    drafted, verified = (
        max(0.0, rounds[0][phase] - later[first]) / length for phase, later in (("draft", draft), ("verify", call))
    )
    return Costs(
        batch_size=batch_size,
        widths=tuple(widths),
        target_seconds=tuple(call.values()),
        loop_seconds=tuple(loop.values()),
        draft_seconds=fixed,
        draft_step_seconds=step,
        # What a draft inside the target reads of a prompt is the target's own reading, and no further cost.
        draft_token_seconds=0.0 if inside_target else drafted,
        target_token_seconds=verified + drafted if inside_target else verified,
    )


def _rising(seconds: list[float]) -> list[float]:
    """The nearest figures that never fall: a wider call is not cheaper, so where it looks so, both are its mean."""
    blocks: list[tuple[float, int]] = []
    for each in seconds:
        total, count = each, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            total, count = total + blocks[-1][0], count + blocks[-1][1]
            blocks.pop()
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def _line(seconds: dict[int, float]) -> tuple[float, float]:
    """Height at 0 and slope of the line that is nearest to the points, both at least 0."""
    count, slope = len(seconds), 0.0
    middle, height = sum(seconds) / count, sum(seconds.values()) / count
    if count > 1:
        spread = sum((x - middle) ** 2 for x in seconds)
        slope = max(0.0, sum((x - middle) * (y - height) for x, y in seconds.items()) / spread)
    if height < slope * middle or count == 1:  # through the origin
        slope = sum(x * y for x, y in seconds.items()) / sum(x * x for x in seconds)
        return 0.0, max(0.0, slope)
    return height - slope * middle, slope


def _name(module: LanguageModel | Drafter) -> str:
    """What it is: the size of a model, and of a draft that has one; of other drafts their settings."""
    sizes = [each.num_parameters for each in module.modules() if isinstance(each, LanguageModel)]
    if sizes:
        return f"{type(module).__name__}, {max(sizes):,} parameters"
    settings = (f"{name}={value}" for name, value in vars(module).items() if type(value) is int and name[0] != "_")
    return f"{type(module).__name__}({', '.join(settings)})"


def _dtype(target: LanguageModel) -> str:
    weights = (each.dtype for each in target.parameters() if each.is_floating_point())
    return str(getattr(target, "dtype", None) or next(weights, torch.float32)).removeprefix("torch.")
