"""Laws of cached features: they are what the target makes of the texts, made once, and never another target's."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from cli_fixtures import call, here, succeed
from torch import Tensor

from lightning_specdec.data import Batch, SequenceFile, TextFiles, TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.training import CachedFeatures, OnTheFly, feature_shards
from lightning_specdec.training.cached_features import weights_fingerprint
from lightning_specdec.training.target_reading import Reading

__all__ = ["here"]

TOKENS = torch.tensor([1, 2, 5, 9])
"""What a draft can say."""
LAYERS = [0, 1]
SHARDS = "cache/train/shard-*.safetensors"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_shards, "SHARD_BYTES", 2**14)


def sequences(directory: Path, *, seed: int = 0) -> SequenceFile:
    """Rows of 2 to 21 tokens, some of them in each split."""
    noise = torch.Generator().manual_seed(seed)
    lengths = [2 + (7 * i) % 20 for i in range(40)]
    rows = [torch.randint(cases.VOCAB, (length,), generator=noise).tolist() for length in lengths]
    path = directory / "rows.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return of_file(path)


def of_file(path: Path) -> SequenceFile:
    return SequenceFile(str(path), cases.VOCAB, num_val=5, num_test=3, batch_size=4)


def prepared(data: TokenData, directory: Path, target: LanguageModel | None = None, **options: Any) -> CachedFeatures:
    layers = options.pop("layers", LAYERS)
    features = CachedFeatures(str(directory / "cache"), **options)
    features.prepare(cases.target("llama") if target is None else target, data, layers, ["train", "val"])
    return features


def batches(data: TokenData, split: str) -> list[Batch]:
    """All rows, in an order that is not their own."""
    rows = data.rows(split)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    return [data.collate([rows[i] for i in order[first : first + 4]]) for first in range(0, len(rows), 4)]


def real(values: Tensor, batch: Batch) -> Tensor:
    """What belongs to tokens, not to padding."""
    return values[torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]]


def both(
    target: LanguageModel, features: CachedFeatures, batch: Batch, split: str, tokens: Tensor | None
) -> tuple[Reading, Reading]:
    cached = features.read(target, batch, split, layers=LAYERS, tokens=tokens)
    return cached, OnTheFly().read(target, batch, split, layers=LAYERS, tokens=tokens)


@pytest.mark.parametrize("name", ["llama", "transformer", "rnn"])
@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["all", "some"])
def test_what_is_kept_in_float32_is_what_the_target_makes_of_the_batch(
    tmp_path: Path, name: str, tokens: Tensor | None
) -> None:
    target, data = cases.target(name), sequences(tmp_path)
    features = prepared(data, tmp_path, target, dtype="float32")
    assert len(list(tmp_path.glob(SHARDS))) > 2, "rows of several shards"
    for split in ("train", "val"):
        for batch in batches(data, split):
            found, wanted = both(target, features, batch, split, tokens)
            for layer in LAYERS:
                torch.testing.assert_close(
                    real(found.features[layer], batch), real(wanted.features[layer], batch), atol=1e-5, rtol=1e-5
                )
            torch.testing.assert_close(
                real(found.log_probs, batch), real(wanted.log_probs, batch), atol=1e-5, rtol=1e-5
            )
            assert torch.equal(real(found.choices, batch), real(wanted.choices, batch))
            for values in (found.log_probs, found.choices, *found.features.values()):
                assert values.isfinite().all() and values.shape[:2] == batch.tokens.shape


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
        said = target.output_logits(found.features[1])[..., TOKENS] - full.logsumexp(-1, keepdim=True)
        torch.testing.assert_close(real(found.log_probs, batch), real(said, batch), atol=1e-5, rtol=1e-5)
        assert torch.equal(real(found.choices, batch), real(wanted.choices, batch))


@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["all", "some"])
def test_of_the_likeliest_tokens_alone_those_are_kept_and_the_others_count_as_never_said(
    tmp_path: Path, tokens: Tensor | None
) -> None:
    target, data = cases.target("llama"), sequences(tmp_path)
    features = prepared(data, tmp_path, dtype="float32", top_n=3)
    chosen = torch.arange(cases.VOCAB) if tokens is None else tokens
    for batch in batches(data, "train"):
        found, wanted = both(target, features, batch, "train", tokens)
        likeliest = target(batch.tokens).logits.topk(3).indices
        kept = real((likeliest[..., None] == chosen).any(-2), batch)
        log_probs = real(found.log_probs, batch)
        torch.testing.assert_close(log_probs[kept], real(wanted.log_probs, batch)[kept], atol=1e-5, rtol=1e-5)
        assert (log_probs[~kept] == -torch.inf).all() and kept.any() and not kept.all()
        assert torch.equal(real(found.choices, batch), real(wanted.choices, batch))


def test_what_was_read_is_mapped_and_not_copied(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    features = prepared(data, tmp_path)
    for batch in batches(data, "train"):
        features.read(cases.target("llama"), batch, "train", layers=LAYERS, tokens=TOKENS)
    maps = Path("/proc/self/maps").read_text()
    assert all(str(shard) in maps for shard in tmp_path.glob(SHARDS))


def test_nothing_is_made_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, seen, target = sequences(tmp_path), Counter[int](), deepcopy(cases.target("llama"))
    target.register_forward_pre_hook(lambda _, inputs: seen.update([inputs[0].numel() > 1]))
    prepared(data, tmp_path, target)
    assert seen[True] > 1 and "caching " in capsys.readouterr().err
    seen.clear()
    prepared(data, tmp_path, target)
    assert not seen[True] and "caching" not in (told := capsys.readouterr().err)
    assert told.startswith(f"the cached features of {num_tokens(data):,} tokens are in ")


def test_drafts_that_read_other_layers_share_a_cache_that_keeps_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data, target = sequences(tmp_path), cases.target("llama")
    for layers in ([0], [1], []):
        features = CachedFeatures(also_layers=[1, 0], dtype="float32")
        features.prepare(target, data, layers, ["train"])
        assert ("caching " in capsys.readouterr().err) == (layers == [0]), "made for the first alone"
        batch = batches(data, "train")[0]
        found = features.read(target, batch, "train", layers=layers, tokens=TOKENS)
        wanted = OnTheFly().read(target, batch, "train", layers=layers, tokens=TOKENS)
        assert list(found.features) == layers
        for layer in layers:
            torch.testing.assert_close(
                real(found.features[layer], batch), real(wanted.features[layer], batch), atol=1e-5, rtol=1e-5
            )


def num_tokens(data: TokenData) -> int:
    return sum(int(batch.lengths.sum()) for split in ("train", "val") for batch in batches(data, split))


def test_what_it_takes_is_said_before_it_starts_and_refused_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = sequences(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"takes \d\.\d MB, .*cache has 0\.0 MB free: .*cache_dir") as refusal:
        prepared(data, tmp_path)
    assert "\n" not in str(refusal.value) and not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * 10**9))
    prepared(data, tmp_path, layers=[0])
    # Two layers of 32 numbers and the last one's of two bytes each, the normalizer and the choice of four.
    size = num_tokens(data) * (2 * 2 * 32 + 8)
    line = (
        f"caching {num_tokens(data):,} tokens of the target's layers [0, 2] takes {size / 1e6:.1f} MB in "
        f"{tmp_path}/cache"
    )
    assert f"{line} (3.0 GB free)\n" in capsys.readouterr().err
    written = sum(path.stat().st_size for path in tmp_path.glob("cache/*/shard-*"))
    assert size < written < 1.2 * size, "what it took, headers of small shards aside"


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full when that file is written, counted from 1."""
    calls, sync = [], os.fsync

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("shard-*"))}


