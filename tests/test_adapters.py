"""Laws of adapters: `--adapter` decodes what PEFT computes with the adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cli_fixtures import call, refused, succeed
from tiny_models import write, write_text_model
from tiny_tokenizers import byte_level
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import TargetReference
from lightning_specdec.config.pairs import read_pair
from lightning_specdec.models import adapters
from lightning_specdec.models.changes import user_code
from lightning_specdec.models.loading import load_model

PROMPT = [3, 5, 7, 3, 5]
NUM_NEW = 12
BRIEF = ("--repeats", "1", "--max_new_tokens", "12", "--output", "json")
ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_alpha=16, **ATTENTION),
    "LoRA of all layers": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **ATTENTION),
    "a whole head": lambda: peft.LoraConfig(r=4, modules_to_save=["lm_head"], **ATTENTION),
    "new tokens": lambda: peft.LoraConfig(r=4, trainable_token_indices=PROMPT[:2], **ATTENTION),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_adapter(
    path: str,
    model_path: str,
    config: peft.PeftConfig | None = None,
    *,
    seed: int = 1,
) -> str:
    """Write an adapter with weights large enough to change the output."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    wrapped = peft.get_peft_model(model, config or KINDS["LoRA"]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator))
    wrapped.save_pretrained(path)
    return path


