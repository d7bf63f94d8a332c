"""Every command and every block of Python in the README and in the introductory pages works."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import tiny_models
from cli_fixtures import shipped_run, succeed
from test_guides import PAGES, commands
from tiny_eagle import eagle
from training_fixtures import EPOCHS, TrainedRun

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.models.safetensors_file import read_header

__all__ = ["shipped_run"]
ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "train_a_draft.md"
PAGES_TO_RUN = [README, ROOT / "docs" / "small_models.md", ROOT / "docs" / "models.md"]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT_TRAINING = ["--trainer.max_epochs", str(EPOCHS + 1), "--trainer.accelerator", "cpu"]
SHORT_TRAINING += ["--trainer.logger", "false", "--trainer.limit_train_batches", "1"]
SHORT_TRAINING += ["--trainer.limit_val_batches", "1"]
SHORTER = {
    "decode": {"--repeats": "1", "--max_new_tokens": "8", "--prompt": "1 2 3"},
    "sweep": {"--max_new_tokens": "8"},
}
"""Options that shorten a call. They are added unless the call has them."""
TRAINING_CALLS = commands(README)[1:4]
"""`test_recipes.py` runs these, because they are in the guide too."""
MEASURING_CALLS = [call for call in commands(README) if call[0] in ("bench", "report", "audit")]
"""Calls that measure and prove. A report needs its benchmark."""
CHAIN = [call for call in commands(ROOT / "docs" / "generate.md")[1:] if "--engine" not in call]
"""Calls that train a draft on text of its target. Each needs the previous one.

Calls of other engines are not run here.
"""


def programs() -> dict[str, str]:
    """The code of each block of Python in the pages, by its title."""
    titled_programs: dict[str, str] = {}
    for path in PAGES_TO_RUN:
        for code in PYTHON_BLOCK.findall(path.read_text()):
            titled_programs[f"{path.name}, block {len(titled_programs)}"] = code
    return titled_programs


PROGRAMS = programs()


def independent_calls() -> list[list[str]]:
    """The calls of the pages that need no other call before them."""
    calls = []
    for path in PAGES_TO_RUN:
        for call in commands(path):
            if call not in TRAINING_CALLS and call not in MEASURING_CALLS:
                calls.append(call)
    return calls


def edit_file(path: Path, changes: dict[str, str]) -> None:
    """Replace pieces of text, each of which must be in the file."""
    text = path.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_the_readme_trains_a_draft_as_the_guide_does() -> None:
    assert commands(GUIDE)[:3] == TRAINING_CALLS


def test_every_target_of_make_that_a_page_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = set()
    for path in PAGES:
        names.update(re.findall(r"(?:^|`)make ([a-z][\w-]*)", path.read_text(), re.MULTILINE))
    assert len(names) > 5
    for name in names:
        assert f"\n{name}:" in makefile, name


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped files, with a tiny model instead of SmolLM2 and a draft file for it."""
    home = tmp_path_factory.mktemp("stand-in")
    for path in (ROOT / "checkpoints").glob("*.safetensors"):
        shutil.copy(path, home)
    tiny_models.write_text_model(home / "smollm2", chat=True)
    tokenizer_config = home / "smollm2" / "tokenizer_config.json"
    settings = json.loads(tokenizer_config.read_text())
    settings["pad_token"] = "</s>"
    tokenizer_config.write_text(json.dumps(settings))
    decoder = SpeculativeDecoder.from_pretrained(home / "smollm2")
    decoder.with_drafter(eagle(decoder.target)).save_draft(home / "smollm2_eagle.safetensors")
    return home


