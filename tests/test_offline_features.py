"""Laws of offline features: they are the target's outputs for the texts, computed once, and never another target's."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cli_fixtures import call, here, succeed
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_specdec.data import Batch, SequenceFile, TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.training import OfflineFeatures, OnlineFeatures, offline_features
from lightning_specdec.training.target_outputs import TargetOutputs

__all__ = ["here"]

TOKENS = torch.tensor([1, 2, 5, 9])
"""The draft's vocabulary."""
LAYERS = [0, 1]
SHARDS = "cache/train/shard-*.safetensors"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_features, "SHARD_ROWS", 4)


def sequences(directory: Path, *, seed: int = 0) -> SequenceFile:
    """Rows of 2 to 21 tokens, some of them in each split."""
    noise = torch.Generator().manual_seed(seed)
    rows = [torch.randint(cases.VOCAB, (2 + (7 * i) % 20,), generator=noise).tolist() for i in range(40)]
    path = directory / "rows.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return of_file(path)


def of_file(path: Path) -> SequenceFile:
    return SequenceFile(str(path), cases.VOCAB, num_val=5, num_test=3, batch_size=4)


def prepared(data: TokenData, directory: Path, target: LanguageModel | None = None, **options: Any) -> OfflineFeatures:
    layers = options.pop("layers", LAYERS)
    features = OfflineFeatures(str(directory / "cache"), **options)
    features.prepare(target or cases.target("llama"), data, layers, ["train", "val"])
    return features


def batches(data: TokenData, split: str) -> list[Batch]:
    """All rows, in another order."""
    rows = data.rows(split)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    return [data.collate([rows[i] for i in order[first : first + 4]]) for first in range(0, len(rows), 4)]


def num_tokens(data: TokenData) -> int:
    return sum(int(batch.lengths.sum()) for split in ("train", "val") for batch in batches(data, split))


def real(values: Tensor, batch: Batch) -> Tensor:
    """What belongs to tokens, not to padding."""
    return values[torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]]


def both(
    target: LanguageModel, features: OfflineFeatures, batch: Batch, split: str, tokens: Tensor | None
) -> tuple[TargetOutputs, TargetOutputs]:
    offline = features.read(target, batch, split, layers=LAYERS, tokens=tokens)
    return offline, OnlineFeatures().read(target, batch, split, layers=LAYERS, tokens=tokens)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("shard-*"))}


def other_weights() -> LanguageModel:
    target = deepcopy(cases.target("llama"))
    with torch.no_grad():
        next(target.parameters())[0, 0] += 1e-3
    return target


@pytest.mark.parametrize("name", ["llama", "transformer", "rnn"])
@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["all", "some"])
def test_features_kept_in_float32_are_the_targets_outputs(tmp_path: Path, name: str, tokens: Tensor | None) -> None:
    target, data = cases.target(name), sequences(tmp_path)
    features = prepared(data, tmp_path, target, dtype="float32")
    assert len(list(tmp_path.glob(SHARDS))) > 2, "rows of several shards"
    for split in ("train", "val"):
        for batch in batches(data, split):
            found, wanted = both(target, features, batch, split, tokens)
            pairs = [(found.log_probs, wanted.log_probs)]
            pairs += [(found.features[layer], wanted.features[layer]) for layer in LAYERS]
            for own, other in pairs:
                torch.testing.assert_close(real(own, batch), real(other, batch), atol=1e-5, rtol=1e-5)
                assert own.isfinite().all() and own.shape[:2] == batch.tokens.shape
            assert torch.equal(real(found.choices, batch), real(wanted.choices, batch))


def test_bfloat16_rounds_the_states_and_nothing_else(tmp_path: Path) -> None:
    target, data = cases.target("rnn"), sequences(tmp_path)
    features = prepared(data, tmp_path, target)
    for batch in batches(data, "train"):
        found, wanted = both(target, features, batch, "train", TOKENS)
        assert found.features[0].dtype == torch.float32, "in the target's type"
        rounded = wanted.features[1].bfloat16().float()
        # float32 noise may fall on either side of the middle between two numbers
        torch.testing.assert_close(real(found.features[1], batch), real(rounded, batch), atol=1e-6, rtol=2**-7)
        full = target(batch.tokens).logits
        log_probs = target.output_logits(found.features[1])[..., TOKENS] - full.logsumexp(-1, keepdim=True)
        torch.testing.assert_close(real(found.log_probs, batch), real(log_probs, batch), atol=1e-5, rtol=1e-5)


