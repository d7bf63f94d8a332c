"""The verb `chat`: a conversation on the terminal, streamed; states are kept from turn to turn.

Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import load_decoder
from lightning_specdec.cli.options import MeasureSettings, Parser, chosen, decoding, pair_source
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say, short

if TYPE_CHECKING:
    from lightning_specdec.decoding.session import Conversation
    from lightning_specdec.text.tokenizer import Message, TextTokenizer

SUMMARY = "chat with a model, decoding speculatively"
EXAMPLES = """\
lightning_specdec chat --pair smollm2
lightning_specdec chat checkpoints/smollm2 --drafter NGramDrafter --temperature 0.7
printf 'Hi\\nAnd again\\n' | lightning_specdec chat --pair smollm2 --max_new_tokens 40"""
COMMANDS = "/reset begins a new chat, /quit, /exit or Ctrl-D leaves, Ctrl-C stops an answer, /help shows this"


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Settings):
    """How a chat begins."""

    system: str | None = setting(None, "system message")


def add_arguments(parser: Parser) -> None:
    parser.add_models(skip=("ckpt",))
    parser.add_settings("Prompt", ChatSettings)
    parser.add_decoding(skip=("eos", "logprobs"), max_new_tokens=512)
    parser.add_settings("Measure", MeasureSettings, skip=("repeats", "batch_size", "ignore_eos"))


def run(options: Namespace) -> int:
    """Talk until the input ends: on a terminal with a prompt for each turn, otherwise one turn per line of stdin."""
    config, source = decoding(options), pair_source(options)
    decoder = load_decoder(options, source)
    from lightning_specdec.decoding.session import Conversation
    from lightning_specdec.text.tokenizer import TextTokenizer

    tokenizer, interactive = decoder.tokenizer, sys.stdin.isatty() and sys.stdout.isatty()
    if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
        raise ValueError(
            f"{source.name} has no chat template: choose a model tuned for chats, or use `decode`"
        )
    config = decoder.config(config, num_draft_tokens=decoder.window(config))
    if interactive:
        _note(f"{source.name} with {type(decoder.drafter).__name__}. {COMMANDS}")
    talk: Talk | None = None
    for line in _turns(interactive):
        if line in ("/quit", "/exit"):
            break
        if line in ("/help", "/reset"):
            talk = None if line == "/reset" else talk
            _note(COMMANDS if line == "/help" else "the chat begins anew")
        elif line:
            if talk is None:
                conversation, system = (
                    Conversation(*decoder.ready(), config),
                    chosen(options, ChatSettings).system,
                )
                talk = Talk(tokenizer, conversation, system=system, interactive=interactive)
            try:
                if re.fullmatch(r"/\w+", line.split()[0]):  # not a path
                    raise ValueError(f"there is no command {short(line, 40)}: {COMMANDS}")
                told = talk.say(line)
            except ValueError as error:
                if not interactive:
                    raise
                told = f"error: {error}"
            if interactive or "verbose" in options:
                _note(told)
    return 0


class Talk:
    """A chat as messages, and the conversation that answers in it.

    A template renders the whole chat anew for each turn. Nearly every template only adds to its last rendering, so a
    conversation that continues with it reads little more than the question.

    Args:
        tokenizer: of the model, with a chat template.
        system: the system message; the template's own when None.
        interactive: whether Ctrl-C stops an answer and not the program.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        conversation: Conversation,
        *,
        system: str | None = None,
        interactive: bool,
    ) -> None:
        self.tokenizer, self.conversation, self.interactive = tokenizer, conversation, interactive
        self.messages: list[Message] = (
            [] if system is None else [{"role": "system", "content": system}]
        )

    def say(self, content: str) -> str:
        """Ask, show the answer as it comes, and give its figures in a line. A question without an answer is dropped.

        Raises:
            ValueError: the chat has outgrown the context, or its template does not take it.
        """
        started, stream, pieces = time.perf_counter(), self.tokenizer.stream(), list[str]()
        messages = [*self.messages, {"role": "user", "content": content}]
        row = self.conversation.begin(self.tokenizer.encode_chat(messages))
        interrupted = False

        def stop(number: int, frame: FrameType | None) -> None:
            """On a terminal the first Ctrl-C ends the answer after the current round, a second one the program."""
            nonlocal interrupted
            if interrupted or not self.interactive:
                raise KeyboardInterrupt
            interrupted = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            while row.live:
                for _, tokens in self.conversation.session.step():
                    pieces.append(stream.push(tokens, hold=row.num_hidden))
                    say(pieces[-1], end="", flush=True)
                if interrupted:
                    self.conversation.session.cancel(row)
        finally:
            signal.signal(signal.SIGINT, before)
        pieces.append(stream.finish(drop=row.num_hidden))
        say(pieces[-1], flush=True)
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        seconds, rate = time.perf_counter() - started, row.counts and row.counts.acceptance_rate
        accepted = "" if rate is None else f", {rate:.0%} of the draft tokens accepted"
        return f"{row.num_new} tokens, {row.num_new / seconds:.1f} tokens/s{accepted} (stopped: {row.stop_reason})"


def _turns(interactive: bool) -> Iterator[str]:
    """The user's lines, stripped."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  (gives `input` its editing and history)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            say(file=sys.stderr)
            return
        except KeyboardInterrupt:  # drops the line, as shells do
            say(file=sys.stderr)


def _note(text: str) -> None:
    say(text, file=sys.stderr, flush=True)
