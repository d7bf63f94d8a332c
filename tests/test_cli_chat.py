"""Laws of `chat`: each answer is standard decoding's, streamed, and stdout has nothing else."""

from __future__ import annotations

import io
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import text_cases
import tiny_models
from cli_fixtures import call, here, refused, succeed
from text_model import model

from lightning_specdec.cli.chat import COMMANDS, Talk
from lightning_specdec.config import activity
from lightning_specdec.config.terminal import visible
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding.session import Conversation
from lightning_specdec.text.tokenizer import Message, TextTokenizer

__all__ = ["here", "model"]
TURNS = ["the oak", "Où est l'été ?", "thunder 🌩"]
NUM_NEW = 24


@pytest.fixture(scope="module")
def decoder(model: str) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(model)


def oracle(
    decoder: SpeculativeDecoder,
    turns: list[str],
    *,
    system: str | None = None,
    **options: Any,
) -> list[str]:
    """Standard decoding's answers. Each reads the whole chat from the beginning."""
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})

    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = decoder.encode_chat(messages)
        result = decoder.decode_standard(prompt, max_new_tokens=NUM_NEW, **options)
        answer = str(result.text)
        messages.append({"role": "assistant", "content": answer})
        answers.append(answer)
    return answers


def talk(model: str, *arguments: str) -> str:
    """The output of a chat with the questions `TURNS`."""
    command = ["chat", "--target", model, "--max_new_tokens", str(NUM_NEW), *arguments]
    return succeed(*command, stdin="".join(f"{turn}\n" for turn in TURNS)).out


def printed(answers: list[str]) -> str:
    """The answers as `chat` prints them."""
    return "".join(f"{visible(answer)}\n" for answer in answers)


@pytest.mark.parametrize("window", ["1", "5"])
@pytest.mark.parametrize("draft", ["lookup", "itself"])
def test_the_answers_are_those_of_standard_decoding(
    model: str,
    decoder: SpeculativeDecoder,
    draft: str,
    window: str,
) -> None:
    draft_options = {"lookup": ["--drafter", "NGramDrafter"], "itself": ["--draft", model]}
    output = talk(model, "--num_draft_tokens", window, *draft_options[draft])
    assert output == printed(oracle(decoder, TURNS))


