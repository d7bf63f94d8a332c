"""Laws of targets that lie elsewhere: a checkpoint says which one it means, and decodes and trains with no other."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import Outcome, call, refused, succeed
from tiny_models import write_text_model

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.models import loading
from lightning_specdec.models.loading import load_model
from lightning_specdec.training import MedusaTraining

DATA = ("--data", "QuadraticProgressions", "--data.vocab_size", "320", "--data.max_change", "0")
TRAINER = (
    "--trainer.accelerator",
    "cpu",
    "--trainer.limit_train_batches",
    "2",
    "--trainer.limit_val_batches",
    "1",
)
QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
)
HEADS = ("--model", "MedusaTraining", "--model.num_heads", "2", "--model.num_draft_tokens", "2")
BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--output", "json", "--prompt", "1 2 3")


def train(verb: str, *arguments: str, target: str = "target", freeze: str = "true") -> Outcome:
    given = (
        "--model.target_checkpoint",
        target,
        "--model.freeze_target",
        freeze,
        "--trainer.default_root_dir",
        "run",
    )
    saved: tuple[str, ...] = (
        "--trainer.callbacks",
        "ModelCheckpoint",
        "--trainer.callbacks.dirpath",
        "run",
    )
    saved += ("--trainer.callbacks.filename", "best", "--trainer.callbacks.save_last", "true")
    saved += ("--trainer.callbacks.enable_version_counter", "false")
    return call(
        verb,
        *HEADS,
        *given,
        *DATA,
        *TRAINER,
        *QUIET,
        *saved,
        "--trainer.limit_test_batches",
        "1",
        *arguments,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, another one, and a run of heads on the first that stays as it is."""
    home = tmp_path_factory.mktemp("references")
    for name, seed in (("target", 1), ("other", 2)):
        write_text_model(home / name, seed=seed)
        for path in (home / name).glob("token*"):
            path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        outcome = train("fit", "--trainer.max_epochs", "1")
        assert outcome.code == 0, outcome.err
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path) if path.name == "cache" else _copy(
            path, tmp_path / path.name
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _copy(path: Path, place: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, place)


def test_a_frozen_target_of_a_directory_is_named_and_not_stored() -> None:
    content = checkpoint.read("run/version_0/best.ckpt")
    target, described = load_model("target"), content[checkpoint.KEY]["target"]
    assert target.origin is not None
    assert (described["source"], described["sha256"]) == ("target", target.origin.sha256)
    assert {name.split(".")[0] for name in content["state_dict"]} == {"drafter"}
    assert (
        Path("run/version_0/best.ckpt").stat().st_size
        < sum(weight.nbytes for weight in target.parameters()) * 4
    )
    loaded = checkpoint.load("run/version_0/best.ckpt").target.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in target.state_dict().items())


def test_decode_finds_the_target_or_is_given_it_anew(tmp_path: Path) -> None:
    (both,) = succeed("decode", "--ckpt", "run/version_0/best.ckpt", *BRIEF).json["prompts"]
    assert both["standard"]["tokens"] == both["speculative"]["tokens"]
    Path("target").rename("moved")
    refused(
        "decode",
        "--ckpt",
        "run/version_0/best.ckpt",
        *BRIEF,
        told="give its directory with --target",
    )
    (moved,) = succeed(
        "decode", "--ckpt", "run/version_0/best.ckpt", "--target", "moved", *BRIEF
    ).json["prompts"]
    assert moved["speculative"]["tokens"] == both["speculative"]["tokens"]
    own = SpeculativeDecoder.from_checkpoint("run/version_0/best.ckpt", target=load_model("moved"))
    assert own.decode([[1, 2, 3]], max_new_tokens=6, eos=()).tokens == [
        both["speculative"]["tokens"]
    ]
    shown = succeed("info", "run/version_0/best.ckpt").out
    assert "target (sha256 " in shown and "not in this file" in shown and "MedusaDrafter(" in shown


def test_another_target_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("decode", "--ckpt", "run/version_0/best.ckpt", *BRIEF)
    refused(
        *given, "--target", "other", told="run/version_0/best.ckpt was trained for target (sha256 "
    )
    shutil.rmtree("target")
    Path("other").rename("target")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_model", None)  # its weights are not read
        refused(*given, told="has another sha256")
    refused(
        "decode",
        "--ckpt",
        "run/version_0/best.ckpt",
        "--pair",
        "smollm2",
        told="name the models by one of",
    )


def test_the_draft_is_exported_alone_and_needs_no_target_for_that() -> None:
    window = checkpoint.load("run/version_0/best.ckpt").recipe["num_draft_tokens"]
    Path("target").rename("moved")
    succeed(
        "export",
        "--ckpt",
        "run/version_0/best.ckpt",
        "--output",
        "draft.safetensors",
        "--dtype",
        "bfloat16",
    )
    succeed(
        "export", "--ckpt", "run/version_0/best.ckpt", "--output", "draft.safetensors"
    )  # over a draft file
    succeed(
        "export",
        "--ckpt",
        "run/version_0/best.ckpt",
        "--output",
        "small.ckpt",
        "--dtype",
        "bfloat16",
    )
    Path("moved").rename("target")
    alone = succeed("decode", "--target", "target", "--draft", "draft.safetensors", *BRIEF).json
    assert alone["manifest"]["options"]["num_draft_tokens"] == window == 2
    (both,) = succeed("decode", "--ckpt", "run/version_0/best.ckpt", *BRIEF).json["prompts"]
    assert alone["prompts"][0]["speculative"]["tokens"] == both["speculative"]["tokens"]
    assert (
        checkpoint.load("small.ckpt").reference
        == checkpoint.load("run/version_0/best.ckpt").reference
    )
    succeed("decode", "--ckpt", "small.ckpt", *BRIEF)


