"""Laws of targets that are not in the checkpoint: it decodes and trains only with its own."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import Outcome, call, refused, succeed
from safetensors.torch import save_file
from tiny_models import write_text_model

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import TargetReference, checkpoint
from lightning_specdec.models import loading
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.safetensors_file import single_file_sha256, weights_sha256
from lightning_specdec.training import MedusaTraining

RUN = "run/version_0/best.ckpt"
DATA = ("--data", "QuadraticProgressions", "--data.vocab_size", "320", "--data.max_change", "0")
TRAINER = (
    *("--trainer.accelerator", "cpu"),
    *("--trainer.limit_train_batches", "2"),
    *("--trainer.limit_val_batches", "1"),
    *("--trainer.limit_test_batches", "1"),
    *("--trainer.default_root_dir", "run"),
)
SAVING = (
    *("--trainer.callbacks", "ModelCheckpoint"),
    *("--trainer.callbacks.dirpath", "run"),
    *("--trainer.callbacks.filename", "best"),
    *("--trainer.callbacks.save_last", "true"),
    *("--trainer.callbacks.enable_version_counter", "false"),
)
QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
)
HEADS = ("--model", "MedusaTraining", "--model.num_heads", "2", "--model.num_draft_tokens", "2")
BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--output", "json", "--prompt", "1 2 3")


def train(verb: str, *arguments: str, target: str = "target", freeze: str = "true") -> Outcome:
    """Run a verb of the Trainer for heads on a target."""
    target_arguments = ("--model.target_checkpoint", target, "--model.freeze_target", freeze)
    return call(verb, *HEADS, *target_arguments, *DATA, *TRAINER, *QUIET, *SAVING, *arguments)


def decode_tokens(*arguments: str) -> list[int]:
    """Return the tokens that `decode` writes with the draft."""
    (prompt,) = succeed("decode", *arguments, *BRIEF).json["prompts"]
    return prompt["speculative"]["tokens"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, another one, and a run of heads on the first, which is frozen."""
    home = tmp_path_factory.mktemp("references")
    for name, seed in (("target", 1), ("other", 2)):
        write_text_model(home / name, seed=seed)
        # Without a tokenizer, the tokens of the data are the model's.
        for path in (home / name).glob("token*"):
            path.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        outcome = train("fit", "--trainer.max_epochs", "1")
        assert outcome.code == 0, outcome.err
    return home


