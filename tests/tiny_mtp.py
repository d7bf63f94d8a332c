"""Tiny multi-token prediction layers: fitted to a target's own texts, and checkpoints with them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from families import LATENT, SIZES, tiny
from safetensors.torch import load_file, save_file
from tiny_heads import examples, steps_of_fit
from torch import nn

from lightning_specdec.drafters import MtpDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.model_config import quiet
from lightning_specdec.models.mtp import MtpNetwork
from lightning_specdec.models.mtp_building import new_mtp
from lightning_specdec.models.mtp_files import num_mtp_layers, stored_weights

_SIZES: dict[str, Any] = {
    **SIZES,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MELLUM: dict[str, Any] = {
    key: value
    for key, value in _SIZES.items()
    if key not in ("n_routed_experts", "n_group", "topk_group", "first_k_dense_replace")
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_SIZES, **LATENT, "num_nextn_predict_layers": 2},
    "glm4_moe": {**_SIZES, "head_dim": 8, "num_nextn_predict_layers": 1},
    "sarvam_moe": {**_SIZES, "head_dim": 8, "num_nextn_predict_layers": 3},
    "sarvam_mla": {**_SIZES, **LATENT, "num_nextn_predict_layers": 1},
    "mellum": {
        **_MELLUM,
        "head_dim": 8,
        "num_local_experts": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_nextn_predict_layers": 1,
    },
    "inkling_text": {
        **_MELLUM,
        "head_dim": 8,
        "n_routed_experts": 4,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "d_rel": 4,
        "rel_extent": 16,
        "sliding_window_size": 5,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "logits_mup_width_multiplier": 1.5,
        "num_mtp_layers": 2,
        "chain_hidden_post_norm": True,
    },
}
"""Families with prediction layers in transformers: one to three of them; latent, full and sliding
attention; short convolutions; and all layouts of their weights."""


def fitted_mtp(target: LanguageModel, *, num_steps: int = 30, **settings: Any) -> MtpDrafter:
    """Prediction layers after a few steps, if the target has a place for them; do not write to it.

    The global seed stays unchanged.
    """
    drafter = MtpDrafter(**settings)
    if num_mtp_layers(target) > 0:
        assert isinstance(target, HuggingFaceLM)
        drafter.network = _fitted_network(target, steps_of_fit(num_steps))
    return drafter.eval()


@functools.cache
def _fitted_network(target: HuggingFaceLM, num_steps: int) -> MtpNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = new_mtp(target, num_mtp_layers(target))
    if num_steps:
        texts, hidden = examples(target)
        fit(network, target, texts, hidden, num_steps)
    return network.eval().requires_grad_(False)


def fit(
    network: MtpNetwork,
    target: HuggingFaceLM,
    texts: torch.Tensor,
    hidden: torch.Tensor,
    num_steps: int,
) -> None:
    """Train the layers to predict texts, padded with -1."""
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for _ in range(num_steps):
        outputs = network.read_text(target, texts.clamp(min=0), hidden)
        losses = []
        for index, output in enumerate(outputs):
            logits = network.logits(target, output[:, :-1]).flatten(0, 1)
            labels = texts[:, 2 + index :].flatten()
            losses.append(nn.functional.cross_entropy(logits, labels, ignore_index=-1))
        gradients = torch.autograd.grad(torch.stack(losses).sum(), weights, allow_unused=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()


def write_with_mtp(path: Path, family: str, *, seed: int = 2, num_steps: int = 8) -> str:
    """Write a random model with fitted prediction layers, in one file as checkpoints have them."""
    model = tiny(family, seed, **FAMILIES[family])
    with quiet():
        model.save_pretrained(path)
    target = HuggingFaceLM(model)
    network = _fitted_network(target, num_steps)

    file = path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, **stored_weights(network, target)}, file, {"format": "pt"})
    return str(path)
