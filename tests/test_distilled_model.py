"""A small model as the draft of a frozen target: what layers of the target make, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from families import FAMILIES, tiny
from generated import corpus, target  # noqa: F401
from tiny_distillation import VOCAB, begun, check_that_counts_are_decodings, check_that_it_learns, fit_shipped
from tiny_distillation import target as frozen

from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models.fewer_layers import with_layers
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack
from lightning_specdec.training import DistilledModelTraining

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
SMALL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCAB}


def training(**options: Any) -> DistilledModelTraining:
    given = {"draft_layers": [0, 2], "num_draft_tokens": 3, "learning_rate": 0.003, **options}
    return DistilledModelTraining(frozen(), **given)


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3", "gemma2"])
def test_with_all_its_layers_it_is_the_target_and_with_some_what_these_make(family: str) -> None:
    model = HuggingFaceLM(tiny(family))
    with torch.no_grad():
        assert torch.equal(with_layers(model, [0, 1, 2])(TOKENS).logits, model(TOKENS).logits)
        made = with_layers(model, [0, 2])
        assert made.num_layers == 2 and made.origin is None
        other = tiny(family)
        stack = LayerStack(other)
        del stack.layers[1]
        other.config.num_hidden_layers = 2  # what a loop over the layers goes by, here and there
        for name in ("layer_types", "no_rope_layers"):
            if getattr(other.config, name, None):
                values = getattr(other.config, name)
                setattr(other.config, name, [values[0], values[2]])
        wanted = other(TOKENS, use_cache=False).logits
    torch.testing.assert_close(made(TOKENS).logits, wanted, atol=1e-4, rtol=1e-4)
    state, pieces = made.init_state(1, 12), []
    with torch.no_grad():  # its layers write where their own numbers say
        for piece in TOKENS.split(4, dim=1):
            pieces.append(made(piece, state).logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), wanted, atol=1e-4, rtol=1e-4)


def test_its_weights_are_its_own_in_float32_and_tied_where_the_targets_are() -> None:
    model = HuggingFaceLM(tiny("llama", vocab_size=VOCAB, tie_word_embeddings=True).bfloat16())
    made = with_layers(model, [1])
    assert made.model.get_input_embeddings().weight is made.model.get_output_embeddings().weight
    assert made.dtype == torch.float32 and not made.training
    assert torch.equal(made.output_weight, model.model.get_output_embeddings().weight.float())
    theirs = {weight.data_ptr() for weight in model.parameters()}
    assert not any(weight.data_ptr() in theirs for weight in made.parameters())
    again = HuggingFaceLM(**made.arguments())
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(TOKENS % VOCAB).logits, made(TOKENS % VOCAB).logits)


@pytest.mark.parametrize("layers", [[], [1, 1], [2, 0]])
def test_layers_that_do_not_ascend_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"layers must ascend, each once, got \["):
        with_layers(frozen(), layers)


def test_layers_that_cannot_be_put_together_are_refused() -> None:
    for layers in ([0, 3], [-1, 2]):
        with pytest.raises(ValueError, match="a layer must be from 0 to 2, got"):
            with_layers(frozen(), layers)
    with pytest.raises(ValueError, match=r"with the layers \[1, 2\] cannot be built: .* layers of one kind"):
        with_layers(HuggingFaceLM(tiny("deepseek_v3")), [1, 2])  # its first layer is another than the others
    packed = frozen().packed()
    with pytest.raises(ValueError, match="take plain weights"):
        with_layers(packed, [0, 1])


@pytest.mark.parametrize("new", [False, True], ids=["layers", "new"])
def test_a_few_steps_let_more_guesses_be_kept_and_leave_the_target_as_it_is(new: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"draft": HuggingFaceLM(SMALL), "draft_layers": None} if new else {}
    check_that_it_learns(training(**options, learning_rate=0.01 if new else 0.003), 30)


@pytest.mark.parametrize("prompt_length", [1, 3])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(prompt_length: int) -> None:
    check_that_counts_are_decodings(begun(training()), prompt_length)


@pytest.mark.parametrize("frozen_embeddings", [False, True])
def test_embeddings_and_output_head_learn_only_when_they_may(frozen_embeddings: bool) -> None:
    module = training(freeze_embeddings=frozen_embeddings)
    model = module.drafter.model
    assert isinstance(model, HuggingFaceLM)
    for part in (model.model.get_input_embeddings(), model.model.get_output_embeddings()):
        assert part.weight.requires_grad is not frozen_embeddings
    assert all(weight.requires_grad for weight in LayerStack(model.model).layers.parameters())
    (group,) = module.configure_optimizers().param_groups
    assert len(group["params"]) == sum(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"draft_layers": None}, "a draft is new or made of the target's layers, got neither: give draft or draft_la"),
        ({"draft": cases.target("llama")}, "got both: give draft or draft_layers"),
        ({"draft_layers": [0, 9]}, "a layer must be from 0 to 2, got 9"),
        ({"draft": cases.MODELS["rnn"](vocab_size=12), "draft_layers": None}, "the draft has a vocabulary of 12"),
    ],
    ids=["neither", "both", "range", "vocabulary"],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        training(**options)


def test_layers_are_those_of_a_transformers_model_whose_output_head_can_be_called() -> None:
    with pytest.raises(ValueError, match="draft_layers takes a transformers model apart, the target is a RNN"):
        DistilledModelTraining(cases.target("rnn"), draft_layers=[0])
    with pytest.raises(ValueError, match="Gemma3ForCausalLM cannot be taken apart"):
        DistilledModelTraining(cases.target("gemma3"), draft_layers=[0])


def test_the_shipped_config_trains_a_draft_that_decodes(
    corpus: Path,  # noqa: F811
    target: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = fit_shipped("smollm2_layers", corpus, target, tmp_path, monkeypatch, draft_layers=[0, 2])
    assert isinstance(made.drafter, ModelDrafter) and made.drafter.model.num_layers == 2
