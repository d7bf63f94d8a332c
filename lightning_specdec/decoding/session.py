"""The decoding loop: rows that come and go, and one round for all of them at a time.

Texts live on the host, states on the device. A round uploads a few integers for each row, runs draft, target and rule
without looking, and reads their outcome once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.decoding.batch import Batch, Upload
from lightning_specdec.decoding.results import DecodeInterrupted, DecodeResult
from lightning_specdec.decoding.rows import (
    Prompts,
    Row,
    check_batch,
    check_context,
    check_eos,
    check_prompt,
    num_shared,
    power_of_two,
    stops_of,
)
from lightning_specdec.decoding.timing import PhaseTimer, peak_memory_bytes
from lightning_specdec.decoding.verification import Verification
from lightning_specdec.decoding.windows import as_window
from lightning_specdec.drafters import Draft, Drafter, DraftRequest, last_two
from lightning_specdec.drafters.base import DeviceRound
from lightning_specdec.drafters.layout import pad, with_draft_tokens
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.base import one_thread
from lightning_specdec.models.graphs import begin_read
from lightning_specdec.rules import Sampling, make_rule
from lightning_specdec.text.tokenizer import Tokenizer

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; the room doubles when it is needed."""


class Session:
    """A batch of rows that are added, decoded and removed at any time, for example by a server.

    Each `step` is one round for all live rows. The drafter proposes up to `num_draft_tokens` tokens for each row. The
    target reads them in one call, together with all that it has not read yet: in a row's first round the whole prompt
    (predictive prefill). Each row gets its accepted draft tokens and one token of the target.

    Args:
        target: the model whose output is wanted.
        drafter: proposes draft tokens.
        config: how to decode. `changes` are fields of `DecodingConfig` and win over it. `num_draft_tokens` is an
            integer or a `Window`; without `eos` no token ends a row.
        max_length: most tokens of a row, prompt and new tokens together.
        batch_size: rows to allocate memory for at first; it grows in powers of two.

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
        self.target, self.drafter = target, drafter
        self.config = config = DecodingConfig.of(config, **changes)
        self.sampling, self.rule = Sampling.of(config), make_rule(config.rule)
        self.window = as_window(config.num_draft_tokens)
        self.max_length = require_int("max_length", max_length, 2)
        self._eos, self._stops = check_eos(config.eos, target.vocab_size), stops_of(config, target)
        drafter.check_target(target)
        if self.rule.needs_draft_logits and not drafter.gives_logits:
            rule_name, drafter_name = type(self.rule).__name__, type(drafter).__name__
            raise ValueError(
                f"{rule_name} compares the draft's logits, and {drafter_name} has none: use another rule"
            )
        self.device = target.device
        self.timer = PhaseTimer(self.device)
        self.num_target_calls = self.num_draft_calls = 0
        # A round that begins elsewhere changes the output of some rules: see `AdaptiveWindow`.
        certain = self.rule.lossless and self.sampling.greedy
        self._plan = self.window.plan(jointly=self.rule.ignores_windows or certain)
        self._added: dict[Row, None] = {}
        self._next_index = 0
        self._ahead: int | None = None
        """Draft tokens of the next round where the device runs it already."""
        self._unobserved = False
        self._waiting: list[tuple[Row, list[int]]] = []
        # Draft tokens are read beyond the text: at most a window and the token before it.
        num_slots = max_length + self.window.largest + 1
        noisy = not self.sampling.greedy or drafter.needs_noise(self.sampling)
        seed = config.seed if noisy else None
        self._batch = Batch(target, drafter, batch_size=batch_size, num_slots=num_slots, seed=seed)
        self._verification = Verification(
            self.rule, self.sampling, target.vocab_size, logprobs=config.logprobs
        )
        if self._batch.graphs is not None:
            self._plan.keep_to_measured()
        self._features = tuple(drafter.features(target))

    @property
    def live(self) -> list[Row]:
        """The rows that have not ended."""
        return [row for row in self._batch.rows if row.live]

    @torch.inference_mode()
    def add(
        self, prompt: Sequence[int], *, max_new_tokens: int | None = None, index: int | None = None
    ) -> Row:
        """Add a prompt; its row takes part in the next round. Returns the row.

        Args:
            prompt: tokens.
            max_new_tokens: the config's when None.
            index: the prompt's number, which with the seed decides its random numbers; the next free one when None.

        Raises:
            ValueError: the prompt is empty, has a token outside the vocabulary, or is too long.
        """
        row = self._row(prompt, max_new_tokens, self._next_index if index is None else index)
        self._settle()
        return self._enter(row, self._batch.make_place())

    @torch.inference_mode()
    def resume(self, row: Row, prompt: Sequence[int], *, max_new_tokens: int | None = None) -> Row:
        """Add the next turn of a conversation, which reuses the state of a row that has ended. Returns a new row.

        `prompt` is the whole text of the new turn. The models read only what follows its common beginning with the old
        row's text, if their states still reach back so far. A row can be resumed once, since its random numbers go on
        in the new row. At temperature 0 and with `ExactMatch` the output is that of reading the whole prompt; with
        `RejectionSampling` it has the same distribution.

        Raises:
            ValueError: the row has not ended or was resumed before, or as of `add`.
        """
        if row.live or row.resumed:
            state = (
                "was resumed before: resume the newest turn"
                if row.resumed
                else "is still being decoded: cancel it"
            )
            raise ValueError(f"the row {state} instead")
        new = self._row(prompt, max_new_tokens, row.index, num_drawn=row.num_drawn + row.num_new)
        self._settle()
        row.resumed = True
        # The old text's last token was drawn and never read; a draft token may have been, in its place.
        keep = min(num_shared(row.text, prompt), len(row.text) - 1, len(prompt) - 1)
        place = self._batch.go_back(row, keep)
        return self._enter(new, self._batch.make_place() if place is None else place)

    def _row(
        self, prompt: Sequence[int], max_new_tokens: int | None, index: int, num_drawn: int = 0
    ) -> Row:
        """A row that has no place yet, checked."""
        check_prompt(prompt, self.target.vocab_size, "the prompt")
        wanted = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_context(
            len(prompt), require_int("max_new_tokens", wanted, 1), self.target, self.drafter
        )
        if len(prompt) + wanted > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {wanted} new ones exceed max_length={self.max_length}: open the "
                "session with a larger one"
            )
        return Row(
            index,
            prompt,
            max_new_tokens=wanted,
            eos=self._eos,
            speculative=True,
            stop=self._stops,
            num_drawn=num_drawn,
        )

    def _enter(self, row: Row, place: int) -> Row:
        self._batch.enter(row, place)
        self._added[row] = None
        self._next_index = max(self._next_index, row.index + 1)
        return row

    def cancel(self, row: Row) -> None:
        """End a row; it keeps the tokens it has, with the stop reason "cancelled"."""
        if row.live:
            row.stop_reason = "cancelled"

    def release(self, row: Row) -> None:
        """Forget a row that has ended, so that `result` leaves it out. Long-running servers release every row."""
        if row.live:
            raise ValueError(
                "the row is still being decoded: cancel it, or wait for its end, before it is released"
            )
        self._added.pop(row, None)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """Run one round. Returns each live row with its new tokens; an empty list if no row is live."""
        with self.lock:
            if self._waiting:
                events, self._waiting = self._waiting, []
                return events
            if not (self.live if self._ahead is not None else self._batch.shrink()):
                return []
            return self._round()

    def _round(self, *, last: bool = False) -> list[tuple[Row, list[int]]]:
        batch, timer, verification, graphs = (
            self._batch,
            self.timer,
            self._verification,
            self._batch.graphs,
        )
        rows, ahead, self._ahead = batch.rows, self._ahead, None
        if (
            ahead is None and self._unobserved and graphs is not None
        ):  # interrupted, its outputs overwritten
            batch.draft_state.clear(range(len(rows)))
        self._unobserved = True
        if ahead is None:
            windows = self._plan.windows(rows)
            width = max(windows)
            if width and graphs is not None:
                width = (
                    self._plan.ahead or width
                )  # the last rounds of a text need no recordings of their own
        else:
            width, windows = (
                ahead,
                [min(ahead, row.remaining - 1) if row.live else 0 for row in rows],
            )
        upload = batch.upload(windows, ahead=ahead is not None)
        if graphs is not None:
            graphs.begin(repeated=ahead is not None)
        lap = timer.lap if graphs is None else partial(graphs.mark, timer.lap)
        unread = batch.rewind(upload)
        tail = last_two([row.text for row in rows], self.device) if upload is None else upload.tail
        noise = batch.round_noise(width + 1, upload)
        lap("rest")
        draft = self._propose(tail, windows, width, noise, upload)
        lap("draft")
        # The target reads what it has not seen of each text, and the draft tokens; it scores the K + 1 last positions.
        last_only = all(len(each) == 1 for each in unread)
        new = (tail[:, 1:], None) if last_only else pad(unread, self.device)
        tokens, valid_lengths, places = with_draft_tokens(
            *new, draft.tokens, graphs if last_only else None
        )
        score = (
            self.target
            if draft.exit_states is None
            else partial(self.target, exit_states=draft.exit_states)
        )
        output = score(
            tokens,
            batch.target_state,
            valid_lengths=valid_lengths,
            logits_for=places,
            features=self._features,
        )
        self.num_target_calls += 1
        lap("verify")
        with one_thread(self.target.backend == "openvino"):
            outcome = verification.outcome(rows, draft, output.logits, noise, graphs)
            read = outcome.tolist if graphs is None else begin_read(outcome)
            steady = upload is not None and upload.graphs.end() and draft.tokens.shape[1] == width
            next_width = (
                self._run_ahead(upload, outcome, width) if upload and steady and not last else None
            )
            values = read()
        timer.lap("accept")
        events, outcomes, num_accepted = verification.commit(
            rows, values, draft, windows, timer.elapsed()
        )
        self._ahead = next_width
        timer.lap("rest")
        self.drafter.observe(batch.draft_state, output, num_accepted)
        self._unobserved = False
        timer.lap("draft")
        self._plan.learn(outcomes)
        timer.lap("rest")
        return events

    def _run_ahead(self, upload: Upload, outcome: Tensor, width: int) -> int | None:
        """Launch the next round before the host reads this one's outcome, unless it may be another, or none. Gives its
        width."""
        live = self.live
        same = self._plan.ahead == width and power_of_two(len(live)) >= len(self._batch.rows)
        if not (
            same and self.drafter.runs_ahead and any(row.remaining > width + 1 for row in live)
        ):
            return None
        upload.go_on(outcome, width, self.target.vocab_size)
        upload.graphs.repeat()
        return width

    def _settle(self) -> None:
        """Finish a round that runs ahead, since rows are about to change; `step` gives its tokens."""
        if self._ahead is not None:
            with self.lock:
                self._waiting += self._round(last=True)

    def _propose(
        self,
        tail: Tensor,
        windows: Sequence[int],
        width: int,
        noise: Tensor | None,
        upload: Upload | None,
    ) -> Draft:
        """Draft tokens for every row, `width` columns at most; none, without a call, where no row wants any."""
        if width == 0:
            return Draft(torch.empty(len(windows), 0, dtype=torch.long, device=self.device))
        device = None
        if upload is not None:
            device = DeviceRound(
                upload.graphs, upload.starts, upload.num_added, windows, upload.windows, width
            )
        request = DraftRequest(
            texts=[row.text for row in self._batch.rows],
            tail=tail,
            uniform=None if noise is None else noise[:, :width, self.rule.draft_purpose],
            wants_logits=self.rule.needs_draft_logits,
            vocab_size=self.target.vocab_size,
            device=device,
        )
        draft = self.drafter.propose(self._batch.draft_state, request, windows, self.sampling)
        self.num_draft_calls += draft.num_calls
        return draft

    def result(self) -> DecodeResult:
        """The result so far of all rows that were added and not released, in the order they were added."""
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


class Conversation:
    """One row that is resumed turn after turn.

    A turn costs only its own tokens, however long the conversation. Where a prompt departs from what was said (a
    template that rewrites earlier turns), the states go back as far as they can or begin again. When the room for the
    states doubles, the text is read once more.

    Args:
        config: how to decode; an answer has `max_new_tokens` at most, fewer where the models' context ends before.
    """

    def __init__(self, target: LanguageModel, drafter: Drafter, config: DecodingConfig) -> None:
        self.config = config
        limits = (target.max_positions, drafter.max_positions)
        self.max_length = min((limit for limit in limits if limit is not None), default=MAX_TOKENS)
        self.session = Session(target, drafter, config, max_length=FIRST_LENGTH)
        self.row: Row | None = None

    def begin(self, prompt: Sequence[int]) -> Row:
        """Begin a turn with the whole text so far; `session.step` until the row is no longer live.

        Raises:
            ValueError: the prompt leaves no room for an answer, or the last answer has not ended.
        """
        wanted = min(self.config.max_new_tokens, self.max_length - len(prompt))
        if wanted < 1:
            raise ValueError(
                f"{len(prompt)} tokens fill the chat's context of {self.max_length}: begin a new one"
            )
        if self.session.max_length < (needed := len(prompt) + wanted):
            models = self.session.target, self.session.drafter
            del self.session  # the old room goes before the new one is made
            self.session = Session(*models, self.config, max_length=power_of_two(needed))
        if self.row is None:
            self.row = self.session.add(prompt, max_new_tokens=wanted)
        else:
            self.row = self.session.resume(self.row, prompt, max_new_tokens=wanted)
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
        indices: the prompts' numbers, which their noise is keyed by; 0, 1, ... when None.
    """
    config = DecodingConfig.of(config, **changes)
    # Checked before there are states to hold them.
    batch = check_batch(prompts, target, config, indices=indices, drafter=drafter)
    max_length = max(len(text) for _, text in batch) + config.max_new_tokens
    session = Session(target, drafter, config, max_length=max_length, batch_size=len(batch))
    for number, text in batch:
        session.add(text, index=number)
    return session


