"""Laws of quantized weights as users have them: output is that of transformers' own loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import refused, succeed
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import edit_config, write, write_text_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, TorchAoConfig

import lightning_specdec
from lightning_specdec import SpeculativeDecoder
from lightning_specdec.checkpoints import TargetReference
from lightning_specdec.models.loading import examine, load_model
from lightning_specdec.text.tokenizer import named_tokenizer

PROMPTS = [[3, 5, 7, 3, 5], [11, 2, 11, 2, 11, 2, 9]]
NUM_NEW = 12
BRIEF = ("--repeats", "1", "--max_new_tokens", "12", "--output", "json")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def reference(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """Greedy tokens of transformers' own `generate`, each row alone."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, **options}
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        rows.append(output[0, len(prompt) :].tolist())
    return rows


def check_decoding(source: str, expected: list[list[int]]) -> None:
    """Decoding, drafting with the model itself, and standard decoding give these tokens."""
    for draft in (None, source):
        decoder = SpeculativeDecoder.from_pretrained(source, draft)
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos": ()}
        assert decoder.decode_standard(PROMPTS, **options).tokens == expected
        assert decoder.decode(PROMPTS, **options).tokens == expected
        ragged = [decoder.decode([prompt], **options).tokens[0] for prompt in PROMPTS]
        assert ragged == expected


def weight_only() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def with_inputs() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig()


def write_torchao(path: Path, config: Any) -> str:
    plain = write(path / "plain")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=TorchAoConfig(config))
    model.save_pretrained(path / "quantized")
    return str(path / "quantized")


@pytest.mark.quick_cases("weight_only")
@pytest.mark.parametrize("make_config", [weight_only, with_inputs])
def test_weights_that_torchao_quantized_decode_as_transformers_loads_them(
    make_config: Callable[[], Any], tmp_path: Path
) -> None:
    source = write_torchao(tmp_path, make_config())
    model = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True)
    expected = reference(model)
    check_decoding(source, expected)
    assert SpeculativeDecoder(model).decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected
    assert reference(model, custom_generate=lightning_specdec.generate) == expected


def write_fp8(path: Path) -> str:
    """Matrices of eight bits with a scale for each block, as DeepSeek's."""
    source = Path(write(path / "fp8", hidden_size=64, intermediate_size=64))
    block = 32
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            weights[name] = weight
            continue
        rows, columns = weight.shape
        blocks = weight.view(rows // block, block, columns // block, block)
        scale = blocks.abs().amax((1, 3)) / 448
        scaled = blocks / scale[:, None, :, None]
        weights[name] = scaled.view(rows, columns).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [block, block]}
    edit_config(quantization_config=settings)(source)
    return str(source)


def test_weights_of_eight_bits_decode_as_transformers_loads_them(tmp_path: Path) -> None:
    """Without a GPU, transformers unpacks them."""
    source = write_fp8(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = reference(model)
    check_decoding(source, expected)


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        "compressed.tensors",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16}, "gptqmodel|GPU|awq"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "gptq|optimum"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_package_or_gpu_is_one_line_of_transformers(method: str, tmp_path: Path) -> None:
    settings, message = METHODS[method]
    source = write(tmp_path / "model")
    edit_config(quantization_config=settings)(Path(source))
    with pytest.raises(ValueError, match=f"cannot be loaded: .*({message})") as error:
        load_model(source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_stored_quantization_is_not_combined_with_another(tmp_path: Path) -> None:
    source = write_fp8(tmp_path)
    with pytest.raises(ValueError, match=r"is quantized already \(by fp8\)"):
        examine(source, quantization="int8")
    with pytest.raises(ValueError, match="OpenVINO does not run weights of fp8"):
        examine(source, backend="openvino")


def test_the_memory_of_quantized_weights_is_that_of_their_files(tmp_path: Path) -> None:
    source = write_torchao(tmp_path, weight_only())
    plain = examine(str(tmp_path / "plain"))
    quantized = examine(source)
    stored_bytes = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    num_bytes = quantized.size.weight_bytes(quantized.dtype)
    assert abs(num_bytes - stored_bytes) < 16
    assert num_bytes < plain.size.weight_bytes(plain.dtype)


@pytest.mark.quick_cases("True")
@pytest.mark.parametrize("quantized", [True, False])
def test_a_gguf_file_decodes_as_transformers_unpacks_it(quantized: bool, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", quantized=quantized)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    expected = reference(model)
    check_decoding(file, expected)
    check_decoding(str(tmp_path), expected)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    decoder = SpeculativeDecoder.from_pretrained(file)
    assert decoder.encode("the cat sat") == tokenizer("the cat sat")["input_ids"]
    assert decoder.eos == (tokenizer.eos_token_id,)
    assert named_tokenizer(file).fingerprint == decoder.tokenizer.fingerprint

    options = ("--prompt", "the cat sat", "--raw", "--ignore_eos", *BRIEF)
    documents = [
        succeed("decode", *arguments, *options).json
        for arguments in (("--target", file), (file,), ("--target", file, "--draft", file))
    ]
    [[tokens]] = [reference(model, [decoder.encode("the cat sat")])]
    for document in documents:
        assert document["prompts"][0]["speculative"]["tokens"] == tokens


def test_a_gguf_file_is_the_target_of_a_draft(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    target = load_model(file)
    recorded = TargetReference.of(target)
    assert recorded.source == file and recorded.sha256 is not None
    assert recorded.load(None, "the draft").vocab_size == target.vocab_size
    write_gguf(tmp_path / "model.gguf", seed=2)
    with pytest.raises(ValueError, match="has another sha256 now"):
        recorded.load(None, "the draft")


def test_what_is_no_single_gguf_model_is_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    refused("decode", "--target", str(tmp_path), message="2 GGUF files (a.gguf, b.gguf)")
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    refused("decode", "--target", "c.gguf", message="c.gguf describes no model")
    refused("decode", "--target", "./missing.gguf", message="./missing.gguf")


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_a_model_with_a_device_map_of_one_device_decodes(device_map: Any, tmp_path: Path) -> None:
    source = write_text_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source, device_map=device_map)
    expected = reference(model)
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos": ()}
    assert SpeculativeDecoder(model).decode(PROMPTS, **options).tokens == expected
    assert reference(model, custom_generate=lightning_specdec.generate) == expected


def test_a_model_on_several_devices_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_specdec.models.changes import check_in_memory

    class Weight:
        is_meta = False

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    model = torch.nn.Linear(2, 2)
    weights = [Weight("cpu"), Weight("cuda:1"), Weight("cpu")]
    monkeypatch.setattr(model, "parameters", lambda: iter(weights))
    with pytest.raises(ValueError, match="Linear is spread over cpu and cuda:1"):
        check_in_memory(model)


def test_the_settings_of_a_file_are_plain_json(tmp_path: Path) -> None:
    """Unknown methods are refused by what is missing, and never loaded as random weights."""
    source = write_fp8(tmp_path)
    config = json.loads((Path(source) / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "tomorrow"
    (Path(source) / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="tomorrow|shape|lack|cannot be loaded"):
        load_model(source)
