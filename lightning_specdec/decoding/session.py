"""The decoding loop: rows that come and go, and one round for all of them at a time.

Texts live on the host, states on the device. A round uploads a few integers for each row, runs
draft, target and rule without waiting, and reads their outcome once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.decoding.batch import Batch, SavedText
from lightning_specdec.decoding.requests import (
    Prompts,
    Request,
    RowSettings,
    check_batch,
    check_context,
    check_prompt,
    check_switch,
    num_shared,
    power_of_two,
)
from lightning_specdec.decoding.results import DecodeInterrupted, DecodeResult
from lightning_specdec.decoding.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.decoding.verification import Events, Verification
from lightning_specdec.decoding.windows import Outcome, Plan, Window, as_window
from lightning_specdec.drafters import Draft, Drafter, DraftRequest, DraftState
from lightning_specdec.drafters.known_tokens import draft_around
from lightning_specdec.drafters.layout import pad, verified_positions, with_draft_tokens
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.threads import one_thread
from lightning_specdec.rules import Sampling, make_rule
from lightning_specdec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; the room doubles when it is full."""


class Session:
    """A batch of rows that are added, decoded and removed at any time, for example by a server.

    Each `step` is one round for all live rows. The drafter proposes up to `num_draft_tokens`
    tokens for each row. The target reads them in one call, together with all that it has not read
    yet: in a row's first round the whole prompt (predictive prefill). Each row gets its accepted
    draft tokens and one token of the target.

    Args:
        target: the model whose output is wanted.
        drafter: proposes draft tokens.
        config: how to decode. `changes` are fields of `DecodingConfig` and win over it.
            `num_draft_tokens` is an integer or a `Window`; without `eos` no token ends a row.
        max_length: most tokens of a row, prompt and new tokens together.
        batch_size: rows to allocate memory for at first; it grows in powers of two.

    Attributes:
        outcomes: what became of the draft tokens of each live row, in the round whose events
            `step` has returned.

    Raises:
        ValueError: the drafter cannot draft for this target or this rule, or a setting is wrong.
    """

    lock: AbstractContextManager[Any] = nullcontext()
    """Held during a round. Assign one lock to all sessions that share a pair between threads."""

    @torch.inference_mode()
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        config: DecodingConfig | None = None,
        *,
        max_length: int,
        batch_size: int = 1,
        **changes: Any,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config = DecodingConfig.of(config, **changes)
        self.rule = make_rule(config.rule)
        self.window = as_window(config.num_draft_tokens)
        self.max_length = require_int("max_length", max_length, 2)
        # The settings are checked once here, and again for each row that changes some.
        self._own_settings = RowSettings.of(config, target)
        self._check_drafter(drafter)

        self.device = target.device
        self.timer = PhaseTimer(self.device)
        self.num_target_calls = 0
        self.num_draft_calls = 0

        # The target reads draft tokens after the text: at most a window and the token before it.
        self._largest_window = self.window.largest
        num_slots = max_length + self._largest_window + 1
        self._batch = Batch(
            target,
            drafter,
            self.timer,
            batch_size=batch_size,
            num_slots=num_slots,
            own_sampling=self._own_settings.sampling,
        )
        self._executor = self._batch.executor
        self._verification = Verification(self.rule, target.vocab_size)
        self._features = tuple(drafter.features(target))

        self._shares_windows = self._may_share_windows(self._own_settings.sampling)
        self._plan = self._new_plan()

        self._added: dict[Request, None] = {}
        self._next_index = 0
        self._pending_events: Events = []
        self.outcomes: list[Outcome] = []

    def _check_drafter(self, drafter: Drafter) -> None:
        drafter.check_target(self.target)
        if self.rule.needs_draft_logits and not drafter.gives_logits:
            rule_name = type(self.rule).__name__
            drafter_name = type(drafter).__name__
            raise ValueError(
                f"{rule_name} compares the draft's logits, and {drafter_name} has none: use "
                "another rule"
            )

    @property
    def states(self) -> tuple[DecodeState, DraftState]:
        """The states of the target and of the drafter, for all slots. Read them only."""
        return self._batch.target_state, self._batch.draft_state

    def _may_share_windows(self, sampling: Sampling) -> bool:
        """Whether rows with this sampling may share their windows.

        Under some rules the output depends on where rounds begin.
        """
        is_certain = self.rule.lossless and sampling.greedy
        return self.rule.ignores_windows or is_certain

    def _new_plan(self) -> Plan:
        """A plan of windows that has learned nothing yet."""
        plan = self.window.plan(jointly=self._shares_windows)
        if self._executor.is_recorded:
            plan.keep_to_measured()
        return plan

    @property
    def live(self) -> list[Request]:
        """The rows that have not ended."""
        return [row for row in self._batch.rows if row.live]

    @torch.inference_mode()
    def step(self, max_prompt_tokens: int | None = None) -> Events:
        """Run one round.

        Args:
            max_prompt_tokens: most tokens of prompts that the round reads, so that rows with new
                tokens do not wait for a long prompt. The others are read in the next rounds. None
                reads whole prompts, and so do targets that read parts one token a call. No row's
                tokens depend on it.

        Returns:
            Each live row with its new tokens, without rows that read a part of their prompt. An
            empty list if there are none.
        """
        if max_prompt_tokens is not None:
            require_int("max_prompt_tokens", max_prompt_tokens, 1)
        with self.lock:
            if self._pending_events:
                events = self._pending_events
                self._pending_events = []
                return events
            if not self.live:
                return []
            self._batch.shrink()
            # In the order in which they were added.
            live_rows = [row for row in self._added if row.live]
            self._batch.withhold(live_rows, max_prompt_tokens)
            return self._run_round()

    def _run_round(self) -> Events:
        """Draft, verify, accept, commit, observe."""
        batch, executor = self._batch, self._executor
        rows = batch.rows

        windows, num_draft_tokens = executor.begin_round(rows, self._plan, batch.draft_state)
        forced_tokens = self._forced_tokens(windows)
        windows = with_forced(windows, forced_tokens)
        num_draft_tokens = max(num_draft_tokens, *windows)
        unread = batch.truncate_target()
        last_two_tokens = executor.last_two_tokens(rows)
        noise = batch.next_noise(num_draft_tokens + 1)
        sampling = batch.sampling()
        executor.lap("rest")

        draft = self._draft(
            windows, num_draft_tokens, forced_tokens, last_two_tokens, noise, sampling
        )
        executor.lap("draft")

        output = self._verify(unread, last_two_tokens, draft)
        executor.lap("verify")

        with one_thread(self.target.backend == "openvino"):
            outcome = self._verification.judge(
                rows, draft, output.logits, noise, executor, sampling
            )
            values = executor.read(outcome, draft)
        executor.lap("accept")

        seconds = self.timer.elapsed()
        events, outcomes, num_accepted = self._verification.commit(
            rows, values, draft, windows, seconds
        )
        executor.lap("rest")

        self.drafter.observe(batch.draft_state, output, num_accepted)
        executor.finish_round()
        executor.lap("draft")

        self.outcomes = outcomes
        self._plan.learn(outcomes)
        executor.lap("rest")
        return events

    def _draft(
        self,
        windows: list[int],
        num_draft_tokens: int,
        forced_tokens: list[list[int]],
        last_two_tokens: Int[Tensor, "B 2"],
        noise: Float[Tensor, "B N 3"] | None,
        sampling: Sampling,
    ) -> Draft:
        """Draft tokens for every row. The drafter is not called if no row requests any."""
        if num_draft_tokens == 0:
            return Draft(torch.empty(len(windows), 0, dtype=torch.long, device=self.device))

        uniform = None
        if noise is not None:
            uniform = noise[:, :num_draft_tokens, self.rule.draft_purpose]
        request = DraftRequest(
            texts=[row.visible_text for row in self._batch.rows],
            last_two_tokens=last_two_tokens,
            uniform=uniform,
            wants_logits=self.rule.needs_draft_logits,
            vocab_size=self.target.vocab_size,
            calls=self._executor,
            prompt_lengths=[row.prompt_length for row in self._batch.rows],
            may_use_other_texts=self._shares_windows,
            fallback_windows=self._plan.fallback_windows(self._batch.rows),
        )
        draft = draft_around(
            forced_tokens,
            self.drafter,
            self._batch.draft_state,
            self._batch.target_context,
            request,
            windows,
            sampling,
        )
        draft.forced = [bool(tokens) for tokens in forced_tokens]
        self.num_draft_calls += draft.num_calls
        return self._plan.adjust(draft, windows)

    def _forced_tokens(self, windows: Sequence[int]) -> list[list[int]]:
        """Each row's draft tokens if a grammar leaves no choice, so that no drafter is needed.

        A drafter that draws its tokens under the grammar has these too, and may continue them. So
        its rows have them only if they fill the window or end the text.

        Args:
            windows: draft tokens that each row requests of the drafter.
        """
        if self.rule.needs_draft_logits:
            # Such rules judge draft models only.
            return [[] for _ in windows]

        forced_windows = self._plan.forced_windows(self._batch.rows) or windows
        forced: list[list[int]] = []
        for row, window, forced_window in zip(
            self._batch.rows, windows, forced_windows, strict=True
        ):
            tokens = row.forced_tokens(forced_window) if row.live and forced_window else []
            is_whole = len(tokens) >= window or (tokens and tokens[-1] in row.eos)
            if self.drafter.gives_logits and not is_whole:
                tokens = []
            forced.append(tokens)
        return forced

    def _verify(
        self,
        unread: list[list[int]],
        last_two_tokens: Int[Tensor, "B 2"],
        draft: Draft,
    ) -> ModelOutput:
        """The target reads its unread tokens and the draft, and scores the last K + 1 positions."""
        valid_lengths: list[int] | None = None
        positions: Tensor | slice
        if all(len(tokens) == 1 for tokens in unread):
            tokens = self._executor.join(last_two_tokens[:, 1:], draft.tokens)
            positions = verified_positions(draft.tokens.shape[1])
        else:
            padded, lengths = pad(unread, self.device)
            tokens, valid_lengths, positions = with_draft_tokens(padded, lengths, draft.tokens)

        options: dict[str, Any] = {}
        if draft.exit_states is not None:
            options["exit_states"] = draft.exit_states
        output = self.target(
            tokens,
            self._batch.target_state,
            valid_lengths=valid_lengths,
            logits_for=positions,
            features=self._features,
            **options,
        )
        self.num_target_calls += 1
        return output

    @torch.inference_mode()
    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        index: int | None = None,
        num_top_logprobs: int = 0,
        saved: SavedText | None = None,
        **changes: Any,
    ) -> Request:
        """Add a prompt; its row takes part in the next round. Returns the row.

        Args:
            prompt: tokens.
            max_new_tokens: the config's when None.
            index: the prompt's number, which with the seed decides its random numbers; the next
                free one when None.
            num_top_logprobs: how many of the likeliest tokens to keep with each new token, in
                `Request.top_logprobs`.
            saved: states of an earlier text, as `save` returns them. Of the prefix that both texts
                share, the models read nothing again, unless the two are on different sides of the
                target's `position_switch`. At temperature 0 and with `ExactMatch` the tokens are
                the same.
            changes: fields of `DecodingConfig` that differ for this row: sampling, processors,
                seed, eos, stop, and logprobs.

        Raises:
            ValueError: the prompt is empty, has a token outside the vocabulary, or is too long; or
                a changed setting is wrong, or belongs to the whole session; or the saved text
                belongs to other models.
        """
        if index is None:
            index = self._next_index
        settings = self._row_settings(changes)
        row = self._make_row(
            prompt, max_new_tokens, index, settings, num_top_logprobs=num_top_logprobs
        )
        self._finish_pipelined_round()
        slot = self._batch.free_slot()
        if saved is not None:
            self._batch.load(slot, saved, prompt)
        self._enter(row, slot)
        return row

    @torch.inference_mode()
    def save(self, row: Request) -> SavedText | None:
        """Copy the states of a row that has just ended, for other rows that begin with its text.

        None if the row was not decoded, has left its slot, or has states that make no copies.
        """
        self._finish_pipelined_round()
        return self._batch.save(row)

    @torch.inference_mode()
    def resume(
        self,
        row: Request,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None = None,
    ) -> Request:
        """Add the next turn of a conversation, which reuses the state of a row that has ended.
        Returns a new row.

        `prompt` is the whole text of the new turn. The models read only what follows the common
        prefix with the old row's text, if their states can be truncated so far. The new row keeps
        the old one's settings. A row can be resumed once, since the new row continues its random
        numbers. At temperature 0 and with
        `ExactMatch` the output is that of reading the whole prompt; with `RejectionSampling` it
        has the same distribution.

        Raises:
            ValueError: the row has not ended or was resumed before, or as of `add`.
        """
        if row.resumed:
            raise ValueError("the row was resumed before: resume the newest turn instead")
        if row.live:
            raise ValueError("the row is still being decoded: cancel it instead")

        next_row = self._make_row(
            prompt,
            max_new_tokens,
            row.index,
            row.settings or self._own_settings,
            num_drawn=row.num_drawn + row.num_new,
            num_top_logprobs=row.num_top_logprobs,
        )
        self._finish_pipelined_round()
        row.resumed = True

        num_common = num_shared(row.text, prompt)
        length = min(num_common, row.num_final, len(prompt) - 1)
        slot = self._batch.resume(row, length, len(prompt))
        if slot is None:
            slot = self._batch.free_slot()
        self._enter(next_row, slot)
        return next_row

    @torch.inference_mode()
    def replace_drafter(
        self,
        drafter: Drafter,
        num_draft_tokens: int | Window | None = None,
    ) -> None:
        """Draft with another drafter from the next round on, in running rows too.

        Rows keep their texts and random numbers. So with `ExactMatch`, and at temperature 0 under
        every lossless rule, their tokens are the same as without the change. With
        `RejectionSampling` they have the same distribution. The new drafter reads the texts again.
        So does the target, if the drafter needs hidden states that the previous one did not have.
        What an adaptive window has learned of the previous drafter is forgotten. Rows that have
        ended can be continued no more.

        Args:
            drafter: proposes draft tokens from now on.
            num_draft_tokens: an integer or a `Window`, up to the largest one that the session
                began with; unchanged when None.

        Raises:
            ValueError: the drafter cannot draft for this target, this rule, or a running row; or
                the window is too large. The previous drafter then stays.
        """
        window = self.window if num_draft_tokens is None else as_window(num_draft_tokens)
        if window.largest > self._largest_window:
            raise ValueError(
                f"{window.largest} draft tokens exceed the {self._largest_window} that the session "
                "has room for: request fewer, or open another session"
            )
        self._check_drafter(drafter)
        for row in self.live:
            max_new_tokens = row.max_length - row.prompt_length
            check_context(row.prompt_length, max_new_tokens, self.target, drafter)

        self._finish_pipelined_round()
        self._batch.replace_drafter(drafter)
        self.drafter = drafter
        self.window = window
        self._executor = self._batch.executor
        self._features = tuple(drafter.features(self.target))
        self._plan = self._new_plan()

    def _row_settings(self, changes: dict[str, Any]) -> RowSettings:
        """The session's settings of a row, with these changes."""
        for name in ("num_draft_tokens", "rule"):
            if name in changes:
                raise ValueError(f"{name} applies to all rows of a session: open another session")
        if not changes:
            return self._own_settings
        return RowSettings.of(self.config.changed(**changes), self.target)

    def _make_row(
        self,
        prompt: Sequence[int],
        max_new_tokens: int | None,
        index: int,
        settings: RowSettings,
        *,
        num_drawn: int = 0,
        num_top_logprobs: int = 0,
    ) -> Request:
        """Check a prompt, and make a row for it."""
        check_prompt(prompt, self.target.vocab_size, "the prompt")
        if max_new_tokens is None:
            max_new_tokens = self.config.max_new_tokens
        require_int("max_new_tokens", max_new_tokens, 1)
        check_context(len(prompt), max_new_tokens, self.target, self.drafter)
        # A user's model around another one may not repeat its attributes.
        check_switch(len(prompt), max_new_tokens, self._batch.target_state.position_switch)
        if len(prompt) + max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed "
                f"max_length={self.max_length}: "
                "open the session with a larger one"
            )
        is_random = not settings.sampling.greedy or self.drafter.needs_noise(settings.sampling)
        return Request(
            index,
            prompt,
            max_new_tokens=max_new_tokens,
            eos=settings.eos,
            speculative=True,
            stop=settings.stops,
            num_drawn=num_drawn,
            sampling=settings.sampling.for_row(len(prompt), self.target, settings.eos),
            seed=settings.seed if is_random else None,
            wants_logprobs=settings.logprobs,
            num_top_logprobs=require_int("num_top_logprobs", num_top_logprobs, 0),
            settings=settings,
        )

    def _enter(self, row: Request, slot: int) -> None:
        if self._shares_windows and not self._may_share_windows(row.sampling):
            # Until now every row was certain, whatever its windows.
            self._shares_windows = False
            self._plan = self._new_plan()
        self._batch.enter(row, slot)
        self._added[row] = None
        self._next_index = max(self._next_index, row.index + 1)

    def _finish_pipelined_round(self) -> None:
        """Finish a round that the device runs already, since rows are about to change.

        `step` returns its tokens.
        """
        if self._executor.has_pipelined_round:
            with self.lock, self._executor.not_pipelined():
                self._pending_events += self._run_round()

    def cancel(self, row: Request) -> None:
        """End a row; it keeps the tokens it has, with the stop reason "cancelled"."""
        if row.live:
            row.stop_reason = "cancelled"

    def release(self, row: Request) -> None:
        """Forget a row that has ended, so that `result` leaves it out.

        Long-running servers release every row.
        """
        if row.live:
            raise ValueError(
                "the row is still being decoded: cancel it, or wait for its end, before it is "
                "released"
            )
        self._added.pop(row, None)

    def result(self) -> DecodeResult:
        """The result so far of all rows that were added and not released, in their order."""
        return DecodeResult(
            rows=[row.result() for row in self._added],
            seconds=self.timer.elapsed(),
            phase_seconds=self.timer.seconds(),
            num_target_calls=self.num_target_calls,
            peak_memory_bytes=peak_memory_bytes(self.device),
            lossless=self.rule.lossless and self.target.lossy_reason is None,
            num_draft_calls=self.num_draft_calls,
            num_draft_tokens=self.window.largest,
            window=self.window.to_dict(),
            rule=type(self.rule).__name__,
            lossy_reason=self.target.lossy_reason,
        )