@pytest.fixture(autouse=True)
def _in_a_copy_of_home(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in home.iterdir():
        if path.name == "cache":
            (tmp_path / "cache").symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_frozen_target_of_a_directory_is_named_and_not_stored() -> None:
    content = checkpoint.read(RUN)
    reference = content[checkpoint.KEY]["target"]
    target = load_model("target")
    assert target.origin is not None
    assert reference["source"] == "target"
    assert reference["sha256"] == target.origin.sha256

    assert {name.split(".")[0] for name in content["state_dict"]} == {"drafter"}
    target_bytes = sum(weight.nbytes for weight in target.parameters())
    assert Path(RUN).stat().st_size < target_bytes * 4

    loaded_weights = checkpoint.load(RUN).target.state_dict()
    for name, weight in target.state_dict().items():
        assert torch.equal(loaded_weights[name], weight), name


def test_decode_finds_the_target_or_takes_it_from_the_command_line(tmp_path: Path) -> None:
    (prompt,) = succeed("decode", "--ckpt", RUN, *BRIEF).json["prompts"]
    tokens = prompt["speculative"]["tokens"]
    assert prompt["standard"]["tokens"] == tokens

    Path("target").rename("moved")
    refused("decode", "--ckpt", RUN, *BRIEF, message="give its directory with --target")
    assert decode_tokens("--ckpt", RUN, "--target", "moved") == tokens
    decoder = SpeculativeDecoder.from_checkpoint(RUN, target=load_model("moved"))
    assert decoder.decode([[1, 2, 3]], max_new_tokens=6, eos=()).tokens == [tokens]

    description = succeed("info", RUN).out
    assert "target (sha256 " in description
    assert "not in this file" in description
    assert "MedusaDrafter(" in description


def test_another_target_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = ("decode", "--ckpt", RUN, *BRIEF)
    refused(*decode, "--target", "other", message=f"{RUN} was trained for target (sha256 ")

    shutil.rmtree("target")
    Path("other").rename("target")
    with monkeypatch.context() as patch:
        # Its weights are not read.
        patch.setattr(loading, "load_model", None)
        refused(*decode, message="has another sha256")
    refused(
        *("decode", "--ckpt", RUN, "--pair", "smollm2"),
        message="name the models by one of",
    )


def shard(directory: str) -> None:
    """Distribute a model's weights over several files."""
    model = load_model(directory).model
    Path(directory, "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(Path(directory).glob("model-*.safetensors"))) > 1


@pytest.mark.slow
def test_equal_weights_are_the_same_target_in_one_file_and_in_several() -> None:
    """In each direction, where the file expects the target and elsewhere."""
    tokens = decode_tokens("--ckpt", RUN)
    succeed("export", "--ckpt", RUN, "--output", "of_one.safetensors")
    shutil.copytree("target", "in_one_file")
    shard("target")
    sharded_target = load_model("target")
    heads = checkpoint.load(RUN).drafter
    checkpoint.save("of_several.safetensors", TargetReference.of(sharded_target), heads)

    drafts = (RUN, "of_one.safetensors", "of_several.safetensors")
    for draft in drafts:
        assert decode_tokens("--ckpt", draft) == tokens
        assert decode_tokens("--ckpt", draft, "--target", "target") == tokens
        assert decode_tokens("--ckpt", draft, "--target", "in_one_file") == tokens

    shard("other")
    for draft in drafts:
        refused("decode", "--ckpt", draft, "--target", "other", *BRIEF, message="another sha256")


def test_a_reference_to_sharded_weights_has_no_entry_that_older_versions_refuse() -> None:
    in_one_file = TargetReference.of(load_model("target"))
    assert in_one_file.to_document() == {"target": in_one_file.to_dict()}

    shard("target")
    sharded = TargetReference.of(load_model("target"))
    document = sharded.to_document()
    assert document["target"].keys() == in_one_file.to_dict().keys()
    assert document["target"]["sha256"] != in_one_file.sha256
    assert document["target_single_file_sha256"] == in_one_file.sha256
    assert TargetReference.from_document(document) == sharded


def test_the_digest_of_weights_in_one_file_is_that_of_the_file_that_safetensors_writes(
    tmp_path: Path,
) -> None:
    """Whatever the dtypes, names and metadata are."""
    dtypes = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float16, torch.bool)
    weights = {f"layer.{i}.\u00e9": torch.arange(i + 1).to(dtype) for i, dtype in enumerate(dtypes)}
    for metadata in ({"format": "pt"}, {"format": "pt", "author": "x"}, None):
        save_file(weights, tmp_path / "model.safetensors", metadata)
        written_sha256 = weights_sha256(tmp_path)
        if metadata == {"format": "pt"}:
            expected_sha256 = written_sha256
        else:
            assert written_sha256 != expected_sha256
        assert single_file_sha256(tmp_path) == expected_sha256

    weights["layer.1.\u00e9"] += 1
    save_file(weights, tmp_path / "model.safetensors")
    assert single_file_sha256(tmp_path) != expected_sha256


def test_the_draft_is_exported_alone_and_needs_no_target_for_that() -> None:
    num_draft_tokens = checkpoint.load(RUN).recipe["num_draft_tokens"]
    export = ("export", "--ckpt", RUN, "--output")
    Path("target").rename("moved")
    succeed(*export, "draft.safetensors", "--dtype", "bfloat16")
    # Over a draft file.
    succeed(*export, "draft.safetensors", "--overwrite")
    succeed(*export, "small.ckpt", "--dtype", "bfloat16")
    Path("moved").rename("target")

    result = succeed("decode", "--target", "target", "--draft", "draft.safetensors", *BRIEF).json
    assert result["manifest"]["options"]["num_draft_tokens"] == num_draft_tokens == 2
    assert result["prompts"][0]["speculative"]["tokens"] == decode_tokens("--ckpt", RUN)
    assert checkpoint.load("small.ckpt").reference == checkpoint.load(RUN).reference
    succeed("decode", "--ckpt", "small.ckpt", *BRIEF)


def test_an_exported_draft_names_no_directory_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = checkpoint.read(RUN)
    here = str(Path.cwd())
    document = content[checkpoint.KEY]
    document["target"]["source"] = f"{here}/target"
    document["recipe"]["draft"] = f"{here}/run/a.ckpt"
    document["recipe"]["data_arguments"] = {"paths": [f"{here}/a.txt", "b"], "seed": 0}

    for directory, tokenizer, draft in (
        (tmp_path, None, "run/a.ckpt"),
        (tmp_path / "run", "target", "a.ckpt"),
    ):
        monkeypatch.chdir(directory)
        document["tokenizer"] = None if tokenizer is None else f"{here}/{tokenizer}"
        torch.save(content, "whole.ckpt")
        succeed("export", "--ckpt", "whole.ckpt", "--output", "draft.safetensors")

        assert here.encode() not in Path("draft.safetensors").read_bytes()
        exported = checkpoint.read("draft.safetensors")[checkpoint.KEY]
        assert exported["target"]["source"] == "target"
        assert exported["tokenizer"] == tokenizer
        assert exported["recipe"]["draft"] == draft
        assert exported["recipe"]["data_arguments"] == {"paths": ["a.txt", "b"], "seed": 0}

    refused(
        *("decode", "--ckpt", "draft.safetensors", *BRIEF),
        message="give its directory with --target",
    )
    monkeypatch.chdir(tmp_path)
    succeed("decode", "--ckpt", "draft.safetensors", *BRIEF)


def test_the_trainer_uses_such_a_checkpoint() -> None:
    outcome = train("test", "--ckpt_path", RUN)
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
def test_a_run_is_resumed_where_its_target_is_now_and_on_no_other() -> None:
    last = "run/version_0/last.ckpt"
    Path("target").rename("moved")
    content = torch.load(last, weights_only=True)
    arguments = content[checkpoint.KEY]["drafter"]["arguments"]
    # Older runs have this argument instead.
    arguments["shared_output"] = arguments.pop("draft_vocabulary") is not None
    torch.save(content, last)

    resume = ("--ckpt_path", last, "--trainer.max_epochs", "2")
    outcome = train("fit", *resume, target="moved")
    assert outcome.code == 0, outcome.err
    resumed_path = "run/version_1/last.ckpt"
    resumed = checkpoint.load(resumed_path)
    assert resumed.recipe["steps"] == 4
    assert resumed.reference is not None
    assert resumed.reference.source == "moved"

    resume = ("--ckpt_path", resumed_path, "--trainer.max_epochs", "3")
    outcome = train("fit", *resume, target="other")
    assert outcome.code == 2
    assert f"{resumed_path} was trained for moved (sha256 " in outcome.err
    assert outcome.err.count("\n") == 1
    outcome = train("fit", *resume, target="moved", freeze="false")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1, outcome.err


@pytest.mark.slow
def test_a_run_is_resumed_on_its_target_in_several_files() -> None:
    shard("target")
    outcome = train("fit", "--ckpt_path", "run/version_0/last.ckpt", "--trainer.max_epochs", "2")
    assert outcome.code == 0, outcome.err


def test_a_target_that_is_trained_is_stored_whole() -> None:
    trained = MedusaTraining(target_checkpoint="target")
    assert trained.describe()["target"]["class"] == "HuggingFaceLM"
    frozen = MedusaTraining(target_checkpoint=RUN, freeze_target=True)
    assert frozen.describe()["target"]["source"] == "target", (
        "heads on the target of heads mean the same target"
    )
    trained_further = MedusaTraining(target_checkpoint=RUN)
    assert trained_further.describe()["target"]["class"] == "HuggingFaceLM"


def change_target(**values: object) -> Callable[[dict[str, Any]], object]:
    """Return a function that changes what a checkpoint says of its target."""
    return lambda content: content[checkpoint.KEY]["target"].update(values)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no digest": (change_target(sha256=None), "which is not here"),
    "no source": (change_target(source=None), "which is not here"),
    "a number for a source": (change_target(source=3), "its target.source must be"),
    "more than it may say": (change_target(code="x"), "unknown setting its target.code"),
    "a model of the hub": (change_target(source="a/b"), "which is not here"),
    "no name of one": (change_target(source="a//\n../b"), "which is not here"),
    "a place of other files": (change_target(source="run/version_0"), "holds no weights"),
    "an unknown type": (change_target(dtype="int3"), "dtype must be one of"),
    "weights beside the place": (
        lambda content: content["state_dict"].update({"target.x": torch.ones(1)}),
        "describes no network",
    ),
    "a digest that is a number": (
        lambda content: content[checkpoint.KEY].update(target_single_file_sha256=3),
        "target_single_file_sha256 must be",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_whatever_a_strangers_file_says_of_its_target_is_one_line(name: str) -> None:
    damage, message = DAMAGES[name]
    content = copy.deepcopy(checkpoint.read(RUN))
    damage(content)
    torch.save(content, "bad.ckpt")
    refused("decode", "--ckpt", "bad.ckpt", *BRIEF, message=message)


def test_code_beside_a_target_is_never_run() -> None:
    config_path = Path("target/config.json")
    config = config_path.read_text().replace('"llama"', '"own"')
    config = config.replace("{", '{"auto_map": {"AutoConfig": "c.C"},', 1)
    config_path.write_text(config)
    Path("target/c.py").write_text("import os; os.mkdir('exploded')")
    refused("decode", "--ckpt", RUN, *BRIEF, message="its own Python code")
    assert not Path("exploded").exists()