def test_shards_are_memory_mapped(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    features = prepared(data, tmp_path)
    for batch in batches(data, "train"):
        features.read(cases.target("llama"), batch, "train", layers=LAYERS, tokens=TOKENS)
    maps = Path("/proc/self/maps").read_text()
    assert all(str(shard) in maps for shard in tmp_path.glob(SHARDS))


def test_nothing_is_computed_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, seen, target = sequences(tmp_path), Counter[int](), deepcopy(cases.target("llama"))
    target.register_forward_pre_hook(lambda _, inputs: seen.update([inputs[0].numel() > 1]))
    prepared(data, tmp_path, target)
    assert seen[True] > 1 and "keeping " in capsys.readouterr().err
    seen.clear()
    prepared(data, tmp_path, target)
    assert not seen[True] and "keeping" not in capsys.readouterr().err


def test_drafts_that_read_other_layers_share_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data, target = sequences(tmp_path), cases.target("llama")
    for layers in ([0], [1], []):
        features = OfflineFeatures(also_layers=[1, 0], dtype="float32")
        features.prepare(target, data, layers, ["train"])
        assert ("keeping " in capsys.readouterr().err) == (layers == [0]), "computed for the first alone"
        batch = batches(data, "train")[0]
        found = features.read(target, batch, "train", layers=layers, tokens=TOKENS)
        wanted = OnlineFeatures().read(target, batch, "train", layers=layers, tokens=TOKENS)
        assert list(found.features) == layers
        for layer in layers:
            pair = (real(each.features[layer], batch) for each in (found, wanted))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


def test_the_size_is_said_before_it_starts_and_refused_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, usage = sequences(tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"takes \d\.\d MB in .*cache, 0\.0 MB are free: .*cache_dir"):
        prepared(data, tmp_path)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * 10**9))
    prepared(data, tmp_path, layers=[0])
    # Two layers of 32 numbers and the last one's of two bytes each, the normalizer and the choice of four.
    size = num_tokens(data) * (2 * 2 * 32 + 8)
    told = f"keeping {num_tokens(data):,} tokens of the target's layers [0] takes {size / 1e6:.1f} MB in {tmp_path}"
    assert told in (line := capsys.readouterr().err) and "(3.0 GB free)\n" in line
    written = sum(path.stat().st_size for path in tmp_path.glob("cache/*/shard-*"))
    assert size < written < 1.2 * size, "headers of small shards aside"


def test_a_full_disk_is_one_line_and_finished_shards_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, calls, sync = sequences(tmp_path), [], os.fsync

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:  # four shards are written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\): .*run it again") as fault:
        prepared(data, tmp_path)
    assert "\n" not in str(fault.value)
    left = contents(tmp_path)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in left}
    assert len(left) == 4 and not list(tmp_path.rglob(".shard*"))
    prepared(data, tmp_path)
    assert left.items() <= contents(tmp_path).items() and len(contents(tmp_path)) > 4
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in left}


def test_a_torn_shard_is_computed_again(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    prepared(data, tmp_path)
    whole = contents(tmp_path)
    torn = sorted(tmp_path.glob(SHARDS))[1]
    torn.write_bytes(torn.read_bytes()[:-9])
    prepared(data, tmp_path)
    assert contents(tmp_path) == whole


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"target": other_weights()}, "other target"),
    "type": ({"target": deepcopy(cases.target("llama")).bfloat16()}, "other target"),
    "layers": ({"layers": [1, 2]}, r"layers \[0, 1\] instead of \[1, 2\]"),
    "dtype": ({"dtype": "float32"}, "dtype bfloat16 instead of float32"),
    "rows": ({"seed": 1}, "other rows"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_features_of_something_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    prepared(sequences(tmp_path), tmp_path)
    before, (options, told) = contents(tmp_path), OTHERS[name]
    options = dict(options)
    data = sequences(tmp_path, seed=options.pop("seed", 0))
    with pytest.raises(ValueError, match=f"cache/train holds features of {told}: give another .*cache_dir, or delete"):
        prepared(data, tmp_path, options.pop("target", None), **options)
    assert contents(tmp_path) == before


def test_without_a_directory_each_of_them_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    data = sequences(tmp_path)
    for options in ({}, {"dtype": "float32"}, {"also_layers": [2]}, {"dtype": "float32"}):
        OfflineFeatures(**options).prepare(cases.target("llama"), data, LAYERS, ["train"])
    OfflineFeatures().prepare(other_weights(), data, LAYERS, ["train"])
    assert len(list((tmp_path / "home" / "lightning_specdec" / "features").iterdir())) == 4


def test_shards_of_an_older_format_are_refused(tmp_path: Path) -> None:
    prepared(data := sequences(tmp_path), tmp_path)
    shard = sorted(tmp_path.glob(SHARDS))[0]
    save_file(load_file(shard), shard)
    with pytest.raises(ValueError, match="cache/train holds features of format None instead of 2: .* delete it"):
        prepared(data, tmp_path)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for options, told in (
        ({"dtype": "float16"}, "dtype must be bfloat16 or float32"),
        ({"also_layers": [9]}, "also_layers must be below the target's 3"),
        ({"target": cases.target("gemma3")}, "cannot be taken apart.*: give OnlineFeatures"),
    ):
        with pytest.raises(ValueError, match=told):
            prepared(sequences(tmp_path), tmp_path, **options)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="cache.* cannot be written .* give another target_features.cache_dir"):
        prepared(sequences(tmp_path), tmp_path)


