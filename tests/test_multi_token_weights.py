"""Heads as weights: how they begin, what they are called in files, what they are refused for."""

from __future__ import annotations

import cases
import pytest
import torch
from families import tiny
from tiny_heads import OPEN, Chain, family, heads, small
from torch import nn

from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters.heads import MOST_STACKED
from lightning_specdec.drafters.multi_token import from_medusa, to_medusa
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.packed import quantize

BOTH = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


@pytest.mark.parametrize("name", [*OPEN, "gemma3_text", "longcat_flash"])
def test_a_new_head_that_was_copied_from_the_target_says_what_the_target_says(name: str) -> None:
    target, rounded, tokens = family(name), family(name), torch.tensor([cases.PROMPTS[3]])
    quantize(rounded.model, "int8")
    for model in (target, target.fused(), rounded):
        drafter = small(hidden_size=32, vocab_size=cases.VOCAB, num_blocks=2).init_from(model)
        (layer,) = drafter.features(model)
        output = model(tokens, features=(layer,))
        for logits in drafter.logits(output.features[layer], model):
            torch.testing.assert_close(logits, output.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["rnn", "fused", "transformer", "llama", "gpt2", "gpt_neox"])
def test_a_shared_output_head_is_the_one_that_the_target_scores_with(name: str) -> None:
    target = cases.target(name) if name in cases.MODELS else family(name)
    drafter = heads(target, shared_output=True, num_steps=0)
    (layer,) = drafter.features(target)
    output = target(torch.tensor([cases.PROMPTS[3]]), features=(layer,))
    made = drafter.logits(output.features[layer], target)
    assert made.shape == (3, *output.logits.shape)
    for logits in made:
        torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=1e-5)
    assert not any("output" in key for key in drafter.state_dict()), "the head is the target's to save"


@pytest.mark.parametrize("name", ["rnn", "fused", "transformer"])
def test_own_outputs_begin_as_copies_of_the_targets(name: str) -> None:
    target = cases.target(name)
    drafter = small(hidden_size=16, vocab_size=cases.VOCAB).init_from(target)
    for head in drafter.heads.children():
        assert torch.equal(head[-1].weight, target.output_weight)  # type: ignore[index]


def test_heads_are_as_wide_as_what_the_targets_output_head_reads() -> None:
    """Which need not be as wide as its layers: some of the OPT models narrow their last layer's output."""
    target = HuggingFaceLM(tiny("opt", vocab_size=cases.VOCAB, word_embed_proj_dim=16))
    assert target.hidden_size == 16
    drafter = small(hidden_size=16, vocab_size=cases.VOCAB).init_from(target)
    (layer,) = drafter.features(target)
    output = target(torch.tensor([cases.PROMPTS[3]]), features=(layer,))
    for logits in drafter.logits(output.features[layer], target):
        torch.testing.assert_close(logits, output.logits, atol=1e-4, rtol=1e-4)
    assert speculative_decode(target, drafter, cases.PROMPTS, max_new_tokens=5).num_draft_calls
    with pytest.raises(ValueError, match="a hidden size of 32 .*the target has 16"):
        small(hidden_size=32, vocab_size=cases.VOCAB).check_target(target)


def test_heads_of_one_type_serve_a_target_of_another() -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=cases.VOCAB).bfloat16())
    for shared in (False, True):
        drafter = small(hidden_size=32, vocab_size=cases.VOCAB, shared_output=shared)
        result = speculative_decode(target, drafter, [1, 2, 3], max_new_tokens=8)
        assert len(result.tokens[0]) == 8 and result.num_draft_calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize(("vocab_size", "shared"), [(7, False), (MOST_STACKED + 3, False), (cases.VOCAB, True)])
def test_fused_heads_say_the_same(vocab_size: int, shared: bool, num_blocks: int, dtype: torch.dtype) -> None:
    """Stacked outputs, packed ones, and the target's own."""
    torch.manual_seed(0)
    target = cases.target("transformer")
    size = 16 if shared else 24
    drafter = small(
        num_heads=3, hidden_size=size, vocab_size=vocab_size, num_blocks=num_blocks, shared_output=shared
    ).to(dtype)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.2)
    fused, hidden = drafter.fused(), torch.randn(2, 4, size)
    assert fused.fused() is fused and fused.arguments() == drafter.arguments()
    for num_heads in (None, 1, 3):
        with torch.no_grad():
            expected, made = (each.logits(hidden, target, num_heads) for each in (drafter, fused))
        assert made.shape == expected.shape
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)


def test_weights_have_the_names_that_medusas_files_give_them() -> None:
    """Those that `MedusaModel.medusa_head.state_dict()` has: a list of sequences of blocks and a linear layer."""
    names = ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "1.0.linear.weight", "1.0.linear.bias", "1.1.weight"]
    assert list(to_medusa(small().state_dict())) == names
    deeper = to_medusa(small(num_heads=1, num_blocks=2).state_dict())
    assert {name: list(weight.shape) for name, weight in deeper.items()} == {
        "0.0.linear.weight": [4, 4],
        "0.0.linear.bias": [4],
        "0.1.linear.weight": [4, 4],
        "0.1.linear.bias": [4],
        "0.2.weight": [7, 4],
    }
    assert list(to_medusa(small(shared_output=True).state_dict())) == [n for n in names if "linear" in n]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_weights_go_to_medusas_names_and_back_and_mean_what_they_mean_there(num_blocks: int) -> None:
    one, other = small(num_blocks=num_blocks), small(num_blocks=num_blocks)
    for parameter in one.parameters():
        nn.init.normal_(parameter)
    weights = to_medusa(one.state_dict())
    other.load_state_dict(from_medusa(weights))
    hidden = torch.randn(3, 5, 4)
    made = other.logits(hidden, Chain())
    assert torch.equal(made, one.logits(hidden, Chain()))
    for i in range(2):  # Medusa's forward pass, written out
        state = hidden
        for j in range(num_blocks):
            inner = state @ weights[f"{i}.{j}.linear.weight"].T + weights[f"{i}.{j}.linear.bias"]
            state = state + inner * torch.sigmoid(inner)
        torch.testing.assert_close(made[i], state @ weights[f"{i}.{num_blocks}.weight"].T)


@pytest.mark.parametrize("names", [[], ["0.0.linear.weight", "lm_head.weight"], ["heads.0.0.linear.weight"]])
def test_a_file_of_something_else_is_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="no file of Medusa's heads, whose weights are named like 0.0.linear.weight"):
        from_medusa({name: torch.zeros(1) for name in names})


def test_a_target_of_another_kind_is_refused_by_name() -> None:
    rnn = cases.target("rnn")
    with pytest.raises(ValueError, match="for a hidden size of 4 .*the target has 16"):
        small(vocab_size=cases.VOCAB).check_target(rnn)
    with pytest.raises(ValueError, match="a vocabulary of 7, the target has 16 and 11"):
        small(hidden_size=16).check_target(rnn)
    with pytest.raises(ValueError, match="Gemma3ForCausalLM cannot be taken apart"):
        small(hidden_size=32, vocab_size=cases.VOCAB, shared_output=True).check_target(cases.target("gemma3"))
    closed = Chain()
    closed.num_layers = None
    with pytest.raises(ValueError, match="Chain gives no hidden states"):
        small(hidden_size=11, vocab_size=11).check_target(closed)
    with pytest.raises(ValueError, match="Chain .* output head"):
        LanguageModel.check_output_head(Chain())
