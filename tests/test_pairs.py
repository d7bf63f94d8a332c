"""Laws of the registry of pairs: every entry is checked, and describes its models truly."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_specdec.checkpoints import load_pair
from lightning_specdec.config import pairs
from lightning_specdec.config.models import PairSource, check_directory
from lightning_specdec.config.pairs import get_pair, list_pairs, read_pair, shipped_directory

PATHS = sorted(shipped_directory().glob("*.yaml"))


def test_every_shipped_pair_is_read() -> None:
    pairs_by_name = {pair.name: pair for pair in list_pairs()}
    assert set(pairs_by_name) == {
        "pythia",
        "gpt2",
        "gpt2_dev",
        "tinyllama_llama3",
        "phi3_llama3",
        "llama3_self",
        "smollm2",
        "qwen_coder",
    }
    assert pairs_by_name["tinyllama_llama3"].drafter.name == "CrossVocabulary"
    assert pairs_by_name["phi3_llama3"].drafter.name == "CrossVocabulary"
    assert pairs_by_name["smollm2"].drafter.name == "NGramWithFallback"
    assert pairs_by_name["smollm2"].draft is None
    for pair in pairs_by_name.values():
        assert pair.description
        assert "\n" not in pair.description


def test_pairs_and_models_of_the_current_directory_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "configs" / "pairs"
    directory.mkdir(parents=True)
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    values["num_draft_tokens"] = "auto"
    (directory / "mine.yaml").write_text(yaml.safe_dump(values))
    values["num_draft_tokens"] = 3
    (directory / "gpt2.yaml").write_text(yaml.safe_dump(values))
    assert get_pair("mine").num_draft_tokens == "auto"
    assert get_pair("gpt2").num_draft_tokens == 3
    assert len(list_pairs()) == len(PATHS) + 1

    target = get_pair("smollm2").target
    assert target is not None
    local_copy = tmp_path / "checkpoints" / "smollm2"
    local_copy.mkdir(parents=True)
    assert target.location == "HuggingFaceTB/SmolLM2-135M-Instruct", "an empty directory is no copy"
    (local_copy / "config.json").write_text("{}")
    assert target.location == "checkpoints/smollm2"

    pinned = replace(target, revision="v1")
    assert pinned.location_revision is None, "a local copy has no revision"
    assert replace(pinned, local=None).location_revision == "v1"


def test_a_pair_that_is_neither_here_nor_on_the_hub_names_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A package without the clone's checkpoints.
    package = tmp_path / "site" / "lightning_specdec"
    shutil.copytree(shipped_directory(), package / "configs" / "pairs")
    monkeypatch.setattr(pairs, "__file__", str(package / "config" / "pairs.py"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError) as raised:
        load_pair(PairSource(pair="qwen_coder"))
    error = str(raised.value)
    assert "\n" not in error
    assert "no checkpoints/qwen_coder_1.5b and checkpoints/qwen_coder_0.5b here" in error
    assert error.endswith("run `make qwen_coder` in a clone of the repository")


def test_a_missing_directory_that_make_writes_names_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`make qwen_coder` writes this one"):
        check_directory("checkpoints/qwen_coder_0.5b")


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("num_draft_token", 3, "num_draft_token: did you mean num_draft_tokens?"),
        ("target.size.heads", 1, "unknown setting target.size.heads"),
        ("target.trust_remote_code", True, "target.trust_remote_code"),
        ("draft.dtype", "int8", "draft.dtype must be one of float32, bfloat16"),
        ("num_draft_tokens", 0, "num_draft_tokens must be"),
        ("name", "gpt3", "name follows from the file's name: drop it"),
    ],
)
def test_a_wrong_entry_is_one_line_with_its_file(
    entry: str,
    value: Any,
    message: str,
    tmp_path: Path,
) -> None:
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    *sections, key = entry.split(".")
    mapping = values
    for section in sections:
        mapping = mapping[section]
    mapping[key] = value
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(values))

    with pytest.raises(ValueError) as raised:
        read_pair(path)
    error = str(raised.value)
    assert error.startswith(f"{path}: "), error
    assert message in error


def test_an_installed_package_brings_its_pairs_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a wheel, the pairs are inside the package."""
    package = tmp_path / "site" / "lightning_specdec"
    shutil.copytree(shipped_directory(), package / "configs" / "pairs")
    monkeypatch.setattr(pairs, "__file__", str(package / "config" / "pairs.py"))
    monkeypatch.chdir(tmp_path)
    assert shipped_directory() == package / "configs" / "pairs"
    assert len(list_pairs()) == len(PATHS)

    settings = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'force-include = { "configs" = "lightning_specdec/configs" }' in settings


@pytest.mark.parametrize(
    ("drafter", "has_draft"),
    [(None, True), ("ModelDrafter", True), ("SuffixCorpusWithFallback", True)]
    + [("NGramDrafter", False)],
)
def test_drafters_that_need_the_model_of_a_pair_get_it(
    drafter: str | None, has_draft: bool
) -> None:
    source = PairSource(pair="qwen_coder", drafter=drafter)
    completed = get_pair("qwen_coder").complete(source)
    expected_drafter = "NGramWithFallback" if drafter is None else drafter
    assert completed.drafter.name == expected_drafter
    assert (completed.draft is not None) == has_draft
    assert completed.draft_quantization == ("int8" if has_draft else None)
