"""Laws of chat templates: another process renders them, and what they do stays there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import text_cases
from transformers.utils.chat_template_utils import _compile_jinja_template

from lightning_specdec.text import chat_template
from lightning_specdec.text.chat_template import _compile, render_chat_template
from lightning_specdec.text.tokenizer import TextTokenizer

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "the oak"}]
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


def render(template: str, **variables: Any) -> str:
    return render_chat_template(template, HELLO, variables)


def test_templates_find_the_same_filters_and_functions_as_in_transformers() -> None:
    environment = _compile("").environment
    expected: Any = _compile_jinja_template("").environment
    assert set(environment.filters) == set(expected.filters)
    assert set(environment.globals) == set(expected.globals)
    assert set(environment.tests) == set(expected.tests)
    names = {name.rpartition(".")[2].strip("_") for name in expected.extensions}
    assert names == {"AssistantTracker", "LoopControlExtension"}
    assert len(environment.extensions) == 2


def test_variables_of_a_generation_tag_stay_inside_as_in_transformers() -> None:
    source = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}"
    assert render(source) == _compile_jinja_template(source).render() == "1False"


def test_one_process_renders_all_chats() -> None:
    render("{{ 1 }}")
    process = chat_template._renderer._process
    for number in range(20):
        assert render("{{ n }}", n=number) == str(number)
    assert chat_template._renderer._process is process


@pytest.fixture
def interrupt() -> Iterator[threading.Timer]:
    """Sends Ctrl-C to this process a little later."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    yield timer
    timer.cancel()


def test_ctrl_c_reaches_a_template_that_does_not_end(
    interrupt: threading.Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 60.0)
    render("{{ 1 }}")
    started = time.perf_counter()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        render(ENDLESS)
    assert time.perf_counter() - started < 10
    assert render("{{ 'the next one' }}") == "the next one"


def test_a_killed_process_is_started_again() -> None:
    render("{{ 1 }}")
    process = chat_template._renderer._process
    assert process is not None
    process.kill()
    process.wait()
    assert render("{{ 2 }}") == "2"


def test_threads_get_their_own_replies() -> None:
    replies: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            replies[number] = render("{{ n * 2 }}", n=number)
            assert replies[number] == str(2 * number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {number: str(2 * number) for number in range(6)}


def test_a_forked_process_renders_in_a_process_of_its_own() -> None:
    render("{{ 1 }}")
    child = os.fork()
    if child == 0:
        # pytest must not see this process end.
        is_right = render("{{ 'in the child' }}") == "in the child"
        chat_template._renderer.stop()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render("{{ 'in the parent' }}") == "in the parent"


def test_a_variable_that_no_other_process_can_read_is_refused_in_one_line() -> None:
    tokenizer = text_cases.byte_level()
    with pytest.raises(ValueError, match="a variable is no plain value") as error:
        TextTokenizer(tokenizer).encode_chat(HELLO, chat_template_kwargs={"f": lambda: 1})
    assert "\n" not in str(error.value)


def test_a_file_of_the_current_directory_does_not_render_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    chat_template._renderer.stop()
    assert render("{{ 'rendered' }}") == "rendered"


def test_an_error_of_a_template_has_a_bounded_length() -> None:
    with pytest.raises(ValueError, match="^aaa") as error:
        render("{{ raise_exception('a' * 1000000) }}")
    assert len(str(error.value)) <= chat_template.MAX_ERROR_SIZE + len("...")


def test_a_variable_that_is_nested_too_deeply_is_refused_in_one_line() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ValueError, match="a variable is no plain value"):
        render("{{ 1 }}", nested=nested)
