"""Laws of checkpoints with transformers, several drafts, and drafts inside the target.

What is read is what was written. Whatever a file says, it runs and fetches nothing, and an error is
one line.
"""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import here, refused, succeed
from families import FAMILIES, MORE, tiny

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.config.kinds import MODELS
from lightning_specdec.drafters import Drafter, EarlyExitDrafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM

__all__ = ["here"]
pytestmark = pytest.mark.usefixtures("here")
SHIPPED = Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def llama(seed: int = 0, **sizes: Any) -> HuggingFaceLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HuggingFaceLM({**LLAMA, "initializer_range": 0.5, **sizes}).eval()


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, model.init_state(1, 16)).logits


def through_a_file(
    target: LanguageModel,
    drafter: Drafter | None = None,
    **options: Any,
) -> checkpoint.LoadedPair:
    checkpoint.save("a.ckpt", target, drafter or NGramDrafter(), prompts=[[1, 2]], **options)
    return checkpoint.load("a.ckpt")


@pytest.mark.parametrize("family", FAMILIES | MORE)
def test_a_family_scores_alike_after_a_checkpoint(family: str) -> None:
    model = HuggingFaceLM(tiny(family))
    loaded = through_a_file(model).target
    assert torch.equal(logits(model), logits(loaded))
    assert loaded.arguments() == model.arguments()
    assert loaded.num_parameters == model.num_parameters
    assert not any(value.is_meta for value in (*loaded.parameters(), *loaded.buffers()))
    assert all(value.data_ptr() % 64 == 0 for value in loaded.parameters())


def test_reading_a_checkpoint_draws_no_random_numbers() -> None:
    checkpoint.save("a.ckpt", HuggingFaceLM(tiny("gpt2")), NGramDrafter())
    generator_state = torch.get_rng_state()
    checkpoint.load("a.ckpt")
    assert torch.equal(torch.get_rng_state(), generator_state)


