"""The verb `chat`: a streamed conversation in the terminal. States are kept from turn to turn.

Answers are written to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import load_decoder
from lightning_specdec.cli.early import has_chat_template, target_directory
from lightning_specdec.cli.options import (
    MeasureSettings,
    Parser,
    TemplateSettings,
    UsageError,
    chosen,
    decoding,
    pair_source,
)
from lightning_specdec.config.activity import show_activity
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.settings import setting
from lightning_specdec.config.terminal import one_line, say, short

if TYPE_CHECKING:
    from lightning_specdec.config.models import PairSource
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding.session import Conversation
    from lightning_specdec.text.tokenizer import Message, TextTokenizer

SUMMARY = "chat with a model, decoding speculatively"
EXAMPLES = """\
lightning_specdec chat --pair smollm2
lightning_specdec chat checkpoints/smollm2 --drafter NGramDrafter --temperature 0.7
printf 'Hi\\nAnd again\\n' | lightning_specdec chat --pair smollm2 --max_new_tokens 40"""
COMMANDS = (
    "/reset starts a new chat, /quit, /exit or Ctrl-D leaves, Ctrl-C stops an answer, "
    "/help shows this"
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings(TemplateSettings):
    """How a chat starts."""

    system: str | None = setting(None, "system message")


def add_arguments(parser: Parser) -> None:
    parser.add_models(skip=("ckpt",))
    for flag in ("--prompt", "--prompts_file"):
        parser.absent_flags[flag] = "type messages, or pipe them in, one a line"
    # Accepted so that `run` can explain why it does not apply.
    parser.add_argument("--ckpt", help=argparse.SUPPRESS)
    parser.add_settings("Prompt", ChatSettings)
    parser.add_decoding(skip=("eos", "logprobs"), max_new_tokens=512)
    parser.add_settings("Measure", MeasureSettings, skip=("repeats", "batch_size", "ignore_eos"))


def run(options: Namespace) -> int:
    """Answer until the input ends.

    In a terminal each turn has a prompt; otherwise each line of stdin is one turn.
    """
    if "ckpt" in options:
        raise UsageError("chat takes --pair or --target, since a checkpoint has no chat template")
    config = decoding(options)
    source = pair_source(options)
    directory = target_directory(source)
    if directory is not None and not has_chat_template(directory):
        raise ValueError(_no_template(source))
    decoder = load_decoder(options, source, shortens_answers=True)
    # Imported here because torch takes a second.
    from lightning_specdec.text.tokenizer import TextTokenizer

    tokenizer = decoder.tokenizer
    if not isinstance(tokenizer, TextTokenizer) or not tokenizer.has_chat_template:
        raise ValueError(_no_template(source))
    config = decoder.config(config, num_draft_tokens=decoder.window(config))
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    settings = chosen(options, ChatSettings)
    decoder.check_template(settings.chat_template_kwargs)
    chat = _Chat(decoder, tokenizer, config, settings, interactive=interactive)
    chat.begin()

    # Loading ends here, so that its line is not drawn below the greeting.
    show_activity("")
    if interactive:
        _note(f"{source.name} with {type(decoder.drafter).__name__}. {COMMANDS}")
    num_errors = _answer_turns(chat, interactive=interactive, verbose="verbose" in options)
    return 1 if num_errors and not interactive else 0


def _answer_turns(chat: _Chat, *, interactive: bool, verbose: bool) -> int:
    """Answer each line until the input ends. Returns how many could not be answered."""
    num_errors = 0
    for line in _turns(interactive):
        if line in ("/quit", "/exit"):
            break
        try:
            note = chat.answer(line)
        except ValueError as error:
            # The chat goes on: the next line may fit.
            num_errors += 1
            _note(f"error: {one_line(error)}")
            continue
        # Figures are for people: a pipe receives them only with -v.
        is_command = line in ("/help", "/reset")
        if note and (interactive or is_command or verbose):
            _note(note)
    return num_errors


def _no_template(source: PairSource) -> str:
    return f"{source.name} has no chat template: choose a model tuned for chats, or use `decode`"


class _Chat:
    """Handles the lines of a chat: commands and questions."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: TextTokenizer,
        config: DecodingConfig,
        settings: ChatSettings,
        *,
        interactive: bool,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.config = config
        self.settings = settings
        self.interactive = interactive
        self.talk: Talk | None = None

    def begin(self) -> None:
        """Begin a new chat.

        Raises:
            ValueError: a setting is wrong.
        """
        self.talk = self._new_talk()

    def answer(self, line: str) -> str:
        """Run a command or answer a question; returns a note for stderr.

        Raises:
            ValueError: there is no such command, or as of `Talk.say`.
        """
        if not line:
            return ""
        if line == "/help":
            return COMMANDS
        if line == "/reset":
            self.begin()
            return "a new chat starts"

        # A path such as /etc/hosts is not a command.
        if re.fullmatch(r"/\w+", line.split()[0]):
            raise ValueError(f"there is no command {short(line, 40)}: {COMMANDS}")
        if self.talk is None:
            self.begin()
        assert self.talk is not None
        return self.talk.say(line)

    def _new_talk(self) -> Talk:
        from lightning_specdec.decoding.session import Conversation

        target, drafter = self.decoder.ready()
        conversation = Conversation(target, drafter, self.config)
        return Talk(
            self.tokenizer,
            conversation,
            system=self.settings.system,
            interactive=self.interactive,
            chat_template_kwargs=self.settings.chat_template_kwargs,
        )


