"""Write tiny EAGLE-3 heads with other programs' own code, and their outputs, for the tests of `--draft DIR`.

    python3 -m venv heads && heads/bin/pip install --no-deps speculators==0.9.0 specforge==0.2.0 hs-connectors==0.9.0
    heads/bin/pip install torch transformers==5.19.0 datasets loguru openai pydantic-settings yunchang
    heads/bin/python benchmarks/foreign_heads.py tests/data/heads

The program's own code writes each directory. `expected.safetensors` beside it holds hidden states of three layers,
tokens, and the logits that the program computes from them in each of two steps of a round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

V, W, D, T, STEPS = 23, 6, 32, 9, 2
SIZES: dict[str, Any] = {
    "hidden_size": D,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
SCALED |= {"original_max_position_embeddings": 16}
TOKENS = torch.tensor([1, 3, 4, 7, 20, 22])


def randomize(model: Any) -> None:
    """Set weights in place that make errors visible: norms other than one, and a reduced vocabulary."""
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        value.data = torch.rand_like(value) + 0.5 if "norm" in name else torch.randn_like(value) / 4
    model.d2t.copy_(TOKENS - torch.arange(W))
    model.t2d.copy_(torch.zeros(V, dtype=torch.bool).index_fill_(0, TOKENS, True))


@torch.no_grad()
def speculators(output: Path, layer: Any, **options: Any) -> None:
    """A head of speculators."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposals = [GreedyTokenProposalConfig(speculative_tokens=3)]
    message = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": proposals,
    }
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=W,
        eagle_aux_hidden_state_layer_ids=[1, 3, 4],
        speculators_config=SpeculatorsConfig(**message, verifier=verifier),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    randomize(model)
    features, tokens = torch.randn(1, T, 3 * D), torch.randint(V, (1, T))
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, output: found.append(output[0]))
    forward = getattr(type(model).forward, "__wrapped__", type(model).forward)
    forward(model, features, tokens, torch.zeros(1, T, dtype=torch.long), ttt_steps=STEPS)
    save(model.save_pretrained, output, features, tokens, found[:STEPS])


@torch.no_grad()
def specforge(output: Path, **options: Any) -> None:
    """A head of SpecForge."""
    from specforge.export.checkpoint_io import apply_legacy_rope_scaling
    from specforge.modeling.draft.llama3_eagle import (
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True}
    more: dict[str, Any] = {
        "draft_vocab_size": W,
        "target_hidden_size": D,
        "eagle_config": layers,
        **options,
    }
    config = LlamaConfig(**SIZES, **more)
    model = LlamaForCausalLMEagle3(config).eval()
    randomize(model)
    features, tokens = torch.randn(1, T, 3 * D), torch.randint(V, (1, T))
    positions, found = torch.arange(T)[None], list[torch.Tensor]()
    cache: list[list[torch.Tensor]] = [[], []]
    mask = prepare_decoder_attention_mask(torch.ones(1, T, dtype=torch.bool), (1, T), features, 0)
    hidden, read = model.project_hidden_states(features), tokens
    for _ in range(STEPS):
        hidden = model.backbone(model.embed_input_ids(read), hidden, cache, mask, positions)
        found.append(model.compute_logits(hidden)[0])
        read = torch.cat((read[:, 1:], read[:, :1] * 0), 1)

    def write(path: Path) -> None:
        model.save_pretrained(path, state_dict=model.state_dict())
        apply_legacy_rope_scaling(str(path))

    save(write, output, features, tokens, found)


def save(write: Any, output: Path, features: Any, tokens: Any, logits: list[torch.Tensor]) -> None:
    write(output)
    for path in output.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    expected = {"features": features[0], "tokens": tokens[0], "logits": torch.stack(logits)}
    save_file(
        {name: value.contiguous() for name, value in expected.items()},
        output / "expected.safetensors",
    )
    print(output.name, sorted(json.loads((output / "config.json").read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    speculators(output / "speculators", LlamaConfig(**SIZES))
    speculators(output / "speculators_31", LlamaConfig(**SIZES), norm_output=True, fc_norm=True)
    speculators(output / "speculators_qwen3", Qwen3Config(**SIZES))
    specforge(output / "specforge", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    specforge(output / "specforge_llama3", rope_parameters=SCALED)


if __name__ == "__main__":
    main()