def _one_of_two(rank: int, directory: Path, port_file: str, fails: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    written: list[str] = []
    write = offline_features.Shards.write

    def watched(self: Any, number: int, arrays: Any) -> None:
        if fails and rank == 1:
            raise ValueError("the disk of one is full")
        written.append(f"{self.directory.name} {number}")
        write(self, number, arrays)

    offline_features.Shards.write = watched  # type: ignore[method-assign]
    told = ""
    try:
        prepared(of_file(directory / "rows.csv"), directory)
    except ValueError as error:
        told = str(error)
    (directory / f"{rank}.txt").write_text("\n".join([told, *written]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_processes_each_computes_its_share_and_both_raise_a_fault_of_one(tmp_path: Path, fails: bool) -> None:
    sequences(tmp_path)
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_one_of_two, args=(rank, tmp_path, str(tmp_path / "meet"), fails)) for rank in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    (told, *first), (also_told, *second) = ((tmp_path / f"{rank}.txt").read_text().split("\n") for rank in range(2))
    assert told == also_told == ("the disk of one is full" if fails else "")
    if not fails:
        assert first and second and not set(first) & set(second)
        (tmp_path / "alone").mkdir()
        prepared(sequences(tmp_path), tmp_path / "alone")
        assert contents(tmp_path / "cache") == contents(tmp_path / "alone" / "cache")


def command(data: SequenceFile, *more: str, features: str = "OfflineFeatures") -> tuple[str, ...]:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    given = {"model": "EagleTraining", "model.num_heads": "2", "model.intermediate_size": "16"}
    given |= {"model.target": "HuggingFaceLM", "model.target.vocab_size": str(cases.VOCAB)}
    given |= {"model.target.model": json.dumps({"model_type": "llama", **sizes})}
    given |= {"model.target_features": features, "model.target_features.cache_dir": "cache"}
    given |= {"data": "SequenceFile", "data.path": data.path, "data.vocab_size": str(cases.VOCAB)}
    given |= {"trainer.max_epochs": "1", "trainer.logger": "false", "trainer.accelerator": "cpu"}
    given |= {"trainer.enable_checkpointing": "false", "trainer.enable_model_summary": "false"}
    return ("fit", *(word for name, value in given.items() for word in (f"--{name}", value)), *more)


def test_the_command_line_trains_on_them_and_refuses_those_of_other_layers(tmp_path: Path, here: None) -> None:
    data = sequences(tmp_path)
    outcome = succeed(*command(data))
    assert "keeping " in outcome.err and "GB free)" in outcome.err
    assert sorted(path.name for path in Path("cache").iterdir()) == ["train", "val"]
    before = contents(Path("cache"))
    assert "keeping" not in succeed(*command(data, features="CachedFeatures")).err, "its former name"
    refused = call(*command(data, "--model.feature_layers", "[1]"))
    assert refused.code == 2 and "Traceback" not in refused.err
    assert refused.err.splitlines()[-1].startswith(
        "error: cache/train holds features of layers [0, 1, 2] instead of [1]"
    )
    assert contents(Path("cache")) == before
