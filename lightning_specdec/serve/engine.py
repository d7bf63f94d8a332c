"""The engine: one thread that owns a session, in which requests join and leave between rounds.

It knows tokens only. Text and HTTP belong to the modules that call it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Session
from lightning_specdec.decoding.requests import (
    Request,
    RowSettings,
    TopLogprobs,
    check_context,
    check_prompt,
)
from lightning_specdec.decoding.windows import Outcome, Window
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.serve.memory import DrafterTrial
from lightning_specdec.serve.prefix_cache import PrefixCache
from lightning_specdec.serve.settings import DEFAULT_PROMPT_TOKENS

log = logging.getLogger(__name__)

PROMPT_TOKENS_ALONE = 1024
"""Most tokens of prompts that a round reads while no generation has tokens. Only a new request or
a client that disconnects waits for such a round."""
INTERNAL_ERROR = "the server failed to decode this request"
SHUTTING_DOWN = "the server is shutting down"
GRAMMAR_FAILED = "the answer cannot go on under its grammar"
NOT_FINITE = "the model's logits are not finite"


class QueueFullError(Exception):
    """The queue has no room for more generations."""


class ShuttingDownError(Exception):
    """The engine accepts nothing any more."""


@dataclass(frozen=True)
class Update:
    """What a round added to a generation.

    Args:
        tokens: new tokens.
        num_drafted: draft tokens of the round, without those after a stop.
        num_accepted: how many of `tokens`, from the first on, are accepted draft tokens.
        num_hidden: bytes at the end of all new text that are not shown: a stop string, or a part
            that may become one.
        logprobs: each token's log probability; None unless requested.
        top_logprobs: the likeliest tokens in place of each token; empty unless requested.
        stop_reason: "eos", "stop" or "length" in the last update; "" before.
        error: why the generation ended without a result; "" if it did not.
    """

    tokens: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_hidden: int = 0
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    stop_reason: str = ""
    error: str = ""

    @property
    def is_last(self) -> bool:
        """Whether no update follows."""
        return bool(self.stop_reason or self.error)


@dataclass(eq=False)
class Generation:
    """One answer that is requested.

    Args:
        prompt: tokens.
        max_new_tokens: most new tokens.
        index: which with the seed decides its random numbers.
        changes: fields of `DecodingConfig` that differ from those of the engine.
        num_top_logprobs: how many of the likeliest tokens to report with each token.
        listener: called with every update, by the engine's thread. It must return at once.
        may_record: whether observers may keep its text.

    Attributes:
        num_cached: tokens of the prompt whose state came from an earlier request.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    listener: Callable[[Update], None] = lambda update: None
    index: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    num_top_logprobs: int = 0
    may_record: bool = True
    num_cached: int = 0
    is_cancelled: bool = False
    submitted_at: float = 0.0
    has_tokens: bool = False


@dataclass(frozen=True)
class DraftName:
    """What a drafter is called in metrics and messages.

    Args:
        label: the first digits of the sha256 of its file; its kind if it has no file.
        kind: the name of its class.
    """

    label: str
    kind: str

    def __str__(self) -> str:
        return self.kind if self.kind == self.label else f"{self.kind} {self.label}"


@dataclass(frozen=True)
class Replacement:
    """A drafter that is to draft from the next round on.

    Args:
        drafter: as it will draft: fused.
        name: what it is called.
        num_draft_tokens: the window; None for the present one.
        done: gets a result once it drafts, or the reason why it does not.
    """

    drafter: Drafter
    name: DraftName
    num_draft_tokens: int | Window | None = None
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class TriedDrafter:
    """A replacement that is tried.

    Args:
        replacement: what drafts if it passes the trial.
        trial: its rounds alternate with those of the requests.
    """

    replacement: Replacement
    trial: DrafterTrial


