"""Laws of a run's time: decoding at its end is bounded, and a mistake is found before imports."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli_fixtures import call, succeed
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_decode_callback import data, fit
from test_pieces import fake_tape

from lightning_specdec.bench import measure
from lightning_specdec.bench.pieces import PIECE_TOKENS, take_turns
from lightning_specdec.bench.run_progress import RunProgress
from lightning_specdec.config import activity
from lightning_specdec.training import DecodeHeldOut, TimeLimit
from lightning_specdec.training.callbacks import ShowActivity
from lightning_specdec.training.final_verdict import final_verdict
from lightning_specdec.training.runs import RunFiles

ROOT = Path(__file__).parent.parent


def test_no_answer_begins_after_the_limit() -> None:
    standard = fake_tape([1] * 8, [1] * 8, [1] * 8)
    drafted = fake_tape([4, 4], [4, 4], [4, 4], seconds_per_step=2.0)
    for _ in take_turns([standard, drafted], piece_tokens=6):
        num_answers = max(standard.num_begun, drafted.num_begun)
        standard.end_after(num_answers)
        drafted.end_after(num_answers)
    assert standard.num_tokens == drafted.num_tokens == 8


def test_another_answer_begins_only_if_it_would_end_in_time() -> None:
    """Each answer has 24 tokens, and all methods together take a second for each of them."""
    config = SimpleNamespace(max_new_tokens=24)
    case: Any = SimpleNamespace(config=config, batch_size=1)

    def has_time(num_begun: int, num_tokens: int, max_seconds: float) -> bool:
        tape: Any = SimpleNamespace(num_begun=num_begun, num_tokens=num_tokens)
        return measure._has_time_for_more(tape, case, float(num_tokens), max_seconds)

    assert has_time(1, 6, 30.0), "the next turn is still of this answer"
    assert not has_time(1, 12, 47.0)
    assert has_time(1, 12, 48.0)
    assert not has_time(2, 36, 71.0)
    assert not has_time(1, 6, 5.0)


def test_a_validation_without_time_decodes_one_prompt(tmp_path: Path) -> None:
    decoding = DecodeHeldOut(num_prompts=3, max_new_tokens=20)
    decoding.max_seconds = 0.0
    compared: list[int] = []
    write_samples = decoding._write_samples

    def count(trainer: Any, row_pairs: Any, verdict: str) -> None:
        compared.append(len(row_pairs))
        write_samples(trainer, row_pairs, verdict)

    decoding._write_samples = count  # type: ignore[method-assign]
    trainer, _ = fit(tmp_path, decoding, max_epochs=1)
    assert compared == [1]
    assert decoding.verdict.startswith(("pays", "does not pay", "not proven"))
    assert float(trainer.callback_metrics["val/block_efficiency"]) >= 1


def test_the_time_left_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RunProgress("comparing", {"a": 1})
    tape = fake_tape([1] * 10, seconds_per_step=50.0)
    tape.run_piece(5)
    progress.after_piece("a", tape, 10)
    assert progress.seconds_left == pytest.approx(250.0)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    progress.deadline = 1020.0
    assert progress.seconds_left == pytest.approx(20.0)


def test_a_prompt_that_is_too_long_for_its_time_is_shortened_to_a_piece_at_least() -> None:
    decoding = DecodeHeldOut(num_prompts=2, max_new_tokens=48)
    assert decoding.num_affordable_tokens(1.0) == 48
    decoding.prompt_seconds = 10.0
    assert decoding.num_affordable_tokens(None) == 48
    assert decoding.num_affordable_tokens(20.0) == 48
    assert decoding.num_affordable_tokens(5.0) == 24
    assert decoding.num_affordable_tokens(0.0) == PIECE_TOKENS


def test_the_estimate_of_a_validation_reads_each_prompt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes 5 s, a token 1 s: 5 + 7 for eight tokens, and 5 + 14 for sixteen."""
    trainer, module = fit(tmp_path)
    row = SimpleNamespace(token_seconds=[5.0])
    result = SimpleNamespace(rows=[row], seconds=12.0)
    compared = SimpleNamespace(result=result, standard_result=result)
    monkeypatch.setattr(
        "lightning_specdec.training.decode_callback.compare_once",
        lambda *arguments, **options: compared,
    )
    decoding = DecodeHeldOut(num_prompts=3, max_new_tokens=16)
    assert decoding.estimated_seconds(trainer, module) == pytest.approx(3.5 * 2 * (5 + 14))


