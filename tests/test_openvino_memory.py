"""Laws of the memory that a model in OpenVINO takes: each start is a fresh process.

Sizes are in bytes. The model has 80 MB of random weights in bfloat16, which is enough to tell its
weights from everything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_specdec.config.memory import ModelSize, peak_bytes
from lightning_specdec.models import openvino_conversion
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.openvino import OpenVINOLM
from lightning_specdec.models.weights import weights_digest

OTHER_BYTES = 15e6
"""Keys and values, the network itself, and what is read of the embedding."""
START = '''
import json, sys
import torch
from lightning_specdec import SpeculativeDecoder

def status(name):
    """Bytes of anonymous memory (RssAnon), or the peak of all resident memory (VmHWM).

    The peak of `getrusage` includes what the process had before it was replaced by this one.
    """
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])

def resident(name):
    """Bytes of all mappings of a file that are in memory."""
    total = 0
    is_mapping = False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if not words[0].endswith(":"):
            is_mapping = line.rstrip().endswith(name)
        elif is_mapping and words[0] == "Rss:":
            total += 1024 * int(words[1])
    return total

# One thread in bfloat16 is refused on processors with AMX.
torch.set_num_threads(2)
small, large, quantization = sys.argv[1:]
options = {"backend": "openvino", "quantization": quantization or None}

def decode(source):
    decoder = SpeculativeDecoder.from_pretrained(source, **options)
    tokens = decoder.decode([[3, 5, 7, 3, 5]], max_new_tokens=6, eos=()).tokens
    return decoder, tokens

decode(small)
anonymous_before = status("RssAnon")
peak_before = status("VmHWM")
decoder, tokens = decode(large)
print(json.dumps({
    "anonymous": status("RssAnon") - anonymous_before,
    "peak": status("VmHWM") - peak_before,
    "torch_weights": resident("/large/model.safetensors"),
    "tokens": tokens,
}))
'''


def write_llama(path: Path, hidden_size: int, num_layers: int, vocab_size: int) -> str:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return str(path)


def start(directory: Path, quantization: str | None) -> dict[str, int]:
    """Load and decode in a fresh process; returns what it measured."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    sources = [str(directory / "small"), str(directory / "large")]
    command = [sys.executable, "-c", START, *sources, quantization or ""]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    values: dict[str, int] = json.loads(finished.stdout.splitlines()[-1])
    return values


def test_the_estimate_counts_the_mapped_file_and_its_copy() -> None:
    size = ModelSize(parameters=150, kept_parameters=50, matrix_parameters=100)
    assert size.openvino_bytes("bfloat16") == 2 * 50 + 2 * 2 * 100
    assert size.openvino_bytes("bfloat16", "int8") == 2 * 50 + 2 * 100

    # The second model is read while the first one is in memory.
    quantized = (size, "bfloat16", "int8")
    plain = (size, "bfloat16", None)
    assert peak_bytes([quantized, quantized], packed=True, in_openvino=True) == 2 * 300
    assert peak_bytes([plain, quantized], packed=True, in_openvino=True) == 500 + 300


@torch.no_grad()
def test_matrices_are_converted_in_their_own_dtype_and_stay_in_the_model() -> None:
    model = HuggingFaceLM(tiny("llama").bfloat16())
    weights = [weight.clone() for weight in model.parameters()]
    identities = [id(weight) for weight in model.parameters()]
    attention = model.model.config._attn_implementation
    traceable = openvino_conversion._traceable(model.model)

    stored = 0
    originals: list[Any] = list(model.model.modules())
    copies: list[Any] = list(traceable.modules())
    for original, copy in zip(originals, copies, strict=True):
        if type(original) in (nn.Linear, nn.Embedding):
            assert copy.stored_weight.data_ptr() == original.weight.data_ptr()
            assert copy.weight.dtype == torch.float32
            assert copy.weight.untyped_storage().nbytes() == 4
            stored += 1
    assert stored > 10

    OpenVINOLM.of(model)
    assert identities == [id(weight) for weight in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
    assert model.model.config._attn_implementation == attention


def test_unchanged_weights_are_not_read_for_their_digest(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", 64, 2, 256)
    model = load_model(str(tmp_path / "model"))
    in_float32 = load_model(str(tmp_path / "model"), dtype="float32")
    digest = weights_digest(model, is_unchanged=True)
    assert digest != weights_digest(in_float32, is_unchanged=True)

    known_values = weights_digest(model)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert weights_digest(model, is_unchanged=True) == digest
    assert weights_digest(model) != known_values


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_start_takes_the_memory_of_the_converted_model(
    quantization: str | None, tmp_path: Path
) -> None:
    """The first start has the weights of torch and the converted ones in mapped files, and a copy
    in the processor's layout; later starts do not read torch's weights."""
    write_llama(tmp_path / "small", 64, 2, 256)
    write_llama(tmp_path / "large", 512, 8, 8192)
    num_weight_bytes = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert num_weight_bytes > 75e6

    first = start(tmp_path, quantization)
    later = start(tmp_path, quantization)
    assert later["tokens"] == first["tokens"]
    converted_bytes = num_weight_bytes if quantization is None else num_weight_bytes / 2
    # The embedding is a tenth of the weights. Keys, values and the network take a few megabytes.
    assert later["torch_weights"] < 0.2 * num_weight_bytes
    assert later["anonymous"] < converted_bytes + OTHER_BYTES
    assert later["peak"] < 2 * converted_bytes + 2 * OTHER_BYTES
    # The process that converts also has the converted weights before they are written, and the
    # model that it compares with torch.
    assert first["peak"] < num_weight_bytes + 4 * converted_bytes + 2 * OTHER_BYTES


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "biogpt"])
def test_a_traceable_copy_leaves_the_model_as_it_is(family: str) -> None:
    """The embedding of two of these is a subclass, which shares its weight with the output head."""
    model = tiny(family, tie_word_embeddings=True).bfloat16()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    openvino_conversion._traceable(model)
    for name, weight in model.state_dict().items():
        assert weight.dtype == weights[name].dtype
        assert torch.equal(weight, weights[name])
