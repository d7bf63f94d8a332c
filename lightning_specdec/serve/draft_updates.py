"""Swaps a draft whose file has changed into the running server, and a worse one out again.

A thread looks at the file, reads it, and prepares the draft, while the engine's thread goes on
with its rounds. The engine then replaces its drafter between two of them.
"""

from __future__ import annotations

import logging
import queue
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_specdec.checkpoints.checkpoint import DraftOrigin
from lightning_specdec.checkpoints.loading import load_draft
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.files import file_sha256
from lightning_specdec.config.terminal import one_line
from lightning_specdec.decoding import AdaptiveWindow, Calibration, Window
from lightning_specdec.decoding.calibration import fingerprint, stored
from lightning_specdec.drafters import Drafter, NGramWithFallback
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.base import eval_copy
from lightning_specdec.serve.draft_comparison import Comparison, DraftTrial, Undecided
from lightning_specdec.serve.engine import DraftName, Engine, Replacement
from lightning_specdec.serve.metrics import Metrics

log = logging.getLogger("lightning_specdec")

SETTLE_SECONDS = 1.0
"""Time for which a file must not change before it is read: it may still be written."""
CLOSE_SECONDS = 10.0
"""Time that reading a file may still take when the server ends."""
LABEL_DIGITS = 12
"""Digits of a sha256 in names of drafts."""

Stamp = tuple[int, int, int, int, int]
"""What differs if a file was replaced or written to: device, inode, size, and the times of the
last modification and of the last change of status, which no program can set back."""