class Talk:
    """A chat as messages, and the conversation that answers them.

    A template renders the whole chat again for each turn. Nearly every template only appends to its
    last rendering, so the conversation reads little more than the new question.

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        system: the system message; None for that of the template.
        interactive: whether Ctrl-C stops an answer instead of the program.
        chat_template_kwargs: variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        conversation: Conversation,
        *,
        system: str | None = None,
        interactive: bool,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs
        self.conversation = conversation
        self.interactive = interactive
        self._is_interrupted = False
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def say(self, content: str) -> str:
        """Ask a question, stream the answer to stdout, and return its figures in a line.

        A question without an answer is dropped.

        Raises:
            ValueError: the chat exceeds the context, or its template rejects it.
        """
        start_seconds = time.perf_counter()
        stream = self.tokenizer.stream()
        pieces: list[str] = []
        messages = [*self.messages, {"role": "user", "content": content}]
        prompt = self.tokenizer.encode_chat(
            messages, chat_template_kwargs=self.chat_template_kwargs
        )
        row = self.conversation.begin(prompt)
        show_activity("reading the question")

        try:
            with self._interruptible():
                while row.live:
                    events = self.conversation.session.step()
                    # From here on, the answer itself shows that something happens.
                    show_activity("")
                    for _, tokens in events:
                        pieces.append(stream.push(tokens, hold=row.num_hidden))
                        say(pieces[-1], end="", flush=True)
                    if self._is_interrupted:
                        self.conversation.session.cancel(row)
        except KeyboardInterrupt:
            # End the open line, so that the next output begins on its own.
            say(flush=True)
            raise
        pieces.append(stream.finish(drop=row.num_hidden))
        say(pieces[-1], flush=True)

        answer: Message = {"role": "assistant", "content": "".join(pieces)}
        self.messages = [*messages, answer]
        seconds = time.perf_counter() - start_seconds
        summary = f"{row.num_new} tokens, {row.num_new / seconds:.1f} tokens/s"
        if row.counts and row.counts.acceptance_rate is not None:
            summary += f", {row.counts.acceptance_rate:.0%} of the draft tokens accepted"
        return f"{summary} (stopped: {row.stop_reason})"

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C end the answer after its round, and a second one the program."""
        self._is_interrupted = False

        def stop(number: int, frame: FrameType | None) -> None:
            if self._is_interrupted or not self.interactive:
                raise KeyboardInterrupt
            self._is_interrupted = True

        previous_handler = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous_handler)


def _turns(interactive: bool) -> Iterator[str]:
    """Yield the user's lines, stripped."""
    if not interactive:
        for line in sys.stdin:
            yield line.strip()
        return

    # Importing readline adds editing and history to `input`.
    import readline  # noqa: F401

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            say(file=sys.stderr)
            return
        except KeyboardInterrupt:
            # Drops the line, as shells do.
            say(file=sys.stderr)


def _note(text: str) -> None:
    say(text, file=sys.stderr, flush=True)
