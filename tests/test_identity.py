"""Laws of a model's identity: it is its weights' bytes, read once for as long as the files stay as they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tiny_models import write

from lightning_specdec.files import cache_home
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.identity import Origin, weights_sha256
from lightning_specdec.models.loading import load_model


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("shard_size", [None, "20KB"])
def test_the_sha256_is_that_of_all_files_of_weights_in_the_order_of_their_names(
    shard_size: str | None, tmp_path: Path
) -> None:
    path = Path(write(tmp_path / "llama", shard_size=shard_size))
    files = sorted(path.glob("model*.safetensors"))
    assert (len(files) > 1) == (shard_size is not None)
    (path / "another.safetensors").write_bytes(b"not among the weights")
    assert weights_sha256(path) == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_it_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "llama"))
    first = weights_sha256(path)
    (remembered,) = cache_home().iterdir()
    remembered.write_text("a" * 64)
    assert weights_sha256(path) == "a" * 64
    remembered.write_text("broken")
    assert weights_sha256(path) == first
    write(path, seed=2)
    assert weights_sha256(path) not in (first, "a" * 64)


def test_where_nothing_can_be_remembered_it_is_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write(tmp_path / "llama"))
    first = weights_sha256(path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_sha256(path) == first


def test_a_directory_without_weights_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights in safetensors files"):
        weights_sha256(tmp_path)


def test_a_loaded_model_knows_its_files_packed_or_not_and_a_new_one_has_none(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "llama"))
    model = load_model(path)
    assert model.origin == Origin(str(path), path) and model.packed().origin == model.origin
    assert model.origin is not None and model.origin.sha256 == weights_sha256(path)
    assert HuggingFaceLM(model.model.config).origin is None
