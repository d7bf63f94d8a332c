"""Laws of `chat`: the answers are standard decoding's, streamed, turn by turn, and nothing else is on stdout."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import text_cases
import tiny_models
from cli_fixtures import SCRIPT, call, here, refused, succeed

from lightning_specdec.cli.chat import COMMANDS, ChatSettings, Talk
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import StopStrings
from lightning_specdec.text.chat import Chat
from lightning_specdec.text.tokenizer import TextTokenizer

__all__ = ["here"]
REAL = Path(__file__).parent.parent / "checkpoints" / "smollm2"
TURNS = ["the oak", "Où est l'été ?", "thunder 🌩"]
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a random Llama and a tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("chat")
    return tiny_models.write(path, tokenizer=text_cases.byte_level(), max_position_embeddings=512)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model of the same tokenizer."""
    path = tmp_path_factory.mktemp("draft")
    return tiny_models.write(path, seed=2, tokenizer=text_cases.byte_level(), max_position_embeddings=512)


@pytest.fixture(scope="module")
def decoder(model: str) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(model)


def oracle(decoder: SpeculativeDecoder, turns: list[str], *, system: str | None = None, **options: Any) -> list[str]:
    """Standard decoding's answers, each to the whole chat read from scratch."""
    assert isinstance(decoder.tokenizer, TextTokenizer)
    chat, answers = Chat(decoder.tokenizer, system=system), []
    for turn in turns:
        prompt = chat.ask(turn)
        result = decoder.decode_standard(prompt, max_new_tokens=NEW, **options)
        (row,) = result.rows
        stops = StopStrings(options.get("stop", ()), decoder.tokenizer.vocabulary.token_bytes)
        num_cut = stops.num_cut(row.tokens)
        answers.append(chat.answer(row.tokens, num_cut=num_cut))
    return answers


def talk(model: str, *arguments: str, turns: list[str] | None = None) -> str:
    stdin = "".join(f"{turn}\n" for turn in (TURNS if turns is None else turns))
    return succeed("chat", "--target", model, "--max_new_tokens", str(NEW), *arguments, stdin=stdin).out


def shown(answers: list[str]) -> str:
    return "".join(f"{answer}\n" for answer in answers)


@pytest.mark.parametrize("window", ["1", "5"])
@pytest.mark.parametrize("draft", ["lookup", "itself", "other"])
def test_the_answers_are_those_of_standard_decoding(
    model: str, other: str, decoder: SpeculativeDecoder, draft: str, window: str
) -> None:
    drafts = {"lookup": ["--drafter", "NGramDrafter"], "itself": ["--draft", model], "other": ["--draft", other]}
    assert talk(model, "--num_draft_tokens", window, *drafts[draft]) == shown(oracle(decoder, TURNS))


def test_a_system_prompt_is_said_before_the_chat(model: str, decoder: SpeculativeDecoder) -> None:
    answers = oracle(decoder, TURNS, system="You are an oak.")
    assert talk(model, "--system", "You are an oak.") == shown(answers) != shown(oracle(decoder, TURNS))


