"""What the verbs share at run time: messages on stderr, devices, models, and prompts."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_specdec.cli.early import check_before_loading
from lightning_specdec.cli.options import (
    TEMPLATE_VARIABLES,
    PromptSettings,
    chosen,
    pair_source,
    typed,
)
from lightning_specdec.config.activity import show_activity
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.pairs import get_pair
from lightning_specdec.config.settings import Settings
from lightning_specdec.config.terminal import say
from lightning_specdec.text.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from lightning_specdec.decoder import SpeculativeDecoder

log = logging.getLogger("lightning_specdec")
OWN_PROMPTS = (
    "Summarize in two sentences: The lighthouse at Cape Verity was built in 1874, after three "
    "ships were lost on the reef in one winter. Its lamp burned whale oil, then kerosene, and "
    "since 1931 electricity. The last keeper left in 1968, and the lighthouse has worked by itself "
    "since then. Every summer the town opens it to visitors, who climb its 112 steps to see the "
    "reef and, on clear days, the mountains behind the bay.",
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
"""Default prompts for models of text: a summary, code to edit, and a question."""


class _MessageHandler(logging.Handler):
    """Prints log records on stderr. Messages of mere information have no level before them."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno != logging.INFO:
            text = f"{record.levelname}: {text}"
        say(text, file=sys.stderr, flush=True)


def set_up_logs(options: Namespace) -> None:
    """Show messages on stderr: all of them with -v, only errors with -q."""
    handler = _MessageHandler()
    log.handlers = [handler]
    if "verbose" in options:
        log.setLevel(logging.DEBUG)
    elif "quiet" in options:
        log.setLevel(logging.ERROR)
    else:
        log.setLevel(logging.INFO)


def progress(text: str, *, often: bool = False) -> None:
    """Report the beginning of a slow step; the reporter shows it while it lasts.

    A terminal keeps the text of every step that is not `often`, and -v prints all of them.
    """
    show_activity(text.removesuffix(" ..."))
    is_kept = sys.stderr.isatty() and not often
    log.log(logging.INFO if is_kept else logging.DEBUG, "%s", text)


def counted(number: int, noun: str) -> str:
    """Format a count, as "3 prompts" or "1 prompt"."""
    plural = "" if number == 1 else "s"
    return f"{number} {noun}{plural}"


class Loaded(NamedTuple):
    """The models and prompts that the flags name. `texts` are None for prompts given as tokens.

    `template_variables` are variables of the chat template that wrote the prompts.
    """

    source: PairSource
    decoder: SpeculativeDecoder
    texts: list[str | None]
    prompts: list[list[int]]
    template_variables: dict[str, Any]

    def manifest(self, *settings: Settings) -> dict[str, Any]:
        """Record how results are produced: machine, versions, models, and these settings."""
        from lightning_specdec.bench.manifest import manifest

        options: dict[str, Any] = {}
        for part in (self.source, *settings):
            options.update(part.to_dict())
        if self.template_variables:
            options[TEMPLATE_VARIABLES] = self.template_variables
        return manifest(
            options=options, checkpoint=self.source.ckpt, device=self.decoder.target.device
        )


def load(options: Namespace, *, num_own: int | None = None) -> Loaded:
    """Load the models and prompts that the flags name.

    Without prompts, those of the pair are used, or three default ones for models of text.

    Args:
        num_own: use at most this many of the pair's or default prompts.

    Raises:
        ValueError: the models cannot be loaded or do not fit each other, or a prompt does not fit
            the target.
    """
    source = pair_source(options)
    settings = chosen(options, PromptSettings)
    user_prompts = _read_prompts(settings)
    decoder = load_decoder(options, source)
    if user_prompts is None:
        encoded = _default_prompts(decoder, settings)[:num_own]
    else:
        encoded = _encode_prompts(decoder, user_prompts, settings)
    texts = [text for text, _ in encoded]
    prompts = [tokens for _, tokens in encoded]
    return Loaded(source, decoder, texts, prompts, settings.chat_template_kwargs)


def load_prompts(
    options: Namespace,
    decoder: SpeculativeDecoder,
    default: Sequence[Prompt],
) -> EncodedPrompts:
    """The prompts that the flags name; or the pair's own for a target without a tokenizer; or the
    default ones."""
    settings = chosen(options, PromptSettings)
    user_prompts = _read_prompts(settings)
    if user_prompts is None and decoder.tokenizer is None:
        return _default_prompts(decoder, settings)
    prompts = list(default) if user_prompts is None else user_prompts
    return _encode_prompts(decoder, prompts, settings)


