"""Laws of the command line: immediate help, flags from settings, errors in one line, and files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import cases
import pytest
from cli_fixtures import QUICK, SCRIPT, call, ckpt, here, refused, shipped_run, succeed
from training_fixtures import EPOCHS

from lightning_specdec import __version__
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.cli.main import VERBS, make_parser
from lightning_specdec.cli.options import decoding, pair_source
from lightning_specdec.cli.train import RECIPE_NAMES
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import RULES
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.training.draft_recipes import RECIPES

__all__ = ["ckpt", "here", "shipped_run"]
HEAVY = "{'torch', 'lightning', 'jsonargparse', 'numpy', 'tensorboard'}"


def stdout_of(command: list[str]) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_help_and_mistakes_are_answered_without_torch() -> None:
    help_calls = [f"{verb} --help" for verb in VERBS]
    help_calls.append("--completion bash")
    mistakes = ["decode --nonsense", "decode x.ckpt --temperature -1"]
    calls = [*help_calls, *mistakes]
    program = f"""
import sys
from lightning_specdec.cli.main import main
for words in {calls}:
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit:
        print("\\nanswered", words, *{HEAVY} & {{*sys.modules}})
"""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, check=False)

    # Answers alternate with the lines that end them. Such a line also names heavy modules, if any.
    *parts, remainder = re.split(r"^answered (.*)\n", process.stdout, flags=re.MULTILINE)
    answers = parts[0::2]
    answered_calls = parts[1::2]
    assert answered_calls == calls, process.stderr
    assert remainder == ""
    for answered_call, answer in zip(answered_calls, answers, strict=True):
        assert bool(answer.strip()) == (answered_call in help_calls), answered_call

    errors = process.stderr.splitlines()
    assert len(errors) == len(mistakes)
    for error in errors:
        assert error.startswith("error: ")


def test_the_overview_names_every_verb() -> None:
    overview = succeed("--help").out
    for verb in VERBS:
        assert f"  {verb} " in overview
    assert succeed("help").out == overview
    assert succeed("help", "decode").out == succeed("decode", "--help").out

    without_verb = call()
    assert without_verb.code == 2
    assert without_verb.out == overview

    command = [sys.executable, "-m", "lightning_specdec", "--version"]
    assert stdout_of(command) == f"{__version__}\n"


def test_flags_take_dashes_and_a_kinds_settings_go_with_its_name() -> None:
    words = ["--target", "t", "--drafter.max-ngram=4", "--drafter", "NGramDrafter"]
    words += ["--prompt", "--a-b c", "--eos", "1", "--top-k", "3"]
    options = make_parser("decode").read(words)
    assert options.prompt == ["--a-b c"]
    assert options.eos == [1]
    assert options.top_k == 3
    assert "seed" not in options
    assert options.drafter.name == "NGramDrafter"
    assert options.drafter.settings == {"max_ngram": "4"}

    assert pair_source(options).target == "t"
    assert decoding(options) == DecodingConfig(eos=(1,), top_k=3)


@pytest.mark.parametrize(
    ("kind", "name", "setting"),
    [("drafter", "NGramDrafter", "max_ngram"), ("rule", "TypicalAcceptance", "delta")],
)
def test_help_of_a_kind_shows_its_settings(kind: str, name: str, setting: str) -> None:
    assert f"--{kind}.{setting}" in succeed("decode", f"--{kind}.help", name).out


def test_a_model_is_named_by_its_place_too(here: None) -> None:
    fields = {"a.safetensors": "ckpt", "gpt2": "pair", "lab/model": "target"}
    for model, field in fields.items():
        source = pair_source(make_parser("decode").read([model]))
        assert getattr(source, field) == model


def completed(words: Sequence[str]) -> set[str]:
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = succeed("--completion", "bash").out
    program += f"\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
    program += f"_shtab_lightning_specdec lightning_specdec '{words[-1]}'\n"
    program += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return set(stdout_of(["bash", "-c", program]).split())


def test_a_shell_completes_verbs_flags_and_values(tmp_path: Path) -> None:
    program = "lightning_specdec"
    assert completed([program, "dec"]) == {"decode"}
    assert completed([program, "decode", "--max_new"]) == {"--max_new_tokens"}
    assert completed([program, "decode", "--rule", ""]) == set(RULES)
    assert completed([program, "decode", "--drafter", "NGram"]) >= {"NGramDrafter"}
    assert completed([program, "sweep", "--dtype", "fl"]) == {"float32", "float16", "float64"}
    assert "smollm2" in completed([program, "chat", "--pair", "s"])
    assert completed([program, "fit", "--recipe", "e"]) == {"eagle", "exit"}
    (tmp_path / "some.yaml").touch()
    assert completed([program, "bench", "--config", f"{tmp_path}/so"]) == {f"{tmp_path}/some.yaml"}


def test_recipes_are_completed_as_they_are() -> None:
    assert tuple(RECIPES) == RECIPE_NAMES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_both_names_of_the_program(shell: str) -> None:
    script = succeed("--completion", shell).out
    assert "audit" in script
    assert "max_new_tokens" in script
    assert script.rstrip().splitlines()[-1].count("lightning-specdec") == 1


def test_a_reader_that_has_gone_causes_no_traceback(ckpt: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([SCRIPT, "--help"], stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0

    command = f"{SCRIPT} --help >&-"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert process.stderr == ""


def test_info_says_what_a_checkpoint_holds_and_how_it_was_made(ckpt: str, tmp_path: Path) -> None:
    text = succeed("info", ckpt).out
    assert succeed("info", "--ckpt", ckpt).out == text
    network = "RNN(vocab_size=50, embedding_size=32, hidden_size=64, num_layers=2)"
    assert f"{network} of 19,442 parameters" in text
    assert "ModelDrafter(model=RNN(" in text
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert f"recipe epochs {EPOCHS}" in lines
    assert "prompts 3 with 3 tokens (-v shows them)" in lines

    document = succeed("info", ckpt, "--output", "json").json
    assert document["prompts"] == checkpoint.load(ckpt).prompts
    assert document["recipe"]["epochs"] == EPOCHS

    # Long and hostile entries are shortened and made visible.
    path = str(tmp_path / "text.ckpt")
    recipe = {"losses": {"\x1b[31m": [1]}, "long": "a" * 500, "data": {"size_bytes": "many"}}
    prompts = [list(range(10)) * 10, [1, 2]]
    checkpoint.save(path, cases.MODELS["rnn"](0), NGramDrafter(), prompts=prompts, recipe=recipe)
    text = succeed("info", path).out
    assert "recipe long" not in text
    assert "2 with 2 to 100 tokens (-v shows them)\n" in text
    verbose_text = succeed("info", path, "-v").out
    assert f"{prompts}\n" in verbose_text
    assert "\\x1b[31m" in verbose_text
    assert "\x1b" not in verbose_text
    assert f"{'a' * 200}...\n" in verbose_text

    machine = succeed("info").out
    for word in ("python", "torch", "threads", "pair gpt2", "GB, "):
        assert word in machine


def test_an_exported_checkpoint_decodes_the_same_and_holds_no_training(
    ckpt: str, tmp_path: Path
) -> None:
    exported = tmp_path / "new" / "small.ckpt"
    exported.parent.mkdir()
    outcome = succeed("export", "--ckpt", ckpt, "--output", str(exported))
    assert outcome.out.startswith(str(exported))
    assert exported.stat().st_size < Path(ckpt).stat().st_size
    assert "epoch" not in checkpoint.read(str(exported))

    outputs = []
    for path in (ckpt, str(exported)):
        document = succeed("decode", path, *QUICK, "--output", "json").json
        outputs.append([prompt["speculative"]["tokens"] for prompt in document["prompts"]])
    assert outputs[0] == outputs[1]
    assert list(exported.parent.iterdir()) == [exported]


def test_an_export_replaces_nothing_but_an_earlier_export(ckpt: str, here: None) -> None:
    shutil.copy(ckpt, "trained.ckpt")
    Path("link.ckpt").symlink_to("trained.ckpt")
    Path("README.md").write_text("read me")
    export = ("export", "--ckpt", "trained.ckpt", "--output")
    for path in ("trained.ckpt", "link.ckpt", "README.md", "/dev/null"):
        refused(*export, path, "--overwrite", message="choose another")
    refused(*export, "README.md/new.ckpt", message="README.md")

    succeed(*export, "new.ckpt")
    refused(*export, "new.ckpt", message="or replace it with --overwrite")
    succeed(*export, "new.ckpt", "--overwrite")
    again = ("export", "new.ckpt", "--output", "new.ckpt", "--dtype", "bfloat16")
    succeed(*again, "--overwrite")

    assert succeed(*export, "small").out.startswith("small.safetensors: ")
    refused(*export, "small", message="small.safetensors exists")