def test_a_full_disk_is_one_line_and_what_is_finished_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequences(tmp_path)
    fail_at(5, monkeypatch)  # two manifests and two shards are written
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\): .*run it again") as fault:
        prepared(data, tmp_path)
    assert "\n" not in str(fault.value)
    left = contents(tmp_path)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in left}
    assert len(left) == 2 and not list(tmp_path.rglob(".shard*"))
    prepared(data, tmp_path)
    assert left.items() <= contents(tmp_path).items() and len(contents(tmp_path)) > 3
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in left}, "what is finished is not made again"


def test_a_torn_shard_is_made_anew(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    prepared(data, tmp_path)
    whole = contents(tmp_path)
    torn = sorted(tmp_path.glob(SHARDS))[1]
    torn.write_bytes(torn.read_bytes()[:-9])
    prepared(data, tmp_path)
    assert contents(tmp_path) == whole


def other_weights() -> LanguageModel:
    target = deepcopy(cases.target("llama"))
    with torch.no_grad():
        next(target.parameters())[0, 0] += 1e-3
    return target


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"target": other_weights}, r"of another target \(a LlamaForCausalLM in float32\), those of a Llama"),
    "type": (
        {"target": lambda: deepcopy(cases.target("llama")).bfloat16()},
        r"in float32\), those of .* in bfloat16 are wanted",
    ),
    "layers": ({"layers": [1, 2]}, r"features of layers \[0, 1\], those of layers \[1, 2\] are wanted"),
    "top_n": ({"top_n": 4}, "features of top_n None, those of top_n 4 are wanted"),
    "dtype": ({"dtype": "float32"}, "features of dtype bfloat16, those of dtype float32 are wanted"),
    "rows": ({"seed": 1}, "features of other texts, those of these data's train rows are wanted"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_features_of_something_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    prepared(sequences(tmp_path), tmp_path)
    before = contents(tmp_path)
    options, told = deepcopy(OTHERS[name])
    data = sequences(tmp_path, seed=options.pop("seed", 0))
    make: Callable[[], LanguageModel] | None = options.pop("target", None)
    with pytest.raises(ValueError, match=told) as refusal:
        prepared(data, tmp_path, None if make is None else make(), **options)
    line = str(refusal.value)
    assert line.startswith(f"{tmp_path}/cache/train holds ") and "\n" not in line
    assert line.endswith(": give another target_features.cache_dir, or delete it") and contents(tmp_path) == before


def test_without_a_directory_each_of_them_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    data = sequences(tmp_path)
    for options in ({}, {"top_n": 4}, {"dtype": "float32"}, {"top_n": 4}):
        CachedFeatures(**options).prepare(cases.target("llama"), data, LAYERS, ["train"])
    CachedFeatures().prepare(other_weights(), data, LAYERS, ["train"])
    assert len(list((tmp_path / "home" / "lightning_specdec" / "features").iterdir())) == 4


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}'])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    data = sequences(tmp_path)
    prepared(data, tmp_path)
    (tmp_path / "cache" / "train" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="cache/train holds no features that this version knows: .* delete it"):
        prepared(data, tmp_path)


