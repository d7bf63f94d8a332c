"""Laws of exported pairs and draft files: what is written drafts the same again, for its own target alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write, write_text_model

from lightning_specdec import SpeculativeDecoder, checkpoints
from lightning_specdec.checkpoints import TargetReference
from lightning_specdec.checkpoints.archive import KEY, read
from lightning_specdec.checkpoints.checkpoint import describe
from lightning_specdec.checkpoints.networks import spec
from lightning_specdec.config.models import PairSource
from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    MultiTokenDrafter,
    NGramDrafter,
    NGramWithFallback,
)
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model

RECIPE = {"training": "MedusaTraining", "num_draft_tokens": 2, "losses": {"val/loss": 1.25}}
SHIPPED = Path(__file__).parent.parent / "checkpoints"


def sizes(target: HuggingFaceLM) -> dict[str, Any]:
    return {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}


def eagle(target: HuggingFaceLM, tokens: list[int]) -> EagleDrafter:
    shape: dict[str, Any] = {
        "num_heads": 2,
        "num_key_heads": 2,
        "intermediate_size": 8,
        **sizes(target),
    }
    return EagleDrafter(feature_layers=[0, 2], draft_vocabulary=tokens, **shape)


KINDS: dict[str, Callable[[HuggingFaceLM], Drafter]] = {
    "heads": lambda target: MultiTokenDrafter(num_heads=2, **sizes(target)).init_from(target),
    "exit with a head": lambda target: EarlyExitDrafter(
        exit_layer=1, head_layers=[1], **sizes(target)
    ),
    "exit without weights": lambda target: EarlyExitDrafter(exit_layer=1),
    "model": lambda target: ModelDrafter(
        HuggingFaceLM(
            {**target.arguments()["model"], "num_hidden_layers": 1, "tie_word_embeddings": True}
        )
    ),
    "lookup first": lambda target: NGramWithFallback(
        NGramDrafter(min_ngram=2), KINDS["heads"](target)
    ),
    "some tokens": lambda target: eagle(target, [0, 1, 5, 7]),
}


class Oracle(ModelDrafter):
    """A drafter of a user's own."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, others, a draft file and a pair. Read it, do not write to it."""
    home = tmp_path_factory.mktemp("drafts")
    write_text_model(home / "target")
    write_text_model(home / "other", seed=2)
    write(home / "narrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        target = load_model("target")
        heads = KINDS["heads"](target)
        checkpoints.save("draft.safetensors", TargetReference.of(target), heads, recipe=RECIPE)
        checkpoints.save("pair.safetensors", target, heads, prompts=[[5, 6, 7]], recipe=RECIPE)
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def header(path: str | Path) -> tuple[dict[str, Any], bytes]:
    content = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def altered(
    path: Path, change: Callable[[dict[str, Any]], object], source: str = "draft.safetensors"
) -> Path:
    """A copy of a file with another document."""
    head, rest = header(source)
    document = json.loads(head["__metadata__"][KEY])
    change(document)
    head["__metadata__"][KEY] = json.dumps(document)
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_drafts_the_same_when_it_is_read_again(kind: str, tmp_path: Path) -> None:
    target = load_model("target")
    drafter, path = KINDS[kind](target).eval(), tmp_path / "new" / "draft.safetensors"
    checkpoints.save(path, TargetReference.of(target), drafter, recipe=RECIPE)
    loaded = checkpoints.load(path, target=target)
    again = loaded.drafter
    assert loaded.recipe == RECIPE and spec(again) == spec(drafter) and loaded.target is target
    torch.testing.assert_close(dict(again.state_dict()), dict(drafter.state_dict()), rtol=0, atol=0)
    one, other = (
        SpeculativeDecoder(target, each).decode([[5, 6, 7]], max_new_tokens=9)
        for each in (drafter, again)
    )
    assert one.rows[0].tokens == other.rows[0].tokens and one.rows[0].rounds == other.rows[0].rounds


def test_the_file_is_safetensors_with_one_document_and_nothing_of_the_target() -> None:
    head, _ = header("draft.safetensors")
    assert head["__metadata__"].keys() == {KEY} and set(
        load_file("draft.safetensors")
    ) == head.keys() - {"__metadata__"}
    assert {name.split(".")[0] for name in load_file("draft.safetensors")} == {"drafter"}
    document = json.loads(head["__metadata__"][KEY])
    assert document["target"]["sha256"] == load_model("target").origin.sha256  # type: ignore[union-attr]
    assert checkpoints.is_exported("draft.safetensors") and not checkpoints.is_exported(
        SHIPPED / "README.md"
    )


@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.6), ("bfloat16", 0.6), ("int8", 0.45)])
def test_smaller_types_keep_what_is_computed_in(dtype: str, most: float, tmp_path: Path) -> None:
    whole, path = checkpoints.load("pair.safetensors"), tmp_path / "small.safetensors"
    checkpoints.save(path, whole.target, whole.drafts, prompts=whole.prompts, dtype=dtype)
    again = checkpoints.load(path)
    assert path.stat().st_size < most * Path("pair.safetensors").stat().st_size
    for old, new in ((whole.target, again.target), (whole.drafter, again.drafter)):
        for (name, one), other in zip(
            old.state_dict().items(), new.state_dict().values(), strict=True
        ):
            assert one.dtype == other.dtype == torch.float32, name
            rows = one.flatten(1) if one.dim() > 1 else one[None]
            limit = rows.abs().amax(1) / (254 if dtype == "int8" and one.dim() > 1 else 100)
            assert ((rows - other.view(rows.shape)).abs() <= limit[:, None] + 1e-6).all(), name
    decoder = SpeculativeDecoder.from_checkpoint(path)
    assert (
        decoder.decode([[5, 6]], max_new_tokens=6).tokens
        == decoder.decode_standard([[5, 6]], max_new_tokens=6).tokens
    )


