"""A request's grammar, tried in a process with limits before the server compiles it.

Compiling is a program of the client's, in a way: it may take long, fill the memory, or find a fault
of the library. So another process does it first, and the first tokens of a text with it.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import threading
from contextlib import suppress

MAX_GRAMMAR_BYTES = 2**16
"""Longest grammar of a request."""
MAX_SECONDS = 3
"""Processor time of a trial. Real grammars need milliseconds."""
MAX_WAIT_SECONDS = 30.0
"""Longest wait for a trial on a busy machine."""
MAX_MEMORY = 2**30
"""Bytes of memory that a trial may use."""
MAX_TRIALS = 2
"""Trials that run at the same time."""
NUM_TOKENS = 32
"""Bytes of a text that are tried."""


_trials = threading.BoundedSemaphore(MAX_TRIALS)


class TooManyTrialsError(Exception):
    """Other grammars are being tried."""


def try_grammar(library_grammar: str) -> None:
    """Raise ValueError if a grammar cannot be compiled within the limits, with the reason.

    Args:
        library_grammar: as `llguidance` takes it.

    Raises:
        TooManyTrialsError: as many grammars as allowed are being tried.
    """
    if not _trials.acquire(blocking=False):
        raise TooManyTrialsError
    try:
        _run_trial(library_grammar)
    finally:
        _trials.release()


def _run_trial(library_grammar: str) -> None:
    command = [sys.executable, "-P", __file__]
    try:
        trial = subprocess.run(
            command,
            input=library_grammar.encode("utf-8", "replace"),
            capture_output=True,
            timeout=MAX_WAIT_SECONDS,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError("it takes too long to compile") from None
    if trial.returncode != 0:
        raise ValueError(f"it needs more than {MAX_SECONDS} s or {MAX_MEMORY >> 20} MiB to compile")
    error = json.loads(trial.stdout)["error"]
    if error:
        raise ValueError(error)


class _Bytes:
    """A vocabulary of bytes."""

    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(255)), b"\xff<eos>"]
    eos_token_id = 255
    special_token_ids = (255,)

    def __call__(self, text: bytes) -> list[int]:
        return []


def main() -> None:
    """The other process: compile what arrives on stdin, and write a line of JSON."""
    # Not every system has both limits.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=256)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    grammar = sys.stdin.buffer.read().decode()
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    generator = random.Random(0)
    for _ in range(NUM_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(255) if mask >> token & 1]
        if not allowed or not matcher.consume_token(generator.choice(allowed)):
            break
    sys.stdout.write(json.dumps({"error": matcher.get_error()}) + "\n")


if __name__ == "__main__":
    main()
