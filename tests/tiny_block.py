"""Block drafters for tests, fitted to a tiny target's own texts: right often, but not always."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny_heads import examples, some_tokens, steps_of_fit
from torch import nn

from lightning_specdec.drafters import BlockDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.block import blocks


def block(
    target: LanguageModel,
    *,
    reduced: bool = False,
    layers: list[int] | None = None,
    **more: Any,
) -> BlockDrafter:
    """A random block drafter with `more` settings; the global seed stays unchanged."""
    # A target without hidden states gets a drafter that refuses it.
    sizes: dict[str, Any] = {"hidden_size": 4, "vocab_size": 7, "feature_layers": [0]}
    if target.hidden_size is not None and target.num_layers is not None:
        sizes = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "feature_layers": layers or list(range(target.num_layers)),
        }
    settings: dict[str, Any] = {
        "num_heads": 2,
        "num_key_heads": 1,
        "intermediate_size": 16,
        "num_layers": 2,
        "block_size": 6,
        "markov_rank": 3,
        **more,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        draft_vocabulary = some_tokens(sizes["vocab_size"]) if reduced else None
        drafter = BlockDrafter(**sizes, **settings, draft_vocabulary=draft_vocabulary)
        if drafter.network.markov_output is not None:
            nn.init.normal_(drafter.network.markov_output.weight)
        nn.init.normal_(drafter.network.confidence.weight, std=0.2)
    return drafter.to(target.device).eval()


def fitted_block(target: LanguageModel, *, num_steps: int = 30, **more: Any) -> BlockDrafter:
    """One fitted by a few steps where it takes the target; read it, do not write to it."""
    return _fitted_block(target, steps_of_fit(num_steps), **more)


@functools.cache
def _fitted_block(target: LanguageModel, num_steps: int, **more: Any) -> BlockDrafter:
    drafter = block(target, **more)
    try:
        drafter.check_target(target)
    except ValueError:
        return drafter
    if not num_steps:
        return drafter
    network = drafter.network
    texts, _ = examples(target)
    tokens = texts.clamp(min=0)
    labels = texts
    if drafter.draft_vocabulary is not None:
        labels = drafter.draft_vocabulary.to_draft(texts, -1)
    with torch.no_grad():
        features_by_layer = target(tokens, features=tuple(drafter.settings.feature_layers)).features
    anchors = torch.arange(1, tokens.shape[1] - 1)
    weights = list(network.parameters())
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for _ in range(num_steps):
        features = network.features(
            [features_by_layer[layer][:, :-1] for layer in drafter.settings.feature_layers]
        )
        hidden = blocks(network, target.embeddings(tokens[:, anchors]), features, anchors)
        losses = []
        for slot in range(drafter.settings.block_size):
            inside_anchors = anchors[anchors + 1 + slot < tokens.shape[1]]
            markov_input = drafter.before(tokens[:, inside_anchors + slot])
            logits = network.output(hidden[:, : len(inside_anchors), slot]) + network.bias(
                markov_input
            )
            slot_labels = labels[:, inside_anchors + 1 + slot]
            losses.append(
                nn.functional.cross_entropy(
                    logits.flatten(0, 1), slot_labels.flatten(), ignore_index=-1
                )
            )
        gradients = torch.autograd.grad(torch.stack(losses).sum(), weights, allow_unused=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    return drafter.eval()