class EngineObserver:
    """Told what the engine does, by its thread. Does nothing; metrics derive from it."""

    def first_token(self, seconds: float) -> None:
        """A generation has its first token, this long after it was submitted."""

    def round(self, row: Request, num_new: int) -> None:
        """A row was part of a round and got new tokens."""

    def drafted(self, outcome: Outcome) -> None:
        """What became of a row's draft tokens in a round; called after `round` for all rows."""

    def replaced(self, drafter: DraftName) -> None:
        """Another drafter drafts from the next round on."""

    def answered(self, generation: Generation, row: Request) -> None:
        """A generation has its whole answer, which a stop or the limit of its tokens ended."""

    def ended(self, generation: Generation, reason: str) -> None:
        """A generation has ended: "eos", "stop", "length", "cancelled" or "failed"."""


class Observers:
    """Tells several observers, in their order.

    What one of them raises is logged, and harms neither a request nor the other observers. Only
    `replaced` raises it, so that the drafter is not replaced.
    """

    def __init__(self, *observers: EngineObserver) -> None:
        self.observers = observers

    def first_token(self, seconds: float) -> None:
        self._tell(lambda observer: observer.first_token(seconds))

    def round(self, row: Request, num_new: int) -> None:
        self._tell(lambda observer: observer.round(row, num_new))

    def drafted(self, outcome: Outcome) -> None:
        self._tell(lambda observer: observer.drafted(outcome))

    def replaced(self, drafter: DraftName, previous: DraftName) -> None:
        """As of `EngineObserver`. If one raises, those before it are told of the previous drafter.

        Args:
            previous: the drafter that goes on then.
        """
        for index, observer in enumerate(self.observers):
            try:
                observer.replaced(drafter)
            except Exception:
                earlier_observers = Observers(*self.observers[:index])
                earlier_observers._tell(lambda observer: observer.replaced(previous))
                raise

    def answered(self, generation: Generation, row: Request) -> None:
        self._tell(lambda observer: observer.answered(generation, row))

    def ended(self, generation: Generation, reason: str) -> None:
        self._tell(lambda observer: observer.ended(generation, reason))

    def _tell(self, call: Callable[[EngineObserver], None]) -> None:
        for observer in self.observers:
            try:
                call(observer)
            except Exception:
                log.exception("%s failed", type(observer).__name__)


