"""Laws of exported pairs and draft files: a draft is read as written, only for its target."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from safetensors.torch import load_file, save_file
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
    MedusaDrafter,
    ModelDrafter,
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
    return EagleDrafter(
        feature_layers=[0, 2],
        draft_vocabulary=tokens,
        num_heads=2,
        num_key_heads=2,
        intermediate_size=8,
        **sizes(target),
    )


def medusa(target: HuggingFaceLM) -> MedusaDrafter:
    return MedusaDrafter(num_heads=2, **sizes(target)).init_from(target)


def exit_with_head(target: HuggingFaceLM) -> EarlyExitDrafter:
    return EarlyExitDrafter(exit_layer=1, head_layers=[1], **sizes(target))


def draft_model(target: HuggingFaceLM) -> ModelDrafter:
    """Return a draft model whose embeddings are its output matrix too."""
    target_config = target.arguments()["model"]
    config = {**target_config, "num_hidden_layers": 1, "tie_word_embeddings": True}
    return ModelDrafter(HuggingFaceLM(config))


def lookup_first(target: HuggingFaceLM) -> NGramWithFallback:
    return NGramWithFallback(NGramDrafter(min_ngram=2), medusa(target))


KINDS: dict[str, Callable[[HuggingFaceLM], Drafter]] = {
    "heads": medusa,
    "exit with a head": exit_with_head,
    "exit without weights": lambda target: EarlyExitDrafter(exit_layer=1),
    "model": draft_model,
    "lookup first": lookup_first,
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
    """Return a safetensors file's header, and the bytes of its weights."""
    content = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def altered(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a function that writes a copy of the draft file with another document."""

    def write_copy(path: Path) -> None:
        values, weights = header("draft.safetensors")
        document = json.loads(values["__metadata__"][KEY])
        change(document)
        values["__metadata__"][KEY] = json.dumps(document)
        text = json.dumps(values).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + weights)

    return write_copy


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_drafts_the_same_when_it_is_read_again(kind: str, tmp_path: Path) -> None:
    target = load_model("target")
    drafter = KINDS[kind](target).eval()
    path = tmp_path / "new" / "draft.safetensors"
    checkpoints.save(path, TargetReference.of(target), drafter, recipe=RECIPE)

    loaded = checkpoints.load(path, target=target)
    assert loaded.recipe == RECIPE
    assert loaded.target is target
    assert spec(loaded.drafter) == spec(drafter)
    weights = dict(drafter.state_dict())
    torch.testing.assert_close(dict(loaded.drafter.state_dict()), weights, rtol=0, atol=0)

    expected = SpeculativeDecoder(target, drafter).decode([[5, 6, 7]], max_new_tokens=9)
    result = SpeculativeDecoder(target, loaded.drafter).decode([[5, 6, 7]], max_new_tokens=9)
    assert result.rows[0].tokens == expected.rows[0].tokens
    assert result.rows[0].rounds == expected.rows[0].rounds


def test_the_file_is_safetensors_with_one_document_and_nothing_of_the_target() -> None:
    values, _ = header("draft.safetensors")
    metadata = values.pop("__metadata__")
    assert metadata.keys() == {KEY}
    assert set(load_file("draft.safetensors")) == values.keys()
    assert {name.split(".")[0] for name in values} == {"drafter"}

    origin = load_model("target").origin
    assert origin is not None
    assert json.loads(metadata[KEY])["target"]["sha256"] == origin.sha256
    assert checkpoints.is_exported("draft.safetensors")
    assert not checkpoints.is_exported(SHIPPED / "README.md")


def check_rounded_weights(
    weights: dict[str, torch.Tensor],
    rounded_weights: dict[str, torch.Tensor],
    dtype: str,
) -> None:
    """Check that weights differ by no more than storing them in a dtype explains."""
    assert weights.keys() == rounded_weights.keys()
    for name, weight in weights.items():
        rounded = rounded_weights[name]
        assert weight.dtype == rounded.dtype == torch.float32, name

        # A step of int8 is 1 / 127 of a row's largest value, and rounding errs by half a step.
        is_matrix = weight.dim() > 1
        rows = weight.flatten(1) if is_matrix else weight[None]
        divisor = 254 if dtype == "int8" and is_matrix else 100
        limits = rows.abs().amax(1) / divisor
        errors = (rows - rounded.view(rows.shape)).abs()
        assert (errors <= limits[:, None] + 1e-6).all(), name


@pytest.mark.parametrize(
    ("dtype", "max_size"), [("float16", 0.6), ("bfloat16", 0.6), ("int8", 0.45)]
)
def test_smaller_types_keep_what_is_computed_in(
    dtype: str,
    max_size: float,
    tmp_path: Path,
) -> None:
    pair = checkpoints.load("pair.safetensors")
    path = tmp_path / "small.safetensors"
    checkpoints.save(path, pair.target, pair.drafts, prompts=pair.prompts, dtype=dtype)
    assert path.stat().st_size < max_size * Path("pair.safetensors").stat().st_size

    small_pair = checkpoints.load(path)
    check_rounded_weights(pair.target.state_dict(), small_pair.target.state_dict(), dtype)
    check_rounded_weights(pair.drafter.state_dict(), small_pair.drafter.state_dict(), dtype)
    decoder = SpeculativeDecoder.from_checkpoint(path)
    expected = decoder.decode_standard([[5, 6]], max_new_tokens=6)
    assert decoder.decode([[5, 6]], max_new_tokens=6).tokens == expected.tokens


def test_weights_that_are_too_large_for_a_type_are_refused(tmp_path: Path) -> None:
    target = load_model("narrow")
    with torch.no_grad():
        next(target.parameters())[0, 0] = 1e6
    with pytest.raises(ValueError, match="too large for float16"):
        checkpoints.save(tmp_path / "x.safetensors", target, NGramDrafter(), dtype="float16")
    assert not list(tmp_path.glob("*.safetensors"))


def test_older_files_are_read(tmp_path: Path) -> None:
    """An exported torch archive gives what the file that it is converted to gives."""
    old_pair = checkpoints.load(Path(__file__).parent / "data" / "rnn_format_1.ckpt")
    path = tmp_path / "new.safetensors"
    checkpoints.save(path, old_pair.target, old_pair.drafts, prompts=old_pair.prompts)
    new_pair = checkpoints.load(path)
    assert new_pair.prompts == old_pair.prompts
    assert spec(new_pair.target) == spec(old_pair.target)
    old_weights = old_pair.target.parameters()
    for old_weight, new_weight in zip(old_weights, new_pair.target.parameters(), strict=True):
        assert torch.equal(old_weight, new_weight)

    shipped = checkpoints.load(SHIPPED / "smollm2_eagle.safetensors")
    assert isinstance(shipped.drafter, EagleDrafter)


def test_a_draft_computes_in_the_dtype_of_its_target_by_default() -> None:
    for options, dtype in (({}, torch.bfloat16), ({"draft_dtype": "float32"}, torch.float32)):
        decoder = SpeculativeDecoder.from_pretrained(
            "target", "draft.safetensors", dtype="bfloat16", **options
        )
        assert {weight.dtype for weight in decoder.drafter.parameters()} == {dtype}
    from_file = SpeculativeDecoder.from_checkpoint("draft.safetensors")
    assert from_file.num_draft_tokens == decoder.num_draft_tokens == 2
    assert from_file.recipe == RECIPE
    from_file = SpeculativeDecoder.from_checkpoint("draft.safetensors", num_draft_tokens=5)
    assert from_file.num_draft_tokens == 5


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
    names: dict[str, Any],
    kind: str,
    window: int | None,
) -> None:
    loaded = checkpoints.load_pair(PairSource(**names))
    assert type(loaded.drafter).__name__ == kind
    assert loaded.num_draft_tokens == window
    if isinstance(loaded.drafter, NGramWithFallback):
        assert loaded.drafter.lookup.settings.min_ngram == 2


def test_an_early_exit_keeps_its_trained_heads_at_another_layer(tmp_path: Path) -> None:
    target, path = load_model("target"), tmp_path / "exits.safetensors"
    checkpoints.save(
        path, target, EarlyExitDrafter(exit_layer=1, head_layers=[1, 2], **sizes(target))
    )
    choice = {"class_path": "EarlyExitDrafter", "init_args": {"exit_layer": 2}}
    drafter = checkpoints.load_pair(PairSource(ckpt=str(path), drafter=choice)).drafter
    assert isinstance(drafter, EarlyExitDrafter)
    assert drafter.settings.exit_layer == 2
    assert set(drafter.heads) == {"1", "2"}


def test_a_drafter_of_a_users_own_is_imported_only_where_the_user_names_it(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    name = f"{Oracle.__module__}.Oracle"
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
    without_files = HuggingFaceLM(load_model("target").model, tokenizer=target.tokenizer)
    path = tmp_path / "loose.safetensors"
    checkpoints.save(path, TargetReference.of(without_files), KINDS["heads"](target))
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
    with pytest.raises(ValueError, match=r"use --ckpt pair\.safetensors without --target"):
        checkpoints.load("pair.safetensors", target="other")


def tear(path: Path) -> None:
    path.write_bytes(Path("draft.safetensors").read_bytes()[:-100])


def copy_target(path: Path) -> None:
    path.write_bytes(Path("target/model.safetensors").read_bytes())


def with_entries(**values: Any) -> Callable[[Path], object]:
    return altered(lambda document: document.update(values))


def with_argument(**values: Any) -> Callable[[Path], object]:
    return altered(lambda document: document["drafter"]["arguments"].update(values))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (tear, "truncated or damaged"),
    "other weights": (copy_target, "no checkpoint"),
    "a later format": (with_entries(format=3), "has format 3"),
    "shared heads": (with_argument(shared_output=True), "train them again"),
    "no prompts": (altered(lambda document: document.pop("prompts")), "it has no 'prompts'"),
    "no target": (with_entries(target=None), "expected a class"),
    "no digest": (
        altered(lambda document: document["target"].update(sha256=5)),
        "its target.sha256 must be",
    ),
    "an absurd size": (with_argument(num_heads=64), "more"),
    "no window": (
        altered(lambda document: document["recipe"].update(num_draft_tokens=0)),
        "from 1",
    ),
    "a type that is none": (with_entries(computes_in="int3"), "must be one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_hold_together_is_one_line(name: str, tmp_path: Path) -> None:
    write_bad_file, message = REFUSED[name]
    path = tmp_path / "bad.safetensors"
    write_bad_file(path)
    with pytest.raises(ValueError, match=message) as error:
        checkpoints.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_int8_scales_must_fit_their_matrices(tmp_path: Path) -> None:
    draft = checkpoints.load("draft.safetensors")
    path = tmp_path / "small.safetensors"
    assert draft.reference is not None
    checkpoints.save(path, draft.reference, draft.drafts, dtype="int8")
    weights = load_file(path)
    metadata = header(path)[0]["__metadata__"]
    name = next(name for name in weights if name.endswith(".int8_scale"))
    scales = weights.pop(name)

    for bad_weights, message in (
        ({**weights, name: scales[:1]}, "invalid"),
        ({**weights, name: scales / 0}, "not finite"),
        (weights, "invalid"),
    ):
        save_file(bad_weights, path, metadata)
        with pytest.raises(ValueError, match=message):
            checkpoints.load(path)


def test_a_weight_of_two_names_has_one_value(tmp_path: Path) -> None:
    target = load_model("target")
    path = tmp_path / "pair.ckpt"
    drafter = draft_model(target)
    weights = {f"drafter.{name}": value for name, value in drafter.state_dict().items()}
    content: dict[str, Any] = {
        KEY: describe(TargetReference.of(target), drafter),
        "state_dict": weights,
    }
    torch.save(content, path)
    checkpoints.load(path)

    (output_name,) = (name for name in weights if name.endswith("lm_head.weight"))
    weights[output_name] = weights[output_name] + 1
    torch.save(content, path)
    with pytest.raises(ValueError, match="differ, and it has one weight for both"):
        checkpoints.load(path)


def test_the_shipped_recurrent_target_continues_progressions_that_it_has_not_learned() -> None:
    """At least 95% of the terms of all fifteen that its config holds out."""
    decoder = SpeculativeDecoder.from_checkpoint(SHIPPED / "rnn.safetensors")
    splits = ArithmeticProgressions(seed=26).splits()
    unseen = [list(sequence) for sequence in (*splits.val, *splits.test)]
    assert len(unseen) == 15
    prompts = [sequence[:3] for sequence in unseen]
    result = decoder.decode_standard(prompts, max_new_tokens=7)

    num_right = 0
    for tokens, sequence in zip(result.tokens, unseen, strict=True):
        for token, expected_token in zip(tokens[:7], sequence[3:10], strict=True):
            num_right += token == expected_token
    assert num_right >= 100  # of 105
