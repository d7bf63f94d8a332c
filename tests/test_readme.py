"""Law 10: every command line and every line of Python in the README, and in the pages for a start, works."""

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
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "train_a_draft.md"
RUN = [README, *(ROOT / "docs" / f"{name}.md" for name in ("small_models", "models"))]
"""Pages whose commands are run here."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = [
    (path, text)
    for path in RUN
    for language, text in BLOCK.findall(path.read_text())
    if language == "python"
]
SHORT = [
    "--trainer.max_epochs",
    str(EPOCHS + 1),
    "--trainer.accelerator",
    "cpu",
    "--trainer.logger",
    "false",
]
SHORT += ["--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
TRAINS = commands(README)[1:4]
"""Tried by `test_recipes.py`, where they stand in the guide."""
MEASURES = [call for call in commands(README) if call[0] in ("bench", "report", "audit")]
"""Calls that measure and prove; a report needs its benchmark."""
CALLS = [call for path in RUN for call in commands(path) if call not in TRAINS + MEASURES]
CHAIN = [call for call in commands(ROOT / "docs" / "generate.md")[1:] if "--engine" not in call]
"""Calls that train a draft on text that its target writes; each needs the one before. Other engines are not in CI."""


def test_the_readme_trains_a_draft_as_the_guide_does() -> None:
    assert commands(GUIDE)[:3] == TRAINS


def test_every_target_of_make_that_a_page_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {
        name
        for path in PAGES
        for name in re.findall(r"(?:^|`)make ([a-z][\w-]*)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 5 and [name for name in named if f"\n{name}:" not in makefile] == []


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ships, with a tiny model where SmolLM2 is, and a draft file for it where the trained one is."""
    home = tmp_path_factory.mktemp("stand-in")
    for path in (ROOT / "checkpoints").glob("*.safetensors"):
        shutil.copy(path, home)
    tiny_models.write_text_model(home / "smollm2", chat=True)
    settings = home / "smollm2" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "</s>"}))
    decoder = SpeculativeDecoder.from_pretrained(home / "smollm2")
    decoder.with_drafter(eagle(decoder.target)).save_draft(home / "smollm2_eagle.safetensors")
    return home


@pytest.mark.parametrize("arguments", CALLS, ids=" ".join)
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
    rows = (",".join(str(start + i) for i in range(3 + start % 4)) for start in range(40))
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    trains = arguments[0] in ("fit", "validate", "test")
    brief = {"--repeats": "1", "--max_new_tokens": "8"} if arguments[0] == "decode" else {}
    few = (
        SHORT
        if trains
        else [word for each in brief.items() if each[0] not in arguments for word in each]
    )
    outcome = succeed(*arguments, *few, stdin="Hello\n")
    assert outcome.out


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
"""What a tiny model in the place of the real one needs otherwise."""


def test_the_calls_that_train_a_draft_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [call[0] for call in CHAIN] == ["generate", "generate", "fit", "export", "decode"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "checkpoints" / "smollm2"
    tiny_models.write_text_model(model, chat=True)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(40, 70)]}))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, changes in SMALLER.items():
        path = tmp_path / "configs" / f"{name}.yaml"
        text = path.read_text()
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after.replace("vocab_size: 300", f"vocab_size: {size}"))
        path.write_text(text)
    more = {"fit": ["--trainer.accelerator", "cpu"], "decode": ["--repeats", "1"]}
    outcomes = [succeed(*call, *more.get(call[0], [])) for call in CHAIN]
    assert "val/block_efficiency" in outcomes[2].out
    assert "output " in outcomes[-1].out.splitlines()[0]


def test_the_calls_that_measure_and_prove_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [call[0] for call in MEASURES] == ["bench", "report", "audit"]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs" / "bench", tmp_path / "configs" / "bench")
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(
        ROOT / "checkpoints" / "rnn.safetensors", tmp_path / "checkpoints" / "rnn.safetensors"
    )
    config = tmp_path / MEASURES[0][MEASURES[0].index("--config") + 1]
    text = config.read_text()
    fewer = {
        "num_prompts: 9": "num_prompts: 2",
        "repeats: 20": "repeats: 1",
        "[1, 2, 4, 8, auto]": "[2]",
    }
    for before, after in fewer.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    less = [
        "--rules",
        "ExactMatch",
        "--temperatures",
        "0",
        "1",
        "--num_prompts",
        "1",
        "--num_places",
        "1",
    ]
    outcomes = [succeed(*call, *(less if call[0] == "audit" else [])) for call in MEASURES]
    assert " method " in outcomes[0].out and "(temperature 0" in outcomes[1].out
    assert (tmp_path / "results" / "rnn" / "report" / "report.html").exists()
    assert "passed: " in outcomes[2].out


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_block_of_python_runs(
    number: int,
    stand_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(stand_in, tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    path, program = PROGRAMS[number]
    exec(compile(program, f"{path.name}, block {number}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_no_shipped_file_names_a_directory_of_the_machine_that_made_it() -> None:
    for path in (ROOT / "checkpoints").glob("*.safetensors"):
        source = json.loads(read_header(path)[0]["lightning_specdec"])["target"].get("source")
        assert source is None or not Path(source).is_absolute(), path.name
