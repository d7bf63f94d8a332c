"""A tiny pair whose distributions are peaked as those of real models, and its sampled answers."""

from __future__ import annotations

import torch
from families import tiny

from lightning_specdec import ModelDrafter, SpeculativeDecoder
from lightning_specdec.audit.reference import Reference
from lightning_specdec.audit.token_law import TokenScores
from lightning_specdec.cli.audit_engine import MAX_NEW_TOKENS, NUM_PROMPTS
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import AcceptanceRule, Sampling

VOCAB_SIZE = 67
PROMPT_LENGTH = 6
HEAD_SCALE = 4.0
"""Factor of the output head, which lowers the entropy to about 2 nats."""


def peaked_model(draft_noise: float = 0.0) -> HuggingFaceLM:
    """The target, or a draft: the target with noise in all weights, relative to their spread."""
    model = tiny("llama", 1, num_hidden_layers=1, max_position_embeddings=256)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD_SCALE)
        for parameter in model.parameters():
            if draft_noise and parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(draft_noise * parameter.std() * noise)
    return HuggingFaceLM(model)


def peaked_pair(draft_noise: float) -> SpeculativeDecoder:
    """The target with a draft."""
    return SpeculativeDecoder(peaked_model(), ModelDrafter(peaked_model(draft_noise)))


def answer_scores(
    decoder: SpeculativeDecoder,
    rule: AcceptanceRule,
    *,
    num_audits: int = 1,
    temperature: float = 1.0,
) -> tuple[list[list[TokenScores]], float]:
    """Scores of each answer of some audits with the default number of prompts and new tokens.

    Returns:
        For each audit, the scores of its answers; and the acceptance rate of all of them.
    """
    generator = torch.Generator().manual_seed(3)
    num_answers = num_audits * NUM_PROMPTS
    shape = (num_answers, PROMPT_LENGTH)
    prompts = torch.randint(1, VOCAB_SIZE, shape, generator=generator).tolist()
    sampling = Sampling(temperature)
    result = decoder.decode(
        prompts,
        rule=rule,
        temperature=temperature,
        max_new_tokens=MAX_NEW_TOKENS,
        num_draft_tokens=3,
        seed=1,
        eos=(),
    )
    reference = Reference(decoder.target, "float32")
    scores = []
    for row in result.rows:
        scores.append(reference.score(row.prompt, row.tokens, sampling).scores)
    audits = [scores[i : i + NUM_PROMPTS] for i in range(0, num_answers, NUM_PROMPTS)]

    num_proposed = sum(row.counts.num_proposed for row in result.rows if row.counts)
    num_accepted = sum(row.counts.num_accepted for row in result.rows if row.counts)
    return audits, num_accepted / num_proposed