def with_forced(windows: Sequence[int], forced_tokens: Sequence[Sequence[int]]) -> list[int]:
    """The number of draft tokens that each row requests: of a grammar if that has some for it."""
    requested = []
    for window, tokens in zip(windows, forced_tokens, strict=True):
        requested.append(len(tokens) or window)
    return requested


class Conversation:
    """One row that is resumed turn after turn.

    A turn costs only its own tokens, however long the conversation is. If a prompt departs from
    the text so far (a template that rewrites earlier turns), the states are truncated as far as
    they can be, or cleared. When the room for the states doubles, the text is read once more.

    Args:
        config: how to decode; an answer has up to `max_new_tokens`, fewer if the models' context
            ends before.
    """

    def __init__(self, target: LanguageModel, drafter: Drafter, config: DecodingConfig) -> None:
        self.config = config
        limits = (target.max_positions, drafter.max_positions)
        # The last token of an answer needs no position until the next turn.
        max_lengths = [limit + 1 for limit in limits if limit is not None]
        self.max_length = min(max_lengths, default=MAX_TOKENS)
        self.session = Session(target, drafter, config, max_length=FIRST_LENGTH)
        self.row: Request | None = None

    def begin(self, prompt: Sequence[int]) -> Request:
        """Begin a turn with the whole text; call `session.step` until the row is not live.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the last answer has not ended.
        """
        max_new_tokens = min(self.config.max_new_tokens, self.max_length - len(prompt))
        room = self.session.target.room_after(len(prompt))
        if room is not None:
            # An answer that begins before a position switch also ends before it.
            max_new_tokens = min(max_new_tokens, room)
        if max_new_tokens < 1:
            raise ValueError(
                f"{len(prompt)} tokens fill the chat's context of {self.max_length - 1}: shorten "
                "the question, or begin a new chat"
            )

        length = len(prompt) + max_new_tokens
        if self.session.max_length < length:
            target = self.session.target
            drafter = self.session.drafter
            del self.session  # free its states before those of the new session are allocated
            self.session = Session(target, drafter, self.config, max_length=power_of_two(length))

        if self.row is None:
            self.row = self.session.add(prompt, max_new_tokens=max_new_tokens)
        else:
            self.row = self.session.resume(self.row, prompt, max_new_tokens=max_new_tokens)
        return self.row


