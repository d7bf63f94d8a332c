"""The verb `chat`: a conversation with a pair on the terminal, streamed, its states kept from turn to turn.

Answers go to stdout; everything else that is not asked for goes to stderr.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_specdec.checks import require_int
from lightning_specdec.cli_common import draws, set_threads, set_up_logs
from lightning_specdec.cli_decode import make_rule
from lightning_specdec.cli_groups import MAX_TOKENS
from lightning_specdec.cli_models import load_decoder
from lightning_specdec.cli_report import styled
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.inference import Counts, Row, StopStrings
from lightning_specdec.inference.conversation import Conversation
from lightning_specdec.rules import Sampling
from lightning_specdec.terminal import say, visible
from lightning_specdec.text.chat import Chat
from lightning_specdec.text.stream import TextStream
from lightning_specdec.text.tokenizer import TextTokenizer
from lightning_specdec.threads import limit_threads

COMMANDS = {
    "/reset": "forget the chat and begin a new one",
    "/stats": "what the answers so far have cost",
    "/help": "show these commands",
    "/quit": "leave (so does Ctrl-D)",
}


def chat(options: Namespace) -> int:
    """Talk until the input ends: on a terminal with a prompt for each turn, otherwise one turn a line of stdin."""
    set_up_logs(options.log_level, json_lines=options.log_json)
    set_threads(options)
    require_int("max_new_tokens", options.max_new_tokens, 1, MAX_TOKENS)
    if options.max_length is not None:
        require_int("max_length", options.max_length, 2, MAX_TOKENS)
    Sampling(**draws(options))  # refused before anything is loaded
    decoder = load_decoder(options)
    if options.threads is None:
        limit_threads(decoder.target.num_parameters)
    tokenizer = decoder.tokenizer
    name = options.pair or options.target
    if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise ValueError(f"{name} has no {missing}: choose a model that was tuned for chats, or use `decode`")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    talk = Talk(decoder, tokenizer, options, interactive=interactive)
    if interactive:
        _note(f"{name}, {type(decoder.drafter).__name__} guesses for it. /help shows the commands, Ctrl-D leaves.")
    if options.show_drafts:
        _note(f"{talk.marked('kept guesses')}; the rest is the target's own")
    for line in _turns(interactive):
        word, *rest = line.split(maxsplit=1) or [""]
        if word.lower() in COMMANDS:
            if rest:
                _note(f"{word.lower()} takes nothing behind it, got {rest[0]!r}")
            elif not talk.command(word.lower()):
                break
        elif re.fullmatch(r"/[A-Za-z]+", line):
            _note(f"there is no {line}: {', '.join(COMMANDS)}")
        elif line:
            try:
                talk.say(line)
            except ValueError as error:
                if not interactive:
                    raise
                _note(f"error: {error}")
    return 0


class Talk:
    """One chat and the conversation that answers in it.

    Args:
        decoder: a pair whose target has a tokenizer.
        tokenizer: that one, with a chat template.
        options: of the verb.
        interactive: whether somebody sits there: then Ctrl-C stops an answer and not the program.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, tokenizer: TextTokenizer, options: Namespace, *, interactive: bool
    ) -> None:
        self.decoder, self.tokenizer, self.options, self.interactive = decoder, tokenizer, options, interactive
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        special = {text: token for token, text in tokenizer.vocabulary.special_texts.items()}
        given = options.stop or []
        strings = [string for string in given if string not in special]
        self.stop = StopStrings(strings, tokenizer.vocabulary.token_bytes) if strings else None
        # A special token has no text that could be looked for: it ends the answer by itself.
        ends = tokenizer.eos | {special[string] for string in given if string in special}
        self.eos = sorted(token for token in ends if token < decoder.target.vocab_size)
        self.rule, drawn = make_rule(options), draws(options)
        self.window = decoder.window(rule=self.rule, **drawn)
        self.sampling, self.interrupted = Sampling(**drawn), False
        self._begin()

    def _begin(self) -> None:
        self.chat = Chat(self.tokenizer, system=self.options.system)
        self.conversation = Conversation(
            *self.decoder.ready(),
            max_length=self.options.max_length,
            num_draft_tokens=self.window,
            rule=self.rule,
            sampling=self.sampling,
            eos=self.eos,
            seed=self.options.seed,
        )
        self.num_turns = self.num_new = self.num_rounds = 0
        self.seconds, self.counts = 0.0, Counts()

    def command(self, line: str) -> bool:
        """Do what a command says; False ends the chat."""
        if line == "/reset":
            self._begin()
            _note("the chat begins anew")
        elif line == "/stats":
            say(self.stats(), flush=True)
        elif line == "/help":
            say("\n".join(f"{name:<8} {what}" for name, what in COMMANDS.items()), flush=True)
        return line != "/quit"

    def say(self, content: str) -> None:
        """Ask, and show the answer as it comes.

        Raises:
            ValueError: the chat has outgrown the context, or its template does not take it.
        """
        started, stream = time.perf_counter(), self.tokenizer.stream()
        row = self.conversation.begin(
            self.chat.ask(content), max_new_tokens=self.options.max_new_tokens, stop=self.stop
        )
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
        """Write what the last round has settled."""
        last, hidden = row.rounds[-1], row.num_hidden
        kept, own = last.drafted[: last.num_accepted], [] if last.next_token is None else [last.next_token]
        if self.options.show_drafts and kept:
            behind = sum(len(self.tokenizer.vocabulary.join([token])) for token in own)
            text = stream.push(kept, hold=max(hidden - behind, 0))
            if text:
                say(self.marked(visible(text)), end="", has_colours=True)
            kept = []
        say(stream.push([*kept, *own], hold=hidden), end="", flush=True)

    def marked(self, text: str) -> str:
        """Text as it is shown where it was guessed and kept."""
        return styled(text, "kept", True) if self.colour else f"[{text}]"

    def _count(self, row: Row, seconds: float) -> None:
        assert row.counts is not None
        self.num_turns += 1
        self.num_new += row.num_new
        self.num_rounds += row.num_rounds
        self.seconds += seconds
        self.counts.add(row.counts)
        if self.interactive or self.options.stats:
            efficiency = f", block efficiency {row.num_new / row.num_rounds:.2f}" if row.num_rounds else ""
            why = {"length": ", cut off by max_new_tokens", "cancelled": ", stopped"}.get(row.stop_reason, "")
            _note(f"{row.num_new} tokens, {row.num_new / seconds:.1f} tokens/s{efficiency}{why}")

    def stats(self) -> str:
        """One line on all answers since the chat began."""
        if not self.num_rounds:
            return "no answers yet"
        rate = self.counts.acceptance_rate
        row = self.conversation.row
        parts = [
            f"{self.num_turns} answer{'s' if self.num_turns > 1 else ''}",
            f"{self.num_new} new tokens in {self.num_rounds} rounds",
            f"{self.num_new / self.seconds:.1f} tokens/s",
            f"block efficiency {self.num_new / self.num_rounds:.2f}",
            f"acceptance rate {'-' if rate is None else f'{rate:.2f}'}",
            f"{len(row.text) if row else 0} tokens in the chat",
        ]
        return ", ".join(parts)

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
    """What the user says, line by line, without white space around it."""
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
    """Say something beside the chat, dimmed on a terminal."""
    dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    text = visible(text)
    say(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True, has_colours=True)