def run(session: Session) -> DecodeResult:
    """Decode until no row is live; on Ctrl-C, `DecodeInterrupted` with what was committed."""
    try:
        while session.step():
            pass
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
        self.session, self._numbered = session, numbered
        self._texts = {row: tokenizer.stream() for row in session.live}
        self._pieces = self._decode()

    def __next__(self) -> Any:
        return next(self._pieces)

    def cancel(self) -> None:
        """End all rows after the current round, from any thread; the text that they have is still yielded."""
        for row in self.session.live:
            self.session.cancel(row)

    def _decode(self) -> Iterator[Any]:
        while events := self.session.step():
            for row, tokens in events:
                piece = self._texts[row].push(tokens, hold=row.num_hidden)
                piece += "" if row.live else self._texts.pop(row).finish(drop=row.num_hidden)
                if piece:
                    yield (row.index, piece) if self._numbered else piece
        for row, text in self._texts.items():  # cancelled
            if piece := text.finish(drop=row.num_hidden):
                yield (row.index, piece) if self._numbered else piece


def speculative_decode(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Prompts,
    config: DecodingConfig | None = None,
    **options: Any,
) -> DecodeResult:
    """Generate with draft tokens that the target verifies several at a time.

    With a lossless rule the output has the target's distribution, whatever the drafter proposes; at temperature 0, and
    with `ExactMatch` at every temperature, it is what `autoregressive_decode` gives, token for token.

    Arguments are those of `open_session`.
    """
    return run(open_session(target, drafter, prompts, config, **options))