def open_session(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Prompts,
    config: DecodingConfig | None = None,
    *,
    indices: Sequence[int] | None = None,
    **changes: Any,
) -> Session:
    """A session with exactly these prompts in it, ready for its first round.

    Args:
        config: how to decode; `changes` replace fields of it.
        indices: the prompts' numbers, which decide their noise; 0, 1, ... when None.
    """
    config = DecodingConfig.of(config, **changes)
    # Prompts are checked before memory for their states is allocated.
    texts = check_batch(prompts, target, config, indices=indices, drafter=drafter)
    longest_prompt = max(len(text) for _, text in texts)
    session = Session(
        target,
        drafter,
        config,
        max_length=longest_prompt + config.max_new_tokens,
        batch_size=len(texts),
    )
    for index, text in texts:
        session.add(text, index=index)
    return session


def run(session: Session) -> DecodeResult:
    """Decode until no row is live; on Ctrl-C, `DecodeInterrupted` with what was committed."""
    num_tokens = sum(row.remaining for row in session.live)
    try:
        with Activity("decoding", num_tokens, unit="tokens") as activity:
            while events := session.step():
                activity.advance(sum(len(tokens) for _, tokens in events))
    except KeyboardInterrupt:
        raise DecodeInterrupted(session.result()) from None
    return session.result()