class Engine:
    """Decodes generations in one session, in a thread that it starts and ends.

    A generation's tokens depend on its prompt and settings only, with one exception: under
    `RejectionSampling`, a drafter inside the target may draft sooner if the cache has a prefix of
    the prompt. The distribution is the same. All methods may be called from any thread.

    Args:
        target: the model whose output is wanted.
        drafter: proposes draft tokens.
        config: settings of the session, and of generations that change none.
        max_length: most tokens of a prompt and its answer.
        max_batch_size: generations that are decoded together.
        max_queue: generations that wait for them.
        prompt_tokens_per_round: most tokens of prompts that a round reads while other generations
            wait for their next tokens.
        cache_bytes: memory for the states of texts that have ended, whose prefixes are not read
            again.
        observers: told what happens.
        name: what the drafter is called; None for the name of its class.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        config: DecodingConfig,
        *,
        max_length: int,
        max_batch_size: int,
        max_queue: int,
        prompt_tokens_per_round: int = DEFAULT_PROMPT_TOKENS,
        cache_bytes: int = 0,
        observers: Sequence[EngineObserver] = (),
        name: DraftName | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config
        self.max_length = max_length
        self.max_batch_size = max_batch_size
        self.max_queue = max_queue
        self.prompt_tokens_per_round = prompt_tokens_per_round
        self.observer = Observers(*observers)
        kind = type(drafter).__name__
        self.draft_name = name or DraftName(kind, kind)
        self._session = self._new_session()

        # Guards what other threads read and change: the queue, the number of live generations,
        # and the end.
        self._condition = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._num_live = 0
        self._deadline: float | None = None
        # The replacement that waits, and its trial if it is open already.
        self._replacement: Replacement | None = None
        self._opened: DrafterTrial | None = None

        # Only the engine's thread uses the session and its rows, and the drafter that is tried.
        self._tried: TriedDrafter | None = None
        self._live: dict[Request, Generation] = {}
        self._cache = PrefixCache(cache_bytes)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _new_session(self) -> Session:
        return Session(self.target, self.drafter, self.config, max_length=self.max_length)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts generations."""
        return self._thread.is_alive() and self._deadline is None

    @property
    def num_waiting(self) -> int:
        """Generations in the queue."""
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        """Generations that are being decoded."""
        return self._num_live

    def check(self, generation: Generation) -> None:
        """Raise ValueError for a generation that cannot be decoded, whatever the load."""
        check_prompt(generation.prompt, self.target.vocab_size, "the prompt")
        num_prompt_tokens = len(generation.prompt)
        check_context(num_prompt_tokens, generation.max_new_tokens, self.target, self.drafter)
        if num_prompt_tokens + generation.max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and {generation.max_new_tokens} new ones "
                f"exceed this server's limit of {self.max_length} tokens"
            )
        RowSettings.of(self.config.changed(**generation.changes), self.target)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue generations that `check` has passed: all of them or none.

        Raises:
            QueueFullError: there is no room for them.
            ShuttingDownError: nothing is accepted any more.
        """
        with self._condition:
            if not self.is_running:
                raise ShuttingDownError(SHUTTING_DOWN)
            num_free = self.max_batch_size - self._num_live
            if len(self._waiting) + len(generations) > self.max_queue + num_free:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already")
            now = time.monotonic()
            for generation in generations:
                generation.submitted_at = now
            self._waiting += generations
            self._condition.notify()

    def cancel(self, generation: Generation) -> None:
        """End a generation whose listener is gone. It gets no update any more."""
        with self._condition:
            generation.is_cancelled = True
            was_waiting = generation in self._waiting
            if was_waiting:
                self._waiting.remove(generation)
            self._condition.notify()
        if was_waiting:
            self.observer.ended(generation, "cancelled")

    def replace_drafter(self, replacement: Replacement) -> None:
        """Try another drafter, and draft with it from then on. Running requests go on.

        A replacement that has not begun is given up for this one. On a CPU, the calling thread
        opens the session of the trial, so that requests do not wait for it. On a GPU, the engine's
        thread does so between two rounds, since it may be recording calls.
        """
        opened = None
        if self.target.device.type == "cpu":
            try:
                opened = self._open_trial(replacement)
            except Exception as error:  # whatever is wrong with it, the present drafter goes on
                replacement.done.set_exception(error)
                return
        with self._condition:
            superseded = self._replacement
            self._replacement = replacement
            self._opened = opened
            self._condition.notify()
        if superseded is not None:
            superseded.done.cancel()
        if not self.is_running:
            self._give_up_replacement()

    def _open_trial(self, replacement: Replacement) -> DrafterTrial:
        """Open the trial of a drafter. Raises ValueError if the drafter does not fit."""
        config = self._config_with(replacement)
        self._check_context_of(replacement.drafter)
        return DrafterTrial(
            self.target,
            replacement.drafter,
            config,
            max_length=self.max_length,
            max_batch_size=self.max_batch_size,
        )

    def _config_with(self, replacement: Replacement) -> DecodingConfig:
        """The present config with the window of a replacement."""
        if replacement.num_draft_tokens is None:
            return self.config
        return self.config.changed(num_draft_tokens=replacement.num_draft_tokens)

    def _check_context_of(self, drafter: Drafter) -> None:
        # The last token of an answer is not read.
        limit = drafter.max_positions
        if limit is not None and limit + 1 < self.max_length:
            raise ValueError(
                f"its context of {limit} tokens is too short for requests of {self.max_length}"
            )

    def begin_shutdown(self, seconds: float) -> None:
        """Refuse what waits and what comes. What is being decoded has some seconds to finish."""
        with self._condition:
            if self._deadline is None:
                self._deadline = time.monotonic() + seconds
            self._condition.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end after `begin_shutdown`."""
        self._thread.join(seconds)

    # The engine's thread

    def _run(self) -> None:
        """Decode until the shutdown."""
        try:
            while self._await_work():
                self._end_cancelled()
                self._replace_drafter()
                self._admit_waiting()
                self._decode_round()
        finally:
            # Empty unless something failed that no round can recover from.
            self.begin_shutdown(0)
            self._give_up_replacement()
            self._give_up_trial()
            self._refuse_waiting()
            self._fail_all(INTERNAL_ERROR)

    def _await_work(self) -> bool:
        """Wait until there is something to decode. Returns False at the end."""
        with self._condition:
            while not self._has_work:
                self._condition.wait()
            if self._deadline is None:
                return True
            has_time = time.monotonic() < self._deadline

        self._refuse_waiting()
        if not has_time:
            self._fail_all(SHUTTING_DOWN)
        return bool(self._live)

    @property
    def _has_work(self) -> bool:
        """Whether something is to be done, or the end has come."""
        has_requests = bool(self._waiting or self._live)
        has_drafter = self._replacement is not None or self._tried is not None
        return has_requests or has_drafter or self._deadline is not None

    def _replace_drafter(self) -> None:
        """Go one step towards another drafter, if one waits or is being tried.

        Such a step takes about as long as a round, so that requests wait for no whole trial.
        """
        tried = self._tried
        if tried is None:
            self._begin_trial()
            return
        try:
            if not tried.trial.step():
                return
            self._use(tried)
        except Exception as error:  # whatever is wrong with it, the present drafter goes on
            tried.replacement.done.set_exception(error)
        else:
            tried.replacement.done.set_result(None)
        finally:
            if tried.replacement.done.done():
                self._tried = None

    def _begin_trial(self) -> None:
        """Begin to try the drafter that waits, if there is one."""
        with self._condition:
            replacement = self._replacement
            trial = self._opened
            self._replacement = None
            self._opened = None
        if replacement is None or not replacement.done.set_running_or_notify_cancel():
            return

        if trial is None:
            try:
                trial = self._open_trial(replacement)
            except Exception as error:  # as in `_replace_drafter`
                replacement.done.set_exception(error)
                return
        self._tried = TriedDrafter(replacement, trial)

    def _use(self, tried: TriedDrafter) -> None:
        """Draft from the next round on with a drafter that has passed its trial.

        If an observer cannot be told, the present drafter goes on.
        """
        replacement = tried.replacement
        present_window = self._session.window
        self._session.replace_drafter(replacement.drafter, replacement.num_draft_tokens)
        try:
            self.observer.replaced(replacement.name, self.draft_name)
        except Exception:
            self._session.replace_drafter(self.drafter, present_window)
            raise
        self.drafter = replacement.drafter
        self.draft_name = replacement.name
        self.config = self._config_with(replacement)
        # The states in the cache were saved with the previous drafter.
        self._cache = PrefixCache(self._cache.capacity)

    def _give_up_replacement(self) -> None:
        """Refuse a replacement, since the engine has ended."""
        with self._condition:
            replacement = self._replacement
            self._replacement = None
            self._opened = None
        if replacement is not None:
            replacement.done.cancel()

    def _give_up_trial(self) -> None:
        """Refuse the drafter that is being tried, since the engine ends."""
        tried = self._tried
        self._tried = None
        if tried is not None:
            # What has begun cannot be cancelled any more.
            tried.replacement.done.set_exception(CancelledError())

    def _refuse_waiting(self) -> None:
        """End what waits in the queue."""
        with self._condition:
            refused = list(self._waiting)
            self._waiting.clear()
        for generation in refused:
            self._end(generation, Update(error=SHUTTING_DOWN))

    def _end_cancelled(self) -> None:
        """Free the slots of generations whose listener is gone."""
        for row, generation in list(self._live.items()):
            if generation.is_cancelled:
                self._session.cancel(row)
                self._keep(row)
                self._leave(row)
                self.observer.ended(generation, "cancelled")

    def _admit_waiting(self) -> None:
        """Fill free slots from the queue."""
        while len(self._live) < self.max_batch_size:
            with self._condition:
                if not self._waiting:
                    return
                generation = self._waiting.popleft()
                self._num_live = len(self._live) + 1
            try:
                row = self._add(generation)
            except Exception:  # whatever is wrong with one request must not end the others
                log.exception("a request could not be added")
                self._num_live = len(self._live)
                self._end(generation, Update(error=INTERNAL_ERROR))
                continue
            self._live[row] = generation

    def _add(self, generation: Generation) -> Request:
        """A row for a generation, which continues the longest known prefix of its prompt."""
        saved, generation.num_cached = self._cache.find(generation.prompt)
        return self._session.add(
            generation.prompt,
            saved=saved,
            max_new_tokens=generation.max_new_tokens,
            index=generation.index,
            num_top_logprobs=generation.num_top_logprobs,
            **generation.changes,
        )

    def _decode_round(self) -> None:
        """One round for all live rows."""
        try:
            events = self._session.step(self._max_prompt_tokens())
        except Exception:  # a model or the device failed, so the states are unknown
            log.exception("a round failed, and all its requests with it")
            self._fail_all(INTERNAL_ERROR)
            self._session = self._new_session()
            return
        for row, tokens in events:
            self._report(row, tokens)
        for outcome in self._session.outcomes if events else ():
            self.observer.drafted(outcome)

    def _max_prompt_tokens(self) -> int:
        """Most tokens of prompts that the next round reads."""
        if any(row.num_new > 0 for row in self._live):
            return self.prompt_tokens_per_round
        # Large parts are read faster.
        return max(self.prompt_tokens_per_round, PROMPT_TOKENS_ALONE)

    def _report(self, row: Request, tokens: list[int]) -> None:
        """Pass a row's new tokens on."""
        generation = self._live.get(row)
        if generation is None:
            # It was cancelled while the device ran this round already.
            return
        if tokens and not generation.has_tokens:
            generation.has_tokens = True
            self.observer.first_token(time.monotonic() - generation.submitted_at)
        self.observer.round(row, len(tokens))

        update = _update_of(row, tokens)
        if not update.is_last:
            self._tell(generation, update)
            return
        self._keep(row)
        self._leave(row)
        if not update.error:
            self.observer.answered(generation, row)
        self._end(generation, update)

    def _keep(self, row: Request) -> None:
        """Keep the states of an ended row in the cache."""
        if not self._cache.capacity:
            return
        try:
            saved = self._session.save(row)
        except (MemoryError, RuntimeError):  # torch raises the latter if there is no memory
            log.exception("the states of a request could not be kept")
            return
        if saved is not None:
            self._cache.put(saved)

    def _leave(self, row: Request) -> None:
        """Take an ended row out of the session."""
        self._session.release(row)
        del self._live[row]
        self._num_live = len(self._live)

    def _end(self, generation: Generation, update: Update) -> None:
        """Send a generation's last update."""
        self.observer.ended(generation, update.stop_reason or "failed")
        self._tell(generation, update)

    def _tell(self, generation: Generation, update: Update) -> None:
        if generation.is_cancelled:
            return
        try:
            generation.listener(update)
        except Exception:  # a broken listener must not end the others
            log.exception("a request's listener failed")
            generation.is_cancelled = True

    def _fail_all(self, error: str) -> None:
        """End all live generations with an error."""
        for row, generation in list(self._live.items()):
            self._session.cancel(row)
            self._leave(row)
            self._end(generation, Update(error=error))


def _update_of(row: Request, tokens: list[int]) -> Update:
    """The update for a row's new tokens in its last round."""
    num_added = len(tokens)
    last_round = row.rounds[-1]
    error = ""
    stop_reason = row.stop_reason
    if stop_reason == "failed":
        error = f"{GRAMMAR_FAILED}: {row.failure}" if row.failure else NOT_FINITE
        stop_reason = ""
    logprobs = None
    if row.logprobs is not None:
        logprobs = row.logprobs[len(row.logprobs) - num_added :]
    top_logprobs = row.top_logprobs[len(row.top_logprobs) - num_added :]
    return Update(
        tokens=tokens,
        num_drafted=len(last_round.drafted),
        num_accepted=last_round.num_accepted,
        num_hidden=row.num_hidden,
        logprobs=logprobs,
        top_logprobs=top_logprobs if row.num_top_logprobs else [],
        stop_reason=stop_reason,
        error=error,
    )