def test_stop_strings_end_an_answer_and_are_not_shown(model: str, decoder: SpeculativeDecoder) -> None:
    whole = oracle(decoder, TURNS[:1])[0]
    written = re.findall(r"[ -~]{2,3}", whole)
    stops = [written[-1], written[len(written) // 2]]
    answers = oracle(decoder, TURNS, stop=stops)
    assert answers[0] == whole[: min(whole.find(stop) for stop in stops)]
    assert talk(model, "--stop", stops[0], "--stop", stops[1]) == shown(answers)


def test_a_special_token_ends_an_answer_like_any_stop_string(model: str, decoder: SpeculativeDecoder) -> None:
    assert isinstance(decoder.tokenizer, TextTokenizer)
    answers = oracle(decoder, TURNS, eos=[0, 2])
    assert talk(model, "--stop", "<unk>") == shown(answers)


def test_the_same_seed_gives_the_same_chat_at_a_temperature(model: str) -> None:
    options = ("--temperature", "1", "--top_k", "40")
    first = talk(model, *options, "--seed", "1")
    assert first == talk(model, *options, "--seed", "1", "--num_draft_tokens", "7") != talk(model, *options)


def test_a_reset_forgets_the_chat_and_quit_ends_it(model: str, decoder: SpeculativeDecoder) -> None:
    once = oracle(decoder, TURNS[:2])
    turns = [*TURNS[:2], "/reset", "", *TURNS[:2], " /quit ", TURNS[2]]
    assert talk(model, turns=turns) == shown([*once, *once])


def test_stats_count_all_answers_since_the_chat_began(model: str, decoder: SpeculativeDecoder) -> None:
    out = talk(model, turns=["/stats", TURNS[0], "/stats", TURNS[1], "/stats", "/reset", "/stats"])
    lines = [line for line in out.splitlines() if "answer" in line]
    assert lines[0] == lines[-1] == "no answers yet"
    assert lines[1].startswith("1 answer, ") and lines[2].startswith("2 answers, ")
    found = re.search(r"(\d+) new tokens in (\d+) rounds, .* block efficiency ([\d.]+), .* (\d+) tokens in", lines[2])
    assert found is not None and float(found[3]) == pytest.approx(int(found[1]) / int(found[2]), abs=0.005)


def test_each_answer_has_its_figures_on_stderr_on_demand(model: str) -> None:
    arguments = ("chat", "--target", model, "--max_new_tokens", "5")
    assert succeed(*arguments, stdin="a\nb\n").err == ""
    lines = succeed(*arguments, "--stats", stdin="a\nb\n").err.splitlines()
    pattern = r"5 tokens, [\d.]+ tokens/s, block efficiency [\d.]+, cut off by max_new_tokens"
    assert len(lines) == 2 and all(re.fullmatch(pattern, line) for line in lines)


def test_kept_draft_tokens_are_in_brackets_where_there_are_no_colours(model: str, decoder: SpeculativeDecoder) -> None:
    plain = oracle(decoder, TURNS)
    marked = talk(model, "--draft", model, "--num_draft_tokens", "3", "--show_drafts", "--stop", "zzz")
    assert "[" not in shown(plain) and marked.count("[") >= NEW // 4
    assert re.sub(r"[\[\]]", "", marked) == shown(plain)


def test_help_shows_the_commands_and_an_unknown_one_is_told(model: str) -> None:
    outcome = succeed("chat", "--target", model, stdin="/help\n/hlep\n")
    assert all(command in outcome.out for command in COMMANDS)
    assert outcome.err.startswith("there is no /hlep: /reset")


def test_commands_are_known_in_any_case(model: str, decoder: SpeculativeDecoder) -> None:
    turns = f"{TURNS[0]}\n/Reset\n{TURNS[0]}\n/QUIT\n{TURNS[1]}\n"
    outcome = succeed("chat", "--target", model, "--max_new_tokens", str(NEW), stdin=turns)
    assert outcome.out == shown(oracle(decoder, TURNS[:1]) * 2)
    assert outcome.err.splitlines() == ["the chat begins anew"]


def test_shown_drafts_have_a_legend(model: str) -> None:
    outcome = succeed("chat", "--target", model, "--show_drafts", stdin="")
    assert outcome.err == "[draft tokens kept]; the rest is the target's own\n"


class Impatient(io.StringIO):
    """Somebody who presses Ctrl-C as soon as an answer begins, once or twice."""

    presses = 1

    def write(self, text: str) -> int:
        for _ in range(self.presses if text.strip() else 0):
            signal.raise_signal(signal.SIGINT)
        self.presses = 0
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    model: str, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(decoder.tokenizer, TextTokenizer)
    config = DecodingConfig(max_new_tokens=NEW)
    talker = Talk(decoder, decoder.tokenizer, ChatSettings(), config, interactive=True)
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdout", Impatient())
    talker.say(TURNS[0])
    whole, row = oracle(decoder, TURNS[:1])[0], talker.conversation.row
    first = talker.chat.messages[-1]["content"]
    assert row is not None and row.stop_reason == "cancelled" and row.num_new < NEW
    assert whole.startswith(first) and len(first) < len(whole)
    assert ", stopped" in capsys.readouterr().err and signal.getsignal(signal.SIGINT) is before
    talker.say(TURNS[1])
    assert talker.num_turns == 2 and row.resumed
    assert isinstance(sys.stdout, Impatient)
    sys.stdout.presses = 2
    with pytest.raises(KeyboardInterrupt):
        talker.say(TURNS[2])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_gets_a_prompt_colours_and_figures(model: str) -> None:
    """In a process of its own, on a pseudo-terminal, left by Ctrl-D."""
    leader, follower = pty.openpty()
    command = [SCRIPT, "chat", "--target", model, "--draft", model, "--max_new_tokens", "9", "--show_drafts"]
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    seen = b""

    def read_to(end: bytes) -> None:
        nonlocal seen
        while not seen.endswith(end):
            ready, _, _ = select.select([leader], [], [], 90)
            assert ready, seen
            seen += os.read(leader, 4096)

    try:
        read_to(b"> ")
        assert b"/help shows the commands" in seen and b"with ModelDrafter" in seen
        seen = b""
        os.write(leader, b"the oak\n")
        read_to(b"\r\n> ")
        assert b"\x1b[32m" in seen and b"9 tokens, " in seen
        os.write(leader, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        os.close(leader)


@pytest.fixture(scope="module")
def speechless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models that cannot chat."""
    tokenizer = text_cases.byte_level()
    tokenizer.chat_template = None
    paths = {name: tmp_path_factory.mktemp(name) for name in ("base", "mute")}
    tiny_models.write(paths["base"], tokenizer=tokenizer)
    tiny_models.write(paths["mute"])
    return {name: str(path) for name, path in paths.items()}


def test_what_cannot_chat_is_refused_in_one_line(speechless: dict[str, str], model: str, here: None) -> None:
    refused("chat", told="name the models by one of")
    refused("chat", "--ckpt", "x.ckpt", told="chat takes --pair or --target, since a checkpoint has no chat template")
    refused("chat", "x.ckpt", told="a checkpoint has none: give --pair or --target")
    refused("chat", "--pair", "smollm2", "--target", model, told="got --pair and --target")
    refused("chat", "--target", speechless["base"], told="has no chat template")
    refused("chat", "--target", speechless["mute"], told="has no tokenizer")
    refused("chat", "--target", "./nowhere", told="there is no directory ./nowhere")
    refused("chat", "--pair", "smolm2", told="did you mean smollm2?")
    refused("chat", "--target", model, "--max_new_tokens", "0", told="max_new_tokens")
    refused("chat", "--target", model, "--num_draft_tokens", "some", told="num_draft_tokens")
    refused("chat", "--target", model, "--stop", "", stdin="a\n", told="stop string is empty")
    refused("chat", "--target", model, "--temperature", "-1", told="temperature")
    refused("chat", "--target", model, "--drafter", "Oracle", told="Oracle")
    refused("chat", "--target", model, stdin="the oak " * 600 + "\n", told="begin a new one")


def test_a_chat_that_outgrows_its_context_can_begin_anew(
    model: str, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = call("chat", "--target", model, "--max_length", "60", stdin="\n".join([*TURNS, "again"]))
    assert out.code == 2 and "tokens and the models a context of 60" in out.err
    first = oracle(decoder, TURNS[:1])[0]
    assert out.out.startswith(first[:5])


@pytest.mark.real
@pytest.mark.skipif(not REAL.is_dir(), reason="checkpoints/smollm2 is absent: make smollm2")
def test_smollm2_answers_as_if_it_had_read_the_chat_from_scratch() -> None:
    decoder = SpeculativeDecoder.from_pretrained(str(REAL), dtype="float32")
    turns = ["Name three colours.", "Repeat them in the same order."]
    options = ("--dtype", "float32", "--drafter", "NGramDrafter", "--num_draft_tokens", "5")
    assert talk(str(REAL), *options, turns=turns) == shown(oracle(decoder, turns))
