"""Laws of draft files: what is written guesses the same again, for its own target and no other, and runs nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import call, refused, succeed
from safetensors.torch import load_file
from tiny_models import write, write_text_model

from lightning_specdec import SpeculativeDecoder, checkpoint, draft_file
from lightning_specdec.cli_models import load_decoder
from lightning_specdec.cli_options import make_parser
from lightning_specdec.description import spec
from lightning_specdec.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    LookupFirstDrafter,
    ModelDrafter,
    MultiTokenDrafter,
    NGramDrafter,
)
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model

BRIEF = ("--repeats", "1", "--max_new_tokens", "6", "--output", "json", "--prompt", "the cat")
RECIPE = {"training": "MultiTokenTraining", "num_draft_tokens": 2, "losses": {"val/loss": 1.25}}
KINDS: dict[str, Callable[[HuggingFaceLM], Drafter]] = {
    "heads": lambda target: MultiTokenDrafter(2, **sizes(target)).init_from(target),
    "exit with a head": lambda target: EarlyExitDrafter(1, head_layers=[1], **sizes(target)),
    "exit without weights": lambda target: EarlyExitDrafter(1),
    "model": lambda target: ModelDrafter(
        HuggingFaceLM({**target.arguments()["model"], "num_hidden_layers": 1, "tie_word_embeddings": True})
    ),
    "look-up first": lambda target: LookupFirstDrafter(NGramDrafter(min_ngram=2), KINDS["heads"](target)),
    "some tokens": lambda target: eagle(target, [0, 1, 5, 7]),
}


def sizes(target: HuggingFaceLM) -> dict[str, Any]:
    return {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}


def eagle(target: HuggingFaceLM, tokens: list[int]) -> EagleDrafter:
    shape: dict[str, Any] = {"num_heads": 2, "num_key_heads": 2, "intermediate_size": 8, **sizes(target)}
    return EagleDrafter([0, 2], draft_vocabulary=tokens, **shape)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, another one, and a draft file for the first. Read it, do not write to it."""
    home = tmp_path_factory.mktemp("drafts")
    write_text_model(home / "target")
    write_text_model(home / "other", seed=2)
    write(home / "narrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        target = load_model("target")
        draft_file.save_draft("draft.safetensors", KINDS["heads"](target), target, recipe=RECIPE)
        checkpoint.save("whole.ckpt", target, KINDS["heads"](target))
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def description(path: str = "draft.safetensors") -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A draft file's description, its whole header, and what follows."""
    content = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return json.loads(header["__metadata__"][draft_file.KEY]), header, content[8 + length :]


def altered(path: Path, change: Callable[..., object], source: str = "draft.safetensors") -> Path:
    """A copy of the draft file with another description."""
    described, header, rest = description(source)
    change(described)
    header["__metadata__"][draft_file.KEY] = json.dumps(described)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_guesses_the_same_when_it_is_read_again(kind: str, tmp_path: Path) -> None:
    target = load_model("target")
    drafter = KINDS[kind](target).eval()
    path = tmp_path / "new" / "draft.safetensors"
    draft_file.save_draft(path, drafter, target, recipe=RECIPE)
    again, recipe = draft_file.load_draft(path, target)
    assert recipe == RECIPE and spec(again) == spec(drafter)
    weights = again.state_dict()
    assert weights.keys() == drafter.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in drafter.state_dict().items())
    results = [
        SpeculativeDecoder(target, each).decode([[5, 6, 7]], max_new_tokens=12).rows[0] for each in (drafter, again)
    ]
    assert results[0].tokens == results[1].tokens and results[0].rounds == results[1].rounds


def test_the_file_is_safetensors_with_all_that_it_says_in_one_entry() -> None:
    described, header, _ = description()
    assert header["__metadata__"].keys() == {draft_file.KEY}
    assert described["class"] == "MultiTokenDrafter" and described["target"]["source"] == "target"
    assert described["target"]["sha256"] == load_model("target").origin.sha256  # type: ignore[union-attr]
    assert set(load_file("draft.safetensors")) == header.keys() - {"__metadata__"}


def test_a_draft_computes_as_its_target_unless_told_however_it_is_stored(tmp_path: Path) -> None:
    target = load_model("target")
    small, whole = tmp_path / "small.safetensors", Path("draft.safetensors")
    draft_file.save_draft(small, KINDS["heads"](target), target, dtype="bfloat16")
    assert small.stat().st_size < 0.7 * whole.stat().st_size
    for options, computed in (({}, torch.bfloat16), ({"draft_dtype": "float32"}, torch.float32)):
        decoder = SpeculativeDecoder.from_pretrained("target", small, dtype="bfloat16", **options)  # type: ignore[arg-type]
        assert {weight.dtype for weight in decoder.drafter.parameters()} == {computed}
        assert decoder.decode([[5, 6]], max_new_tokens=4).tokens
    assert next(SpeculativeDecoder.from_pretrained("target", small).drafter.parameters()).dtype == torch.float32