def stream(session: Session) -> Iterator[tuple[int, int]]:
    """Pairs of a prompt's number and its next token, as rounds commit them."""
    while events := session.step():
        for row, tokens in events:
            for token in tokens:
                yield row.index, token


class TextPieces(Iterator[Any]):
    """Iterates over a session's text, piece by piece.

    Args:
        numbered: whether to yield pairs (prompt number, piece) instead of pieces.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer, *, numbered: bool) -> None:
        self.session = session
        self._numbered = numbered
        self._text_streams = {row: tokenizer.stream() for row in session.live}
        self._pieces = self._decode()

    def __next__(self) -> Any:
        return next(self._pieces)

    def cancel(self) -> None:
        """End all rows after the current round, from any thread; their text is still yielded."""
        for row in self.session.live:
            self.session.cancel(row)

    def _decode(self) -> Iterator[Any]:
        while events := self.session.step():
            for row, tokens in events:
                piece = self._text_streams[row].push(tokens, hold=row.num_hidden)
                if not row.live:
                    text_stream = self._text_streams.pop(row)
                    piece += text_stream.finish(drop=row.num_hidden)
                if piece:
                    yield self._numbered_piece(row, piece)

        # Rows that were cancelled had no last event.
        for row, text_stream in self._text_streams.items():
            piece = text_stream.finish(drop=row.num_hidden)
            if piece:
                yield self._numbered_piece(row, piece)

    def _numbered_piece(self, row: Request, piece: str) -> Any:
        return (row.index, piece) if self._numbered else piece


def speculative_decode(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Prompts,
    config: DecodingConfig | None = None,
    **options: Any,
) -> DecodeResult:
    """Generate with draft tokens that the target verifies several at a time.

    With a lossless rule the output has the target's distribution, whatever the drafter proposes.
    At temperature 0, and with `ExactMatch` at every temperature, it equals the output of
    `autoregressive_decode`, token for token.

    Arguments are those of `open_session`.
    """
    return run(open_session(target, drafter, prompts, config, **options))
