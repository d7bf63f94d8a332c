"""Heads as weights: how they begin, and what they are refused for."""

from __future__ import annotations

import cases
import pytest
import torch
from families import tiny
from tiny_heads import OPEN, Chain, family, small

from lightning_specdec.decoding import speculative_decode
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import quantize


@pytest.mark.parametrize("name", [*OPEN, "gemma3_text", "longcat_flash"])
def test_a_new_head_that_was_copied_from_the_target_says_what_the_target_says(name: str) -> None:
    target, rounded, tokens = family(name), family(name), torch.tensor([cases.PROMPTS[3]])
    quantize(rounded.model, "int8")
    for model in (target, target.fused(), rounded):
        drafter = small(hidden_size=32, vocab_size=cases.VOCAB, num_blocks=2).init_from(model)
        (layer,) = drafter.features(model)
        output = model(tokens, features=(layer,))
        for number in range(2):
            made = drafter.logits(number, output.features[layer])
            torch.testing.assert_close(made, output.logits, atol=1e-4, rtol=1e-4)


def test_heads_are_as_wide_as_what_the_targets_output_head_reads() -> None:
    """Which need not be as wide as its layers: some of the OPT models narrow their last layer's output."""
    target = HuggingFaceLM(tiny("opt", vocab_size=cases.VOCAB, word_embed_proj_dim=16))
    assert target.hidden_size == 16
    drafter = small(hidden_size=16, vocab_size=cases.VOCAB).init_from(target)
    assert speculative_decode(target, drafter, cases.PROMPTS, max_new_tokens=5).num_draft_calls


def test_heads_of_one_type_serve_a_target_of_another() -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=cases.VOCAB).bfloat16())
    drafter = small(hidden_size=32, vocab_size=cases.VOCAB)
    result = speculative_decode(target, drafter, [1, 2, 3], max_new_tokens=8)
    assert len(result.tokens[0]) == 8 and result.num_draft_calls


def test_weights_have_medusas_names() -> None:
    """Those of its published files are sequences of blocks and a linear layer, without the prefix."""
    names = ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "1.0.linear.weight", "1.0.linear.bias", "1.1.weight"]
    assert list(small().state_dict()) == [f"heads.{name}" for name in names]


def test_a_target_of_another_kind_is_refused_by_name() -> None:
    rnn = cases.target("rnn")
    with pytest.raises(ValueError, match="for a hidden size of 4 .*the target has 16"):
        small(vocab_size=cases.VOCAB).check_target(rnn)
    with pytest.raises(ValueError, match="a vocabulary of 7, the target has 16 and 11"):
        small(hidden_size=16).check_target(rnn)
    closed = Chain()
    closed.num_layers = None
    with pytest.raises(ValueError, match="Chain gives no hidden states"):
        small(hidden_size=11, vocab_size=11).check_target(closed)
