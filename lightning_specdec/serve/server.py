"""Start the server for a decoder, and run it until it is told to stop."""

from __future__ import annotations

import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import AdaptiveWindow
from lightning_specdec.decoding.calibration import batch_sizes_up_to
from lightning_specdec.decoding.windows import DEFAULT_WINDOW
from lightning_specdec.serve.app import make_app
from lightning_specdec.serve.draft_comparison import DraftTrial
from lightning_specdec.serve.draft_updates import DraftUpdates, draft_name
from lightning_specdec.serve.engine import Engine, EngineObserver
from lightning_specdec.serve.memory import check_memory
from lightning_specdec.serve.metrics import Metrics
from lightning_specdec.serve.recording import Recording
from lightning_specdec.serve.service import Service
from lightning_specdec.serve.settings import DEFAULT_MAX_LENGTH, ServeSettings

log = logging.getLogger("lightning_specdec")

SHUTDOWN_SECONDS = 30.0
"""Time that running requests have after a signal to stop."""


@dataclass(frozen=True)
class Server:
    """A server that is ready to run.

    Args:
        engine: decodes; not started yet.
        app: answers requests.
        settings: where it listens.
        updates: swaps the draft if its file changes.
        recording: keeps requests and answers; None if nothing does.
    """

    engine: Engine
    app: Starlette
    settings: ServeSettings
    updates: DraftUpdates
    recording: Recording | None = None

    def run(self, bound: socket.socket) -> None:
        """Serve until SIGTERM or Ctrl-C. What runs then has `SHUTDOWN_SECONDS` to finish.

        SIGHUP, where there is one, has the file of the draft looked at.
        """
        runner = self.runner()
        # uvicorn raises the signal again after it has stopped, which ended well by then.
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGTERM: _do_nothing}
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = self._look_at_draft
        previous_handlers = {}
        for number, handler in handlers.items():
            previous_handlers[number] = signal.signal(number, handler)
        try:
            self.start()
            runner.run(sockets=[bound])
        finally:
            for number, previous_handler in previous_handlers.items():
                signal.signal(number, previous_handler)
            self.stop()

    def _look_at_draft(self, number: int, frame: FrameType | None) -> None:
        self.updates.request()

    def start(self) -> None:
        """Begin to decode, and to watch the file of the draft."""
        self.engine.start()
        self.updates.start()

    def runner(self) -> uvicorn.Server:
        """What runs the application."""
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            # Requests end before, since the engine ends them.
            timeout_graceful_shutdown=int(SHUTDOWN_SECONDS) + 5,
        )
        return _Runner(config, self.engine)

    def stop(self) -> None:
        """End the engine, if it still runs."""
        self.engine.begin_shutdown(0)
        self.engine.join(SHUTDOWN_SECONDS)
        self.updates.close()
        if self.recording is not None:
            self.recording.close()


class _Runner(uvicorn.Server):
    """uvicorn, which also tells the engine of a signal to stop."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._engine.begin_shutdown(SHUTDOWN_SECONDS)
        super().handle_exit(sig, frame)


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Ignore SIGHUP, where there is one: while models load, it must not end the process."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def make_server(
    decoder: SpeculativeDecoder,
    config: DecodingConfig,
    settings: ServeSettings,
    *,
    model_name: str,
) -> Server:
    """A server for a decoder.

    Args:
        decoder: with a tokenizer.
        config: how requests are decoded that name nothing else.
        settings: where to listen, and limits.
        model_name: the model's name in requests and answers.

    Raises:
        ValueError: the decoder has no tokenizer, there is not enough memory, or the directory of
            the records is another's.
    """
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise ValueError("the target has no tokenizer, so it cannot serve text: use `decode`")
    api_key = settings.api_key()
    requested_config = decoder.config(config)

    target, drafter = decoder.ready()
    limits = (target.max_positions, drafter.max_positions)
    known_limits = [limit for limit in limits if limit is not None]
    context = min(known_limits, default=DEFAULT_MAX_LENGTH)
    max_length = settings.max_length or min(context, DEFAULT_MAX_LENGTH)
    if known_limits and max_length > context:
        advice = ""
        if target.longer_texts_with is not None:
            advice = f": use {target.longer_texts_with}"
        raise ValueError(
            f"--max_length {max_length} exceeds the models' context of {context}{advice}"
        )

    checked_config = requested_config
    if requested_config.num_draft_tokens == "auto":
        # What is refused is refused before the costs are measured.
        checked_config = requested_config.changed(num_draft_tokens=DEFAULT_WINDOW)
    check_memory(
        target,
        drafter,
        checked_config,
        max_length=max_length,
        max_batch_size=settings.max_batch_size,
        cache_bytes=settings.prefix_cache_megabytes * 2**20,
    )
    # Drafts that pay for one request may cost more than they save for many.
    window = decoder.window(requested_config, batch_size=batch_sizes_up_to(settings.max_batch_size))
    config = requested_config.changed(num_draft_tokens=window)

    origin = decoder.draft_origin
    name = draft_name(drafter, None if origin is None else origin.sha256)
    metrics = Metrics(name)
    trial = DraftTrial(
        name,
        first_token_only=isinstance(config.num_draft_tokens, AdaptiveWindow),
        # A trial can end only while the server runs.
        report=lambda result: updates.judged(result),
    )
    recording = None
    observers: list[EngineObserver] = [metrics]
    if settings.record is not None:
        recording = Recording(
            Path(settings.record).expanduser(),
            decoder.target,
            temperature=config.temperature,
            max_bytes=settings.record_megabytes * 2**20,
        )
        observers.append(recording)
    # The last one, so that it is told of a new draft only if the others could be.
    observers.append(trial)
    engine = Engine(
        target,
        drafter,
        config,
        max_length=max_length,
        max_batch_size=settings.max_batch_size,
        max_queue=settings.max_queue,
        prompt_tokens_per_round=settings.prompt_tokens_per_round,
        cache_bytes=settings.prefix_cache_megabytes * 2**20,
        observers=observers,
        name=name,
    )
    updates = DraftUpdates(
        engine,
        origin,
        decoder.target,
        requested_config,
        seconds=settings.reload_seconds,
        trial=trial,
        metrics=metrics,
    )
    metrics.watch(engine)
    service = Service(engine, tokenizer, model_name=model_name, records=recording is not None)
    app = make_app(service, metrics, settings, api_key)
    return Server(engine, app, settings, updates, recording)


def bind(settings: ServeSettings) -> socket.socket:
    """A socket with the address of the settings, which does not listen yet.

    Raises:
        ValueError: the port is in use, or the address is none of this machine's.
    """
    host = settings.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    # A port whose last connections are still closing is free.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, settings.port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {settings.port} is in use by another program: choose another --port"
            ) from None
        raise ValueError(f"cannot listen on {host}: {error.strerror}") from None
    return bound
