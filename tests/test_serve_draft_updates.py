"""A running server whose draft file changes: no request is lost or changed, and a draft that cannot
be used, or that predicts worse, does not stay.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import cases
import httpx
import pytest
import text_cases
import tiny_models
import torch
from test_serve_http import running
from text_model import model
from tiny_eagle import eagle, fitted_eagle

from lightning_specdec.checkpoints.loading import load_draft, load_pair
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.files import file_sha256
from lightning_specdec.config.models import PairSource
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import AdaptiveWindow, Calibration
from lightning_specdec.drafters import (
    Drafter,
    EagleDrafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.serve import draft_comparison, draft_updates
from lightning_specdec.serve.draft_comparison import DraftTrial
from lightning_specdec.serve.engine import DraftName
from lightning_specdec.serve.memory import DrafterTrial
from lightning_specdec.serve.metrics import Metrics
from lightning_specdec.serve.server import Server, hangups_ignored, make_server
from lightning_specdec.serve.settings import ServeSettings

__all__ = ["model"]
HTTP = httpx.Client(timeout=60)
LABEL = re.compile(r'lightning_specdec_draft_info\{draft="(\w+)",kind="\w+"\} 1.0')
TEXTS = ("the oak", "and the river was", "a", "the stone speaks to the")


@pytest.fixture(scope="module")
def drafts(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft files by name: EAGLE heads, the target itself as a draft, and unsuitable files."""
    directory = tmp_path_factory.mktemp("drafts")
    decoder = SpeculativeDecoder.from_pretrained(model, pack=False)
    target = decoder.target

    def write(name: str, drafter: Drafter, owner: SpeculativeDecoder = decoder) -> None:
        owner.with_drafter(drafter).save_draft(directory / f"{name}.safetensors")

    write("random", eagle(target))
    write("fitted", fitted_eagle(target, num_steps=60))
    write("narrow", eagle(target, head_size=2))
    write("itself", ModelDrafter(target))
    other_model = tiny_models.write(
        directory / "other", tokenizer=text_cases.byte_level(), seed=9, max_position_embeddings=512
    )
    other = SpeculativeDecoder.from_pretrained(other_model, pack=False)
    write("of_another_target", eagle(other.target), other)

    broken = eagle(target)
    with torch.no_grad():
        next(broken.network.parameters()).fill_(torch.nan)
    write("not_finite", broken)
    (directory / "garbage.safetensors").write_bytes(b"PK is no archive" * 100)
    whole = (directory / "fitted.safetensors").read_bytes()
    (directory / "cut.safetensors").write_bytes(whole[: len(whole) * 2 // 3])
    return {path.stem: path for path in directory.glob("*.safetensors")}


@pytest.fixture
def path(drafts: dict[str, Path], tmp_path: Path) -> Path:
    """The draft file of a server, at first with the random head."""
    path = tmp_path / "draft.safetensors"
    path.write_bytes(drafts["random"].read_bytes())
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(draft_updates, "SETTLE_SECONDS", 0.02)
    caplog.set_level(logging.INFO, "lightning_specdec")


def decoder_of(model: str, path: Path, **options: Any) -> SpeculativeDecoder:
    source = PairSource(target=model, draft=str(path), **options)
    return SpeculativeDecoder.load(source, mapped=False)


@contextmanager
def serving(model: str, path: Path, **options: Any) -> Iterator[tuple[Server, str]]:
    settings = {"reload_seconds": 0.01, **options}
    with running(decoder_of(model, path), **settings) as served:
        yield served


def label_of(path: Path) -> str:
    return file_sha256(path)[: draft_updates.LABEL_DIGITS]


def metrics_of(address: str) -> str:
    return HTTP.get(f"{address}/metrics").text


def live_label(address: str) -> str:
    match = LABEL.search(metrics_of(address))
    assert match is not None
    return match[1]


def num_swaps(address: str, outcome: str) -> int:
    name = f'lightning_specdec_draft_swaps_total{{outcome="{outcome}"}} '
    return int(float(metrics_of(address).split(name)[1].split("\n")[0]))


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def wait_for_more(values: dict[int, str], count: int) -> None:
    """Wait until there are so many values more."""
    num_values = len(values)
    wait(lambda: len(values) >= num_values + count)


def put(content: Path, path: Path) -> None:
    """Replace a file in one step, as `export` and `fit` do."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content.read_bytes())
    os.replace(temporary, path)


def complete(address: str, number: int, **fields: Any) -> str:
    """The text of an answer, whose length and settings depend on the number."""
    body = {
        "prompt": TEXTS[number % len(TEXTS)],
        "max_tokens": 20 + 30 * (number % 3),
        "temperature": (0.0, 1.0, 0.7)[number % 3],
        "seed": number,
        **fields,
    }
    answer = HTTP.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def expected_text(decoder: SpeculativeDecoder, number: int) -> str:
    """The same answer by standard decoding."""
    result = decoder.decode_standard(
        TEXTS[number % len(TEXTS)],
        max_new_tokens=20 + 30 * (number % 3),
        temperature=(0.0, 1.0, 0.7)[number % 3],
        seed=number,
    )
    return str(result.rows[0].text)


def test_running_requests_go_on_while_drafts_come_and_go(
    model: str, drafts: dict[str, Path], path: Path
) -> None:
    texts: dict[int, str] = {}
    numbers = iter(range(10_000))
    with serving(model, path, max_batch_size=4) as (server, address):
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                number = next(numbers)
                texts[number] = complete(address, number)

        clients = [threading.Thread(target=ask) for _ in range(5)]
        for client in clients:
            client.start()
        for name in ("fitted", "itself", "narrow", "random", "fitted"):
            put(drafts[name], path)
            wait(lambda: live_label(address) == label_of(path))
            wait_for_more(texts, 4)
            assert f'rounds_by_draft_total{{draft="{label_of(path)}"}}' in metrics_of(address)
        is_over.set()
        for client in clients:
            client.join()
        assert num_swaps(address, "swapped") == 5
        assert num_swaps(address, "refused") == 0
        assert isinstance(server.engine.drafter, EagleDrafter)

    decoder = SpeculativeDecoder.from_pretrained(model)
    assert len(texts) >= 20
    for number, text in texts.items():
        assert text == expected_text(decoder, number)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("of_another_target", "has another sha256"),
        ("not_finite", "are not finite"),
        ("garbage", "is truncated or damaged"),
        ("cut", "is truncated or damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_and_the_old_draft_stays(
    model: str,
    drafts: dict[str, Path],
    path: Path,
    name: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    label = label_of(path)
    with serving(model, path) as (_, address):
        put(drafts[name], path)
        wait(lambda: num_swaps(address, "refused") == 1)
        # It is not read again as long as it does not change.
        time.sleep(0.1)
        assert num_swaps(address, "refused") == 1
        assert live_label(address) == label
        assert complete(address, 0) == expected_text(SpeculativeDecoder.from_pretrained(model), 0)
        (record,) = [record for record in caplog.records if "is not used" in record.message]
        assert reason in record.message
        assert str(path) in record.message
        assert "\n" not in record.message
        assert record.exc_info is None

        put(drafts["fitted"], path)
        wait(lambda: live_label(address) == label_of(drafts["fitted"]))


def test_the_thread_that_decodes_opens_no_trial_and_compiles_nothing(
    model: str, drafts: dict[str, Path], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, str] = {}
    own_init = DrafterTrial.__init__
    own_prepare = LanguageModel.prepare_features

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        threads["trial"] = threading.current_thread().name
        own_init(self, *arguments, **options)

    def prepare_features(self: Any, layers: Any) -> None:
        threads["features"] = threading.current_thread().name
        own_prepare(self, layers)

    monkeypatch.setattr(DrafterTrial, "__init__", init)
    monkeypatch.setattr(LanguageModel, "prepare_features", prepare_features)
    with serving(model, path) as (_, address):
        put(drafts["fitted"], path)
        wait(lambda: live_label(address) == label_of(path))
    assert threads == {"features": "draft", "trial": "draft"}


@pytest.mark.parametrize("observer", [Metrics, DraftTrial])
def test_a_metric_that_raises_in_a_swap_leaves_the_old_draft_and_all_requests(
    observer: Any,
    model: str,
    drafts: dict[str, Path],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own_replaced = observer.replaced
    is_broken = True

    def replaced(self: Any, drafter: DraftName) -> None:
        if is_broken and drafter.label == label_of(drafts["fitted"]):
            raise RuntimeError("no metric today")
        own_replaced(self, drafter)

    monkeypatch.setattr(observer, "replaced", replaced)
    expected = [expected_text(SpeculativeDecoder.from_pretrained(model), n) for n in range(3)]
    label = label_of(path)
    with serving(model, path) as (server, address):
        answers: dict[int, str] = {}

        def ask(number: int) -> None:
            answers[number] = complete(address, number)

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for client in clients:
            client.start()
        put(drafts["fitted"], path)
        wait(lambda: num_swaps(address, "refused") == 1)
        for client in clients:
            client.join()
        assert [answers[number] for number in range(3)] == expected
        assert live_label(address) == label
        assert server.engine.is_running
        (record,) = [record for record in caplog.records if "no metric today" in record.message]
        assert f"the draft EagleDrafter {label} stays" in record.message
        assert record.exc_info is None

        # The thread that loads drafts has not been left waiting.
        is_broken = False
        server.updates.request()
        wait(lambda: live_label(address) == label_of(drafts["fitted"]))
        assert complete(address, 1) == expected[1]


def test_a_file_that_is_being_written_is_not_read_until_it_is_complete(
    model: str, drafts: dict[str, Path], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_updates, "SETTLE_SECONDS", 0.3)
    content = drafts["fitted"].read_bytes()
    label = label_of(path)
    with serving(model, path) as (_, address):
        wait(lambda: live_label(address) == label)
        step = len(content) // 12
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(content), step):
                file.write(content[start : start + step])
                time.sleep(0.05)
                assert live_label(address) == label
        wait(lambda: live_label(address) == label_of(drafts["fitted"]))
        assert num_swaps(address, "refused") == 0


def test_a_writer_that_stalls_leaves_the_old_draft_until_it_goes_on(
    model: str, drafts: dict[str, Path], path: Path
) -> None:
    content = drafts["fitted"].read_bytes()
    with serving(model, path) as (server, address):
        label = live_label(address)
        weights = [weight.clone() for weight in server.engine.drafter.parameters()]
        with path.open("wb", buffering=0) as file:
            file.write(content[: len(content) // 2])
            wait(lambda: num_swaps(address, "refused") == 1)
            assert live_label(address) == label
            # The weights in use are not those of the file that was cut under them.
            for weight, present in zip(weights, server.engine.drafter.parameters(), strict=True):
                assert torch.equal(weight, present)
            complete(address, 1)
            file.write(content[len(content) // 2 :])
        wait(lambda: live_label(address) == label_of(drafts["fitted"]))
        path.unlink()
        time.sleep(0.05)
        complete(address, 2)
        assert live_label(address) == label_of(drafts["fitted"])
        put(drafts["random"], path)
        wait(lambda: live_label(address) == label)


def test_a_worse_draft_is_swapped_back_and_its_content_is_tried_again_on_request_only(
    model: str,
    drafts: dict[str, Path],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(draft_comparison, "FIRST_LOOK", 64)
    monkeypatch.setattr(draft_comparison, "FEWEST_OF_KIND", 16)
    monkeypatch.setattr(draft_comparison, "FEWEST_ANSWERS", 8)
    put(drafts["itself"], path)
    good = label_of(path)
    bad = label_of(drafts["random"])
    with serving(model, path, max_batch_size=2) as (server, address):
        fields = {"max_tokens": 24, "temperature": 0.0}
        for number in range(9):
            complete(address, number, **fields)
        put(drafts["random"], path)
        wait(lambda: live_label(address) == bad)
        for number in range(200):
            if num_swaps(address, "swapped_back"):
                break
            complete(address, number, **fields)
        wait(lambda: live_label(address) == good)
        assert num_swaps(address, "swapped_back") == 1
        assert f"EagleDrafter {bad} is swapped back for ModelDrafter {good}" in caplog.text

        # The same content in a new file.
        put(drafts["random"], path)
        wait(lambda: "it is not tried again" in caplog.text)
        assert live_label(address) == good
        assert num_swaps(address, "swapped") == 1
        # On request it is, as a good draft may be swapped back, too.
        server.updates.request()
        wait(lambda: live_label(address) == bad)
        assert num_swaps(address, "swapped") == 2
        # Another content always is.
        put(drafts["narrow"], path)
        wait(lambda: live_label(address) == label_of(drafts["narrow"]))


def test_a_first_draft_with_few_answers_is_said_not_to_be_compared(
    model: str, drafts: dict[str, Path], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, path) as (_, address):
        complete(address, 0)
        first = label_of(path)
        assert f'by_draft_total{{draft="{first}"}}' in metrics_of(address)
        put(drafts["fitted"], path)
        wait(lambda: "finished too few answers to compare it with" in caplog.text)
        complete(address, 0)

        # Drafts that are neither in use nor compared have no series.
        metrics = metrics_of(address)
        assert f'by_draft_total{{draft="{label_of(path)}"}}' in metrics
        assert first not in metrics


def test_a_named_pipe_in_place_of_the_file_is_not_opened(
    model: str, drafts: dict[str, Path], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, path) as (server, address):
        label = live_label(address)
        path.unlink()
        os.mkfifo(path)
        server.updates.request()
        wait(lambda: "there is no regular file" in caplog.text, seconds=5)
        assert live_label(address) == label
        put(drafts["fitted"], path)
        wait(lambda: live_label(address) == label_of(drafts["fitted"]))


def test_a_worse_draft_is_swapped_back_while_the_next_file_is_being_written(
    model: str, drafts: dict[str, Path], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trial of the first draft is kept, though it has answered nothing yet.
    monkeypatch.setattr(draft_comparison, "FEWEST_ANSWERS", 0)
    with serving(model, path) as (server, address):
        first = server.updates._live.name
        put(drafts["fitted"], path)
        wait(lambda: live_label(address) == label_of(drafts["fitted"]))
        wait(lambda: num_swaps(address, "swapped") == 1)
        worse = server.updates._live.name

        monkeypatch.setattr(draft_updates, "SETTLE_SECONDS", 0.5)
        is_over = threading.Event()

        def grow() -> None:
            with path.open("ab", buffering=0) as file:
                while not is_over.wait(0.02):
                    file.write(b".")

        writer = threading.Thread(target=grow)
        writer.start()
        try:
            server.updates.request()
            time.sleep(0.2)
            server.updates.judged(draft_comparison.Comparison(worse, first, -1.0, 0.1, 2.0, 256))
            wait(lambda: num_swaps(address, "swapped_back") == 1, seconds=5)
            assert live_label(address) == first.label
            assert num_swaps(address, "refused") == 0
        finally:
            is_over.set()
            writer.join()


def test_a_file_whose_times_were_set_back_is_another_one(path: Path) -> None:
    stamp = draft_updates.file_stamp(path)
    status = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert draft_updates.file_stamp(path) != stamp
    assert draft_updates.file_stamp(path.parent) is None


def test_a_draft_that_fails_while_it_drafts_is_refused_before_any_request_meets_it(
    model: str, drafts: dict[str, Path], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = label_of(drafts["fitted"])

    def load(origin: Any, target: Any) -> Drafter:
        drafter: Any = load_draft(origin, target)
        if label_of(path) == fails:
            drafter.propose = lambda *arguments: 1 / 0
        return cast(Drafter, drafter)

    monkeypatch.setattr(draft_updates, "load_draft", load)
    with serving(model, path) as (_, address):
        label = live_label(address)
        put(drafts["fitted"], path)
        wait(lambda: num_swaps(address, "refused") == 1)
        assert live_label(address) == label
        complete(address, 0)
        assert 'reason="failed"' not in metrics_of(address)


def test_a_lookup_before_the_draft_keeps_what_it_remembers(
    model: str, drafts: dict[str, Path], path: Path
) -> None:
    decoder = decoder_of(model, path, drafter="SuffixCorpusWithFallback")
    with running(decoder, reload_seconds=0.01) as (server, address):
        complete(address, 0)
        lookup: Any = server.engine.drafter.lookup
        assert lookup.memory.num_tokens > 0
        put(drafts["fitted"], path)
        wait(lambda: label_of(drafts["fitted"]) in metrics_of(address))
        drafter = server.engine.drafter
        assert isinstance(drafter, NGramWithFallback)
        assert drafter.lookup is lookup
        complete(address, 0)


def test_another_lookup_in_the_new_file_is_used(model: str, path: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(model, pack=False)

    def save(lookup: NGramDrafter, name: Path) -> None:
        drafter = NGramWithFallback(lookup, eagle(decoder.target))
        decoder.with_drafter(drafter).save_draft(name)

    save(NGramDrafter(min_ngram=2, max_ngram=3), path)
    with serving(model, path) as (server, address):
        complete(address, 0)
        new_path = path.with_suffix(".other")
        save(NGramDrafter(min_ngram=3, max_ngram=9), new_path)
        put(new_path, path)
        wait(lambda: live_label(address) == label_of(path))
        drafter = server.engine.drafter
        assert isinstance(drafter, NGramWithFallback)
        settings: Any = drafter.lookup.settings
        assert (settings.min_ngram, settings.max_ngram) == (3, 9)
        assert complete(address, 0) == expected_text(decoder, 0)


def test_adaptive_windows_need_known_costs(
    model: str,
    drafts: dict[str, Path],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    costs = Calibration((1, 2, 5), (1.0, 1.02, 1.1), (0.0, 0.0, 0.0), 0.0, 0.1, 0.0)
    monkeypatch.setattr(
        SpeculativeDecoder, "_adaptive_window", lambda *arguments: AdaptiveWindow(costs)
    )
    known: list[Calibration] = []
    monkeypatch.setattr(
        draft_updates, "stored", lambda *arguments, **sizes: known[0] if known else None
    )
    settings = ServeSettings(port=0, reload_seconds=0.01)
    config = DecodingConfig(num_draft_tokens="auto")
    server = make_server(decoder_of(model, path), config, settings, model_name="tiny")
    server.start()
    try:
        engine = server.engine
        first_window = engine.config.num_draft_tokens
        # A head of the same sizes costs the same.
        put(drafts["fitted"], path)
        drafter = engine.drafter
        wait(lambda: engine.drafter is not drafter)
        assert engine.config.num_draft_tokens is first_window

        drafter = engine.drafter
        put(drafts["narrow"], path)
        wait(lambda: "were never measured here" in caplog.text)
        assert engine.drafter is drafter
        known.append(costs.changed(draft_step_seconds=0.2))
        server.updates.request()
        wait(lambda: engine.drafter is not drafter)
        window: Any = engine.config.num_draft_tokens
        assert window.calibration is known[0]
    finally:
        server.stop()


def test_sighup_loads_the_draft_of_a_server_that_looks_at_nothing_itself(
    model: str, drafts: dict[str, Path], path: Path
) -> None:
    command = [sys.executable, "-m", "lightning_specdec", "serve", model, "--draft", str(path)]
    command += ["--port", "0", "--reload_seconds", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=path.parent)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(line for line in lines if "serving" in line)
        address = line.split(" at ")[1].split("/v1")[0]
        put(drafts["fitted"], path)
        time.sleep(0.2)
        assert live_label(address) == label_of(drafts["random"])

        process.send_signal(signal.SIGHUP)
        line = next(line for line in lines if "takes the place of" in line)
        assert label_of(path) in line
        assert live_label(address) == label_of(path)
        complete(address, 0)
        process.send_signal(signal.SIGHUP)
        assert label_of(path) in next(line for line in lines if "stays" in line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_hangup_while_models_load_is_ignored() -> None:
    previous_handler = signal.getsignal(signal.SIGHUP)
    with hangups_ignored():
        # It would end this process.
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == previous_handler


def test_without_a_draft_file_sighup_says_so_and_the_server_goes_on(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = PairSource(target=model)
    with running(SpeculativeDecoder.load(source, mapped=False), reload_seconds=0.01) as served:
        server, address = served
        server.updates.request()
        wait(lambda: "comes from no single file" in caplog.text)
        complete(address, 0)
        assert 'draft_info{draft="NGramDrafter",kind="NGramDrafter"}' in metrics_of(address)


def test_the_draft_of_a_checkpoint_may_change_and_its_target_may_not(tmp_path: Path) -> None:
    path = tmp_path / "pair.safetensors"

    def save(target: Any, seed: int) -> None:
        draft = ModelDrafter(cases.MODELS["rnn"](seed, vocab_size=cases.VOCAB, num_layers=1))
        SpeculativeDecoder(target, draft, prompts=cases.PROMPTS).save(path)

    save(cases.MODELS["rnn"](1), 2)
    loaded = load_pair(PairSource(ckpt=str(path)), mapped=False)
    origin = loaded.draft_origin
    assert origin is not None
    assert origin.path == path
    assert origin.sha256 == file_sha256(path)

    save(cases.MODELS["rnn"](1), 3)
    drafter: Any = load_draft(origin, loaded.target)
    expected: Any = load_pair(PairSource(ckpt=str(path))).drafter
    for weight, other in zip(drafter.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other)

    save(cases.MODELS["rnn"](4), 3)
    with pytest.raises(ValueError, match="has another target now: start again to use it"):
        load_draft(origin, loaded.target)


def test_a_draft_file_named_as_checkpoint_or_by_a_run_belongs_to_its_target(
    model: str, drafts: dict[str, Path], path: Path
) -> None:
    source = PairSource(ckpt=str(path), target=model)
    loaded = load_pair(source, mapped=False)
    assert loaded.draft_origin is not None
    put(drafts["fitted"], path)
    load_draft(loaded.draft_origin, loaded.target)
    put(drafts["of_another_target"], path)
    with pytest.raises(ValueError, match="has another sha256"):
        load_draft(loaded.draft_origin, loaded.target)

    # A mapped file may not change, so it has no origin.
    put(drafts["random"], path)
    assert load_pair(source).draft_origin is None
