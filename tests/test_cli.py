"""Laws of the command line: help at once, both outputs and one table, one JSON document, what is settled kept."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cli_fixtures import SCRIPT, call, ckpt, here, refused, shipped_run, succeed
from training_fixtures import EPOCHS, RNN_CONFIG

from lightning_specdec import SpeculativeDecoder, __version__, checkpoint, cli_groups, cli_options
from lightning_specdec.drafters import DRAFTERS, ModelDrafter
from lightning_specdec.drafters.lookup_first import SHORTEST_MATCH, sure_lookup
from lightning_specdec.pretrained import _TRAINED, KINDS, load_pair
from lightning_specdec.rules import RULES, Sampling
from lightning_specdec.training import cli as training_cli

__all__ = ["ckpt", "here", "shipped_run"]
HEAVY = "{'torch', 'lightning', 'jsonargparse', 'numpy', 'yaml', 'tensorboard'}"
QUICK = ("--repeats", "1")
OPTIONS = {option.name: option for option in cli_options.VERBS["decode"].options}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["decode", "--help"],
        ["fit", "-h"],
        ["check", "--help"],
        ["sweep", "--help"],
        ["--version"],
        ["nonsense"],
        ["decode", "--nonsense"],
    ],
)
def test_help_and_mistakes_are_answered_at_once_without_torch(arguments: list[str]) -> None:
    program = "import sys; from lightning_specdec.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    program += f"sys.exit(str({HEAVY} & set(sys.modules)) if {HEAVY} & set(sys.modules) else 0)"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr.startswith("error:")
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("verb", cli_options.VERBS)
def test_every_verb_has_help_that_names_its_options(verb: str) -> None:
    shown = succeed(verb, "--help").out
    for option in cli_options.VERBS[verb].options:
        assert (option.name if option.positional else f"--{option.name}") in shown
    assert f"  {verb} " in succeed("--help").out


def test_the_table_names_the_verbs_that_there_are() -> None:
    assert cli_options.TRAINER_VERBS == training_cli.VERBS
    for name, verb in cli_options.VERBS.items():
        assert name in training_cli.VERBS or callable(getattr(import_module(f"lightning_specdec.{verb.home}"), name)), (
            name
        )


def test_the_tables_rules_are_the_constructors() -> None:
    assert list(cli_groups.RULES) == list(RULES)
    for name, defaults in cli_groups.RULES.items():
        arguments = inspect.signature(RULES[name]).parameters
        assert {key: argument.default for key, argument in arguments.items()} == defaults
        for key, value in defaults.items():
            assert f"{name} ({value})" in OPTIONS[f"rule.{key}"].help


def test_the_tables_drafters_are_the_constructors() -> None:
    assert list(cli_groups.DRAFTERS) == list(KINDS)
    assert set(cli_groups.TRAINED) == DRAFTERS.keys() - KINDS.keys()
    for name, defaults in cli_groups.DRAFTERS.items():
        arguments = inspect.signature(KINDS[name]).parameters
        named = {key: each.default for key, each in arguments.items() if key not in _TRAINED}
        plain = {key: value for key, value in named.items() if isinstance(value, int | float)}
        assert plain == defaults
        for key, value in defaults.items():
            assert f"of {name}: " in OPTIONS[f"drafter.{key}"].help
            assert OPTIONS[f"drafter.{key}"].help.endswith(f"({value})")


def test_a_look_up_before_a_draft_says_its_own_shortest_match() -> None:
    assert f"LookupFirstDrafter ({SHORTEST_MATCH} there)" in OPTIONS["drafter.min_ngram"].help
    assert sure_lookup().min_ngram == SHORTEST_MATCH and sure_lookup(min_ngram=1, max_ngram=3).min_ngram == 1
    assert sure_lookup(max_ngram=1).min_ngram == 1


def test_the_tables_defaults_are_the_functions_own() -> None:
    functions: list[Any] = [SpeculativeDecoder.benchmark, Sampling, SpeculativeDecoder.from_checkpoint, load_pair]
    owners = {key: value for each in functions for key, value in inspect.signature(each).parameters.items()}
    shared = [
        name for name in OPTIONS if name in owners and owners[name].default not in (None, inspect.Parameter.empty)
    ]
    assert set(shared) >= {"max_new_tokens", "temperature", "seed", "mode", "repeats", "batch_size"}
    # What depends on the models has no default in the table; its help names the functions' own.
    shared.remove("stop")  # given again and again, or never
    for name in ("max_new_tokens", "repeats"):
        assert OPTIONS[name].default is None and f"({owners[name].default}; " in OPTIONS[name].help
        shared.remove(name)
    assert inspect.signature(SpeculativeDecoder).parameters["num_draft_tokens"].default == 3
    assert OPTIONS["num_draft_tokens"].default is None and "or 3" in OPTIONS["num_draft_tokens"].help
    for name in shared:
        default = OPTIONS[name].default or (False if OPTIONS[name].action == "store_true" else OPTIONS[name].default)
        assert default == owners[name].default, name
    for name in set(OPTIONS) & set(owners) - set(shared) - {"rule", "stop"}:
        assert OPTIONS[name].default is None, name


def test_the_sweeps_defaults_are_the_functions_own() -> None:
    owned = inspect.signature(SpeculativeDecoder.sweep).parameters
    options = {option.name: option for option in cli_options.VERBS["sweep"].options}
    assert options["num_draft_tokens"].default == owned["windows"].default
    assert options["fuse"].default == ("both" if owned["fuse"].default else "none")
    for name in ("max_new_tokens", "repeats", "batch_size", "seed"):
        assert options[name].default == owned[name].default, name


def test_version_and_the_module_are_the_script(ckpt: str) -> None:
    commands = [[SCRIPT, "--version"], [sys.executable, "-m", "lightning_specdec", "--version"]]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    assert outputs == [f"{__version__}\n"] * 2
    assert call().code == 2 and "usage:" in call().out


@pytest.mark.parametrize("output", ["text", "json"])
def test_ctrl_c_prints_what_is_settled_and_says_130(ckpt: str, output: str) -> None:
    options = ["decode", "--ckpt", ckpt, "--prompt", "-", "--max_new_tokens", "1000000", "--output", output]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [SCRIPT, *options], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as child:
        assert child.stdin is not None
        child.stdin.write("\n" * 500_000 + "1 2 3\n")  # more than a pipe holds: once it is taken, the program is up
        child.stdin.close()
        child.stdin = None
        time.sleep(0.7)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130 and err == "interrupted: what is above was settled by then\n"
    tokens = (
        json.loads(out)["prompts"][0]["standard"]["tokens"] if output == "json" else out.split("standard")[1].split()
    )
    assert len(tokens) > 100
    assert output == "json" or "(stopped: interrupted)" in out


def test_ctrl_c_during_the_repeats_keeps_those_that_are_over(ckpt: str) -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    outcome = call("decode", "--ckpt", ckpt, "--repeats", "1000000", "--output", "json")
    assert outcome.code == 130
    assert len(outcome.json["summary"]["standard"]["runs"]["seconds"]) >= 1
    assert all(len(each["speculative"]["tokens"]) == 7 for each in outcome.json["prompts"])


def test_ctrl_c_during_training_says_130_and_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    last = Path("checkpoints/rnn/last.ckpt")

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not last.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    handler = signal.getsignal(signal.SIGINT)  # the Trainer ignores the signal from then on
    try:
        outcome = call("fit", "--config", str(RNN_CONFIG), "--trainer.accelerator", "cpu", "--trainer.logger", "false")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert outcome.code == 130 and "Traceback" not in outcome.err
    assert 0 <= checkpoint.load(last).training["epoch"] < 99
    assert (
        "\ncheckpoints/rnn/last.ckpt is where it was: the same command with --ckpt_path last goes on\n" in outcome.err
    )


def test_a_reader_that_has_gone_causes_no_traceback(ckpt: str) -> None:
    with subprocess.Popen([SCRIPT, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0
    closed = subprocess.run(f"{SCRIPT} --help >&-", shell=True, capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_info_says_what_a_checkpoint_holds_and_how_it_was_made(ckpt: str) -> None:
    shown = succeed("info", "--ckpt", ckpt).out
    assert "target      RNN(vocab_size=50, embedding_size=32, hidden_size=64, num_layers=2), 19,442 parameters" in shown
    assert "drafter     ModelDrafter" in shown and json.dumps(checkpoint.load(ckpt).prompts) in shown
    assert f"recipe      epochs: {EPOCHS}\n" in shown and f"training    epoch: {EPOCHS - 1}\n" in shown


def test_info_shows_the_prompts_of_a_text_model_as_text(tmp_path: Path) -> None:
    target, path = cases.MODELS["rnn"](0, vocab_size=256), tmp_path / "text.ckpt"
    prompts = [list(b"say \x1b[31m"), list(b"a" * 500)]
    checkpoint.save(path, target, ModelDrafter(target), prompts=prompts, tokenizer="bytes")
    shown = succeed("info", "--ckpt", str(path)).out
    assert 'prompt      "say \\u001b[31m"\n' in shown and f'prompt      "{"a" * 80}"...\n' in shown


def test_an_exported_checkpoint_decodes_the_same_and_holds_no_training(ckpt: str, tmp_path: Path) -> None:
    exported = str(tmp_path / "new" / "small.ckpt")
    assert succeed("export", "--ckpt", ckpt, "--output", exported).out.startswith(exported)
    small, whole = checkpoint.read(exported), checkpoint.read(ckpt)
    assert set(small) == {checkpoint.KEY, "state_dict"} and Path(exported).stat().st_size < Path(ckpt).stat().st_size
    for name, weight in small["state_dict"].items():
        assert torch.equal(weight, whole["state_dict"][name])
    documents = [succeed("decode", "--ckpt", path, *QUICK, "--output", "json").json for path in (ckpt, exported)]
    first, second = ([each["speculative"]["tokens"] for each in document["prompts"]] for document in documents)
    assert first == second
    assert [path.name for path in Path(exported).parent.iterdir()] == ["small.ckpt"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_an_export_in_fewer_bits_is_half_as_large_and_still_computes_in_float32(
    ckpt: str, tmp_path: Path, kind: str
) -> None:
    plain, small = str(tmp_path / "plain.ckpt"), str(tmp_path / "small.ckpt")
    succeed("export", "--ckpt", ckpt, "--output", plain)
    succeed("export", "--ckpt", ckpt, "--output", small, "--dtype", kind)
    weights = [sum(each.nbytes for each in checkpoint.read(path)["state_dict"].values()) for path in (plain, small)]
    assert weights[1] * 2 == weights[0]
    again, before = checkpoint.load(small), checkpoint.load(plain)
    for one, other in ((again.target, before.target), (again.drafter, before.drafter)):
        for weight, expected in zip(one.parameters(), other.parameters(), strict=True):
            assert weight.dtype == torch.float32
            assert torch.equal(weight, expected.to(getattr(torch, kind)).float())
    succeed("export", "--ckpt", small, "--output", str(tmp_path / "again.ckpt"), "--dtype", kind)
    assert (tmp_path / "again.ckpt").stat().st_size == Path(small).stat().st_size


@pytest.mark.usefixtures("here")
def test_weights_too_large_for_fewer_bits_are_not_exported(tmp_path: Path) -> None:
    target = cases.MODELS["rnn"](0)
    with torch.no_grad():
        next(target.parameters())[0] = 1e5
    checkpoint.save(tmp_path / "large.ckpt", target, ModelDrafter(target))
    told = "too large for float16: take bfloat16"
    refused("export", "--ckpt", str(tmp_path / "large.ckpt"), "--output", "x.ckpt", "--dtype", "float16", told=told)


def test_env_says_what_a_bug_report_needs() -> None:
    shown = succeed("env").out
    for word in ("lightning_specdec", "python", "torch", "lightning", "threads", "float32", "cuda", "numpy"):
        assert word in shown
