"""Laws of bad checkpoints: whatever a file says, it runs nothing and the answer is one line."""

from __future__ import annotations

import copy
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import OF_A_CHECKPOINT, Bomb, call, ckpt, here, refused, shipped_run, succeed

from lightning_specdec.checkpoints import archive, checkpoint

__all__ = ["ckpt", "here", "shipped_run"]
pytestmark = pytest.mark.usefixtures("here")


def changed(**parts: object) -> Callable[[dict[str, Any]], None]:
    """Replace parts of a description; `target__hidden_size` is that argument of the target."""

    def change(content: dict[str, Any]) -> None:
        for name, value in parts.items():
            owner, _, argument = name.partition("__")
            if argument:
                content[checkpoint.KEY][owner]["arguments"][argument] = value
            else:
                content[checkpoint.KEY][name] = value

    return change


def weight(
    value: Callable[[torch.Tensor], object], name: str = "target.output.weight"
) -> Callable[..., None]:
    """Store another value, computed from the target's output matrix, under a name."""

    def change(content: dict[str, Any]) -> None:
        weights = content["state_dict"]
        weights[name] = value(weights["target.output.weight"])

    return change


def optimizer(key: str, value: object) -> Callable[..., None]:
    return lambda content: content["optimizer_states"][0]["state"][0].update({key: value})


def many_networks(content: dict[str, Any]) -> None:
    """Describe networks that take half a second each to build and contain no number."""
    heads = {"num_heads": 1, "hidden_size": 1, "vocab_size": 2**20, "draft_vocabulary": 2**20}
    stages = [{"class": "MultiTokenDrafter", "arguments": heads}] * 200
    arguments = {"stages": stages, "stage_windows": 2}
    content[checkpoint.KEY]["drafter"] = {"class": "StagedDrafter", "arguments": arguments}
    for number in range(400):
        content["state_dict"][f"drafter.{number}"] = torch.zeros(0)


def deep(content: dict[str, Any]) -> None:
    """Describe twenty drafters, one within the other."""
    for _ in range(20):
        lookup = {"class": "NGramDrafter", "arguments": {}}
        arguments = {"lookup": lookup, "fallback": content[checkpoint.KEY]["drafter"]}
        content[checkpoint.KEY]["drafter"] = {"class": "NGramWithFallback", "arguments": arguments}


def integers_in_a_smaller_file(content: dict[str, Any]) -> None:
    content[checkpoint.KEY]["computes_in"] = "float32"
    weight(lambda value: value.long())(content)