def test_decode_and_sweep_take_a_draft_file_with_its_own_window() -> None:
    given = ("--target", "target", "--draft", "draft.safetensors")
    document = succeed("decode", *given, *BRIEF).json
    (each,) = document["prompts"]
    assert each["standard"]["tokens"] == each["speculative"]["tokens"]
    assert document["manifest"]["options"]["num_draft_tokens"] == 2
    assert (
        succeed("decode", *given, "--num_draft_tokens", "1", *BRIEF).json["manifest"]["options"]["num_draft_tokens"]
        == 1
    )
    rows = succeed("sweep", *given, "--num_draft_tokens", "2", *BRIEF).out
    assert "MultiTokenDrafter" in rows


@pytest.mark.parametrize(
    "given",
    [
        ("--target", "target", "--draft", "draft.safetensors"),
        ("--target", "target", "--draft", "other"),
        ("--ckpt", "whole.ckpt"),
    ],
)
def test_look_up_goes_before_any_draft(given: tuple[str, ...]) -> None:
    options = ("--drafter", "LookupFirstDrafter", "--drafter.min_ngram", "2")
    text = ("--prompt", "1 2 3 4 1 2 3") if given[0] == "--ckpt" else ()
    (each,) = succeed("decode", *given, *options, *(BRIEF[:-2] if text else BRIEF), *text).json["prompts"]
    assert each["standard"]["tokens"] == each["speculative"]["tokens"]


def test_before_the_draft_of_a_checkpoint_matches_of_two_tokens_are_the_shortest() -> None:
    options = make_parser("decode").parse_args(["--ckpt", "whole.ckpt", "--drafter", "LookupFirstDrafter"])
    drafter = load_decoder(options).drafter
    assert isinstance(drafter, LookupFirstDrafter) and drafter.lookup.min_ngram == 2


def test_look_up_first_needs_a_draft_and_takes_the_look_ups_arguments() -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        "target", "draft.safetensors", drafter="LookupFirstDrafter", drafter_arguments={"min_ngram": 3}
    )
    assert isinstance(decoder.drafter, LookupFirstDrafter) and decoder.drafter.lookup.min_ngram == 3
    assert isinstance(decoder.drafter.fallback, MultiTokenDrafter) and decoder.num_draft_tokens == 2
    unnamed = SpeculativeDecoder.from_pretrained("target", "draft.safetensors", drafter="LookupFirstDrafter")
    assert isinstance(unnamed.drafter, LookupFirstDrafter) and unnamed.drafter.lookup.min_ngram == 2
    refused(
        "decode", "--target", "target", "--drafter", "LookupFirstDrafter", *BRIEF, told="needs a model: give a draft"
    )


def test_a_decoder_saves_its_draft_and_finds_it_again(tmp_path: Path) -> None:
    path = tmp_path / "again.safetensors"
    decoder = SpeculativeDecoder.from_pretrained("target", "draft.safetensors")
    decoder.save_draft(path)
    again = SpeculativeDecoder.from_pretrained("target", path)
    assert again.recipe == decoder.recipe == RECIPE and again.num_draft_tokens == 2
    assert SpeculativeDecoder.from_pretrained("target", path, num_draft_tokens=5).num_draft_tokens == 5


def test_info_says_what_a_draft_file_holds_without_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.safetensors").write_bytes(Path("draft.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    shown = succeed("info", "d.safetensors").out
    assert shown == succeed("info", "--ckpt", "d.safetensors").out
    assert "drafter     MultiTokenDrafter(num_heads=2" in shown and "target      target (sha256 " in shown
    assert "recipe      num_draft_tokens: 2\n" in shown and "recipe      losses val/loss: 1.25\n" in shown
    refused("info", told="name one checkpoint or draft file, got 0")


def test_a_draft_of_another_target_is_refused_by_name() -> None:
    own = load_model("target").origin.sha256  # type: ignore[union-attr]
    outcome = refused("decode", "--target", "other", "--draft", "draft.safetensors", *BRIEF)
    told = f"error: draft.safetensors was trained for target (sha256 {own[:12]}...), the target other (sha256 "
    assert outcome.err.startswith(told) and outcome.err.endswith("is another: give its own target\n")


