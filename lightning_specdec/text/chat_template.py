"""Chat templates, rendered in a process with limits on time and memory.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from reaching the
machine, but a template can still run forever or fill the memory, in places where no check of ours
runs. So another process renders it: the system ends that process at its limits, and Ctrl-C reaches
the process that waits. It is started once and renders all chats.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightning_specdec.config.terminal import one_line, short

MAX_SECONDS = 1.0
"""Processor time that a template may use for one chat. Real templates need milliseconds."""
MAX_MEMORY = 2**30
"""Bytes of memory that the process that renders may use."""
MAX_SIZE = 10_000_000
"""Characters that a template may write."""
MAX_ERROR_SIZE = 500
"""Characters of an error that are kept. A template chooses the text of its errors."""

_LENGTH_BYTES = 8
"""Bytes before each request that hold its length."""
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightning_specdec.text.chat_template import serve; serve()"
)
"""What the other process runs. Its argument is this process's `sys.path`."""


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The text of a chat, up to where the model's answer begins.

    Args:
        template: source of the template.
        messages: turns of the chat.
        variables: further variables of the template, such as special tokens. They override the ones
            set here.

    Raises:
        ValueError: the template refuses the chat, is wrong, or exceeds a limit.
    """
    # As in transformers: many templates would write "None" for a key that is present without a
    # value.
    present_values = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    all_variables = {
        "messages": present_values,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **variables,
    }
    return _renderer.render(template, all_variables)


class _Renderer:
    """The process that renders templates, from the side of the one that waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that a template writes; raises ValueError with the reason if there is none."""
        try:
            request = pickle.dumps((MAX_SECONDS, template, dict(variables)))
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"a variable is no plain value ({one_line(error)})") from error

        with self._lock:
            reply = self._ask(request)
        if "error" in reply:
            raise ValueError(reply["error"])
        return str(reply["text"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        process = self._running_process()
        assert process.stdin is not None and process.stdout is not None
        line = b""
        try:
            # A process that has ended meanwhile takes no request, and returns an empty reply.
            with suppress(BrokenPipeError):
                process.stdin.write(len(request).to_bytes(_LENGTH_BYTES) + request)
                process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:
            # Ctrl-C, for example. The next request must not read this one's reply.
            self.stop()
            raise
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        return {"error": _reason_of_end(self.stop())}

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                # -P: a json.py in the current directory is not what _SERVE imports.
                [sys.executable, "-P", "-c", _SERVE, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # A terminal sends Ctrl-C to this session only.
                start_new_session=True,
            )
        return self._process

    def stop(self) -> int:
        """End the process; returns its exit status, negative for a signal."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode

    def forget(self) -> None:
        """Leave the process to the parent of this one, which was forked."""
        if self._process is not None:
            self._process.returncode = 0
        self.__init__()  # type: ignore[misc]


def _reason_of_end(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it does not end within {MAX_SECONDS:g} s"
    return f"the process that renders it ended with status {status}"


_renderer = _Renderer()
atexit.register(_renderer.stop)
os.register_at_fork(after_in_child=_renderer.forget)


# The other process.


def serve() -> None:
    """Render what arrives on stdin until it is closed, and write a line of JSON for each."""
    # A program may have started this one with signals ignored or blocked.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with suppress(ValueError, OSError):  # Not every system has this limit.
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    requests = sys.stdin.buffer
    replies = sys.stdout.buffer
    while length := requests.read(_LENGTH_BYTES):
        reply = _reply_to(requests.read(int.from_bytes(length)))
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _reply_to(request: bytes) -> dict[str, str]:
    try:
        max_seconds, template, variables = pickle.loads(request)
        # At the end of this processor time, the system ends the process.
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        text = _compile(template).render(variables)
    except MemoryError:
        return {"error": f"it needs more than {MAX_MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template is a program, which may raise anything
        return {"error": short(one_line(error), MAX_ERROR_SIZE)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if len(text) > MAX_SIZE:
        return {"error": f"it writes more than {MAX_SIZE} characters"}
    return {"text": text}


class _Generation(Extension):
    """The tag that marks a model's own words in a template. It changes nothing in the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        tag = next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=tag.lineno)


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as models read it. Jinja's own filter escapes it for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
