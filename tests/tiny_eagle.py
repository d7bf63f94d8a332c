"""EAGLE heads for tests, fitted to a tiny target's own texts: right often, but not always."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny_heads import examples, steps_of_fit
from torch import Tensor, nn

from lightning_specdec.drafters import EagleDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.eagle import rollouts


def eagle(
    target: LanguageModel,
    *,
    draft_vocabulary: list[int] | None = None,
    layers: list[int] | None = None,
    **more: Any,
) -> EagleDrafter:
    """A random EAGLE head with `more` settings; the global seed stays unchanged."""
    assert target.hidden_size is not None and target.num_layers is not None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return (
            EagleDrafter(
                layers or list(range(target.num_layers)),
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                num_heads=2,
                num_key_heads=1,
                intermediate_size=16,
                draft_vocabulary=draft_vocabulary,
                **more,
            )
            .to(target.device)
            .eval()
        )


def fitted_eagle(
    target: LanguageModel,
    *,
    reduced: bool = False,
    num_steps: int = 30,
    **more: Any,
) -> EagleDrafter:
    """An EAGLE head after a few steps, if the target supports one; do not write to it."""
    return _fitted_eagle(target, reduced, steps_of_fit(num_steps), **more)


@functools.cache
def _fitted_eagle(
    target: LanguageModel,
    reduced: bool,
    num_steps: int,
    **more: Any,
) -> EagleDrafter:
    vocabulary = None
    if reduced:
        vocabulary = [token for token in range(target.vocab_size) if token % 5 != 4]
    if target.hidden_size is not None and target.num_layers is not None:
        drafter = eagle(target, draft_vocabulary=vocabulary, **more)
    else:
        # A target without hidden states gets a drafter that refuses it.
        drafter = EagleDrafter(
            [0], hidden_size=4, vocab_size=7, num_heads=1, num_key_heads=1, intermediate_size=4
        )
    try:
        drafter.check_target(target)
    except ValueError:
        return drafter
    if not num_steps:
        return drafter
    texts, _ = examples(target)
    tokens = texts.clamp(min=0)
    with torch.no_grad():
        features_by_layer = target(tokens, features=tuple(drafter.settings.feature_layers)).features
        embedded = target.embeddings(tokens[:, 1:])
    labels = texts
    if drafter.draft_vocabulary is not None:
        labels = drafter.draft_vocabulary.to_draft(texts, -1)
    weights = list(drafter.network.parameters())
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for _ in range(num_steps):
        features = drafter.network.features(
            [features_by_layer[layer][:, :-1] for layer in drafter.settings.feature_layers]
        )
        steps: list[Tensor] = rollouts(drafter.network, embedded, features, 3)
        losses = []
        for step, hidden in enumerate(steps):
            logits = drafter.network.logits(hidden[:, step:-1]).flatten(0, 1)
            step_labels = labels[:, 2 + step :].flatten()
            losses.append(nn.functional.cross_entropy(logits, step_labels, ignore_index=-1))
        gradients = torch.autograd.grad(torch.stack(losses).sum(), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    return drafter.eval()