def merged(model_path: str, adapter_path: str) -> Any:
    """The model that PEFT merges."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    return peft.PeftModel.from_pretrained(model, adapter_path).merge_and_unload()


def reference(model: nn.Module) -> list[int]:
    generate: Any = model.generate
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    output = generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_with_an_adapter_is_the_merged_model(kind: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    adapter = write_adapter("adapter", model, KINDS[kind]())
    expected = merged(model, adapter)
    assert reference(expected) != reference(AutoModelForCausalLM.from_pretrained(model))

    loaded = load_model(model, adapter=adapter)
    assert not user_code(loaded.model) and not hasattr(loaded.model, "peft_config")
    weights = loaded.model.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(weights[name], weight), name

    decoder = SpeculativeDecoder.from_pretrained(model, adapter=adapter)
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW}
    assert decoder.decode([PROMPT], **options).tokens == [reference(expected)]
    assert decoder.decode_standard([PROMPT], **options).tokens == [reference(expected)]


def test_a_draft_may_have_an_adapter_as_well(tmp_path: Path) -> None:
    target = write(tmp_path / "target")
    draft = write(tmp_path / "draft", seed=2)
    target_adapter = write_adapter("target_adapter", target)
    draft_adapter = write_adapter("draft_adapter", draft, seed=2)
    decoder = SpeculativeDecoder.from_pretrained(
        target, draft, adapter=Path(target_adapter), draft_adapter=Path(draft_adapter), pack=False
    )
    expected = merged(draft, draft_adapter).state_dict()
    drafter: Any = decoder.drafter
    for name, weight in drafter.model.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    tokens = decoder.decode([PROMPT], max_new_tokens=NUM_NEW).tokens
    assert tokens == [reference(merged(target, target_adapter))]


def test_decode_records_the_adapters_of_its_models(tmp_path: Path) -> None:
    target = write(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    options = ("--target", "target", "--adapter", adapter, "--prompt", "3 5 7 3 5", *BRIEF)
    document = succeed(
        "decode", *options, "--draft", "target", "--draft_adapter", "adapter", "--dtype", "float32"
    ).json
    assert document["prompts"][0]["speculative"]["tokens"] == reference(merged(target, adapter))
    settings = document["manifest"]["options"]
    assert settings["adapter"] == "adapter" and settings["draft_adapter"] == "adapter"
    description = succeed("info", "target", "--adapter", adapter, "--output", "json").json
    assert description["adapter"] == adapter


def test_a_pair_of_the_registry_may_have_adapters(tmp_path: Path) -> None:
    target = write(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    size = "{parameters: 1000, matrix_parameters: 1000, kept_parameters: 1}"
    model = f"source: {target}\n  dtype: float32\n  size: {size}\n  adapter: {adapter}"
    file = tmp_path / "configs" / "pairs" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"description: mine\ntarget:\n  {model}\ndraft:\n  {model}\n"
        "drafter: ModelDrafter\nnum_draft_tokens: 3\n"
    )
    pair_target = read_pair(file).target
    assert pair_target is not None and pair_target.adapter == adapter
    decoder = SpeculativeDecoder.from_pair("mine")
    result = decoder.decode([PROMPT], max_new_tokens=NUM_NEW)
    assert result.tokens == [reference(merged(target, adapter))]
    assert result.acceptance_rate == 1, "the draft has the adapter as well"


def test_a_draft_is_for_its_target_with_that_adapter(tmp_path: Path) -> None:
    target = write_text_model(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    other = write_adapter("other", target, seed=2)
    decoder = SpeculativeDecoder.from_pretrained(target, adapter=adapter)
    reference_of_target = TargetReference.of(decoder.target)
    assert reference_of_target.adapter == adapter
    assert "with the adapter adapter" in str(reference_of_target)
    document = reference_of_target.to_document()
    assert TargetReference.from_document(document) == reference_of_target
    plain = load_model(target)
    with pytest.raises(ValueError, match="has another sha256"):
        reference_of_target.check(plain, "the draft")
    with pytest.raises(ValueError, match="has another sha256"):
        reference_of_target.check(load_model(target, adapter=other), "the draft")
    reference_of_target.check(load_model(target, adapter=adapter), "the draft")

    # The adapter's settings count as well.
    config = Path("adapter/adapter_config.json")
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 32'))
    with pytest.raises(ValueError, match="has another sha256"):
        reference_of_target.check(load_model(target, adapter=adapter), "the draft")


def test_a_trained_draft_finds_the_adapter_of_its_target(tmp_path: Path) -> None:
    target = write_text_model(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    Path("text").mkdir()
    for number in range(30):
        Path(f"text/{number}.txt").write_text(f"the cat sat on the mat {number}\n" * 200)
    recipe = ("--recipe", "medusa", "--target", "target", "--adapter", adapter, "--text", "text")
    trainer = (
        "--minutes=5",
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=1",
        "--trainer.logger=false",
        "--trainer.accelerator=cpu",
    )
    succeed("fit", *recipe, *trainer)
    file = str(next(Path("checkpoints").rglob("last.ckpt")))

    prompt = ("--prompt", "the cat", "--raw", *BRIEF, "--dtype", "float32")
    expected = succeed("decode", "--target", "target", "--adapter", adapter, *prompt).json
    for arguments in (
        ("--ckpt", file),
        ("--ckpt", file, "--target", "target"),
        ("--ckpt", file, "--target", "target", "--adapter", adapter),
    ):
        document = succeed("decode", *arguments, *prompt).json
        tokens = document["prompts"][0]["speculative"]["tokens"]
        assert tokens == expected["prompts"][0]["speculative"]["tokens"]

    recorded = SpeculativeDecoder.from_checkpoint(file)
    assert recorded.recipe["target_adapter"] == adapter
    shutil.move("adapter", "elsewhere")
    assert "adapter" in call("decode", "--ckpt", file, *prompt).err
    moved = ("--target", "target", "--adapter", "elsewhere")
    document = succeed("decode", "--ckpt", file, *moved, *prompt).json
    tokens = document["prompts"][0]["speculative"]["tokens"]
    assert tokens == expected["prompts"][0]["speculative"]["tokens"]


def test_the_tokenizer_of_an_adapter_is_used(tmp_path: Path) -> None:
    target = write_text_model(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    byte_level(chat_template="<user>{{ messages[0].content }}").save_pretrained(adapter)
    tokenizer: Any = load_model(target, adapter=adapter).tokenizer
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "<user>a"
    assert tokenizer.eos == load_model(target).tokenizer.eos  # type: ignore[union-attr]


def damaged(adapter: Path, **changes: Any) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "prompt tuning": (
        lambda path: damaged(path, peft_type="PROMPT_TUNING"),
        "of kind PROMPT_TUNING, which changes the model's inputs",
    ),
    "no settings": (lambda path: (path / "adapter_config.json").unlink(), "is no adapter"),
    "broken settings": (
        lambda path: (path / "adapter_config.json").write_text("{"),
        "adapter_config.json is damaged",
    ),
    "no weights": (
        lambda path: (path / "adapter_model.safetensors").unlink(),
        "has no adapter_model.safetensors",
    ),
    "other modules": (
        lambda path: damaged(path, target_modules=["elsewhere"]),
        "the adapter adapter does not fit",
    ),
    "more modules than weights": (
        lambda path: damaged(path, target_modules=["q_proj", "v_proj", "k_proj"]),
        "missing adapter keys",
    ),
    "fewer modules than weights": (
        lambda path: damaged(path, target_modules=["q_proj"]),
        "the model has no place for .*v_proj.*trained for another model",
    ),
    "fewer layers than weights": (
        lambda path: damaged(path, layers_to_transform=[0]),
        "the model has no place for .*layers.1.*trained for another model",
    ),
    "another rank": (lambda path: damaged(path, r=8), "the adapter adapter does not fit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    damage, message = FAULTS[fault]
    target = write(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    damage(Path(adapter))
    with pytest.raises(ValueError, match=message) as error:
        load_model(target, adapter=adapter)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_an_adapter_of_a_tied_head_is_refused_since_merging_changes_the_embedding(
    tmp_path: Path,
) -> None:
    target = write(tmp_path / "target", tie_word_embeddings=True)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    adapter = write_adapter("adapter", target, config)
    with pytest.raises(ValueError, match="cannot be merged: the output would change"):
        load_model(target, adapter=adapter)


def test_adapters_are_refused_where_they_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write(tmp_path / "target")
    adapter = write_adapter("adapter", target)
    refused("decode", "--target", target, "--adapter", target, message="this is a whole model")
    with pytest.raises(ValueError, match="needs the name of a target"):
        SpeculativeDecoder.from_pretrained(load_model(target), adapter=adapter)
    with pytest.raises(ValueError, match="need a named draft model"):
        SpeculativeDecoder.from_pretrained(target, draft_adapter=adapter)
    with pytest.raises(ValueError, match="give that target as --target"):
        SpeculativeDecoder.from_checkpoint("x.safetensors", adapter=adapter)
    refused(
        "decode", "--target", target, "--adapter", "./missing", message="no directory ./missing"
    )

    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="an adapter needs PEFT: .* -m pip install peft"):
        load_model(target, adapter=adapter)
