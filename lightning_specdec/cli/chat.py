"""The verb `chat`: a conversation on the terminal, streamed, whose states are kept from turn to turn.

Answers go to stdout; everything else that is not asked for goes to stderr.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import counted, load_decoder, set_up_logs
from lightning_specdec.cli.options import (
    MeasureSettings,
    Parser,
    UsageError,
    add_decoding,
    add_models,
    chosen,
    decoding,
    pair_source,
    typed,
)
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.terminal import say, visible

if TYPE_CHECKING:
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding import Row
    from lightning_specdec.text.stream import TextStream
    from lightning_specdec.text.tokenizer import TextTokenizer

SUMMARY = "talk to a chat model, its draft at work"
EXAMPLES = """\
lightning_specdec chat --pair smollm2
lightning_specdec chat checkpoints/smollm2 --drafter NGramDrafter --temperature 0.7 --show_drafts
printf 'Hi\\nAnd again\\n' | lightning_specdec chat --pair smollm2 --max_new_tokens 40"""
COMMANDS = {
    "/reset": "forget the chat and begin a new one",
    "/stats": "what the answers so far have cost",
    "/help": "show these commands",
    "/quit": "leave (so does Ctrl-D)",
}


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Settings):
    """A chat and what is shown of it."""

    system: str | None = setting(None, "system message")
    max_length: int | None = setting(
        None, "tokens of the whole chat; default: the models' context", minimum=2, maximum=MAX_TOKENS
    )
    show_drafts: bool = setting(False, "mark the draft tokens that were kept, by colour or brackets")
    stats: bool = setting(False, "print speed after each answer on stderr; always on a terminal")


def add_arguments(parser: Parser) -> None:
    """The flags of the verb."""
    add_models(parser, skip=("ckpt",))
    parser.add_settings("chat", ChatSettings)
    add_decoding(parser, skip=("eos", "logprobs"), max_new_tokens=512)
    parser.add_settings("machine", MeasureSettings, only=("threads",))


def run(options: Namespace) -> int:
    """Talk until the input ends: on a terminal with a prompt for each turn, otherwise one turn per line of stdin."""
    set_up_logs(options)
    settings, config, source = chosen(options, ChatSettings), decoding(options), pair_source(options)
    if source.ckpt is not None:
        raise UsageError("chat needs a model with a chat template, and a checkpoint has none: give --pair or --target")
    decoder = load_decoder(options, source)
    from lightning_specdec.text.tokenizer import TextTokenizer

    tokenizer = decoder.tokenizer
    if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise ValueError(f"{source.name} has no {missing}: choose a model tuned for chats, or use `decode`")
    config = config.changed(rule=typed(config.rule, "rule"))
    talk = Talk(decoder, tokenizer, settings, config, interactive=sys.stdin.isatty() and sys.stdout.isatty())
    if talk.interactive:
        _note(f"{source.name} with {type(decoder.drafter).__name__}. /help shows the commands, Ctrl-D leaves.")
    if settings.show_drafts:
        _note(f"{talk.marked('draft tokens kept')}; the rest is the target's own")
    for line in _turns(talk.interactive):
        if re.fullmatch(r"/[A-Za-z]+", line):
            if not talk.command(line.lower()):
                break
        elif line:
            try:
                talk.say(line)
            except ValueError as error:
                if not talk.interactive:
                    raise
                _note(f"error: {error}")
    return 0


class Talk:
    """One chat and the conversation that answers in it.

    Args:
        interactive: whether somebody sits there: then Ctrl-C stops an answer and not the program.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: TextTokenizer,
        settings: ChatSettings,
        config: DecodingConfig,
        *,
        interactive: bool,
    ) -> None:
        self.decoder, self.tokenizer, self.settings = decoder, tokenizer, settings
        self.interactive, self.interrupted = interactive, False
        special = {text: token for token, text in tokenizer.vocabulary.special_texts.items()}
        # A special token has no text to look for: it ends the answer itself.
        ends = tokenizer.eos | {special[text] for text in config.stop if text in special}
        self.config = config.changed(
            num_draft_tokens=decoder.window(config),
            stop=tuple(text for text in config.stop if text not in special),
            eos=tuple(sorted(token for token in ends if token < decoder.target.vocab_size)),
        )
        self._begin()

    def _begin(self) -> None:
        from lightning_specdec.decoding import Counts
        from lightning_specdec.decoding.conversation import Conversation
        from lightning_specdec.text.chat import Chat

        self.chat = Chat(self.tokenizer, system=self.settings.system)
        self.conversation = Conversation(*self.decoder.ready(), self.config, max_length=self.settings.max_length)
        self.num_turns = self.num_new = self.num_rounds = 0
        self.seconds, self.counts = 0.0, Counts()

    def command(self, name: str) -> bool:
        """Do what a command says; False ends the chat."""
        if name == "/reset":
            self._begin()
            _note("the chat begins anew")
        elif name == "/stats":
            say(self.stats(), flush=True)
        elif name == "/help":
            say("\n".join(f"{each:<8} {what}" for each, what in COMMANDS.items()), flush=True)
        elif name not in COMMANDS:
            _note(f"there is no {name}: {', '.join(COMMANDS)}")
        return name != "/quit"

    def say(self, content: str) -> None:
        """Ask, and show the answer as it comes.

        Raises:
            ValueError: the chat has outgrown the context, or its template does not take it.
        """
        started, stream = time.perf_counter(), self.tokenizer.stream()
        row = self.conversation.begin(self.chat.ask(content))
        with self._stoppable():
            while row.live:
                self.conversation.step()
                self._show(row, stream)
                if self.interrupted:
                    self.conversation.cancel()
        say(stream.finish(drop=row.num_hidden), flush=True)
        self.chat.answer(row.text[row.prompt_length :], num_cut=row.num_hidden)
        self._count(row, time.perf_counter() - started)

    def _show(self, row: Row, stream: TextStream) -> None:
        """Write what the last round has added."""
        last, hidden = row.rounds[-1], row.num_hidden
        kept, own = last.drafted[: last.num_accepted], [] if last.next_token is None else [last.next_token]
        if self.settings.show_drafts and kept:
            behind = sum(len(self.tokenizer.vocabulary.join([token])) for token in own)
            if text := stream.push(kept, hold=max(hidden - behind, 0)):
                say(self.marked(visible(text)), end="", has_colours=True)
            kept = []
        say(stream.push([*kept, *own], hold=hidden), end="", flush=True)

    def marked(self, text: str) -> str:
        """Text that was drafted and kept."""
        from lightning_specdec.cli.shown import colours, styled

        return styled(text, "kept", colours())

    def _count(self, row: Row, seconds: float) -> None:
        assert row.counts is not None
        self.num_turns, self.num_new = self.num_turns + 1, self.num_new + row.num_new
        self.num_rounds, self.seconds = self.num_rounds + row.num_rounds, self.seconds + seconds
        self.counts.add(row.counts)
        if self.interactive or self.settings.stats:
            efficiency = f", block efficiency {row.num_new / row.num_rounds:.2f}" if row.num_rounds else ""
            why = {"length": ", cut off by max_new_tokens", "cancelled": ", stopped"}.get(str(row.stop_reason), "")
            _note(f"{row.num_new} tokens, {row.num_new / seconds:.1f} tokens/s{efficiency}{why}")

    def stats(self) -> str:
        """One line on all answers since the chat began."""
        if not self.num_rounds:
            return "no answers yet"
        rate, row = self.counts.acceptance_rate, self.conversation.row
        return (
            f"{counted(self.num_turns, 'answer')}, {self.num_new} new tokens in {self.num_rounds} rounds, "
            f"{self.num_new / self.seconds:.1f} tokens/s, block efficiency {self.num_new / self.num_rounds:.2f}, "
            f"acceptance rate {'-' if rate is None else f'{rate:.2f}'}, "
            f"{len(row.text) if row else 0} tokens in the chat"
        )

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """On a terminal the first Ctrl-C ends the answer after the round in progress, a second one the program."""
        self.interrupted = False
        if not self.interactive:
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _turns(interactive: bool) -> Iterator[str]:
    """What the user says, line by line, stripped."""
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
        except KeyboardInterrupt:  # what was typed is dropped, as shells do
            say(file=sys.stderr)


def _note(text: str) -> None:
    """Say something beside the chat."""
    say(text, file=sys.stderr, flush=True)
