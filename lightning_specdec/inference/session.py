"""The loop: rows that come and go, and one round for all of them at a time.

The text lives on the host, states live on the device. A round uploads a few integers for each row, runs draft, target
and rule without looking, and reads their outcome once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Context, Draft, Drafter, last_two
from lightning_specdec.drafters.base import DeviceRound
from lightning_specdec.drafters.layout import pad, with_guesses
from lightning_specdec.inference.batch import Batch, Upload
from lightning_specdec.inference.limits import check_context
from lightning_specdec.inference.results import DecodeResult
from lightning_specdec.inference.rows import Row, check_eos, check_prompt, num_shared
from lightning_specdec.inference.settlement import Settlement
from lightning_specdec.inference.stopping import StopStrings
from lightning_specdec.inference.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.inference.windows import FixedWindow, Window, as_window
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import AcceptanceRule, ExactMatch, Sampling


class Session:
    """Rows decoded together, each at its own pace.

    Theory: a round guesses up to `num_draft_tokens` tokens for every live row, has the target read them in one call
    together with whatever it has not seen yet (the whole prompt in a row's first round: predictive prefill), and
    settles for each row what its verdict keeps plus one token of the target's own. Shapes do not depend on verdicts.

    Args:
        target: the model whose output is wanted.
        drafter: what guesses.
        rule: what decides; `ExactMatch()` when None.
        sampling: how tokens are drawn; greedy when None.
        num_draft_tokens: guesses per round, fewer where a row wants fewer; or a `Window` that chooses.
        max_length: most tokens of a row, prompt and new ones together.
        batch_size: rows to make room for at once; more rows grow it, to powers of two.
        eos: tokens that stop a row.
        seed: keys the noise, together with each row's index.
        logprobs: whether each token's log probability under the target is wanted.

    Raises:
        ValueError: for a drafter that cannot serve this target or this rule.
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        max_length: int,
        rule: AcceptanceRule | None = None,
        sampling: Sampling | None = None,
        num_draft_tokens: int | Window = 3,
        batch_size: int = 1,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        logprobs: bool = False,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rule, self.sampling = rule or ExactMatch(), sampling or Sampling()
        self.window = as_window(num_draft_tokens)
        self.max_length = require_int("max_length", max_length, 2)
        self.eos = check_eos(eos, target.vocab_size)
        self.seed = require_int("seed", seed, 0, 2**63 - 1)
        drafter.check_target(target)
        if self.rule.needs_draft_logits and not drafter.gives_logits:
            rule_name, drafter_name = type(self.rule).__name__, type(drafter).__name__
            raise ValueError(f"{rule_name} compares the draft's logits, and {drafter_name} has none: use another rule")
        self.device = target.device
        self.timer = PhaseTimer(self.device)
        self.num_target_calls = self.num_draft_calls = 0
        # A round that begins elsewhere changes the output of some rules: see `AdaptiveWindow`.
        certain = self.rule.lossless and self.sampling.greedy
        self._plan = self.window.plan(jointly=self.rule.ignores_windows or certain)
        self._added: dict[Row, None] = {}
        self._next_index = 0
        # Guesses are read beyond the text: at most a window and the token that opens it.
        num_slots = max_length + self.window.largest + 1
        noisy = not self.sampling.greedy or drafter.needs_noise(self.sampling)
        self._batch = Batch(target, drafter, batch_size=batch_size, num_slots=num_slots, seed=seed if noisy else None)
        self._settlement = Settlement(self.rule, self.sampling, target.vocab_size, logprobs=logprobs)
        self._features = tuple(drafter.features(target))
        self._nothing = Draft(torch.empty(batch_size, 0, dtype=torch.long, device=self.device))

    @property
    def live(self) -> list[Row]:
        """The rows that want more tokens."""
        return self._batch.live

    @torch.inference_mode()
    def add(
        self, prompt: Sequence[int], *, max_new_tokens: int, index: int | None = None, stop: StopStrings | None = None
    ) -> Row:
        """Begin a row; it joins the next round. `index` keys its noise: the next free number when None."""
        index = self._next_index if index is None else index
        row = self._row(prompt, max_new_tokens=max_new_tokens, index=index, stop=stop)
        return self._enter(row, self._batch.make_place())

    @torch.inference_mode()
    def resume(self, row: Row, prompt: Sequence[int], *, max_new_tokens: int, stop: StopStrings | None = None) -> Row:
        """Begin the next turn of a row that has ended: another row, whose prompt goes on from the old one's text.

        Theory: the states have read the old text already. They go back to where the two texts part, and only what
        follows is read; where they cannot go back so far, or the old row's place has gone to another, all of it is.
        That changes no window: these follow from the texts.

        With `ExactMatch`, and at temperature 0, the outcome is that of the whole prompt read anew. So it is with the
        other rules where the draft guesses by the text alone and windows are fixed. Not so with heads whose prompt is
        no longer than the old text (they have heard the target there, and guess at once), nor with an adaptive window
        (it remembers the earlier turns): where rounds begin elsewhere, `RejectionSampling` draws otherwise, from the
        same distribution.

        No noise that an earlier turn drew from is drawn from again, so a row is resumed once.

        Raises:
            ValueError: the row has not ended, or another one goes on from it already.
        """
        if row.live:
            raise ValueError("the row is still being decoded: cancel it, or wait for its end, before it is resumed")
        if row.resumed:
            raise ValueError(
                "the row has been resumed before, and its noise is being used: resume the newest turn instead, whose "
                "next prompt may go back as far as it likes"
            )
        num_drawn = row.num_drawn + row.num_new
        new = self._row(prompt, max_new_tokens=max_new_tokens, index=row.index, stop=stop, num_drawn=num_drawn)
        row.resumed = True
        batch, place, shared = self._batch, self._batch.place(row), num_shared(row.text, prompt)
        self._plan.resume(new, row, shared)
        # The old text's last token was drawn and never fed; a guess may have been, in its place.
        keep = min(shared, len(row.text) - 1, len(prompt) - 1)
        if place is None or not batch.go_back(place, keep, max(0, keep - self._first_token(row))):
            place = batch.make_place()
        return self._enter(new, place)

    def num_read(self, row: Row) -> int:
        """Tokens of a row's text that the target has read, guesses not counted; 0 where it has no place here."""
        place = self._batch.place(row)
        return 0 if place is None else min(self._batch.target_state.consumed[place], len(row.text))

    def _row(
        self, prompt: Sequence[int], *, max_new_tokens: int, index: int, stop: StopStrings | None, num_drawn: int = 0
    ) -> Row:
        """A row that has no place yet, checked."""
        check_prompt(prompt, self.target.vocab_size, "the prompt")
        require_int("max_new_tokens", max_new_tokens, 1)
        row = Row(
            index,
            prompt,
            max_new_tokens=max_new_tokens,
            eos=self.eos,
            speculative=True,
            stop=stop,
            num_drawn=num_drawn,
        )
        check_context(len(prompt), max_new_tokens, self.target, self.drafter)
        if row.max_length > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed max_length={self.max_length}: "
                "open the session with a larger one"
            )
        return row

    def _enter(self, row: Row, place: int) -> Row:
        self._batch.enter(row, place)
        self._added[row] = None
        self._next_index = max(self._next_index, row.index + 1)
        return row

    def cancel(self, row: Row) -> None:
        """Stop a row; what it has stays."""
        if row.live:
            row.stop_reason = "cancelled"

    def release(self, row: Row) -> None:
        """Forget a row that has ended: `result` leaves it out. A server does so with each, or memory fills up."""
        if row.live:
            raise ValueError("the row is still being decoded: cancel it, or wait for its end, before it is released")
        self._added.pop(row, None)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """One round for all live rows; gives each one's newly settled tokens."""
        batch = self._batch
        if not batch.shrink():
            return []
        rows = batch.rows
        windows = self._plan.windows(rows)
        upload = None if batch.graphs is None else batch.upload(windows)
        unread = batch.rewind(upload)
        tail = last_two([row.text for row in rows], self.device) if upload is None else upload.tail
        width = self._width(windows)
        noise = batch.round_noise(width + 1, upload)
        self.timer.lap("rest")
        draft = self._propose(tail, windows, width, noise, upload)
        self.timer.lap("draft")
        output = self._verify(tail, draft, unread)
        self.timer.lap("verify")
        values = self._settlement.outcome(rows, draft, output.logits, noise, batch.graphs).tolist()
        self.timer.lap("accept")
        seconds = self.timer.elapsed()
        events, outcomes, num_accepted = self._settlement.settle(rows, values, draft, windows, seconds)
        self.drafter.observe(batch.draft_state, output, num_accepted)
        self._plan.learn(outcomes)
        self.timer.lap("rest")
        return events

    def result(self) -> DecodeResult:
        """The outcome so far of all rows that were added and not released, in their order."""
        return DecodeResult(
            rows=[row.result() for row in self._added],
            seconds=self.timer.elapsed(),
            phase_seconds=self.timer.seconds(),
            num_target_calls=self.num_target_calls,
            peak_memory_bytes=peak_memory_bytes(self.device),
            lossless=self.rule.lossless,
            num_draft_calls=self.num_draft_calls,
            num_draft_tokens=self.window.largest,
            window=self.window.to_dict(),
            rule=type(self.rule).__name__,
        )

    def _propose(
        self, tail: Tensor, windows: Sequence[int], width: int, noise: Tensor | None, upload: Upload | None
    ) -> Draft:
        if width == 0:
            if len(self._nothing.tokens) != len(windows):
                self._nothing = Draft(torch.empty(len(windows), 0, dtype=torch.long, device=self.device))
            return self._nothing
        context = Context(
            texts=[row.text[first:] if (first := self._first_token(row)) else row.text for row in self._batch.rows],
            tail=tail,
            uniform=None if noise is None else noise[:, :width, self.rule.draft_purpose],
            wants_logits=self.rule.needs_draft_logits,
            vocab_size=self.target.vocab_size,
            windows=windows,
            device=None if upload is None else self._on_device(upload, windows, width),
        )
        draft = self.drafter.propose(self._batch.draft_state, context, windows, self.sampling)
        self.num_draft_calls += draft.num_calls
        return draft

    def _width(self, windows: Sequence[int]) -> int:
        """Guesses of a recorded round: of a fixed window always the same, fewer of which count where fewer are wanted,
        so that the last rounds of a text need no recordings of their own."""
        most = max(windows)
        if most and self._batch.graphs is not None and isinstance(self.window, FixedWindow):
            return self.window.largest
        return most

    def _on_device(self, upload: Upload, windows: Sequence[int], width: int) -> DeviceRound | None:
        """The round's numbers for recorded calls; None where there are none, or the drafter sees parts of texts."""
        graphs = self._batch.graphs
        if graphs is None or any(map(self._first_token, self._batch.rows)):
            return None
        return DeviceRound(graphs, upload.starts, upload.num_added, windows, upload.windows, width)

    def _first_token(self, row: Row) -> int:
        """Where the part of a row's text begins that the drafter sees."""
        return 0 if self.drafter.inside_target else self._plan.first_token(row)

    def _verify(self, tail: Tensor, draft: Draft, unread: list[list[int]]) -> ModelOutput:
        """The target reads what it has not seen of each text, and the guesses; logits of the K + 1 last positions."""
        self.num_target_calls += 1
        one_each = all(len(each) == 1 for each in unread)
        laid_out = with_guesses(*((tail[:, 1:], None) if one_each else pad(unread, self.device)), draft.tokens)
        tokens, valid_lengths, places = laid_out
        score = self.target if draft.exit_states is None else partial(self.target.finish, draft.exit_states)
        return score(
            tokens, self._batch.target_state, valid_lengths=valid_lengths, logits_for=places, features=self._features
        )
