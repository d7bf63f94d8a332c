"""Laws of the command line: help at once, flags from settings, one line for errors, what is settled kept; files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import cases
import pytest
import torch
from cli_fixtures import QUICK, SCRIPT, call, ckpt, here, refused, shipped_run, succeed
from training_fixtures import EPOCHS, RNN_CONFIG

from lightning_specdec import __version__
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.cli.main import FORMER_VERBS, TRAINER_VERBS, VERBS, make_parser
from lightning_specdec.cli.options import decoding, pair_source
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import DRAFTERS, RULES
from lightning_specdec.config.models import PairSource
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.training import cli as training_cli

__all__ = ["ckpt", "here", "shipped_run"]
HEAVY = "{'torch', 'lightning', 'jsonargparse', 'numpy', 'tensorboard'}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([verb, "--help"] for verb in VERBS),
        ["help", "decode"],
        ["--version"],
        ["--completion", "bash"],
        ["nonsense"],
        ["decode", "--nonsense"],
        ["decode", "x.ckpt", "--temperature", "-1"],
    ],
    ids=" ".join,
)
def test_help_and_mistakes_are_answered_at_once_without_torch(arguments: list[str]) -> None:
    program = "import sys; from lightning_specdec.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    program += f"sys.exit(str({HEAVY} & set(sys.modules)) if {HEAVY} & set(sys.modules) else 0)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr.startswith("error:")


def test_the_overview_names_every_verb_and_the_trainers_are_lightnings() -> None:
    overview = succeed("--help").out
    assert all(f"  {verb} " in overview for verb in VERBS) and TRAINER_VERBS == training_cli.VERBS
    assert call().code == 2 and call().out == overview == succeed("help").out
    assert succeed("help", "decode").out == succeed("decode", "--help").out


def test_decodes_flags_are_the_settings_fields_and_its_kinds_are_those_found() -> None:
    shown = succeed("decode", "--help").out
    for settings in (PairSource, DecodingConfig):
        for each in fields(settings):
            assert not each.metadata.get("help") or shown.count(f"\n  --{each.name} ") == 1, each.name
    for kinds in (DRAFTERS, RULES):
        assert all(f"    {name} " in shown for name in kinds)


def test_underscores_and_dashes_are_one_flag_and_values_stay_as_they_are() -> None:
    options = make_parser("decode").read(
        ["m", "--max-new-tokens=4", "--top-k", "3", "--prompt", "--a-b c", "--eos", "1"]
    )
    assert (options.max_new_tokens, options.top_k, options.prompt, options.eos) == (4, 3, ["--a-b c"], [1])
    assert "seed" not in options, "only flags that are given are there"


def test_a_kinds_settings_are_read_with_its_name() -> None:
    options = make_parser("decode").read(["--target", "t", "--drafter.max-ngram=4", "--drafter", "NGramDrafter"])
    assert options.drafter.name == "NGramDrafter" and options.drafter.settings == {"max_ngram": "4"}
    assert pair_source(options).target == "t" and decoding(options) == DecodingConfig()
    for kind, name, setting in (("drafter", "NGramDrafter", "max_ngram"), ("rule", "TypicalAcceptance", "delta")):
        assert f"--{kind}.{setting}" in succeed("decode", f"--{kind}.help", name).out


@pytest.mark.parametrize(
    ("model", "named"), [("x.ckpt", "ckpt"), ("a.safetensors", "ckpt"), ("gpt2", "pair"), ("lab/model", "target")]
)
def test_a_model_is_named_by_its_place_too(model: str, named: str, here: None) -> None:
    assert getattr(pair_source(make_parser("decode").read([model])), named) == model


@pytest.mark.parametrize("verb", FORMER_VERBS)
def test_a_former_verb_is_answered_with_its_successor(verb: str, here: None) -> None:
    refused(verb, "x", told=f"is now `lightning_specdec {FORMER_VERBS[verb]}`")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_verbs_and_flags(shell: str) -> None:
    script = succeed("--completion", shell).out
    assert "audit" in script and ("max_new_tokens" in script)
    if shell == "bash":
        probe = f"{script}\nCOMP_WORDS=(lightning_specdec decode --max_new); COMP_CWORD=2; _lightning_specdec; "
        done = subprocess.run(
            ["bash", "-c", probe + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
        )
        assert done.stdout == "--max_new_tokens\n"


def test_a_shipped_config_is_found_from_anywhere(here: None) -> None:
    assert "configs/NAME.yaml): draft_sizes, early_exit" in succeed("fit", "--help").out
    assert "PairTraining" in succeed("fit", "--config", "configs/rnn.yaml", "--print_config").out
    assert "--trainer.max_epochs" in succeed("fit", "--help_all").out


def test_version_and_the_module_are_the_script() -> None:
    commands = [[SCRIPT, "--version"], [sys.executable, "-m", "lightning_specdec", "--version"]]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    assert outputs == [f"{__version__}\n"] * 2


def test_ctrl_c_prints_what_was_decoded_and_says_130(ckpt: str) -> None:
    command = [SCRIPT, "decode", ckpt, "--prompt", "1 2 3", "--max_new_tokens", "1000000", "--output", "json", "-v"]
    environment, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        assert child.stderr is not None
        assert any("decoding" in line for line in child.stderr)
        time.sleep(0.7)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130 and err == "interrupted: what is above was decoded by then\n"
    assert len(json.loads(out)["prompts"][0]["standard"]["tokens"]) > 100


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
    last = Path("checkpoints/rnn/version_0/last.ckpt")

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
        "\ncheckpoints/rnn/version_0/last.ckpt is where it was: the same command with --ckpt_path last goes on\n"
        in outcome.err
    )


def test_a_reader_that_has_gone_causes_no_traceback(ckpt: str) -> None:
    with subprocess.Popen([SCRIPT, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0
    closed = subprocess.run(f"{SCRIPT} --help >&-", shell=True, capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_info_says_what_a_checkpoint_holds_and_how_it_was_made(ckpt: str, tmp_path: Path) -> None:
    shown = succeed("info", ckpt).out
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert shown == succeed("info", "--ckpt", ckpt).out and f"recipe epochs {EPOCHS}" in lines
    assert "RNN(vocab_size=50, embedding_size=32, hidden_size=64, num_layers=2) of 19,442 parameters" in shown
    assert "ModelDrafter(model=RNN(" in shown and f"training epoch {EPOCHS - 1}" in lines
    document = succeed("info", ckpt, "--output", "json").json
    assert document["prompts"][0] == [19, 20, 21] and document["recipe"]["epochs"] == EPOCHS
    path = str(tmp_path / "text.ckpt")
    recipe = {"losses": {"\x1b[31m": [1]}, "long": "a" * 500}
    checkpoint.save(path, cases.MODELS["rnn"](0), NGramDrafter(), recipe=recipe)
    shown = succeed("info", path).out
    assert "\\x1b[31m" in shown and "\x1b" not in shown and f"{'a' * 200}...\n" in shown


def test_info_alone_shows_the_environment_and_the_pairs() -> None:
    shown = succeed("info").out
    for word in ("lightning_specdec", "python", "torch", "lightning", "threads", "cuda", "numpy", "pair gpt2", "GB, "):
        assert word in shown


def test_an_exported_checkpoint_decodes_the_same_and_holds_no_training(ckpt: str, tmp_path: Path) -> None:
    exported = str(tmp_path / "new" / "small.ckpt")
    assert succeed("export", "--ckpt", ckpt, "--output", exported).out.startswith(exported)
    assert Path(exported).stat().st_size < Path(ckpt).stat().st_size and not checkpoint.load(exported).training
    documents = [succeed("decode", path, *QUICK, "--output", "json").json for path in (ckpt, exported)]
    first, second = ([each["speculative"]["tokens"] for each in document["prompts"]] for document in documents)
    assert first == second and [path.name for path in Path(exported).parent.iterdir()] == ["small.ckpt"]


def test_an_export_in_fewer_bits_is_smaller_and_still_computes_in_float32(ckpt: str, tmp_path: Path) -> None:
    plain, small = str(tmp_path / "plain.ckpt"), str(tmp_path / "small.ckpt")
    succeed("export", "--ckpt", ckpt, "--output", plain)
    succeed("export", "--ckpt", ckpt, "--output", small, "--dtype", "float16")
    assert Path(small).stat().st_size < 0.6 * Path(plain).stat().st_size
    again, before = checkpoint.load(small), checkpoint.load(plain)
    for weight, expected in zip(again.target.parameters(), before.target.parameters(), strict=True):
        assert weight.dtype == torch.float32 and torch.equal(weight, expected.half().float())


def test_an_export_replaces_nothing_but_an_earlier_export(ckpt: str, here: None) -> None:
    shutil.copy(ckpt, "trained.ckpt")
    Path("link.ckpt").symlink_to("trained.ckpt")
    Path("README.md").write_text("read me")
    for path in ("trained.ckpt", "link.ckpt", "README.md", "/dev/null"):
        refused("export", "--ckpt", "trained.ckpt", "--output", path, told="choose another")
    for path in ("new.ckpt", "new.ckpt"):
        succeed("export", "--ckpt", "trained.ckpt", "--output", path)
    succeed("export", "--ckpt", "new.ckpt", "--output", "new.ckpt", "--dtype", "bfloat16")