def test_weights_that_are_too_large_for_a_type_are_refused(tmp_path: Path) -> None:
    target = load_model("narrow")
    with torch.no_grad():
        next(target.parameters())[0, 0] = 1e6
    with pytest.raises(ValueError, match="too large for float16"):
        checkpoints.save(tmp_path / "x.safetensors", target, NGramDrafter(), dtype="float16")
    assert not list(tmp_path.glob("*.safetensors"))


def test_older_files_are_read(tmp_path: Path) -> None:
    """An exported torch archive gives what the file that it is converted to gives."""
    former = checkpoints.load(Path(__file__).parent / "data" / "rnn_format_1.ckpt")
    checkpoints.save(
        tmp_path / "now.safetensors", former.target, former.drafts, prompts=former.prompts
    )
    now = checkpoints.load(tmp_path / "now.safetensors")
    assert former.prompts == now.prompts and spec(former.target) == spec(now.target)
    for weight, other in zip(former.target.parameters(), now.target.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert isinstance(checkpoints.load(SHIPPED / "smollm2_eagle.safetensors").drafter, EagleDrafter)


def test_a_draft_computes_as_its_target_unless_told() -> None:
    for options, dtype in (({}, torch.bfloat16), ({"draft_dtype": "float32"}, torch.float32)):
        decoder = SpeculativeDecoder.from_pretrained(
            "target", "draft.safetensors", dtype="bfloat16", **options
        )
        assert {weight.dtype for weight in decoder.drafter.parameters()} == {dtype}
    named = SpeculativeDecoder.from_checkpoint("draft.safetensors")
    assert named.num_draft_tokens == decoder.num_draft_tokens == 2 and named.recipe == RECIPE
    assert (
        SpeculativeDecoder.from_checkpoint("draft.safetensors", num_draft_tokens=5).num_draft_tokens
        == 5
    )


@pytest.mark.parametrize(
    ("names", "kind", "window"),
    [
        ({"target": "target", "draft": "draft.safetensors"}, "MedusaDrafter", 2),
        (
            {"target": "target", "draft": "draft.safetensors", "drafter": "NGramWithFallback"},
            "NGramWithFallback",
            2,
        ),
        (
            {"target": "target", "draft": "other", "drafter": "NGramWithFallback"},
            "NGramWithFallback",
            None,
        ),
        ({"ckpt": "pair.safetensors", "drafter": "NGramWithFallback"}, "NGramWithFallback", 2),
        ({"ckpt": "pair.safetensors", "drafter": "MultiTokenDrafter"}, "MedusaDrafter", 2),
        ({"ckpt": "pair.safetensors", "drafter": "NGramDrafter"}, "NGramDrafter", None),
    ],
)
def test_the_drafter_follows_from_what_is_named(
    names: dict[str, Any], kind: str, window: int | None
) -> None:
    loaded = checkpoints.load_pair(PairSource(**names))
    assert type(loaded.drafter).__name__ == kind and loaded.num_draft_tokens == window
    if isinstance(loaded.drafter, NGramWithFallback):
        assert loaded.drafter.lookup.settings.min_ngram == 2


def test_an_early_exit_keeps_its_trained_heads_at_another_layer(tmp_path: Path) -> None:
    target, path = load_model("target"), tmp_path / "exits.safetensors"
    checkpoints.save(
        path, target, EarlyExitDrafter(exit_layer=1, head_layers=[1, 2], **sizes(target))
    )
    choice = {"class_path": "EarlyExitDrafter", "init_args": {"exit_layer": 2}}
    found = checkpoints.load_pair(PairSource(ckpt=str(path), drafter=choice)).drafter
    assert (
        isinstance(found, EarlyExitDrafter)
        and found.settings.exit_layer == 2
        and set(found.heads) == {"1", "2"}
    )


def test_a_drafter_of_a_users_own_is_imported_only_where_the_user_names_it(tmp_path: Path) -> None:
    path, name = tmp_path / "own.safetensors", f"{Oracle.__module__}.Oracle"
    target = cases.MODELS["rnn"](0)
    checkpoints.save(path, target, Oracle(target))
    assert read(path)[KEY]["drafter"]["class"] == name
    with pytest.raises(ValueError, match=r"never imported from a file.*--drafter"):
        checkpoints.load(path)
    with pytest.raises(ValueError, match="never imported"):
        checkpoints.load(path, drafter="os.system")
    assert isinstance(
        checkpoints.load_pair(PairSource(ckpt=str(path), drafter=name)).drafter, Oracle
    )


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"was trained for target \(sha256 .*the target other .* has another sha256",
    ):
        checkpoints.load_pair(PairSource(target="other", draft="draft.safetensors"))
    target = load_model("target")
    loose = HuggingFaceLM(
        load_model("target").model, tokenizer=target.tokenizer
    )  # its weights have no files
    path = tmp_path / "loose.safetensors"
    checkpoints.save(path, TargetReference.of(loose), KINDS["heads"](target))
    assert checkpoints.load(path, target=target).target is target
    with pytest.raises(ValueError, match="has another vocab_size"):
        assert checkpoints.load(path, target=load_model("narrow")).target
    with pytest.raises(ValueError, match="which is not here: give its directory"):
        assert checkpoints.load(path).target
    checkpoints.save(path, TargetReference.of(target), eagle(target, [5, 7]))
    with pytest.raises(
        ValueError, match=r"vocabulary of 2 tokens leaves out tokens that end a text \("
    ):
        assert checkpoints.load(path, target=target).target
    with pytest.raises(ValueError, match="holds its target itself"):
        checkpoints.load("pair.safetensors", target="other")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (
        lambda path: path.write_bytes(Path("draft.safetensors").read_bytes()[:-100]),
        "truncated or damaged",
    ),
    "other weights": (
        lambda path: path.write_bytes(Path("target/model.safetensors").read_bytes()),
        "no checkpoint",
    ),
    "a later format": (lambda path: altered(path, lambda it: it.update(format=3)), "has format 3"),
    "shared heads": (
        lambda path: altered(
            path, lambda it: it["drafter"]["arguments"].update(shared_output=True)
        ),
        "train them again",
    ),
    "no prompts": (lambda path: altered(path, lambda it: it.pop("prompts")), "it has no 'prompts'"),
    "no target": (
        lambda path: altered(path, lambda it: it.update(target=None)),
        "expected a class",
    ),
    "no digest": (
        lambda path: altered(path, lambda it: it["target"].update(sha256=5)),
        "its target.sha256 must be",
    ),
    "an absurd size": (
        lambda path: altered(path, lambda it: it["drafter"]["arguments"].update(num_heads=64)),
        "more",
    ),
    "no window": (
        lambda path: altered(path, lambda it: it["recipe"].update(num_draft_tokens=0)),
        "from 1",
    ),
    "a type that is none": (
        lambda path: altered(path, lambda it: it.update(computes_in="int3")),
        "must be one of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_hold_together_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    REFUSED[name][0](path)
    with pytest.raises(ValueError, match=REFUSED[name][1]) as raised:
        checkpoints.load(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_int8_scales_must_fit_their_matrices(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole, path = checkpoints.load("draft.safetensors"), tmp_path / "small.safetensors"
    assert whole.reference is not None
    checkpoints.save(path, whole.reference, whole.drafts, dtype="int8")
    weights, metadata = load_file(path), header(path)[0]["__metadata__"]
    name = next(each for each in weights if each.endswith(".int8_scale"))
    for scale, told in (
        (weights[name][:1], "invalid"),
        (weights[name] / 0, "not finite"),
        (None, "invalid"),
    ):
        bad = {key: value for key, value in weights.items() if key != name} | (
            {} if scale is None else {name: scale}
        )
        save_file(bad, path, metadata)
        with pytest.raises(ValueError, match=told):
            checkpoints.load(path)


def test_a_weight_of_two_names_has_one_value(tmp_path: Path) -> None:
    target, path = load_model("target"), tmp_path / "pair.ckpt"
    drafter = KINDS["model"](target)
    content: dict[str, Any] = {KEY: describe(TargetReference.of(target), drafter)}
    weights = content["state_dict"] = {
        f"drafter.{name}": value for name, value in drafter.state_dict().items()
    }
    torch.save(content, path)
    checkpoints.load(path)
    (head,) = (name for name in weights if name.endswith("lm_head.weight"))
    weights[head] = weights[head] + 1
    torch.save(content, path)
    with pytest.raises(ValueError, match="differ, and it has one weight for both"):
        checkpoints.load(path)


def test_the_shipped_recurrent_target_continues_progressions_that_it_has_not_learned() -> None:
    """At least 95% of the terms of all fifteen that its config holds out."""
    decoder = SpeculativeDecoder.from_checkpoint(SHIPPED / "rnn.safetensors")
    splits = ArithmeticProgressions(seed=26).splits()
    unseen = [list(sequence) for sequence in (*splits.val, *splits.test)]
    assert len(unseen) == 15
    found = decoder.decode_standard([sequence[:3] for sequence in unseen], max_new_tokens=7).tokens
    num_right = sum(
        row[i] == sequence[3 + i]
        for row, sequence in zip(found, unseen, strict=True)
        for i in range(7)
    )
    assert num_right >= 100  # of 105
