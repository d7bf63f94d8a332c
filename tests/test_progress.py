"""Nothing that takes seconds is silent: a line that is redrawn in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator

import cases
import pytest
from cli_fixtures import call, ckpt, shipped_run

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.config import activity as activity_module
from lightning_specdec.config.activity import Activity, Reporter, show_activity
from lightning_specdec.config.terminal import STATUS_LINE, display_width, padded, say
from lightning_specdec.decoding import calibration
from lightning_specdec.models import huggingface

__all__ = ["ckpt", "shipped_run"]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report after hundredths of a second."""
    monkeypatch.setattr(activity_module, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(activity_module, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(activity_module, "REDRAW_SECONDS", 0.01)


@pytest.fixture
def reporter(impatient: None) -> Iterator[Reporter]:
    reporter = Reporter()
    reporter.start()
    yield reporter
    reporter.stop()


def wait_for(text: str, stream: io.StringIO) -> None:
    """Wait until the stream contains the text, for at most ten seconds."""
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def test_a_pipe_gets_a_line_now_and_then_with_how_far_a_step_is(
    monkeypatch: pytest.MonkeyPatch, reporter: Reporter
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    show_activity("loading a model")
    wait_for("loading a model, 0 s\n", stream)

    with Activity("measuring", 4, unit="steps") as activity:
        activity.advance(3)
        wait_for("loading a model, 0 s; measuring: 3 of 4 steps, about 0 s left\n", stream)
    show_activity("")
    reporter.stop()
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_terminal_has_one_line_that_makes_way_for_output(
    monkeypatch: pytest.MonkeyPatch, reporter: Reporter
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    show_activity("loading a model")
    wait_for("\r\x1b[Kloading a model, 0 s", stream)
    show_activity("")
    say("the answer")
    reporter.stop()
    assert stream.getvalue().endswith("\r\x1b[Kthe answer\n")
    assert "\n" not in stream.getvalue().removesuffix("the answer\n")


def test_a_quiet_verb_reports_nothing(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    reporter = Reporter(is_quiet=True)
    reporter.start()
    show_activity("loading a model")
    time.sleep(0.1)
    reporter.stop()
    assert stream.getvalue() == ""


def test_a_slow_call_in_python_is_logged_and_a_fast_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightning_specdec")
    decoder = SpeculativeDecoder(cases.target("rnn"))
    decoder.decode([1, 2, 3], max_new_tokens=8)
    assert not caplog.messages

    monkeypatch.setattr(activity_module, "FIRST_SECONDS", 0.0)
    decoder.decode([1, 2, 3], max_new_tokens=8)
    assert caplog.records[0].name.startswith("lightning_specdec.")
    assert caplog.messages[0].startswith("decoding: ")
    assert " of 8 tokens, about 0 s left" in caplog.messages[0]


def test_slow_standard_decoding_in_python_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightning_specdec")
    monkeypatch.setattr(activity_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(activity_module, "REPORT_SECONDS", 0.0)
    SpeculativeDecoder(cases.target("rnn")).decode_standard([[1, 2, 3], [4]], max_new_tokens=8)
    assert len(caplog.messages) == 7, "after each step but the last"
    assert caplog.messages[0].startswith("standard decoding: 2 of 16 tokens, about ")
    assert caplog.messages[-1].startswith("standard decoding: 14 of 16 tokens, about ")


def test_a_long_prompt_is_reported_while_it_is_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightning_specdec")
    decoder = SpeculativeDecoder(cases.target("llama"))
    # Measured before the first call, which reads short texts.
    decoder.decode([1, 2], max_new_tokens=2)
    monkeypatch.setattr(activity_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(activity_module, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(huggingface, "longest_part", lambda device: 8)
    decoder.decode([1, 2, 3, 4] * 5, max_new_tokens=2, num_draft_tokens=1)
    reports = [text for text in caplog.messages if text.startswith("reading the prompt: ")]
    assert reports[0].startswith("reading the prompt: 8 of ")
    assert len(reports) == 3


def test_a_measurement_that_nobody_asked_for_is_seen_in_python_by_default(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setattr(activity_module, "FIRST_SECONDS", 0.0)
    calibration.inform_once.cache_clear()
    caplog.set_level(logging.INFO, "lightning_specdec")
    decoder = SpeculativeDecoder(cases.target("rnn"), num_draft_tokens="auto")
    for number in range(2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp(f"cache{number}")))
        decoder.decode([1, 2, 3], max_new_tokens=2)

    announcements = [message for message in caplog.messages if "once for each pair" in message]
    assert len(announcements) == 1, "it is announced once per process"
    levels = {
        record.levelno
        for record in caplog.records
        if "measuring what rounds with NGramDrafter cost on this machine" in record.getMessage()
    }
    assert levels == {logging.WARNING}


def test_every_verb_reports_while_it_runs(
    ckpt: str,
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
) -> None:
    original = SpeculativeDecoder.decode

    def slow_decode(*arguments: object, **options: object) -> object:
        time.sleep(0.3)
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SpeculativeDecoder, "decode", slow_decode)
    outcome = call("decode", ckpt, "--repeats", "0", "--prompt", "1 2 3")
    assert outcome.code == 0
    assert "decoding 1 prompt, 0 s\n" in outcome.err


def test_the_status_line_is_gone_after_an_error(
    monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    STATUS_LINE.draw("working")
    say("error: wrong", file=stream)
    assert stream.getvalue() == "\r\x1b[Kworking\r\x1b[Kerror: wrong\n"


@pytest.mark.parametrize(
    "text, width",
    [("abc", 3), ("é", 1), ("e\u0301", 1), ("中文", 4), ("日本語 text", 11), ("", 0), ("🌍", 2)],
)
def test_the_width_of_a_text_is_what_a_terminal_shows(text: str, width: int) -> None:
    assert display_width(text) == width
    assert display_width(padded(text, 12)) == 12
    assert padded(text, 12).startswith(text)
    assert padded(text, 12, to_right=True).endswith(text)