def test_weights_tell_targets_apart() -> None:
    target = cases.target("llama")
    assert weights_fingerprint(target) == weights_fingerprint(deepcopy(target)) != weights_fingerprint(other_weights())


def test_windows_that_begin_anywhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TextFiles reads other rows each epoch.*OnTheFly.*generate"):
        prepared(TextFiles(vocab_size=cases.VOCAB), tmp_path)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for options, told in (
        ({"top_n": 0}, "top_n"),
        ({"dtype": "float16"}, "dtype must be bfloat16 or float32, got 'float16'"),
        ({"top_n": 12}, "top_n is 12, the target has 11 tokens"),
        ({"also_layers": [9]}, r"also_layers must be of the target's layers 0 to \d, got \[9\]: lower them"),
    ):
        with pytest.raises(ValueError, match=told):
            prepared(sequences(tmp_path), tmp_path, **options)
    with pytest.raises(ValueError, match="cannot be taken apart.*: keep its likeliest tokens, with .*top_n"):
        prepared(sequences(tmp_path), tmp_path, cases.target("gemma3"))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="cache.* cannot be written .*: give another target_features.cache_dir"):
        prepared(sequences(tmp_path), tmp_path)


def test_a_target_that_lies_in_one_piece_is_kept_by_its_likeliest_tokens(tmp_path: Path) -> None:
    data = sequences(tmp_path)
    features = prepared(data, tmp_path, cases.target("gemma3"), top_n=cases.VOCAB, dtype="float32")
    for batch in batches(data, "val"):
        found, wanted = both(cases.target("gemma3"), features, batch, "val", TOKENS)
        torch.testing.assert_close(real(found.log_probs, batch), real(wanted.log_probs, batch), atol=1e-4, rtol=1e-4)


def _one_of_two(rank: int, directory: Path, port_file: str, fails: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    written: list[str] = []
    write = feature_shards.FeatureShards.write

    def watched(self: Any, number: int, arrays: Any) -> None:
        if fails and rank == 1:
            raise ValueError("the disk of one is full")
        written.append(f"{self.directory.name} {number}")
        write(self, number, arrays)

    feature_shards.FeatureShards.write = watched  # type: ignore[method-assign]
    told = ""
    try:
        prepared(of_file(directory / "rows.csv"), directory)
    except ValueError as error:
        told = str(error)
    (directory / f"{rank}.txt").write_text("\n".join([told, *written]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_processes_each_makes_its_part_and_a_fault_of_one_is_told_by_both(tmp_path: Path, fails: bool) -> None:
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


def command(data: SequenceFile, *more: str) -> tuple[str, ...]:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    given = {"model": "EagleTraining", "model.num_heads": "2", "model.intermediate_size": "16"}
    given |= {"model.target": "HuggingFaceLM", "model.target.vocab_size": str(cases.VOCAB)}
    given |= {"model.target.model": json.dumps({"model_type": "llama", **sizes})}
    given |= {"model.target_features": "CachedFeatures", "model.target_features.cache_dir": "cache"}
    given |= {"data": "SequenceFile", "data.path": data.path, "data.vocab_size": str(cases.VOCAB)}
    given |= {"trainer.max_epochs": "1", "trainer.logger": "false", "trainer.accelerator": "cpu"}
    given |= {"trainer.enable_checkpointing": "false", "trainer.enable_model_summary": "false"}
    return ("fit", *(word for name, value in given.items() for word in (f"--{name}", value)), *more)


def test_the_command_line_trains_on_them_and_refuses_those_of_other_layers(tmp_path: Path, here: None) -> None:
    data = sequences(tmp_path)
    outcome = succeed(*command(data))
    assert "caching " in outcome.err and "GB free)" in outcome.err
    assert sorted(path.name for path in Path("cache").iterdir()) == ["train", "val"]
    before = contents(Path("cache"))
    refused = call(*command(data, "--model.feature_layers", "[1]"))
    assert refused.code == 2 and "Traceback" not in refused.err
    last = refused.err.splitlines()[-1]
    assert last.startswith(
        "error: cache/train holds features of layers [0, 1, 2], those of layers [1] are wanted: give"
    )
    assert contents(Path("cache")) == before
