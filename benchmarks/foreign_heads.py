"""Write tiny EAGLE-3 heads with other programs, and their outputs, for the tests of `--draft DIR`.

    python3 -m venv heads && heads/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 hs-connectors==0.9.0
    heads/bin/pip install torch transformers==5.19.0 datasets loguru openai pydantic-settings yunchang
    heads/bin/python benchmarks/foreign_heads.py tests/data/heads

The code of each program writes its directory. `expected.safetensors` in it has the hidden states of
three layers, tokens, and the logits that the program computes from them in both steps of a round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

VOCAB_SIZE = 23
DRAFT_VOCAB_SIZE = 6
HIDDEN_SIZE = 32
NUM_TOKENS = 9
NUM_STEPS = 2
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DRAFT_VOCABULARY = torch.tensor([1, 3, 4, 7, 20, 22])
"""Tokens of the reduced vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    write_speculators(output / "speculators", LlamaConfig(**SIZES))
    write_speculators(
        output / "speculators_31", LlamaConfig(**SIZES), norm_output=True, fc_norm=True
    )
    write_speculators(output / "speculators_qwen3", Qwen3Config(**SIZES))
    default_rope = {"rope_type": "default", "rope_theta": 5e5}
    write_specforge(output / "specforge", rope_parameters=default_rope)
    write_specforge(output / "specforge_llama3", rope_parameters=LLAMA3_ROPE)


@torch.no_grad()
def write_speculators(output: Path, layer_config: Any, **options: Any) -> None:
    """Write a head of speculators."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer_config._attn_implementation = "eager"
    speculators_config = SpeculatorsConfig(
        algorithm="eagle3",
        default_proposal_method="greedy",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=[1, 3, 4],
        speculators_config=speculators_config,
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    randomize(model)
    features, tokens = random_inputs()

    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    # The undecorated function, if `forward` is decorated.
    forward = getattr(type(model).forward, "__wrapped__", type(model).forward)
    positions = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    forward(model, features, tokens, positions, ttt_steps=NUM_STEPS)
    save(model.save_pretrained, output, features, tokens, logits[:NUM_STEPS])


@torch.no_grad()
def write_specforge(output: Path, **options: Any) -> None:
    """Write a head of SpecForge."""
    from specforge.export.checkpoint_io import apply_legacy_rope_scaling
    from specforge.modeling.draft.llama3_eagle import (
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True}
    arguments: dict[str, Any] = {
        **SIZES,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": HIDDEN_SIZE,
        "eagle_config": eagle_config,
        **options,
    }
    config = LlamaConfig(**arguments)
    model = LlamaForCausalLMEagle3(config).eval()
    randomize(model)
    features, tokens = random_inputs()

    is_token = torch.ones(1, NUM_TOKENS, dtype=torch.bool)
    mask = prepare_decoder_attention_mask(is_token, (1, NUM_TOKENS), features, 0)
    positions = torch.arange(NUM_TOKENS)[None]
    cache: list[list[torch.Tensor]] = [[], []]
    hidden = model.project_hidden_states(features)
    step_tokens = tokens
    logits: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        embedded = model.embed_input_ids(step_tokens)
        hidden = model.backbone(embedded, hidden, cache, mask, positions)
        logits.append(model.compute_logits(hidden)[0])
        # Each step reads the tokens one position later; the last one has no successor.
        step_tokens = torch.cat((step_tokens[:, 1:], torch.zeros_like(step_tokens[:, :1])), 1)

    def write(path: Path) -> None:
        model.save_pretrained(path, state_dict=model.state_dict())
        apply_legacy_rope_scaling(str(path))

    save(write, output, features, tokens, logits)


def randomize(model: Any) -> None:
    """Set weights that make errors visible: norms other than one, and a reduced vocabulary."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = torch.rand_like(weight) + 0.5
        else:
            weight.data = torch.randn_like(weight) / 4
    model.d2t.copy_(DRAFT_VOCABULARY - torch.arange(DRAFT_VOCAB_SIZE))
    is_in_draft = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    is_in_draft[DRAFT_VOCABULARY] = True
    model.t2d.copy_(is_in_draft)


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of three layers, and tokens."""
    features = torch.randn(1, NUM_TOKENS, 3 * HIDDEN_SIZE)
    return features, torch.randint(VOCAB_SIZE, (1, NUM_TOKENS))


def save(
    write: Callable[[Path], Any],
    output: Path,
    features: torch.Tensor,
    tokens: torch.Tensor,
    logits: list[torch.Tensor],
) -> None:
    """Write the head without files of code, and the inputs and outputs that tests compare."""
    write(output)
    for path in output.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    expected = {
        "features": features[0].contiguous(),
        "tokens": tokens[0].contiguous(),
        "logits": torch.stack(logits).contiguous(),
    }
    save_file(expected, output / "expected.safetensors")
    print(output.name, sorted(json.loads((output / "config.json").read_text())))


if __name__ == "__main__":
    main()
