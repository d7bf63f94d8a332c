"""Laws of bad checkpoints: whatever a file says, it runs nothing and gives one line."""

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
    """Replaces parts of a description; `target__hidden_size` stands for that argument of the target."""

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
    return lambda content: content["state_dict"].update(
        {name: value(content["state_dict"]["target.output.weight"])}
    )


def optimizer(key: str, value: object) -> Callable[..., None]:
    return lambda content: content["optimizer_states"][0]["state"][0].update({key: value})


def many_networks(content: dict[str, Any]) -> None:
    """Each takes half a second to build and holds no number."""
    heads = {"num_heads": 1, "hidden_size": 1, "vocab_size": 2**20, "draft_vocabulary": 2**20}
    stages = [{"class": "MultiTokenDrafter", "arguments": heads}] * 200
    changed(
        drafter={"class": "StagedDrafter", "arguments": {"stages": stages, "stage_windows": 2}}
    )(content)
    content["state_dict"] |= {f"drafter.{number}": torch.zeros(0) for number in range(400)}


def deep(content: dict[str, Any]) -> None:
    for _ in range(20):
        lookup = {"class": "NGramDrafter", "arguments": {}}
        arguments = {"lookup": lookup, "fallback": content[checkpoint.KEY]["drafter"]}
        changed(drafter={"class": "NGramWithFallback", "arguments": arguments})(content)


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
    "weight of integers in a smaller file": lambda content: (
        changed(computes_in="float32")(content),
        weight(lambda value: value.long())(content),
    ),
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
    refused(*OF_A_CHECKPOINT["decode"]("bad.ckpt"), told="bad.ckpt")
    assert not Path("exploded").exists()


def shared(depth: int) -> list[Any]:
    """A list of ten texts that stands 10^depth times in lists of ten: small in a file, larger than any memory."""
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
    ("place", "large"),
    [
        *((place, "shared") for place in ("recipe", "prompts", "target", "format", "loops")),
        ("recipe", "shared text"),
    ]
    + [("others", "nested"), ("format", "cyclic")],
)
def test_a_small_checkpoint_that_would_fill_any_memory_is_refused_before_it_is_copied(
    ckpt: str, place: str, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        archive, "_MAX_PLAIN_CHARACTERS", archive._MAX_PLAIN_CHARACTERS // 16
    )  # the walk up to it takes seconds
    content, value = torch.load(ckpt, weights_only=True), LARGE[large]()
    if place == "loops":
        content[place] = value
    elif place in ("target", "drafter"):
        content[checkpoint.KEY][place]["class"] = value
    else:
        content[checkpoint.KEY][place] = {"x": value} if place == "recipe" else value
    torch.save(content, "bad.ckpt")
    assert Path("bad.ckpt").stat().st_size < 1_000_000
    refused(
        *OF_A_CHECKPOINT["decode"]("bad.ckpt"), told="more plain values than any checkpoint needs"
    )


def make_files(good: Path) -> list[str]:
    """Files that are no checkpoint, in the current directory; gives their names and one that is not there."""
    data = good.read_bytes()
    for i, length in enumerate((1, 1000, len(data) // 2, len(data) - 1)):
        Path(f"truncated{i}.ckpt").write_bytes(data[:length])
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    Path("flipped.ckpt").write_bytes(flipped)
    Path("empty.ckpt").write_bytes(b"")
    Path("text.ckpt").write_text("a: 1\n")
    Path("folder.ckpt").mkdir()
    Path("pickled_bomb.ckpt").write_bytes(pickle.dumps(Bomb()))
    torch.save(Bomb(), "bomb.ckpt")
    torch.save(torch.nn.Linear(2, 2), "module.ckpt")
    torch.save({"weight": torch.ones(2)}, "other.ckpt")
    torch.save([1, 2], "old.ckpt", _use_new_zipfile_serialization=False)
    lightning = {
        "state_dict": {"layer.weight": torch.ones(2)},
        "epoch": 1,
        "hyper_parameters": {"lr": 1},
    }
    torch.save(
        {**lightning, "pytorch-lightning_version": "2.6.6", "global_step": 1, "loops": {}},
        "lightning.ckpt",
    )
    with zipfile.ZipFile("archive.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", "x" * 1000)
    return ["nowhere.ckpt", *sorted(path.name for path in Path.cwd().iterdir())]


@pytest.mark.parametrize("verb", OF_A_CHECKPOINT)
def test_a_file_that_is_no_checkpoint_is_refused_by_every_verb(ckpt: str, verb: str) -> None:
    for name in make_files(Path(ckpt)):
        refused(*OF_A_CHECKPOINT[verb](name), told=name)
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
    refused(*OF_A_CHECKPOINT["fit"]("bad.ckpt"), told="bad.ckpt")


def test_what_a_run_says_of_lightning_and_its_hyperparameters_is_not_read(ckpt: str) -> None:
    content = torch.load(ckpt, weights_only=True)
    content |= {
        "hyper_parameters": {"class_path": "os.system"},
        "pytorch-lightning_version": "newest",
    }
    torch.save(content, "odd.ckpt")
    succeed(*OF_A_CHECKPOINT["fit"]("odd.ckpt"))


def mutated(data: bytes, seed: int) -> bytes:
    """The bytes with a few flipped, sometimes with some missing: in the middle, or near either end."""
    numbers, changed = random.Random(seed), bytearray(data)
    for _ in range(numbers.choice((1, 1, 3, 30))):
        near_end = numbers.choice((len(data), 4000, -6000))
        changed[
            numbers.randrange(near_end) if near_end > 0 else numbers.randrange(near_end, 0)
        ] ^= 1 << numbers.randrange(8)
    if seed % 5 == 0:
        start = numbers.randrange(len(changed))
        del changed[start : start + numbers.randrange(1, 100)]
    return bytes(changed)


def rewrite(source: str, path: str, change: Callable[[bytes], bytes]) -> None:
    """A checkpoint whose pickle is changed and whose checksums are right, as a forger would write it."""
    with zipfile.ZipFile(source) as archive:
        records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    writer = torch._C.PyTorchFileWriter(path)
    for name, data in records.items():
        if name not in ("version", ".data/serialization_id"):
            data = change(data) if name == "data.pkl" else data
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


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
            assert outcome.code == 0 or (outcome.out == "" and outcome.err.count("\n") == 1), (
                seed,
                outcome,
            )
    assert codes.count(2) > 30
    assert [path.name for path in Path.cwd().iterdir()] == ["bad.ckpt"]
