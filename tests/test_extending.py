"""The modules in docs/extending.md work as the page says, exactly as they are printed there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import SCRIPT, refused, succeed

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.config.kinds import DRAFTERS
from lightning_specdec.drafters import NGramDrafter, NGramWithFallback
from lightning_specdec.rules import RejectionSampling

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()
MODULES = dict(re.findall(r"<!-- file: (\w+)\.py -->\n```python\n(.*?)```", TEXT, flags=re.DOTALL))
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the page's modules into the current directory, with the shipped files.

    As for an installed script, the current directory is not on `sys.path`.
    """
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    for name in ("checkpoints", "configs"):
        (tmp_path / name).mkdir()
        for path in (ROOT / name).glob("*.*"):
            (tmp_path / name / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_works(command: str) -> None:
    succeed(*shlex.split(command)[1:])


def test_the_code_that_makes_a_drafter_decodes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = re.search(r"```python\n(from my_drafter .*?)```", TEXT, flags=re.DOTALL)
    assert code is not None
    values: dict[str, Any] = {}
    exec(code[1], values)
    decoder = values["decoder"]
    assert type(decoder.drafter).__name__ == "BigramDrafter"
    assert decoder.drafter.settings.length == 3
    standard = decoder.decode_standard("import ", max_new_tokens=20)
    assert capsys.readouterr().out == f"{standard.text}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("--drafter.help", "my_drafter.BigramDrafter"),
        (
            "checkpoints/rnn.safetensors",
            "--drafter",
            "my_memory.MemoryDrafter",
            "--rule",
            "my_rule.TopTokens",
        ),
    ],
)
def test_the_installed_script_finds_what_lies_in_the_current_directory(
    words: tuple[str, ...],
) -> None:
    command = [SCRIPT, "decode", *words]
    if "--drafter.help" not in words:
        command += ["--max_new_tokens", "4", "--repeats", "0"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("verb", ["sweep", "audit"])
def test_a_foreign_drafter_is_measured_under_its_import_path(verb: str) -> None:
    brief = (
        ("--minutes", "0.001", "--num_draft_tokens", "2")
        if verb == "sweep"
        else ("--num_places", "1")
    )
    options = (
        "--drafter",
        "my_drafter.BigramDrafter",
        "--max_new_tokens",
        "4",
        "--num_prompts",
        "1",
    )
    assert (
        "my_drafter.BigramDrafter"
        in succeed(verb, "checkpoints/rnn.safetensors", *options, *brief).out
    )


def test_rows_of_the_drafter_that_learns_know_nothing_of_each_other() -> None:
    decoder = SpeculativeDecoder.from_checkpoint("checkpoints/text.safetensors").with_drafter(
        "my_memory.MemoryDrafter"
    )
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "rule": RejectionSampling(),
        "temperature": 0.7,
    }
    prompts = ["def f(x):\n    return x\n", "import os\n", "x = 1\n"]
    batch = decoder.decode(prompts, **options)
    assert batch.counts is not None and batch.counts.num_accepted
    for index, row in enumerate(batch.rows):
        assert (
            row.rounds == decoder.decode(prompts[index], indices=[index], **options).rows[0].rounds
        )


def test_a_foreign_drafter_inside_another_is_loaded_with_it_by_whoever_names_it() -> None:
    name = "my_drafter.BigramDrafter"
    wrapped = NGramWithFallback(NGramDrafter(min_ngram=3), DRAFTERS.load(name)(length=2))
    decoder = SpeculativeDecoder.from_checkpoint("checkpoints/rnn.safetensors").with_drafter(
        wrapped
    )
    decoder.save("pair.safetensors")
    decoder.save_draft("draft.safetensors")
    for loaded in (
        SpeculativeDecoder.from_checkpoint("pair.safetensors", drafter=name),
        SpeculativeDecoder.from_pretrained(decoder.target, "draft.safetensors", drafter=name),
    ):
        assert checkpoint.spec(loaded.drafter) == checkpoint.spec(wrapped)
    for verb in (
        ("info", "pair.safetensors"),
        ("export", "--ckpt", "pair.safetensors", "--output", "again.safetensors"),
    ):
        refused(*verb, message=f"--drafter {name}")
        assert succeed(*verb, "--drafter", name).out
    assert (
        f"fallback={name}(length=2)" in succeed("info", "again.safetensors", "--drafter", name).out
    )
    message = "drop --drafter.length"
    refused("info", "pair.safetensors", "--drafter", name, "--drafter.length", "3", message=message)
    refused(
        "decode",
        "pair.safetensors",
        "--drafter",
        name,
        "--drafter.length",
        "3",
        "--repeats",
        "0",
        message=message,
    )
    refused("info", "configs", "--drafter", name, message="give a checkpoint or a draft file")
    both = {"main": decoder.with_drafter("NGramDrafter").drafter, "own": wrapped}
    checkpoint.save("both.safetensors", decoder.target, both)
    with pytest.raises(ValueError, match="is the class of the draft own: say which"):
        SpeculativeDecoder.from_checkpoint("both.safetensors", drafter=name)
    chosen = SpeculativeDecoder.from_checkpoint("both.safetensors", drafter=name, draft="main")
    assert type(chosen.drafter) is NGramDrafter


