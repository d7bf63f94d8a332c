"""What the verbs share while they run: messages on stderr, devices, models and prompts."""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_specdec.cli.options import PromptSettings, chosen, pair_source, typed
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.settings import Settings
from lightning_specdec.config.terminal import visible
from lightning_specdec.text.prompts import Prompt, read_prompts

if TYPE_CHECKING:
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
"""Default prompts for models of text: a summary, code to edit, a question."""

BUSY = 1.25
"""Load of a core from which on other processes slow a decode down."""
QUIET_SECONDS = 10.0
"""Between two lines of progress where not every step is reported."""
_next_line = QUIET_SECONDS


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def set_up_logs(options: Namespace) -> None:
    """Show messages on stderr: all with -v, errors alone with -q."""
    global _next_line
    _next_line = time.process_time() + QUIET_SECONDS
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(levelname)s: %(message)s"))
    log.handlers = [handler]
    log.setLevel("DEBUG" if "verbose" in options else "ERROR" if "quiet" in options else "INFO")


def progress(text: str, *, often: bool = False) -> None:
    """Report a slow step: on a terminal each that is not `often`, else one in `QUIET_SECONDS`, or all with -v."""
    global _next_line
    # By a clock that stops while others work.
    due = (sys.stderr.isatty() and not often) or time.process_time() >= _next_line
    if due:
        _next_line = time.process_time() + QUIET_SECONDS
    log.log(logging.INFO if due else logging.DEBUG, "%s", text)


def counted(number: int, noun: str) -> str:
    """As "3 prompts" or "1 prompt"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Loaded(NamedTuple):
    """The models and prompts that the flags name; `texts` are None where prompts are tokens."""

    source: PairSource
    decoder: SpeculativeDecoder
    texts: list[str | None]
    prompts: list[list[int]]

    def manifest(self, *settings: Settings) -> dict[str, Any]:
        """How results come about: the machine, versions, the models and these settings."""
        from lightning_specdec.bench.manifest import manifest

        used = {
            name: value
            for each in (self.source, *settings)
            for name, value in each.to_dict().items()
        }
        return manifest(
            options=used, checkpoint=self.source.ckpt, device=self.decoder.target.device
        )


def load(options: Namespace, *, num_own: int | None = None) -> Loaded:
    """The models and prompts that the flags name; prompts by default the pair's own, or three for models of text.

    Args:
        num_own: use at most this many of the default prompts.

    Raises:
        ValueError: the models cannot be loaded or do not fit each other, or a prompt does not fit the target.
    """
    source, given = pair_source(options), _read_prompts(chosen(options, PromptSettings))
    decoder = load_decoder(options, source)
    prompts = _find_prompts(decoder, given, raw="raw" in options)[: None if given else num_own]
    return Loaded(source, decoder, [text for text, _ in prompts], [tokens for _, tokens in prompts])


def load_decoder(options: Namespace, source: PairSource) -> SpeculativeDecoder:
    """The target and its drafter, with as many CPU threads as --threads says."""
    import torch

    from lightning_specdec.checkpoints import runs
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.models.packed import limit_threads

    progress(
        f"loading {runs.find(Path(source.ckpt).expanduser()) if source.ckpt else source.name} ..."
    )
    if source.drafter is not None:
        source = source.changed(drafter=typed(source.drafter, "drafter"))
    decoder = SpeculativeDecoder.load(source)
    if "threads" in options:
        torch.set_num_threads(options.threads)
    else:
        limit_threads(decoder.target.num_parameters)
        threads, cores, load = torch.get_num_threads(), os.cpu_count() or 1, os.getloadavg()[0]
        if threads > 1 and load > BUSY * cores and decoder.target.device.type == "cpu":
            log.warning(
                "%d cores are busy (load %.1f): --threads 1 may be faster and steadier", cores, load
            )
    return decoder


def _read_prompts(settings: PromptSettings) -> list[Prompt] | None:
    """The prompts of the flags as they were typed, their places as ids; None where there are none."""
    if not settings.prompt and settings.prompts_file is None:
        return None
    found: list[Prompt] = []
    for i, text in enumerate(settings.prompt, start=1):
        found += (
            read_prompts(Path("-"), as_typed=True)
            if text == "-"
            else [Prompt(f"--prompt {i}", "", text=text)]
        )
    if settings.prompts_file is not None:
        found += read_prompts(Path(settings.prompts_file), as_typed=True)
    if not found:
        raise ValueError("there is no prompt: give at least one line")
    if empty := [each.id for each in found if not each.text]:
        raise ValueError(f"{empty[0]} is empty: give at least one token")
    return found


def _find_prompts(
    decoder: SpeculativeDecoder, given: list[Prompt] | None, *, raw: bool
) -> list[tuple[str | None, list[int]]]:
    """Text, where prompts are text, and tokens: the user's prompts, the pair's own, or the default ones."""
    tokenizer = decoder.tokenizer
    if given is None and decoder.prompts:
        return [(None, list(prompt)) for prompt in decoder.prompts]
    if tokenizer is None:
        if given is None:
            raise ValueError(
                "the target keeps no prompts of its own: give some with --prompt '1 2 3'"
            )
        return [
            (None, _tokens(each.id, str(each.text), decoder.target.vocab_size)) for each in given
        ]
    prompts = [Prompt("", "", text=text) for text in OWN_PROMPTS] if given is None else given
    return [(each.text, list(each.encoded(tokenizer, raw=raw).tokens)) for each in prompts]


def _tokens(where: str, text: str, vocab_size: int) -> list[int]:
    from lightning_specdec.decoding.rows import check_prompt

    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        prompt = [int(word) for word in words]
    except ValueError:
        raise ValueError(
            f"{where}: {text[:40]!r} is not a list of tokens: give integers, as `1 2 3`"
        ) from None
    check_prompt(prompt, vocab_size, where)
    return prompt