def test_an_exported_draft_names_no_directory_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, here = checkpoint.read("run/version_0/best.ckpt"), str(Path.cwd())
    document = content[checkpoint.KEY]
    document["target"]["source"] = f"{here}/target"
    document["recipe"] |= {
        "draft": f"{here}/run/a.ckpt",
        "data_arguments": {"paths": [f"{here}/a.txt", "b"], "seed": 0},
    }
    for place, tokenizer, draft in (
        (tmp_path, None, "run/a.ckpt"),
        (tmp_path / "run", "target", "a.ckpt"),
    ):
        monkeypatch.chdir(place)
        document["tokenizer"] = tokenizer and f"{here}/{tokenizer}"
        torch.save(content, "whole.ckpt")
        succeed("export", "--ckpt", "whole.ckpt", "--output", "draft.safetensors")
        assert here.encode() not in Path("draft.safetensors").read_bytes()
        made = checkpoint.read("draft.safetensors")[checkpoint.KEY]
        assert (made["target"]["source"], made["tokenizer"], made["recipe"]["draft"]) == (
            "target",
            tokenizer,
            draft,
        )
        assert made["recipe"]["data_arguments"] == {"paths": ["a.txt", "b"], "seed": 0}
    refused(
        "decode", "--ckpt", "draft.safetensors", *BRIEF, told="give its directory with --target"
    )
    monkeypatch.chdir(tmp_path)
    succeed("decode", "--ckpt", "draft.safetensors", *BRIEF)


def test_the_trainer_uses_such_a_checkpoint() -> None:
    outcome = train("test", "--ckpt_path", "run/version_0/best.ckpt")
    assert outcome.code == 0, outcome.err


def test_a_run_is_resumed_where_its_target_is_now_and_on_no_other() -> None:
    Path("target").rename("moved")
    content = torch.load("run/version_0/last.ckpt", weights_only=True)
    arguments = content[checkpoint.KEY]["drafter"]["arguments"]
    arguments["shared_output"] = (
        arguments.pop("draft_vocabulary") is not None
    )  # as older runs say it
    torch.save(content, "run/version_0/last.ckpt")
    more = ("--ckpt_path", "run/version_0/last.ckpt", "--trainer.max_epochs", "2")
    outcome = train("fit", *more, target="moved")
    assert outcome.code == 0, outcome.err
    made = checkpoint.load("run/version_1/last.ckpt")
    assert (
        made.recipe["steps"] == 4
        and made.reference is not None
        and made.reference.source == "moved"
    )
    more = ("--ckpt_path", "run/version_1/last.ckpt", "--trainer.max_epochs", "3")
    outcome = train("fit", *more, target="other")
    assert (
        outcome.code == 2
        and "run/version_1/last.ckpt was trained for moved (sha256 " in outcome.err
    ), outcome.err
    assert outcome.err.count("\n") == 1
    outcome = train("fit", *more, target="moved", freeze="false")
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome.err


def test_a_target_that_is_trained_is_stored_whole() -> None:
    model = MedusaTraining(target_checkpoint="target")
    assert model.describe()["target"]["class"] == "HuggingFaceLM"
    again = MedusaTraining(target_checkpoint="run/version_0/best.ckpt", freeze_target=True)
    assert again.describe()["target"]["source"] == "target", (
        "heads on the target of heads mean the same target"
    )
    learns = MedusaTraining(target_checkpoint="run/version_0/best.ckpt")
    assert learns.describe()["target"]["class"] == "HuggingFaceLM"


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no digest": (lambda it: it[checkpoint.KEY]["target"].update(sha256=None), "which is not here"),
    "no source": (lambda it: it[checkpoint.KEY]["target"].update(source=None), "which is not here"),
    "a number for a source": (
        lambda it: it[checkpoint.KEY]["target"].update(source=3),
        "its target.source must be",
    ),
    "more than it may say": (
        lambda it: it[checkpoint.KEY]["target"].update(code="x"),
        "unknown setting its target.code",
    ),
    "a model of the hub": (
        lambda it: it[checkpoint.KEY]["target"].update(source="a/b"),
        "which is not here",
    ),
    "no name of one": (
        lambda it: it[checkpoint.KEY]["target"].update(source="a//\n../b"),
        "which is not here",
    ),
    "a place of other files": (
        lambda it: it[checkpoint.KEY]["target"].update(source="run/version_0"),
        "holds no weights",
    ),
    "weights beside the place": (
        lambda it: it["state_dict"].update({"target.x": torch.ones(1)}),
        "describes no network",
    ),
    "an unknown type": (
        lambda it: it[checkpoint.KEY]["target"].update(dtype="int3"),
        "dtype must be one of",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_whatever_a_strangers_file_says_of_its_target_is_one_line(name: str) -> None:
    damage, told = DAMAGES[name]
    content = copy.deepcopy(checkpoint.read("run/version_0/best.ckpt"))
    damage(content)
    torch.save(content, "bad.ckpt")
    refused("decode", "--ckpt", "bad.ckpt", *BRIEF, told=told)


def test_code_beside_a_target_is_never_run() -> None:
    config = Path("target/config.json")
    config.write_text(
        config.read_text()
        .replace('"llama"', '"own"')
        .replace("{", '{"auto_map": {"AutoConfig": "c.C"},', 1)
    )
    Path("target/c.py").write_text("import os; os.mkdir('exploded')")
    refused("decode", "--ckpt", "run/version_0/best.ckpt", *BRIEF, told="its own Python code")
    assert not Path("exploded").exists()
