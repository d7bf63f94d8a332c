"""Laws of recipes: a target, its text and a time are enough for a draft that decodes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_fixtures import Outcome, call, succeed
from generated import corpus, somewhere, target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_guides import ROOT, commands
from test_training import Stop, end_of
from tiny_models import write, write_text_model

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.training.distillation import FINAL_RATE
from lightning_specdec.training.draft_recipes import RECIPES, config_for

__all__ = ["corpus", "somewhere", "target"]


@pytest.mark.quick_cases("eagle")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_killed_in_its_first_epoch_goes_on_and_its_draft_decodes(
    recipe: str,
    target: str,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit_command = ["fit", "--recipe", recipe, "--target", target, "--text", str(corpus)]
    fit_command += ["--trainer.accelerator", "cpu", "--trainer.max_epochs", "1"]
    fit_command += ["--data.batch_size", "2"]
    with monkeypatch.context() as stopped:
        Stop(stopped, "SIGKILL")
        assert end_of(lambda: call(*fit_command, "--save_seconds", "0")) == -signal.SIGKILL
    last_checkpoint = Path(f"checkpoints/target_{recipe}_text/version_0/last.ckpt")
    assert checkpoint.read(last_checkpoint)["global_step"] == 3
    outcome = succeed(*fit_command, "--ckpt_path", "last")
    assert "val/block_efficiency" in outcome.out
    message = (
        "hidden states are computed online, in each step: the target needs about 0.0 minutes to "
        "read the text once, max_epochs is 1\n"
    )
    assert message in outcome.err
    assert (
        checkpoint.read(last_checkpoint)["global_step"] > 3
        and last_checkpoint.with_name("best.ckpt").is_file()
    )
    succeed("export", "--ckpt", str(last_checkpoint.parent.parent), "--output", "draft.safetensors")
    decoded = succeed(
        "decode",
        "--target",
        target,
        "--draft",
        "draft.safetensors",
        "--repeats",
        "0",
        "--max_new_tokens",
        "6",
    )
    assert "output identical" in decoded.out


def fit_for_minutes(*words: str) -> Outcome:
    """`fit` with seconds for MINUTES, or a minute on a slow machine; what all tries message."""
    messages = ""
    for minutes in ("0.08", "0.4", "1"):
        outcome = call(*(minutes if word == "MINUTES" else word for word in words))
        messages += outcome.err
        steps = re.findall(r"(\d+)/\d+ step", outcome.err)
        if steps and int(steps[-1]) >= 60:  # twice the warm-up
            break
    assert outcome.code == 0, outcome.err
    return outcome._replace(err=messages)


@pytest.mark.slow
def test_a_run_of_given_minutes_ends_with_its_schedule_and_keeps_what_is_read_often(
    target: str, corpus: Path
) -> None:
    outcome = fit_for_minutes(
        *(
            "fit",
            "--recipe",
            "eagle",
            "--target",
            target,
            "--text",
            str(corpus),
            "--minutes",
            "MINUTES",
        ),
        *("--model.draft_vocabulary", "64"),
    )
    expected_message = (
        r"hidden states are computed once and cached: .* once, the run has \S+ minutes left, "
        "half of"
    )
    assert re.search(expected_message, outcome.err) and "free)" in outcome.err
    *_, best = sorted(Path().glob("checkpoints/target_eagle_text/version_*/best.ckpt"))
    content, logs = checkpoint.read(best), Path("logs/target_eagle_text", best.parent.name)
    rate = content["optimizer_states"][0]["param_groups"][0]["lr"]
    assert FINAL_RATE * 0.004 <= rate < 0.1 * 0.004 and content["epoch"] > 1
    assert (logs / "samples.md").is_file()
    events = EventAccumulator(str(logs)).Reload()
    for tag in events.Tags()["scalars"]:
        assert events.SummaryMetadata(tag).summary_description, f"{tag} says what it shows"
    hparams = events.PluginTagToContent("hparams")
    experiment = hparams["_hparams_/experiment"]
    assert b"val/block_efficiency" in experiment and b"val/draft_loss" not in experiment, (
        "only what was measured"
    )
    assert b" entries" in hparams["_hparams_/session_start_info"], "long lists by their lengths"


@pytest.mark.slow
def test_a_short_run_may_get_more_minutes(target: str, corpus: Path) -> None:
    """What a recipe chooses for a short run changes with its minutes; the error says how to keep
    it.
    """
    fit_command = [
        "fit",
        "--recipe",
        "eagle",
        "--target",
        target,
        "--text",
        str(corpus),
        "--trainer.accelerator",
        "cpu",
    ]
    fit_command += ["--data.batch_size", "2", "--trainer.max_epochs"]
    succeed(*fit_command, "1", "--minutes", "15")
    options = "--model.learning_rate 0.004 --model.num_draft_tokens 2"
    outcome = call(*fit_command, "2", "--minutes", "16", "--ckpt_path", "last")
    assert f": give {options}, or begin a new run" in outcome.err
    assert (
        "resuming"
        in succeed(
            *fit_command, "2", "--minutes", "16", "--ckpt_path", "last", *options.split()
        ).out
    )


@pytest.mark.slow
def test_the_guides_first_commands_work_as_written(target: str, corpus: Path) -> None:
    """But for the size: a tiny target where SmolLM2 is, its text for the shipped one, seconds for
    minutes.
    """
    Path("checkpoints").mkdir()
    Path("checkpoints/smollm2").symlink_to(target)
    fit_words, *other_commands = commands(ROOT / "docs" / "train_a_draft.md")[:3]
    assert [fit_words[0], *(words[0] for words in other_commands)] == ["fit", "export", "decode"]
    replacements = {"shipped": str(corpus), "5": "MINUTES"}
    fit_for_minutes(
        *(replacements.get(word, word) for word in fit_words), "--name", "smollm2_eagle"
    )
    for words in other_commands:
        outcome = succeed(*words)
    assert "Name three uses of a brick." in outcome.out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_yaml_of_a_recipe_is_what_it_runs(recipe: str, target: str, corpus: Path) -> None:
    words = ("fit", "--recipe", recipe, "--target", target, "--text", str(corpus))
    printed = succeed(*words, "--print_config").out
    assert (
        "learning_rate: 0.5\n"
        in succeed(*words, "--model.learning_rate", "0.5", "--print_config").out
    )
    assert yaml.safe_load(printed) == config_for(recipe, target, [str(corpus)])
    Path("mine.yaml").write_text(printed)
    assert "class_path" in succeed("fit", "--config", "mine.yaml", "--print_config").out


def test_the_sizes_follow_from_the_target(tmp_path: Path, corpus: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    two = write_text_model(tmp_path / "two", num_hidden_layers=2, intermediate_size=48, **sizes)
    thirty = write_text_model(tmp_path / "thirty", num_hidden_layers=32, **sizes)
    small = config_for("eagle", two, [str(corpus)])["model"]["init_args"]
    assert (small["num_heads"], small["num_key_heads"], small["intermediate_size"]) == (4, 2, 48)
    assert config_for("layers", two, [str(corpus)])["model"]["init_args"]["draft_layers"] == [0]
    assert config_for("layers", thirty, [str(corpus)])["model"]["init_args"]["draft_layers"] == [
        0,
        1,
        2,
        29,
        30,
        31,
    ]
    model = config_for("pair", thirty, [str(corpus)])["model"]["init_args"]["draft"]["init_args"][
        "model"
    ]
    assert model["num_hidden_layers"] == 4
    drafts = [
        config_for("eagle", two, [str(corpus)], minutes=minutes)["model"]["init_args"]
        for minutes in (5, 60)
    ]
    assert [
        (arguments["num_draft_tokens"], arguments["learning_rate"]) for arguments in drafts
    ] == [
        (2, 0.004),
        (4, 0.002),
    ]


def test_a_fault_is_one_line_and_leaves_nothing(tmp_path: Path, target: str, corpus: Path) -> None:
    text = str(corpus)
    one_layer_target = write(tmp_path / "one", num_hidden_layers=1)
    (tmp_path / "empty").mkdir()
    faults: list[tuple[tuple[str, ...], str]] = [
        (
            ("--recipe", "eegle", "--target", target, "--text", text),
            "there is no recipe 'eegle': did you mean eagle?",
        ),
        (
            ("--recipe", "eagle", "--target", "nowhere", "--text", text),
            "nowhere: no such model directory",
        ),
        (("--recipe", "eagle", "--target", target), "--text"),
        (
            ("--recipe", "eagle", "--target", str(tmp_path / "empty"), "--text", text),
            "has no config.json",
        ),
        (("--recipe", "eagle", "--target", target, "--text", "nowhere"), "nowhere does not exist"),
        (("--recipe", "exit", "--target", one_layer_target, "--text", text), "has one layer"),
        (("--recipe", "eagle", "--target", one_layer_target, "--text", text), "tokenizer"),
        (
            ("--recipe", "eagle", "--target", target, "--text", "shipped"),
            "is text of the tokenizer",
        ),
        (
            ("--recipe", "eagle", "--target", target, "--text", text, str(tmp_path)),
            "train on one kind at a time",
        ),
        (("--recipe", "eagle", "--target", target, "--text", text, "--minutes", "-1"), "minutes"),
        (
            ("--recipe", "eagle", "--target", target, "--text", text, "--minutes", "0.0001"),
            "is too short",
        ),
    ]
    for words, message in faults:
        outcome = call("fit", *words)
        assert outcome.code == 2 and "Traceback" not in outcome.err, words
        assert message in outcome.err.splitlines()[-1], outcome.err
        assert "minutes left" not in outcome.out + outcome.err, (
            "nothing is measured for a run that is over"
        )
    assert not list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("version_*")), (
        "no number is used up"
    )