def test_no_token_of_a_new_model_is_special_unless_its_config_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for family in ("gpt2", "phi3", "gemma3_text"):
        values = {"model_type": family, **FAMILIES[family], "pad_token_id": None}
        config = HuggingFaceLM(values).model.config
        assert config.pad_token_id is config.bos_token_id is config.eos_token_id is None
    assert llama(eos_token_id=3).model.config.eos_token_id == 3
    assert "token_id" not in capfd.readouterr().err


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_shared_embedding_is_stored_once_and_shared_again(family: str) -> None:
    model = HuggingFaceLM(tiny(family, tie_word_embeddings=True))
    loaded = through_a_file(model).target
    assert isinstance(loaded, HuggingFaceLM)
    input_embeddings = loaded.model.get_input_embeddings()
    assert loaded.model.get_output_embeddings().weight is input_embeddings.weight
    assert torch.equal(logits(model), logits(loaded))
    assert Path("a.ckpt").stat().st_size < 4 * model.num_parameters + 40_000


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no family": ({"model_type": None}, "is not a model_type"),
    "unknown family": ({"model_type": "lama"}, "did you mean llama"),
    "a typing error": ({"hiden_size": 3}, "'hiden_size': did you mean hidden_size"),
    "code of its own": ({"auto_map": {"AutoModelForCausalLM": "a--b.C"}}, "auto_map"),
    "attention from a hub": ({"attn_implementation": "somebody/kernels"}, "attn_implementation"),
    "quantization": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "a model within the model": (
        {"rope_parameters": {"model_type": "timm_backbone"}},
        "contains 'model_type'",
    ),
    "weights from a hub": ({"use_pretrained_backbone": True}, "use_pretrained_backbone"),
    "absurd vocabulary": ({"vocab_size": 2**40}, "vocab_size must be from"),
    "no such activation": ({"hidden_act": "os.system"}, "os.system"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_makes_no_model_is_refused_in_one_line(case: str) -> None:
    changes, message = BAD_CONFIGS[case]
    with pytest.raises(ValueError, match=message) as error:
        HuggingFaceLM({**LLAMA, **changes})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a checkpoint of two transformers."""
    path = tmp_path_factory.mktemp("pair") / "pair.ckpt"
    drafter = ModelDrafter(llama(1, num_hidden_layers=1))
    checkpoint.save(path, llama(), drafter, prompts=[[1, 2, 3]])
    return checkpoint.read(path)


def test_a_description_larger_than_its_weights_costs_nothing(content: dict[str, Any]) -> None:
    for key, value in (("num_hidden_layers", 1024), ("hidden_size", 2**20), ("vocab_size", 2**20)):
        bad = copy.deepcopy(content)
        bad[checkpoint.KEY]["target"]["arguments"]["model"][key] = value
        torch.save(bad, "bad.ckpt")
        refused("info", "--ckpt", "bad.ckpt", message="bad.ckpt")


WRONG_VALUES: list[Any] = [
    *(0, 1, -1, 2, 7, 10**12, 0.5, float("nan")),
    *("", "llama", None, [], {}, True, [1] * 50, {"a": 1}),
]


def mutate(numbers: random.Random, description: dict[str, Any]) -> None:
    """Change some random values of a description."""
    for _ in range(numbers.choice((1, 1, 2, 5))):
        arguments = description[numbers.choice(("target", "drafter"))]["arguments"]

        # Mostly go down into the dictionaries within.
        while True:
            inner_keys = [key for key, value in arguments.items() if isinstance(value, dict)]
            if not inner_keys or numbers.random() < 0.2:
                break
            arguments = arguments[numbers.choice(inner_keys)]

        key = numbers.choice([*arguments, "extra"])
        if key in arguments and numbers.random() < 0.15:
            del arguments[key]
        else:
            arguments[key] = numbers.choice(WRONG_VALUES)


@pytest.mark.slow
def test_random_changes_of_a_description_give_one_line_or_none(content: dict[str, Any]) -> None:
    codes = []
    for seed in range(80):
        bad = {**content, checkpoint.KEY: copy.deepcopy(content[checkpoint.KEY])}
        mutate(random.Random(seed), bad[checkpoint.KEY])
        torch.save(bad, "bad.ckpt")
        try:
            loaded = checkpoint.load("bad.ckpt")
        except ValueError as error:
            codes.append(2)
            assert "\n" not in str(error) and "bad.ckpt" in str(error), seed
        else:
            codes.append(0)
            assert logits(loaded.target).shape == (1, 8, 20), seed
    assert codes.count(2) > 40


def test_a_draft_inside_the_target_brings_no_weights_of_the_target() -> None:
    target = llama()
    drafter = EarlyExitDrafter(2)
    loaded = through_a_file(target, drafter)
    assert isinstance(loaded.drafter, EarlyExitDrafter)
    assert loaded.drafter.exit_layer == 2
    assert all(name.startswith("target.") for name in checkpoint.read("a.ckpt")["state_dict"])

    options: dict[str, Any] = {"max_new_tokens": 12, "num_draft_tokens": 3}
    expected = SpeculativeDecoder(target, drafter).decode([[1, 2, 3]], **options)
    result = SpeculativeDecoder.from_checkpoint("a.ckpt").decode([[1, 2, 3]], **options)
    assert result.tokens == expected.tokens
    assert result.counts == expected.counts


def of_several() -> checkpoint.LoadedPair:
    """Return a target with three drafts, read from several.ckpt."""
    drafts = {
        "small": ModelDrafter(llama(1)),
        "tiny": ModelDrafter(llama(2, num_hidden_layers=1)),
        "early": EarlyExitDrafter(1),
    }
    checkpoint.save("several.ckpt", llama(), drafts, prompts=[[1, 2, 3]])
    return checkpoint.load("several.ckpt")


def test_several_drafts_are_found_by_their_names() -> None:
    loaded = of_several()
    assert list(loaded.drafts) == ["small", "tiny", "early"]
    assert loaded.draft() is loaded.draft("small") is loaded.drafter
    tiny_model = loaded.drafts["tiny"].model
    assert torch.equal(logits(tiny_model), logits(llama(2, num_hidden_layers=1)))  # type: ignore[arg-type]


def test_decoding_names_a_draft_of_the_checkpoint() -> None:
    of_several()
    outputs = set()
    for name in (None, "tiny", "early"):
        decoder = SpeculativeDecoder.from_checkpoint("several.ckpt", draft=name)
        outputs.add(str(decoder.decode([[1, 2, 3]], max_new_tokens=9).tokens))
        draft_option = () if name is None else ("--draft", name)
        succeed("decode", "--ckpt", "several.ckpt", "--repeats", "0", *draft_option)
    assert len(outputs) == 1, "whichever draft is used, the output is the target's"
    refused(
        "decode", "--ckpt", "several.ckpt", "--draft", "huge", message="it has small, tiny, early"
    )


DOCUMENT_DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a name that is none": lambda document: document.update(name="a.b"),
    "computing in a list": lambda document: document.update(computes_in=["float32"]),
    "another of another kind": lambda document: document["others"].update(tiny=document["target"]),
    "another without weights": lambda document: document["others"].update(more=document["drafter"]),
    "a tokenizer that is none": lambda document: document.update(tokenizer=5),
}


@pytest.mark.parametrize("damage", DOCUMENT_DAMAGES)
def test_drafts_that_do_not_hold_together_are_refused(damage: str) -> None:
    of_several()
    bad = checkpoint.read("several.ckpt")
    DOCUMENT_DAMAGES[damage](bad[checkpoint.KEY])
    torch.save(bad, "bad.ckpt")
    refused("info", "--ckpt", "bad.ckpt", message="bad.ckpt")


def test_parts_nested_without_end_are_refused() -> None:
    checkpoint.save("a.ckpt", llama(), NGramDrafter())
    bad = checkpoint.read("a.ckpt")
    spec: Any = bad[checkpoint.KEY]["drafter"]
    for _ in range(40):
        spec = {"class": "ModelDrafter", "arguments": {"model": [spec, spec]}}
    bad[checkpoint.KEY]["drafter"] = spec
    torch.save(bad, "bad.ckpt")
    refused("info", "--ckpt", "bad.ckpt", message="too deeply")


def test_recurrent_checkpoints_need_no_transformers() -> None:
    program = (
        "from lightning_specdec import SpeculativeDecoder; import sys\n"
        f"decoder = SpeculativeDecoder.from_checkpoint({str(SHIPPED)!r})\n"
        "decoder.decode([1, 2, 3], max_new_tokens=3)\n"
        "print('transformers' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.strip() == "False"
    assert set(MODELS) == {"RNN", "HuggingFaceLM"}
    assert MODELS.load("HuggingFaceLM") is HuggingFaceLM