RNN_SPEC = {"class": "RNN", "arguments": {"vocab_size": 50}}
DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "foreign class": changed(
        target={"class": "os.system", "arguments": {"command": "mkdir exploded"}}
    ),
    "class of another kind": changed(drafter=RNN_SPEC),
    "huge layer": changed(target__hidden_size=10**12),
    "huge depth": changed(target__num_layers=10**9),
    "huge vocabulary": changed(target__vocab_size=2**40),
    "fraction": changed(target__hidden_size=64.0),
    "not a number": changed(target__hidden_size=float("nan")),
    "legal size that is not the weights'": changed(target__hidden_size=2**14),
    "unknown argument of the drafter": changed(drafter__sampling=RNN_SPEC),
    "prompts outside the vocabulary": changed(prompts=[[1, 50]]),
    "prompts that are none": changed(prompts=["abc"]),
    "recipe with a tensor": changed(recipe={"seed": torch.ones(2)}),
    "format of the future": changed(format=3),
    "no weights": lambda content: content.pop("state_dict"),
    "missing weight": lambda content: content["state_dict"].pop("target.output.weight"),
    "extra weight": weight(lambda value: value, "target.extra"),
    "weight under a number": lambda content: content["state_dict"].update({5: torch.ones(1)}),
    "weight of integers": weight(lambda value: value.long()),
    "weight that is not finite": weight(lambda value: value / 0),
    "weight larger than the file": weight(lambda value: torch.ones(1, 1).expand(value.shape)),
    "weight without memory": weight(lambda value: value.to("meta")),
    "sparse weight": weight(lambda value: value.to_sparse()),
    "weight of integers in a smaller file": integers_in_a_smaller_file,
    "weight of a draft that it does not describe": weight(lambda value: value, "others.z.weight"),
    "two drafts of one name": changed(
        name="a", others={"a": {"class": "NGramDrafter", "arguments": {}}}
    ),
    "two hundred networks": many_networks,
    "networks in networks": deep,
    "code in a corner": lambda content: content.update(corner=Bomb()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_hold_together_is_refused(ckpt: str, damage: str) -> None:
    content = copy.deepcopy(torch.load(ckpt, weights_only=True))
    DAMAGES[damage](content)
    torch.save(content, "bad.ckpt")
    refused(*OF_A_CHECKPOINT["decode"]("bad.ckpt"), message="bad.ckpt")
    assert not Path("exploded").exists()


def shared(depth: int) -> list[Any]:
    """Return a list that occurs 10^depth times: small in a file, larger than any memory."""
    value: list[Any] = ["a"] * 10
    for _ in range(depth):
        value = [value] * 10
    return value


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


LARGE: dict[str, Callable[[], object]] = {
    "shared": lambda: shared(25),
    "shared text": lambda: ["a" * 10**5] * 10**5,
    "nested": nested,
    "cyclic": cyclic,
}


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("recipe", "shared"),
        ("prompts", "shared"),
        ("target", "shared"),
        ("format", "shared"),
        ("loops", "shared"),
        ("recipe", "shared text"),
        ("others", "nested"),
        ("format", "cyclic"),
    ],
)
def test_a_small_checkpoint_that_would_fill_any_memory_is_refused_before_it_is_copied(
    ckpt: str,
    entry: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Counting up to the real limit takes seconds.
    low_limit = archive._MAX_PLAIN_CHARACTERS // 16
    monkeypatch.setattr(archive, "_MAX_PLAIN_CHARACTERS", low_limit)

    content = torch.load(ckpt, weights_only=True)
    document = content[checkpoint.KEY]
    value = LARGE[kind]()
    if entry == "loops":
        content["loops"] = value
    elif entry == "target":
        document["target"]["class"] = value
    elif entry == "recipe":
        document["recipe"] = {"x": value}
    else:
        document[entry] = value
    torch.save(content, "bad.ckpt")
    assert Path("bad.ckpt").stat().st_size < 1_000_000
    refused(
        *OF_A_CHECKPOINT["decode"]("bad.ckpt"),
        message="more plain values than any checkpoint needs",
    )


def make_files(good: Path) -> list[str]:
    """Write files that are no checkpoints; return their names, and one of a missing file."""
    data = good.read_bytes()
    middle = len(data) // 2
    for i, length in enumerate((1, 1000, middle, len(data) - 1)):
        Path(f"truncated{i}.ckpt").write_bytes(data[:length])
    flipped = bytearray(data)
    flipped[middle] ^= 1
    Path("flipped.ckpt").write_bytes(flipped)
    Path("empty.ckpt").write_bytes(b"")
    Path("text.ckpt").write_text("a: 1\n")
    Path("folder.ckpt").mkdir()
    Path("pickled_bomb.ckpt").write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), "bomb.ckpt")
    torch.save(torch.nn.Linear(2, 2), "module.ckpt")
    torch.save({"weight": torch.ones(2)}, "other.ckpt")
    torch.save([1, 2], "old.ckpt", _use_new_zipfile_serialization=False)
    lightning_run = {
        "state_dict": {"layer.weight": torch.ones(2)},
        "epoch": 1,
        "hyper_parameters": {"lr": 1},
        "pytorch-lightning_version": "2.6.6",
        "global_step": 1,
        "loops": {},
    }
    torch.save(lightning_run, "lightning.ckpt")
    with zipfile.ZipFile("archive.ckpt", "w", zipfile.ZIP_DEFLATED) as zip_file:
        zip_file.writestr("data.pkl", "x" * 1000)
    return ["nowhere.ckpt", *sorted(path.name for path in Path.cwd().iterdir())]


