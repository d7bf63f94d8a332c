"""Laws of bad input: one line that says what is wrong, exit code 2, and nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_fixtures import (
    OF_A_CHECKPOINT,
    SCRIPT,
    TRAINER,
    Bomb,
    call,
    ckpt,
    here,
    listing,
    refused,
    shipped_run,
)

__all__ = ["ckpt", "here", "shipped_run"]
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decod"], "unknown verb 'decod': did you mean decode?"),
        (["decode"], "name the models by one of MODEL, --ckpt, --pair, and --target"),
        (
            ["decode", "--ckpt", "x.ckpt", "--num_draft_token", "3"],
            "did you mean --num_draft_tokens?",
        ),
        (["decode", "--ckpt", "x.ckpt", "--prompts", "x.txt"], "did you mean --prompts_file?"),
        (["decode", "x.ckpt", ""], "unrecognized arguments: : give a prompt as --prompt TEXT"),
        (["decode", "x.ckpt", "-"], "unrecognized arguments: - (see `"),
        (["decode", "--ckpt", "x.ckpt", "1 2 3"], "name the models once, got --ckpt and '1 2 3'"),
        (["decode", "--ckpt", "x.ckpt"], "x.ckpt: no such checkpoint"),
        (["export", "--ckpt", "x.ckpt"], "--output"),
        (["fit"], "fit needs --config FILE, for example configs/rnn.yaml, or --recipe NAME"),
        (
            ["generate", "--help_al"],
            "generate needs --config FILE, for example configs/smollm2_generate.yaml",
        ),
        (
            ["fit", "--model", "PairTraining"],
            "are required: target: give --model.target",
        ),
        (
            ["fit", "--config=configs/rnn.yaml", "--minutes", "3"],
            "--minutes is an option of --recipe NAME",
        ),
        (["fit", *TRAINER, "--trainer.max_epoch", "3"], "did you mean --trainer.max_epochs?"),
        (["fit", *TRAINER, "--ckpt", "last"], "did you mean --ckpt_path?"),
        (
            ["fit", "--config=configs/rnn.yaml", "--trainer.max_epoch", "3"],
            "did you mean --trainer.max_epochs?",
        ),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["fit", *TRAINER, "--ckpt_path", "last"], "there is no last checkpoint"),
    ],
)
def test_an_unknown_verb_option_or_file_is_refused(arguments: list[str], message: str) -> None:
    refused(*arguments, message=message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "x.ckpt", "y.ckpt"], "accepts one MODEL"),
        (["report", "a", "b"], "accepts one RESULTS"),
        (["bench", "a"], "accepts only options"),
        (["info", "a.ckpt", "b.ckpt"], "accepts one MODEL"),
        (["decode", "x.ckpt", "1 2 3"], "give a prompt as --prompt TEXT"),
    ],
)
def test_a_word_too_many_is_answered_by_what_the_verb_accepts(
    arguments: list[str], message: str
) -> None:
    refused(*arguments, message=f"unrecognized arguments: {arguments[-1]}: ")
    refused(*arguments, message=message)


@pytest.mark.parametrize(
    "words", ["fit", "fit --config=nowhere.yaml", "fit --target missing", "test --text=a"]
)
def test_what_cannot_be_a_run_is_refused_before_lightning_is_imported(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_specdec.training.cli", None)
    refused(*words.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt 1 --prompt []", "prompt number 2 is empty"),
        ("--prompt two", "prompt number 1: 'two' is not a list of tokens"),
        ("--prompt 50", "prompt number 1 holds 50: tokens of this model are integers from 0 to 49"),
        ("--prompts_file prompts.txt", "prompts.txt, line 3 holds 50"),
        ("--prompts_file binary.txt", "binary.txt is not text"),
        ("--prompts_file deep.jsonl", "deep.jsonl, line 1: '[[["),
        ("--rule Exact", "there is no rule 'Exact': did you mean ExactMatch?"),
        ("--rule EpsilonThreshold --rule.epsilon 0", "epsilon must be in (0, 1], got 0"),
        ("--rule.epsilon 0.1", "--rule.epsilon needs the rule's name: give --rule NAME"),
        (
            "--num_draft_tokens many",
            "num_draft_tokens must be auto or an integer from 1 to 1048576, got 'many'",
        ),
        ("--num_draft_tokens -2", "num_draft_tokens must be from 1 to 1048576, got -2"),
        ("--max_new_tokens -3", "max_new_tokens must be from 1 to 1048576, got -3"),
        ("--eos 50", "eos must be from 0 to 49, got 50"),
        ("--mode twice", "mode must be one of both, standard, speculative, got 'twice'"),
        ("--device cuda:99", "no usable device 'cuda:99'"),
        ("--compile", "only the layers of transformers models are compiled"),
    ],
)
def test_an_option_out_of_range_is_refused(ckpt: str, options: str, message: str) -> None:
    Path("prompts.txt").write_text("1 2 3\n\n4 50\n")
    Path("binary.txt").write_bytes(b"\x80\x81")
    Path("deep.jsonl").write_text("[" * 100_000)
    refused("decode", "--ckpt", ckpt, *options.split(), message=message)


def exponential_aliases() -> str:
    """YAML of ten billion values: each of ten lines repeats the line above it ten times."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for number in range(1, 10):
        references = ", ".join([f"*a{number - 1}"] * 10)
        lines.append(f"a{number}: &a{number} [{references}]")
    return "".join(f"{line}\n" for line in lines)


BAD_YAML = {
    "deep": ("[" * 100_000, "nested at most"),
    "aliases": (exponential_aliases(), "repeated ones counted again"),
    "cyclic": ("a: &a [*a]", "repeated ones counted again"),
    "long": ("#" * 2**21, "characters, got"),
}


@pytest.mark.parametrize("bad", BAD_YAML)
def test_yaml_that_would_exhaust_stack_or_memory_is_one_line(bad: str) -> None:
    text, message = BAD_YAML[bad]
    Path("bad.yaml").write_text(text)
    for verb in ("fit", "bench"):
        refused(verb, "--config", "bad.yaml", message=message)


def test_a_file_below_a_file_is_refused_with_what_to_do(ckpt: str) -> None:
    Path("afile").touch()
    message = "afile: a file is where a directory must be: name another place"
    refused("export", "--ckpt", ckpt, "--output", "afile/x.safetensors", message=message)


def test_a_checkpoint_that_asks_to_run_code_is_refused_by_the_installed_script() -> None:
    torch.save(Bomb(), "bomb.ckpt")
    files_before = listing(Path.cwd())
    command = [SCRIPT, *OF_A_CHECKPOINT["decode"]("bomb.ckpt")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.splitlines()[-1].startswith("error: bomb.ckpt asks to run code")
    assert "Traceback" not in process.stderr
    assert listing(Path.cwd()) == files_before


def test_debug_shows_the_traceback_of_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.ckpt"):
        call("decode", "--ckpt", "nowhere.ckpt", "--debug")
