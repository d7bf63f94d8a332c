"""Laws of the command line: help at once, flags from settings, one line for errors, what is settled kept; files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import cases
from cli_fixtures import QUICK, SCRIPT, call, ckpt, here, refused, shipped_run, succeed
from training_fixtures import EPOCHS

from lightning_specdec import __version__
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.cli.main import VERBS, make_parser
from lightning_specdec.cli.options import decoding, pair_source
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.drafters import NGramDrafter

__all__ = ["ckpt", "here", "shipped_run"]
HEAVY = "{'torch', 'lightning', 'jsonargparse', 'numpy', 'tensorboard'}"


def test_help_and_mistakes_are_answered_without_torch() -> None:
    asked = [*(f"{verb} --help" for verb in VERBS), "--completion bash"]
    mistaken = ["decode --nonsense", "decode x.ckpt --temperature -1"]
    program = f"""
import sys
from lightning_specdec.cli.main import main
for words in {[*asked, *mistaken]}:
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit:
        print("\\nanswered", words, *{HEAVY} & {{*sys.modules}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    told = re.split(r"^answered (.*)\n", done.stdout, flags=re.MULTILINE)
    assert told[1::2] == [*asked, *mistaken], done.stderr
    assert [bool(text.strip()) for text in told[0:-1:2]] == [True] * len(asked) + [False] * len(
        mistaken
    )
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "] * len(mistaken)


def test_the_overview_names_every_verb() -> None:
    overview = succeed("--help").out
    assert all(f"  {verb} " in overview for verb in VERBS)
    assert call().code == 2 and call().out == overview == succeed("help").out
    assert succeed("help", "decode").out == succeed("decode", "--help").out
    command = [sys.executable, "-m", "lightning_specdec", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == f"{__version__}\n"
    )


def test_flags_take_dashes_and_a_kinds_settings_go_with_its_name() -> None:
    words = [
        "--target",
        "t",
        "--drafter.max-ngram=4",
        "--drafter",
        "NGramDrafter",
        "--prompt",
        "--a-b c",
        "--eos",
        "1",
    ]
    options = make_parser("decode").read([*words, "--top-k", "3"])
    assert (options.prompt, options.eos, options.top_k, "seed" in options) == (
        ["--a-b c"],
        [1],
        3,
        False,
    )
    assert options.drafter.name == "NGramDrafter" and options.drafter.settings == {"max_ngram": "4"}
    assert pair_source(options).target == "t" and decoding(options) == DecodingConfig(
        eos=(1,), top_k=3
    )
    for kind, name, setting in (
        ("drafter", "NGramDrafter", "max_ngram"),
        ("rule", "TypicalAcceptance", "delta"),
    ):
        assert f"--{kind}.{setting}" in succeed("decode", f"--{kind}.help", name).out


def test_a_model_is_named_by_its_place_too(here: None) -> None:
    for model, named in (("a.safetensors", "ckpt"), ("gpt2", "pair"), ("lab/model", "target")):
        assert getattr(pair_source(make_parser("decode").read([model])), named) == model


def test_completion_scripts_know_verbs_and_flags() -> None:
    for shell in ("bash", "zsh", "fish"):
        script = succeed("--completion", shell).out
        assert "audit" in script and "max_new_tokens" in script
    probe = (
        succeed("--completion", "bash").out
        + "COMP_WORDS=(lightning_specdec decode --max_new); COMP_CWORD=2\n"
    )
    command = ["bash", "-c", probe + '_lightning_specdec; echo "${COMPREPLY[@]}"']
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == "--max_new_tokens\n"
    )


def test_a_reader_that_has_gone_causes_no_traceback(ckpt: str) -> None:
    with subprocess.Popen(
        [SCRIPT, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 0
    closed = subprocess.run(
        f"{SCRIPT} --help >&-", shell=True, capture_output=True, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def test_info_says_what_a_checkpoint_holds_and_how_it_was_made(ckpt: str, tmp_path: Path) -> None:
    shown = succeed("info", ckpt).out
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert shown == succeed("info", "--ckpt", ckpt).out and f"recipe epochs {EPOCHS}" in lines
    assert (
        "RNN(vocab_size=50, embedding_size=32, hidden_size=64, num_layers=2) of 19,442 parameters"
        in shown
    )
    assert "ModelDrafter(model=RNN(" in shown and "prompts 3 with 3 tokens (-v shows them)" in lines
    document = succeed("info", ckpt, "--output", "json").json
    assert (
        document["prompts"] == checkpoint.load(ckpt).prompts
        and document["recipe"]["epochs"] == EPOCHS
    )
    path = str(tmp_path / "text.ckpt")
    recipe = {"losses": {"\x1b[31m": [1]}, "long": "a" * 500, "data": {"size_bytes": "many"}}
    prompts = [list(range(10)) * 10, [1, 2]]
    checkpoint.save(path, cases.MODELS["rnn"](0), NGramDrafter(), prompts=prompts, recipe=recipe)
    shown = succeed("info", path).out
    assert "recipe long" not in shown and "2 with 2 to 100 tokens (-v shows them)\n" in shown
    shown = succeed("info", path, "-v").out
    assert f"{prompts}\n" in shown
    assert all(
        word in succeed("info").out for word in ("python", "torch", "threads", "pair gpt2", "GB, ")
    )
    assert "\\x1b[31m" in shown and "\x1b" not in shown and f"{'a' * 200}...\n" in shown


def test_an_exported_checkpoint_decodes_the_same_and_holds_no_training(
    ckpt: str, tmp_path: Path
) -> None:
    exported = str(tmp_path / "new" / "small.ckpt")
    assert succeed("export", "--ckpt", ckpt, "--output", exported).out.startswith(exported)
    assert Path(exported).stat().st_size < Path(
        ckpt
    ).stat().st_size and "epoch" not in checkpoint.read(exported)
    documents = [
        succeed("decode", path, *QUICK, "--output", "json").json for path in (ckpt, exported)
    ]
    first, second = (
        [each["speculative"]["tokens"] for each in document["prompts"]] for document in documents
    )
    assert first == second and [path.name for path in Path(exported).parent.iterdir()] == [
        "small.ckpt"
    ]


def test_an_export_replaces_nothing_but_an_earlier_export(ckpt: str, here: None) -> None:
    shutil.copy(ckpt, "trained.ckpt")
    Path("link.ckpt").symlink_to("trained.ckpt")
    Path("README.md").write_text("read me")
    for path in ("trained.ckpt", "link.ckpt", "README.md", "/dev/null"):
        refused("export", "--ckpt", "trained.ckpt", "--output", path, told="choose another")
    refused("export", "--ckpt", "trained.ckpt", "--output", "README.md/new.ckpt", told="README.md")
    for path in ("new.ckpt", "new.ckpt"):
        succeed("export", "--ckpt", "trained.ckpt", "--output", path)
    succeed("export", "--ckpt", "new.ckpt", "--output", "new.ckpt", "--dtype", "bfloat16")