def test_a_system_prompt_precedes_the_chat_and_stop_strings_end_an_answer(
    model: str, decoder: SpeculativeDecoder
) -> None:
    system = "You are an oak."
    full_answer = oracle(decoder, TURNS[:1], system=system)[0]
    ascii_pieces = re.findall(r"[ -~]{2,3}", full_answer)
    late_stop = ascii_pieces[-1]
    early_stop = ascii_pieces[len(ascii_pieces) // 2]

    answers = oracle(decoder, TURNS, system=system, stop=[late_stop, early_stop])
    end = min(full_answer.find(late_stop), full_answer.find(early_stop))
    assert answers[0] == full_answer[:end]
    output = talk(model, "--system", system, "--stop", late_stop, "--stop", early_stop)
    assert output == printed(answers)


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_commands_begin_a_new_chat_and_leave(
    model: str,
    decoder: SpeculativeDecoder,
    leave: str,
) -> None:
    answers = oracle(decoder, TURNS[:2])
    lines = [*TURNS[:2], "/help", "/reset", "", *TURNS[:2], f" {leave} ", TURNS[2]]
    command = ["chat", "--target", model, "--max_new_tokens", str(NUM_NEW), "-v"]
    outcome = call(*command, stdin="\n".join(lines))
    assert outcome.out == printed([*answers, *answers])
    assert outcome.err.count(" tokens/s") == 4


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_loading_is_over_when_the_greeting_is_printed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_check(*arguments: object) -> None:
        time.sleep(0.2)

    monkeypatch.setattr(SpeculativeDecoder, "check_template", slow_check)
    monkeypatch.setattr(activity, "REDRAW_SECONDS", 0.01)
    monkeypatch.setattr(io, "StringIO", Terminal)
    outcome = call("chat", "--target", model, stdin="/quit\n")
    assert outcome.code == 0
    before, greeting, after = outcome.err.partition(COMMANDS)
    assert greeting
    assert f"\r\x1b[Kloading {model}, 0 s" in before
    assert "loading" not in after


class Impatient(io.StringIO):
    """A terminal whose user presses Ctrl-C as soon as an answer begins, once or twice."""

    presses = 1

    def write(self, text: str) -> int:
        if text.strip():
            for _ in range(self.presses):
                signal.raise_signal(signal.SIGINT)
        self.presses = 0
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(decoder.tokenizer, TextTokenizer)
    conversation = Conversation(*decoder.ready(), decoder.config(max_new_tokens=NUM_NEW))
    talker = Talk(decoder.tokenizer, conversation, interactive=True)
    handler = signal.getsignal(signal.SIGINT)

    # One press stops the answer. The chat keeps what was written.
    terminal = Impatient()
    monkeypatch.setattr(sys, "stdout", terminal)
    statistics = talker.say(TURNS[0])
    assert "cancelled" in statistics
    row = conversation.row
    assert row is not None
    assert row.stop_reason == "cancelled"
    assert row.num_new < NUM_NEW
    full_answer = oracle(decoder, TURNS[:1])[0]
    partial_answer = talker.messages[-1]["content"]
    assert full_answer.startswith(partial_answer)
    assert len(partial_answer) < len(full_answer)
    talker.say(TURNS[1])
    assert row.resumed

    # Two presses leave the chat.
    terminal.presses = 2
    with pytest.raises(KeyboardInterrupt):
        talker.say(TURNS[2])
    questions = [message["content"] for message in talker.messages[::2]]
    assert questions == TURNS[:2], "a question without an answer is dropped"
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_cannot_chat_is_refused_in_one_line(model: str, here: None) -> None:
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = None
    tiny_models.write(Path("base"), tokenizer=tokenizer)
    refused("chat", message="name the models by one of")
    message = "chat takes --pair or --target, since a checkpoint has no chat template"
    refused("chat", "--ckpt", "x.ckpt", message=message)
    refused("chat", "--target", "base", message="has no chat template")
    refused("chat", "--pair", "smolm2", message="did you mean smollm2?")

    chat = ("chat", "--target", model)
    refused(*chat, "--num_draft_tokens", "some", message="num_draft_tokens")
    refused(*chat, "--stop", "", stdin="a\n", message="stop string is empty")


def test_a_line_that_is_too_long_does_not_end_a_piped_chat(model: str) -> None:
    command = ("chat", "--target", model, "--max_new_tokens", str(NUM_NEW))
    outcome = call(*command, stdin=f"{'the oak ' * 600}\n{TURNS[0]}\n")
    assert outcome.code == 1, "something failed"
    assert "tokens fill the chat's context of 512: shorten the question" in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == succeed(*command, stdin=f"{TURNS[0]}\n").out


def test_ctrl_c_in_a_pipe_ends_the_line_of_the_answer(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(decoder.tokenizer, TextTokenizer)
    conversation = Conversation(*decoder.ready(), decoder.config(max_new_tokens=NUM_NEW))
    talker = Talk(decoder.tokenizer, conversation, interactive=False)
    pipe = Impatient()
    monkeypatch.setattr(sys, "stdout", pipe)
    with pytest.raises(KeyboardInterrupt):
        talker.say(TURNS[0])
    assert pipe.getvalue().endswith("\n")


def test_an_unknown_command_is_named_and_a_path_is_text(model: str) -> None:
    chat = ("chat", "--target", model, "--max_new_tokens", "4")
    commands = ("/clear", "/save chat.txt", "/reset now")
    outcome = call(*chat, stdin="".join(f"{command}\n" for command in commands))
    assert outcome.code == 1
    assert outcome.out == ""
    for command, error in zip(commands, outcome.err.splitlines(), strict=True):
        assert error.startswith(f"error: there is no command {command}: /reset starts")

    path_question = succeed(*chat, stdin="/usr/bin/ls?\n")
    assert path_question.out, "a path is text, not a command"