@pytest.mark.parametrize("arguments", independent_calls(), ids=" ".join)
def test_every_call_works(
    arguments: list[str],
    shipped_run: TrainedRun,
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for checkpoints in (shipped_run.directory / "checkpoints", stand_in):
        shutil.copytree(checkpoints, tmp_path / "checkpoints", dirs_exist_ok=True)
    write_sequences(tmp_path / "mine.csv")
    schema = {"type": "object", "properties": {"name": {"enum": ["oak"]}}}
    (tmp_path / "answer.json").write_text(json.dumps(schema))
    monkeypatch.chdir(tmp_path)

    extra_options: list[str] = []
    if arguments[0] in ("fit", "validate", "test"):
        extra_options = SHORT_TRAINING
    for flag, value in SHORTER.get(arguments[0], {}).items():
        if flag not in arguments:
            extra_options += [flag, value]
    if arguments[0] == "sweep":
        # The last value counts.
        extra_options += ["--minutes", "0.01"]
    outcome = succeed(*arguments, *extra_options, stdin="Hello\n")
    assert outcome.out


def write_sequences(path: Path) -> None:
    """Write 40 sequences of 3 to 6 consecutive numbers, one a line."""
    lines = []
    for start in range(40):
        length = 3 + start % 4
        numbers = range(start, start + length)
        lines.append(",".join(map(str, numbers)))
    path.write_text("\n".join(lines))


SMALLER = {
    "smollm2_prompts": {
        "num_prompts: 3000": "num_prompts: 40",
        "dtype: bfloat16": "dtype: float32",
    },
    "smollm2_generate": {
        "max_new_tokens: 128": "max_new_tokens: 8",
        "dtype: bfloat16": "dtype: float32",
    },
    "smollm2_eagle": {
        "vocab_size: 49152": "vocab_size: 300",
        "num_val: 48": "num_val: 2\n    num_test: 1",
        "target_dtype: bfloat16": "target_dtype: float32",
        "also_layers: [2, 7, 15, 27, 29]": "also_layers: [0, 1]",
        "num_heads: 9": "num_heads: 2",
        "num_key_heads: 3": "num_key_heads: 1",
        "intermediate_size: 1536": "intermediate_size: 8",
        "draft_vocabulary: 8192": "draft_vocabulary: 64",
        "max_epochs: 3": "max_epochs: 1",
        "num_prompts: 6": "num_prompts: 1",
        "max_new_tokens: 64": "max_new_tokens: 4",
    },
}
"""Changes of the shipped configs that a tiny model needs in place of the real one."""


@pytest.mark.slow
def test_the_calls_that_train_a_draft_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [call[0] for call in CHAIN] == ["generate", "generate", "fit", "export", "decode"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "checkpoints" / "smollm2"
    tiny_models.write_text_model(model, chat=True)
    # Many EOS tokens: some answers are complete.
    generation_config = {"eos_token_id": [1, *range(40, 70)]}
    (model / "generation_config.json").write_text(json.dumps(generation_config))

    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, changes in SMALLER.items():
        edit_file(tmp_path / "configs" / f"{name}.yaml", changes)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    size_change = {"vocab_size: 300": f"vocab_size: {vocab_size}"}
    edit_file(tmp_path / "configs" / "smollm2_eagle.yaml", size_change)

    extra_options = {"fit": ["--trainer.accelerator", "cpu"], "decode": ["--repeats", "1"]}
    outputs = []
    for call in CHAIN:
        outcome = succeed(*call, *extra_options.get(call[0], []))
        outputs.append(outcome.out)
    assert "val/block_efficiency" in outputs[2]
    assert "output " in outputs[-1].splitlines()[0]


def test_the_calls_that_measure_and_prove_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [call[0] for call in MEASURING_CALLS] == ["bench", "report", "audit"]
    bench_call, report_call, audit_call = MEASURING_CALLS
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs" / "bench", tmp_path / "configs" / "bench")
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(ROOT / "checkpoints" / "rnn.safetensors", tmp_path / "checkpoints")
    config_index = bench_call.index("--config") + 1
    smaller = {
        "num_prompts: 9": "num_prompts: 2",
        "repeats: 20": "repeats: 1",
        "[1, 2, 4, 8, auto]": "[2]",
    }
    edit_file(tmp_path / bench_call[config_index], smaller)
    assert " method " in succeed(*bench_call).out

    assert "(temperature 0" in succeed(*report_call).out
    assert (tmp_path / "results" / "rnn" / "report" / "report.html").exists()

    short_audit = ["--rules", "ExactMatch", "--temperatures", "0", "1"]
    short_audit += ["--num_prompts", "1", "--num_places", "1"]
    assert "passed: " in succeed(*audit_call, *short_audit).out


@pytest.mark.parametrize("title", PROGRAMS)
def test_every_block_of_python_runs(
    title: str,
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(stand_in, tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(compile(PROGRAMS[title], title, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_no_shipped_file_names_a_directory_of_the_machine_that_made_it() -> None:
    for path in (ROOT / "checkpoints").glob("*.safetensors"):
        metadata, *_ = read_header(path)
        source = json.loads(metadata["lightning_specdec"])["target"].get("source")
        assert source is None or not Path(source).is_absolute(), path.name