def test_where_weights_have_no_files_class_sizes_and_tokens_tell_targets_apart(tmp_path: Path) -> None:
    target = load_model("target")
    loose = HuggingFaceLM(load_model("target").model, tokenizer=target.tokenizer)
    path = tmp_path / "loose.safetensors"
    draft_file.save_draft(path, KINDS["heads"](target), loose)
    draft_file.load_draft(path, target)
    draft_file.load_draft("draft.safetensors", loose)
    with pytest.raises(
        ValueError, match="was trained for a LlamaForCausalLM, the target narrow .* vocab_size is 67 and not 320"
    ):
        draft_file.load_draft(path, load_model("narrow"))


def torn(path: Path) -> None:
    path.write_bytes(Path("draft.safetensors").read_bytes()[:-100])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (torn, "is truncated or damaged"),
    "empty": (lambda path: path.write_bytes(b""), "is truncated or damaged"),
    "text": (lambda path: path.write_text("{}" * 20), "is truncated or damaged"),
    "a checkpoint": (lambda path: path.write_bytes(Path("whole.ckpt").read_bytes()), "is a checkpoint and no draft"),
    "a model's weights": (
        lambda path: path.write_bytes(Path("target/model.safetensors").read_bytes()),
        "is no draft file of this program",
    ),
    "a format of the future": (lambda path: altered(path, lambda it: it.update(format=2)), "has draft format 2"),
    "more than it may say": (lambda path: altered(path, lambda it: it.update(run="rm")), "has not the entries"),
    "no target": (lambda path: altered(path, lambda it: it.update(target=None)), "nothing usable of its target"),
    "a digest that is none": (
        lambda path: altered(path, lambda it: it["target"].update(sha256="../x")),
        "nothing usable of its target",
    ),
    "a class of elsewhere": (
        lambda path: altered(path, lambda it: it.update({"class": "os.system"})),
        "'os.system' is none of the classes",
    ),
    "an absurd size": (
        lambda path: altered(path, lambda it: it["arguments"].update(num_heads=64)),
        "the weights of the draft lack",
    ),
    "a window of nothing": (
        lambda path: altered(path, lambda it: it["recipe"].update(num_draft_tokens=0)),
        "must be from 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_hold_together_is_one_line(name: str, tmp_path: Path) -> None:
    spoil, told = REFUSED[name]
    path = tmp_path / "bad.safetensors"
    spoil(path)
    outcome = refused("decode", "--target", "target", "--draft", str(path), *BRIEF, told=told)
    assert str(path) in outcome.err
    if "window" not in name:
        refused("info", str(path), told=told)


def test_a_vocabulary_that_is_none_or_cannot_end_a_text_is_one_line(tmp_path: Path) -> None:
    target = load_model("target")
    bare = HuggingFaceLM(target.model)  # it does not know what ends a text
    good = str(tmp_path / "good.safetensors")
    draft_file.save_draft(good, eagle(target, [0, 1, 5]), bare)
    for tokens, told in (
        ([0, 2, 5], "vocabulary of 3 tokens leaves out the tokens that end a text (1)"),
        ([0, 5, 1], "draft_vocabulary must ascend, and 1 follows 5"),
        ([0, 1, 1], "draft_vocabulary must ascend, and 1 follows 1"),
        ([0, 1, 999], "a token of draft_vocabulary must be from 0 to 319, got 999"),
        ([0, 1, "5"], "a token of draft_vocabulary"),
    ):
        changed = {"draft_vocabulary": tokens}
        path = altered(tmp_path / "some.safetensors", lambda it, new=changed: it["arguments"].update(new), good)
        refused("decode", "--target", "target", "--draft", str(path), *BRIEF, told=told)
    with pytest.raises(ValueError, match="leaves out the tokens that end a text"):
        draft_file.save_draft(tmp_path / "never.safetensors", eagle(target, [0, 2, 5]), target)
    assert not (tmp_path / "never.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--draft", "nowhere.safetensors"], "there is no draft file nowhere.safetensors"),
        (["--draft", "draft.safetensors", "--draft_quantization", "int8"], "neither quantized nor of the hub"),
        (["--draft", "draft.safetensors", "--drafter", "NGramDrafter"], "the draft is a MultiTokenDrafter already"),
    ],
)
def test_what_a_draft_file_does_not_go_with_is_one_line(arguments: list[str], told: str) -> None:
    refused("decode", "--target", "target", *arguments, *BRIEF, told=told)


def test_a_draft_of_a_target_that_the_checkpoint_holds_is_not_exported(tmp_path: Path) -> None:
    output = tmp_path / "d.safetensors"
    assert "holds its target itself" in call("export", "--ckpt", "whole.ckpt", "--output", str(output)).err
    output.write_bytes(b"mine")
    assert "no draft file" in call("export", "--ckpt", "whole.ckpt", "--output", str(output)).err
    assert output.read_bytes() == b"mine"