def file_stamp(path: Path) -> Stamp | None:
    """The present stamp of a regular file; None if there is none.

    Whoever opened a named pipe would wait for its writer.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def draft_name(drafter: Drafter, sha256: str | None) -> DraftName:
    """The name of a drafter whose file has that sha256; None if it has no file."""
    kind = type(drafter).__name__
    return DraftName(kind if sha256 is None else sha256[:LABEL_DIGITS], kind)


@dataclass(frozen=True)
class LiveDraft:
    """A drafter that drafts for the server, or has done so.

    Args:
        drafter: as it drafts.
        window: its draft tokens per round.
        sha256: of its file.
        name: what it is called.
    """

    drafter: Drafter
    window: int | Window
    sha256: str
    name: DraftName


@dataclass(frozen=True)
class ChangedFile:
    """A file that is read once it has not changed for `SETTLE_SECONDS`.

    Args:
        stamp: at the last look.
        since: the time at which it was first seen, see `time.monotonic`.
        was_requested: whether someone waits for an answer.
    """

    stamp: Stamp
    since: float
    was_requested: bool

    @property
    def remaining_seconds(self) -> float:
        """The time until it may be read if it does not change any more."""
        return max(0.0, self.since + SETTLE_SECONDS - time.monotonic())


class DraftUpdates:
    """Watches the file of the draft.

    - A changed file that does not change any more is loaded and checked, and its draft is swapped
      in. If it cannot be, one line says why, and the present draft goes on.
    - A new draft whose acceptance is proven lower than that of the one before it is swapped back,
      see `DraftTrial`. The same content is tried again only on request.

    Args:
        engine: what the draft drafts for.
        origin: the file of the draft; None if it comes from no single file.
        target: the target as it was loaded.
        config: of the engine, as it was before the window was chosen.
        seconds: time between two looks at the file; 0 for looks that are requested only.
        trial: records the drafts, and reports to `judged`.
        metrics: counters.
    """

    def __init__(
        self,
        engine: Engine,
        origin: DraftOrigin | None,
        target: LanguageModel,
        config: DecodingConfig,
        *,
        seconds: float,
        trial: DraftTrial,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._origin = origin
        self._target = target
        self._config = config
        self._seconds = seconds
        self._trial = trial
        self._metrics = metrics
        # Calls for the thread, None to end it. A signal handler may put one.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        # Only the thread uses what follows.
        self._swapped_back: set[str] = set()
        self._drafts: dict[DraftName, LiveDraft] = {}
        # The file may have changed since it was read, so the first look compares its content.
        self._seen: Stamp | None = None
        self._changed_file: ChangedFile | None = None
        sha256 = "" if origin is None else origin.sha256
        self._live = LiveDraft(
            engine.drafter, engine.config.num_draft_tokens, sha256, trial.current.name
        )
        self._drafts[self._live.name] = self._live
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def request(self) -> None:
        """Look at the file now, even if it seems unchanged. Signal handlers may call it."""
        self._calls.put(self._look_on_request)

    def judged(self, result: Comparison | Undecided) -> None:
        """Receive the result of a trial, from any thread."""
        self._calls.put(lambda: self._end_trial(result))

    def close(self) -> None:
        """End the thread, after the engine has ended."""
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._waiting_seconds())
            except queue.Empty:
                call = self._look_at_file
            if call is None:
                return
            try:
                call()
            except Exception:  # a fault of ours must not end later updates
                log.exception("the draft could not be updated")

    def _waiting_seconds(self) -> float | None:
        """The time until the next look at the file; None if none is due."""
        if self._changed_file is not None:
            return self._changed_file.remaining_seconds
        return self._seconds or None

    def _look_at_file(self) -> None:
        """Swap the draft if its file has changed since the last look, and does not change now.

        Nothing waits here for the file to settle: a draft that is to be swapped back cannot wait
        for a slow copy.
        """
        if self._origin is None:
            return
        path = self._origin.path
        stamp = file_stamp(path)
        changed_file = self._changed_file
        if changed_file is None:
            # A file that is gone is probably being replaced.
            if stamp is not None and stamp != self._seen:
                self._changed_file = ChangedFile(stamp, time.monotonic(), was_requested=False)
            return

        was_requested = changed_file.was_requested
        if stamp is None:
            self._changed_file = None
            if was_requested:
                self._warn_of_missing(path)
        elif stamp != changed_file.stamp:
            self._changed_file = ChangedFile(stamp, time.monotonic(), was_requested)
        elif changed_file.remaining_seconds == 0:
            self._changed_file = None
            self._update(self._origin, stamp, was_requested)

    def _look_on_request(self) -> None:
        """Have the file read once it has settled, even if it seems unchanged."""
        if self._origin is None:
            log.warning("the draft comes from no single file, so there is nothing to load")
            return
        stamp = file_stamp(self._origin.path)
        if stamp is None:
            self._warn_of_missing(self._origin.path)
            return
        if self._changed_file is None:
            self._changed_file = ChangedFile(stamp, time.monotonic(), was_requested=True)
        else:
            # Requests in quick succession do not put it off.
            self._changed_file = replace(self._changed_file, was_requested=True)

    def _warn_of_missing(self, path: Path) -> None:
        log.warning("there is no regular file %s now: the draft %s stays", path, self._live.name)

    def _update(self, origin: DraftOrigin, stamp: Stamp, was_requested: bool) -> None:
        """Swap in the draft that is in the file, or say why not.

        A file that changes while it is read is read again later.
        """
        self._seen = stamp
        drafter = None
        error = None
        sha256 = ""
        try:
            sha256 = file_sha256(origin.path)
            if self._is_new(origin.path, sha256, was_requested):
                drafter = load_draft(origin, self._target)
        except Exception as caught:  # whatever is wrong with a file, the server goes on
            error = caught

        present_stamp = file_stamp(origin.path)
        if present_stamp is None:
            self._warn_of_missing(origin.path)
        elif present_stamp != stamp:
            self._changed_file = ChangedFile(present_stamp, time.monotonic(), was_requested)
        elif error is not None:
            self._refuse(origin.path, error)
        elif drafter is not None:
            self._swap_in(origin.path, drafter, sha256)

    def _is_new(self, path: Path, sha256: str, was_requested: bool) -> bool:
        """Whether a content is another draft than the present one, and may be tried."""
        if sha256 == self._live.sha256:
            if was_requested:
                log.info("the draft %s stays: it is what %s holds", self._live.name, path)
            return False
        if sha256 in self._swapped_back and not was_requested:
            log.warning(
                "%s holds the draft %s, which was swapped back before: it is not tried again, "
                "unless at SIGHUP",
                path,
                sha256[:LABEL_DIGITS],
            )
            return False
        # Even a good draft is swapped back now and then, so a request tries it once more.
        self._swapped_back.discard(sha256)
        return True

    def _refuse(self, path: Path, error: BaseException) -> None:
        self._metrics.swaps.labels("refused").inc()
        reason = one_line(error) or type(error).__name__
        log.warning(
            "%s is not used, and the draft %s stays: %s "
            "(it is tried again when it has changed, or at SIGHUP)",
            path,
            self._live.name,
            reason,
        )

    def _swap_in(self, path: Path, drafter: Drafter, sha256: str) -> None:
        """Let a loaded draft draft from now on, or say why it does not."""
        try:
            drafter = self._prepared(drafter)
            window = self._window_of(drafter)
        except Exception as error:  # whatever is wrong with a draft, the server goes on
            self._refuse(path, error)
            return

        draft = LiveDraft(drafter, window, sha256, draft_name(drafter, sha256))
        previous = self._live
        if self._replace(draft, path):
            self._metrics.swaps.labels("swapped").inc()
            log.info("the draft %s takes the place of %s", draft.name, previous.name)

    def _prepared(self, drafter: Drafter) -> Drafter:
        """A loaded draft in the form that drafts, for which the target is ready."""
        target = self._engine.target
        fused = eval_copy(drafter).fused(target)
        # Requests go on while OpenVINO compiles the target for other hidden states.
        target.prepare_features(fused.features(target))
        present = self._engine.drafter
        if not isinstance(present, NGramWithFallback) or not isinstance(fused, NGramWithFallback):
            return fused
        has_same_type = type(present.lookup) is type(fused.lookup)
        if not has_same_type or present.lookup.settings != fused.lookup.settings:
            return fused
        # The same lookup keeps what it remembers of earlier requests.
        return type(fused)(present.lookup, fused.fallback)

    def _window_of(self, drafter: Drafter) -> int | Window:
        """The draft tokens per round: those of the present draft, or by the costs of the new one.

        Raises:
            ValueError: its costs are not known, and measuring them would take time from requests.
        """
        window = self._live.window
        if not isinstance(window, AdaptiveWindow):
            return window
        if fingerprint(drafter) == fingerprint(self._engine.drafter):
            return window

        calibrations: dict[int, Calibration] = {}
        for batch_size in window.costs.by_size:
            calibration = stored(self._engine.target, drafter, self._config, batch_size=batch_size)
            if calibration is None:
                raise ValueError(
                    "the costs of a draft of these sizes were never measured here, as "
                    "--num_draft_tokens auto requires: start the server again"
                )
            calibrations[batch_size] = calibration
        return AdaptiveWindow(calibrations)

    def _replace(self, draft: LiveDraft, path: Path) -> bool:
        """Replace the engine's drafter. Returns whether it could be."""
        replacement = Replacement(draft.drafter, draft.name, draft.window)
        self._engine.replace_drafter(replacement)
        try:
            replacement.done.result()
        except CancelledError:
            # The server ends.
            return False
        except Exception as error:  # whatever is wrong with a draft, the server goes on
            self._refuse(path, error)
            return False
        self._live = draft
        self._drafts[draft.name] = draft
        self._forget_others()
        return True

    def _forget_others(self) -> None:
        """Free the drafts that are neither in use nor compared with the one in use."""
        names = {self._live.name}
        previous = self._trial.previous
        if previous is not None:
            names.add(previous.name)
        drafts = {name: draft for name, draft in self._drafts.items() if name in names}
        labels = {name.label for name in drafts}
        for name in self._drafts:
            if name.label not in labels:
                self._metrics.forget_draft(name)
        self._drafts = drafts

    def _end_trial(self, result: Comparison | Undecided) -> None:
        """Keep the new draft, or swap back a worse one."""
        if result.name != self._live.name:
            # It was replaced in the meantime.
            return
        if isinstance(result, Undecided):
            log.info("the draft %s stays: %s", result.name, result.reason)
        elif result.is_better:
            log.info("the draft %s stays: %s", result.name, result)
        else:
            self._swap_back(result)
        self._forget_others()

    def _swap_back(self, comparison: Comparison) -> None:
        assert self._origin is not None
        worse = self._live
        previous = self._drafts[comparison.previous_name]
        self._swapped_back.add(worse.sha256)
        if self._replace(previous, self._origin.path):
            self._metrics.swaps.labels("swapped_back").inc()
            log.warning(
                "the draft %s is swapped back for %s: %s", worse.name, previous.name, comparison
            )