@pytest.mark.quick_cases("info", "decode")
@pytest.mark.parametrize("verb", OF_A_CHECKPOINT)
def test_a_file_that_is_no_checkpoint_is_refused_by_every_verb(ckpt: str, verb: str) -> None:
    for name in make_files(Path(ckpt)):
        refused(*OF_A_CHECKPOINT[verb](name), message=name)
    assert not Path("exploded").exists()


RUN_DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "huge layer": DAMAGES["huge layer"],
    "foreign class": DAMAGES["foreign class"],
    "no loops": lambda content: content.update(loops={}),
    "negative count": lambda content: content["loops"]["fit_loop"]["epoch_progress"][
        "total"
    ].update(ready=-1),
    "no optimizer": lambda content: content.update(optimizer_states=[]),
    "moment of another shape": optimizer("exp_avg", torch.ones(3)),
    "moment larger than the file": optimizer("exp_avg", torch.ones(1, 1).expand(50, 32)),
    "count that is a list": optimizer("step", [1]),
}


@pytest.mark.parametrize("damage", RUN_DAMAGES)
def test_a_run_that_cannot_be_resumed_is_refused_before_it_begins(ckpt: str, damage: str) -> None:
    content = copy.deepcopy(torch.load(ckpt, weights_only=True))
    RUN_DAMAGES[damage](content)
    torch.save(content, "bad.ckpt")
    refused(*OF_A_CHECKPOINT["fit"]("bad.ckpt"), message="bad.ckpt")


def test_what_a_run_says_of_lightning_and_its_hyperparameters_is_not_read(ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    content["hyper_parameters"] = {"class_path": "os.system"}
    content["pytorch-lightning_version"] = "newest"
    torch.save(content, "odd.ckpt")
    succeed(*OF_A_CHECKPOINT["fit"]("odd.ckpt"))


def mutated(data: bytes, seed: int) -> bytes:
    """Return the bytes with a few bits flipped anywhere or near an end, sometimes with a gap."""
    numbers = random.Random(seed)
    damaged = bytearray(data)
    for _ in range(numbers.choice((1, 1, 3, 30))):
        # Any byte, one of the first 4000, or one of the last 6000.
        limit = numbers.choice((len(data), 4000, -6000))
        index = numbers.randrange(min(limit, 0), max(limit, 0))
        damaged[index] ^= 1 << numbers.randrange(8)
    if seed % 5 == 0:
        start = numbers.randrange(len(damaged))
        del damaged[start : start + numbers.randrange(1, 100)]
    return bytes(damaged)


def rewrite(source: str, path: str, change: Callable[[bytes], bytes]) -> None:
    """Write a copy of a checkpoint with a changed pickle and right checksums, like a forger."""
    with zipfile.ZipFile(source) as archive:
        records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    writer = torch._C.PyTorchFileWriter(path)
    for name, data in records.items():
        # The writer adds these itself.
        if name in ("version", ".data/serialization_id"):
            continue
        if name == "data.pkl":
            data = change(data)
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()


@pytest.mark.slow
@pytest.mark.parametrize("forged", [False, True], ids=["damaged", "forged"])
def test_random_damage_gives_one_line_or_none(ckpt: str, forged: bool) -> None:
    codes = []
    for seed in range(30):
        if forged:
            rewrite(ckpt, "bad.ckpt", lambda data, seed=seed: mutated(data, seed))  # type: ignore[misc]
        else:
            Path("bad.ckpt").write_bytes(mutated(Path(ckpt).read_bytes(), seed))
        for verb in ("info", "decode"):
            outcome = call(*OF_A_CHECKPOINT[verb]("bad.ckpt"))
            codes.append(outcome.code)
            assert outcome.code in (0, 2), (seed, outcome)
            if outcome.code == 2:
                assert outcome.out == "", (seed, outcome)
                assert outcome.err.count("\n") == 1, (seed, outcome)
    assert codes.count(2) > 30
    assert [path.name for path in Path.cwd().iterdir()] == ["bad.ckpt"]
