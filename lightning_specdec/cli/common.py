"""What the verbs share while they run: messages on stderr, devices, models and prompts."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.options import PromptSettings, pair_source, typed
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.terminal import visible

if TYPE_CHECKING:
    import torch

    from lightning_specdec.decoder import SpeculativeDecoder

log = logging.getLogger("lightning_specdec")
OWN_PROMPTS = (
    "Summarize in two sentences: The lighthouse at Cape Verity was built in 1874, after three ships were lost on the "
    "reef in one winter. Its lamp burned whale oil, then kerosene, and since 1931 electricity. The last keeper left in "
    "1968, and the lighthouse has worked by itself since then. Every summer the town opens it to visitors, who climb "
    "its 112 steps to see the reef and, on clear days, the mountains behind the bay.",
    "Add a docstring and type hints to this function, and give the whole function back:\n\n"
    "def mean_by_key(rows, key):\n"
    "    totals, counts = {}, {}\n"
    "    for row in rows:\n"
    "        name = row[key]\n"
    "        totals[name] = totals.get(name, 0) + row['value']\n"
    "        counts[name] = counts.get(name, 0) + 1\n"
    "    return {name: totals[name] / counts[name] for name in totals}\n",
    "I have an hour in a city that I do not know, and it is raining. What would you suggest?",
)
"""For models of text where the user gives none: a summary, code to edit, a question."""


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def set_up_logs(options: Namespace) -> None:
    """Show messages on stderr: all with -v, errors alone with -q."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(levelname)s: %(message)s"))
    log.handlers = [handler]
    log.setLevel("DEBUG" if "verbose" in options else "ERROR" if "quiet" in options else "INFO")


def progress(text: str) -> None:
    """Say what takes its time where somebody watches; elsewhere with -v alone."""
    log.log(logging.INFO if sys.stderr.isatty() else logging.DEBUG, "%s", text)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """As "3 prompts" or "1 prompt"."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def find_device(name: str) -> torch.device:
    """The device, if this machine has it and torch can use it."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that torch is giving up
            device = torch.device(name)
            torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"there is no usable device {name!r}: try --device cpu (`lightning_specdec info`)") from error
    return device


def set_threads(options: Namespace, num_parameters: int) -> None:
    """As many CPU threads as --threads says; otherwise one for small models."""
    import torch

    from lightning_specdec.models.packed import limit_threads

    if (threads := getattr(options, "threads", None)) is not None:
        torch.set_num_threads(threads)
    else:
        limit_threads(num_parameters)


def load_decoder(options: Namespace, source: PairSource | None = None) -> SpeculativeDecoder:
    """The target and its drafter that the flags name.

    Raises:
        ValueError: they cannot be loaded, or do not fit each other.
    """
    from lightning_specdec.decoder import SpeculativeDecoder

    source = pair_source(options) if source is None else source
    progress(f"loading {source.name} ...")
    decoder = SpeculativeDecoder.load(source.changed(drafter=typed(source.drafter, "drafter")))
    set_threads(options, decoder.target.num_parameters)
    return decoder


Placed = tuple[str, str]
"""Where a prompt came from, and what it says."""


def read_prompts(settings: PromptSettings) -> list[Placed] | None:
    """The prompts of the flags as they were typed; None where there are none.

    Raises:
        ValueError: a file is not text, or holds no prompt.
    """
    placed: list[Placed] = []
    for i, text in enumerate(settings.prompt, start=1):
        placed += _lines("stdin", sys.stdin.read()) if text == "-" else [(f"--prompt {i}", text)]
    if (path := settings.prompts_file) is not None:
        try:
            text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text: give one prompt a line") from error
        placed += _lines("stdin" if path == "-" else path, text)
    if not settings.prompt and path is None:
        return None
    if not placed:
        raise ValueError("there is no prompt: give at least one line")
    for where, text in placed:
        if not text.strip():
            raise ValueError(f"{where}: the prompt is empty")
    return placed


def find_prompts(
    decoder: SpeculativeDecoder, given: list[Placed] | None, *, raw: bool = False
) -> list[tuple[str | None, list[int]]]:
    """Texts, where prompts are texts, and tokens: the user's prompts, the pair's own, or ours.

    Raises:
        ValueError: a prompt does not fit the target, or there is none.
    """
    from lightning_specdec.decoding.rows import check_prompt

    tokenizer = decoder.tokenizer
    if given is None and (decoder.prompts or tokenizer is None):
        if not decoder.prompts:
            raise ValueError("the target keeps no prompts of its own: give some with --prompt '1 2 3'")
        return [(None, list(prompt)) for prompt in decoder.prompts]
    if tokenizer is None:
        tokens = [(where, _tokens(where, text)) for where, text in given or ()]
        for where, prompt in tokens:
            check_prompt(prompt, decoder.target.vocab_size, where)
        return [(None, prompt) for _, prompt in tokens]
    texts = list(OWN_PROMPTS) if given is None else [_text(where, text) for where, text in given]
    chat = tokenizer.has_chat_template and not raw
    return [(text, decoder.encode_chat(text) if chat else decoder.encode(text)) for text in texts]


def _lines(name: str, text: str) -> list[Placed]:
    return [(f"{name}, line {i}", line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _tokens(where: str, text: str) -> list[int]:
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    for word in words or [""]:
        if not re.fullmatch(r"[+-]?[0-9]{1,40}", word):
            raise ValueError(f"{where}: {word[:40]!r} is no token: give integers, as `1 2 3`")
    return [int(word) for word in words]


def _text(where: str, line: str) -> str:
    """A prompt: the "prompt" of a file's line that is a JSON object, or the line itself."""
    if where.startswith("--prompt") or not line.lstrip().startswith("{"):
        return line
    try:
        values: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return line  # text that begins with a brace
    if not isinstance(values.get("prompt"), str) or not values["prompt"].strip():
        raise ValueError(f'{where}: a JSON object needs its text under "prompt", this one has {", ".join(values)[:80]}')
    return str(values["prompt"])