PLAIN = """
import torch
from lightning.pytorch import LightningModule

class Plain(LightningModule):
    def __init__(self, vocab_size: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.out = torch.nn.Embedding(vocab_size, 8), torch.nn.Linear(8, vocab_size)

    def training_step(self, batch, index):
        scores = self.out(self.embed(batch["tokens"][:, :-1]))
        labels = batch["tokens"][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels)

    def validation_step(self, batch, index):
        self.log("val/loss", self.training_step(batch, index))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, self.trainer.max_epochs)]

class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers(use_pl_optimizer=False)  # whose steps Lightning does not count
        if self.training:
            super().training_step(batch, index).backward()
            optimizer.step()
"""


def test_a_lightning_module_of_ones_own_resumes_from_its_checkpoints_and_from_no_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_plain.py").write_text(PLAIN)
    saves = ("--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.dirpath", "ck")
    named = (
        "--trainer.callbacks.filename",
        "last",
        "--trainer.callbacks.enable_version_counter",
        "false",
    )
    given = (
        "--model",
        "my_plain.Plain",
        "--data",
        "my_data.Counting",
        "--trainer.accelerator",
        "cpu",
    )
    options = (*given, "--trainer.logger", "false", *saves)
    assert (
        "\ncheckpoint: ck/version_0/epoch=0"
        in succeed("fit", *options, "--trainer.max_epochs", "1").out
    )
    manual = ("--model", "my_plain.Manual", *options[2:], "--trainer.callbacks.dirpath", "manual")
    succeed("fit", *manual, "--trainer.limit_val_batches", "0", "--trainer.max_epochs", "1")
    assert list(tmp_path.glob("manual/version_0/*.ckpt")), "steps that Lightning does not count"
    succeed("fit", *options, *named, "--trainer.max_epochs", "1")
    last = tmp_path / "ck" / "version_1" / "last.ckpt"
    assert "val/loss" in succeed("validate", *options, "--ckpt_path", str(last)).out
    succeed("fit", *options, *named, "--trainer.max_epochs", "3", "--ckpt_path", "last")
    content = torch.load(last, weights_only=True)
    assert content["epoch"] == 2 and content["global_step"] == 6
    (group,) = content["optimizer_states"][0]["param_groups"]
    group["fused"] = True
    content["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(1)
    torch.save(content, "smaller.ckpt")
    torch.save({"state_dict": {}}, "empty.ckpt")
    torch.save({**content, "hyper_parameters": {"cwd": Path()}}, "object.ckpt")
    for name, message in (
        ("smaller", "of other weights"),
        ("empty", "networks of other sizes"),
        ("object", "asks to run code"),
    ):
        with pytest.raises(AssertionError, match=message):
            succeed("fit", *options, "--trainer.max_epochs", "9", "--ckpt_path", f"{name}.ckpt")
    refused(
        "validate",
        *given,
        "--trainer.logger",
        "false",
        "--ckpt_path",
        "checkpoints/rnn.safetensors",
        message="networks",
    )
    refused("decode", str(last), message="its own training modules")


def test_data_without_a_vocabulary_say_what_to_do(tmp_path: Path) -> None:
    source = (
        MODULES["my_data"]
        .replace("vocab_size: int = 12, ", "")
        .replace("self.vocab_size,", "self.size,")
    )
    (tmp_path / "no_size.py").write_text(
        source.replace("= vocab_size,", "= 12,").replace("self.vocab_size", "self.size")
    )
    options = ("--data", "no_size.Counting", "--trainer.max_epochs", "1")
    refused("fit", "--config", "configs/rnn.yaml", *options, message="no argument vocab_size")


def test_the_drafter_changes_no_output_and_is_saved_and_loaded_by_whoever_names_it(
    tmp_path: Path,
) -> None:
    kind = DRAFTERS.load("my_drafter.BigramDrafter")
    decoder = SpeculativeDecoder.from_checkpoint("checkpoints/text.safetensors").with_drafter(
        kind(length=3)
    )
    prompt = "def f(x):\n    return x\n\n\ndef g(x):\n    return"
    result = decoder.decode(prompt, max_new_tokens=24)
    assert result.tokens == decoder.decode_standard(prompt, max_new_tokens=24).tokens
    assert result.counts is not None and result.counts.num_accepted
    decoder.save(tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"my_drafter\.BigramDrafter"):
        SpeculativeDecoder.from_checkpoint(tmp_path / "mine.safetensors")
    loaded = SpeculativeDecoder.from_checkpoint(
        tmp_path / "mine.safetensors", drafter="my_drafter.BigramDrafter"
    )
    assert loaded.decode(prompt, max_new_tokens=24).tokens == result.tokens
