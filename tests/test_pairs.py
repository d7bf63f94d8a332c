"""Laws of the registry: every file is checked to the last entry, and describes its models truly."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_specdec.config import pairs
from lightning_specdec.config.pairs import get_pair, list_pairs, read_pair, shipped_directory

PATHS = sorted(shipped_directory().glob("*.yaml"))


def test_every_shipped_pair_is_read() -> None:
    found = {pair.name: pair for pair in list_pairs()}
    assert set(found) == {
        "pythia",
        "gpt2",
        "gpt2_dev",
        "tinyllama_llama3",
        "phi3_llama3",
        "llama3_self",
        "smollm2",
    }
    assert (
        found["tinyllama_llama3"].drafter.name
        == found["phi3_llama3"].drafter.name
        == "CrossVocabulary"
    )
    assert found["smollm2"].drafter.name == "NGramDrafter" and found["smollm2"].draft is None
    for pair in found.values():
        assert pair.description and "\n" not in pair.description


def test_pairs_and_models_of_the_current_directory_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "pairs").mkdir(parents=True)
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    for name, window in (("mine", "auto"), ("gpt2", 3)):
        (tmp_path / "configs" / "pairs" / f"{name}.yaml").write_text(
            yaml.safe_dump({**values, "num_draft_tokens": window})
        )
    assert get_pair("mine").num_draft_tokens == "auto" and get_pair("gpt2").num_draft_tokens == 3
    assert len(list_pairs()) == len(PATHS) + 1
    target = get_pair("smollm2").target
    (tmp_path / "checkpoints" / "smollm2").mkdir(parents=True)
    assert target.place == "HuggingFaceTB/SmolLM2-135M-Instruct", "an empty directory is no copy"
    (tmp_path / "checkpoints" / "smollm2" / "config.json").write_text("{}")
    pinned = replace(target, revision="v1")
    assert target.place == "checkpoints/smollm2" and pinned.place_revision is None, (
        "a local copy has no revision"
    )
    assert replace(pinned, local=None).place_revision == "v1"


@pytest.mark.parametrize(
    ("entry", "value", "told"),
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
    entry: str, value: Any, told: str, tmp_path: Path
) -> None:
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    *keys, last = entry.split(".")
    part = values
    for key in keys:
        part = part[key]
    part[last] = value
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError) as raised:
        read_pair(tmp_path / "bad.yaml")
    assert str(raised.value).startswith(f"{tmp_path / 'bad.yaml'}: ") and told in str(
        raised.value
    ), str(raised.value)


def test_an_installed_package_brings_its_pairs_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a wheel they are inside the package."""
    package = tmp_path / "site" / "lightning_specdec"
    shutil.copytree(shipped_directory(), package / "configs" / "pairs")
    monkeypatch.setattr(pairs, "__file__", str(package / "config" / "pairs.py"))
    monkeypatch.chdir(tmp_path)
    assert shipped_directory() == package / "configs" / "pairs" and len(list_pairs()) == len(PATHS)
    settings = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'force-include = { "configs" = "lightning_specdec/configs" }' in settings