def test_the_verdict_ends_with_the_time_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = fit(tmp_path)
    num_opened: list[int] = []
    open_answer = measure.Case._open

    def count(case: measure.Case, number: int, repeat: int) -> Any:
        num_opened.append(number)
        return open_answer(case, number, repeat)

    monkeypatch.setattr(measure.Case, "_open", count)
    callbacks: list[Callback] = [DecodeHeldOut(num_prompts=6, max_new_tokens=20), TimeLimit(1.0)]
    monkeypatch.setattr(TimeLimit, "began", time.monotonic() - 61)
    assert final_verdict(module, data(), callbacks).startswith(
        ("pays: ", "does not pay yet: ", "not proven to pay: ")
    )
    # A piece of a few tokens, which may be the answers to several prompts.
    assert max(num_opened) < 5

    monkeypatch.setattr(TimeLimit, "began", time.monotonic())
    final_verdict(module, data(), callbacks)
    assert max(num_opened) == 5


def test_after_its_batches_a_validation_is_not_said_to_have_no_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, module = fit(tmp_path, max_epochs=1)
    monkeypatch.setattr(Trainer, "num_val_batches", [2])
    shown = ShowActivity()
    shown.on_validation_start(trainer, module)
    texts = [step.text for step in activity._activities]
    shown.on_validation_batch_end()
    shown.on_validation_batch_end()
    assert texts == ["validating"]
    assert not activity._activities
    shown.on_validation_end(trainer, module)


def test_decoding_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []
    open_answer = measure.Case._open

    def note(case: measure.Case, number: int, repeat: int) -> Any:
        shown.append([step.text for step in activity._activities])
        return open_answer(case, number, repeat)

    monkeypatch.setattr(measure.Case, "_open", note)
    fit(tmp_path, DecodeHeldOut(num_prompts=1, max_new_tokens=4), ShowActivity(), max_epochs=1)
    assert shown and all(texts == [measure.COMPARING] for texts in shown)


def test_a_run_that_ends_before_its_first_step_leaves_no_directory(tmp_path: Path) -> None:
    def files_of(name: str) -> RunFiles:
        files = RunFiles.__new__(RunFiles)
        callback = ModelCheckpoint()
        files.checkpoints = {callback: tmp_path / "checkpoints" / name}
        files.logger = None
        files._lock_descriptors = []
        files._new_directories = []
        files._new_parents = []
        return files

    refused_files = files_of("refused")
    refused_files.claim(None)
    refused_files.release(keep=False)
    assert not list(tmp_path.iterdir())

    other_files = files_of("other")
    other_files.claim(None)
    refused_files = files_of("refused")
    refused_files.claim(None)
    refused_files.release(keep=False)
    other_files.release(keep=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipe", "eagel"), "there is no recipe 'eagel': did you mean eagle?"),
        (("--recipe", "eagle", "--minutes", "-3"), "minutes must be in (0, "),
        (("--recipe", "eagle", "--minutes", "nan"), "minutes must be in (0, "),
        (("--recipe", "eagle"), "nowhere: no such model directory"),
    ],
)
def test_a_mistake_is_found_without_slow_imports(words: tuple[str, ...], message: str) -> None:
    program = (
        "import sys\n"
        "from lightning_specdec.cli import train\n"
        "try:\n"
        "    train.run('fit', sys.argv[1:])\n"
        "except (ValueError, OSError) as error:\n"
        "    print(error)\n"
        "print([name for name in ('torch', 'transformers', 'lightning') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", program, *words, "--target", "nowhere", "--text", "shipped"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    error, modules = outcome.stdout.splitlines()
    assert message in error
    assert modules == "[]"


def minimal_config(**trainer: Any) -> str:
    config = yaml.safe_load((ROOT / "configs" / "rnn.yaml").read_text())
    config["trainer"] = {"max_steps": 2, "accelerator": "cpu", "logger": False, **trainer}
    config["data"]["init_args"]["num_val"] = 4
    Path("minimal.yaml").write_text(yaml.safe_dump(config))
    return "minimal.yaml"


def test_without_callbacks_the_next_command_names_the_checkpoint_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = succeed("fit", "--config", minimal_config()).out
    (line,) = [line for line in output.splitlines() if line.startswith("next: ")]
    *_, option, path = line.split()
    assert option == "--ckpt"
    assert Path(path).is_file()

    output = succeed("fit", "--config", minimal_config(enable_checkpointing=False)).out
    assert "next: nothing was saved: add a ModelCheckpoint" in output


def test_a_refused_time_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((ROOT / "configs" / "rnn.yaml").read_text())
    limit = {"class_path": "TimeLimit", "init_args": {"minutes": 5.0}}
    config["trainer"]["callbacks"].append(limit)
    Path("limited.yaml").write_text(yaml.safe_dump(config))
    # The first check passes, and a step takes more time than is left.
    monkeypatch.setattr("lightning_specdec.training.cli.check_start_up", lambda minutes: None)
    monkeypatch.setattr(TimeLimit, "time_remaining", lambda limit, *stage: 0.0)
    outcome = call("fit", "--config", "limited.yaml")
    assert outcome.code == 2
    advice = "before the first step, and the last validation and the verdict take 24 s: give"
    assert advice in outcome.err
    assert "--minutes 6 or more" in outcome.err, "more than what was too short"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limited.yaml"]