def load_decoder(
    options: Namespace,
    source: PairSource,
    *,
    mapped: bool = True,
    shortens_answers: bool = False,
) -> SpeculativeDecoder:
    """Load the target and its drafter, and set the number of CPU threads.

    Args:
        mapped: as of `SpeculativeDecoder.load`.
        shortens_answers: as of `check_before_loading`.
    """
    if source.drafter is not None:
        source = source.changed(drafter=typed(source.drafter, "drafter"))
    check_before_loading(options, source, shortens_answers=shortens_answers)
    # Imported here because torch takes a second.
    from lightning_specdec.checkpoints import runs
    from lightning_specdec.decoder import SpeculativeDecoder

    name = runs.find(Path(source.ckpt).expanduser()) if source.ckpt else source.name
    progress(f"loading {name} ...")
    num_threads = getattr(options, "threads", None)
    decoder = SpeculativeDecoder.load(source, threads=num_threads, mapped=mapped)
    pair_threads = None if source.pair is None else get_pair(source.pair).threads
    if num_threads is None and pair_threads is None:
        _choose_threads(decoder)
    return decoder


def _choose_threads(decoder: SpeculativeDecoder) -> None:
    """Use one thread for a small model, and warn if other processes keep the cores busy.

    How many threads are fastest then is not known without measuring, so nothing else is changed.
    """
    import torch

    from lightning_specdec.models.packed import limit_threads
    from lightning_specdec.models.threads import is_busy

    limit_threads(decoder.target.num_parameters)
    uses_cpu = decoder.target.device.type == "cpu"
    if is_busy() and uses_cpu and torch.get_num_threads() > 1:
        log.warning(
            "other programs keep the %d cores busy (load %.1f), so timings vary: `sweep` compares "
            "numbers of threads",
            os.cpu_count() or 1,
            os.getloadavg()[0],
        )


def _read_prompts(settings: PromptSettings) -> list[Prompt] | None:
    """Read the prompts that the flags name, with their origins as ids; None if there are none."""
    if not settings.prompt and settings.prompts_file is None:
        return None

    prompts: list[Prompt] = []
    for number, text in enumerate(settings.prompt, start=1):
        if text == "-":
            prompts += read_prompts(Path("-"), as_typed=True)
        else:
            prompts.append(Prompt(f"prompt number {number}", "", text=text))
    if settings.prompts_file is not None:
        prompts += read_prompts(Path(settings.prompts_file), as_typed=True)

    if not prompts:
        place = settings.prompts_file or "-"
        described = "stdin" if place == "-" else place
        raise ValueError(f"{described} holds no prompt: give at least one line")
    for prompt in prompts:
        if not prompt.text:
            raise ValueError(f"{prompt.id} is empty: give at least one token")
    return prompts


EncodedPrompts = list[tuple[str | None, list[int]]]
"""Each prompt's text, None if it was given as tokens, and its tokens."""


def _default_prompts(decoder: SpeculativeDecoder, settings: PromptSettings) -> EncodedPrompts:
    """The pair's own prompts, or the default ones for models of text."""
    if decoder.prompts:
        return [(None, list(prompt)) for prompt in decoder.prompts]
    if decoder.tokenizer is None:
        raise ValueError("the target stores no prompts: give some with --prompt '1 2 3'")
    prompts = [Prompt("", "", text=text) for text in OWN_PROMPTS]
    return _encode_prompts(decoder, prompts, settings)


def _encode_prompts(
    decoder: SpeculativeDecoder,
    prompts: list[Prompt],
    settings: PromptSettings,
) -> EncodedPrompts:
    variables = settings.chat_template_kwargs
    uses_template = decoder.tokenizer is not None and decoder.tokenizer.has_chat_template
    if variables and (settings.raw or not uses_template):
        raise ValueError(
            "chat_template_kwargs are for a chat template, and none is used here: drop them"
        )
    if uses_template and not settings.raw:
        decoder.check_template(variables)
    encoded: EncodedPrompts = []
    for prompt in prompts:
        if decoder.tokenizer is None:
            tokens = _parse_tokens(prompt.id, str(prompt.text), decoder.target.vocab_size)
            encoded.append((None, tokens))
        else:
            encoded_prompt = prompt.encoded(
                decoder.tokenizer, raw=settings.raw, chat_template_kwargs=variables
            )
            encoded.append((prompt.text, list(encoded_prompt.tokens)))
    return encoded


def _parse_tokens(where: str, text: str, vocab_size: int) -> list[int]:
    """Parse tokens such as "1 2 3" or "[1, 2, 3]"."""
    from lightning_specdec.decoding.requests import check_prompt

    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        prompt = [int(word) for word in words]
    except ValueError:
        raise ValueError(
            f"{where}: {text[:40]!r} is not a list of tokens: give integers, as `1 2 3`"
        ) from None
    check_prompt(prompt, vocab_size, where)
    return prompt
