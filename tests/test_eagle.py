"""The EAGLE head: what it reads, what it remembers, and that training sees what decoding does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import EOS, PROMPTS, target
from cli_fixtures import refused, succeed
from tiny_eagle import eagle, fitted_eagle
from tiny_models import write_text_model

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.decoding import Session, autoregressive_decode, speculative_decode
from lightning_specdec.drafters import (
    DraftRequest,
    EagleDrafter,
    NGramWithFallback,
    TargetContext,
    last_two_tokens_of,
)
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling
from lightning_specdec.training.eagle import rollouts

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def calls(model: torch.nn.Module) -> list[tuple[int, ...]]:
    """The shapes that a module is called with from now on."""
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def windowed(drafter: EagleDrafter, attention_window: int | None) -> EagleDrafter:
    """A copy that looks no further back than that."""
    copy = EagleDrafter(**{**drafter.arguments(), "attention_window": attention_window}).eval()
    copy.load_state_dict(drafter.state_dict())
    return copy


def proposed(
    drafter: FeatureDrafter,
    model: LanguageModel,
    text: list[int],
    read: int,
    window: int,
) -> Any:
    """The draft after a text whose first `read` tokens the target has read in a separate call."""
    with torch.inference_mode():
        state = model.init_state(1, 40)
        memory = drafter.init_state(1, 40, TargetContext(model, state))
        for piece in (text[:read], text[read:-1]):
            output = model(
                torch.tensor([piece]),
                state,
                logits_for=slice(-1, None),
                features=drafter.features(model),
            )
            drafter.observe(memory, output, [0])
        request = DraftRequest(
            [text],
            last_two_tokens_of([text], model.device),
            None,
            wants_logits=True,
            vocab_size=model.vocab_size,
        )
        return drafter.propose(memory, request, [window], Sampling())


@torch.no_grad()
def rolled(
    drafter: EagleDrafter,
    model: LanguageModel,
    text: list[int],
    window: int,
) -> torch.Tensor:
    """The logits of training's rollouts for the last tokens of a text, a round's draft."""
    tokens = torch.tensor([text])
    layers = drafter.settings.feature_layers
    features_by_layer = model(tokens, features=tuple(layers)).features
    features = drafter.network.features([features_by_layer[layer][:, :-1] for layer in layers])
    steps = rollouts(drafter.network, model.embeddings(tokens[:, 1:]), features, window)
    first_entry = len(text) - window - 2
    logits = torch.stack(
        [drafter.network.logits(hidden[0, first_entry + step]) for step, hidden in enumerate(steps)]
    )
    vocabulary = drafter.draft_vocabulary
    return logits if vocabulary is None else vocabulary.spread(logits, -torch.inf)


@pytest.mark.parametrize("name", ["transformer", "llama", "gemma3"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("attention_window", [None, 6, 3, 1])
def test_drafts_are_those_of_the_rollouts_that_it_is_trained_on(
    name: str,
    reduced: bool,
    attention_window: int | None,
) -> None:
    model = target(name)
    drafter = windowed(fitted_eagle(model, reduced=reduced), attention_window)
    window = 4
    draft = proposed(drafter, model, TEXT, 5, window)
    expected = rolled(drafter, model, [*TEXT, *draft.tokens[0].tolist()], window)
    torch.testing.assert_close(draft.logits[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_output": True},
        {"feature_norms": False},
        {"norm_before_residual": True},
        {"head_size": 6, "rotary_base": 5e5},
    ],
)
def test_each_variant_drafts_as_it_is_trained_and_differs_from_the_others(
    changes: dict[str, Any],
) -> None:
    model = target("llama")
    plain = fitted_eagle(model)
    drafter = fitted_eagle(model, num_steps=2, **changes)
    draft = proposed(drafter, model, TEXT, 5, 3)
    expected = rolled(drafter, model, [*TEXT, *draft.tokens[0].tolist()], 3)
    torch.testing.assert_close(draft.logits[0], expected, atol=1e-4, rtol=1e-4)
    if "head_size" not in changes:
        plain_copy = EagleDrafter(**{**drafter.arguments(), **plain.arguments()}).eval()
        plain_copy.load_state_dict(
            drafter.state_dict()
            | {key: value for key, value in plain.state_dict().items() if "layer_norms" in key}
        )
        assert not torch.allclose(
            rolled(plain_copy, model, [*TEXT, *draft.tokens[0].tolist()], 3)[-1],
            expected[-1],
            atol=1e-3,
        )


def test_tokens_outside_the_attention_window_are_not_seen() -> None:
    model = target("transformer")
    network = windowed(fitted_eagle(model), 3).network
    with torch.no_grad():
        features = torch.randn(
            1, len(TEXT), model.hidden_size or 0, generator=torch.Generator().manual_seed(0)
        )
        changed = features.clone()
        changed[:, :2] += 1.0
        embedded = model.embeddings(torch.tensor([TEXT]))
        steps = rollouts(network, embedded, features, 2)
        changed_steps = rollouts(network, embedded, changed, 2)
    assert torch.equal(steps[0][:, 4:], changed_steps[0][:, 4:]) and not torch.allclose(
        steps[0][:, 3], changed_steps[0][:, 3]
    )
    assert torch.equal(
        steps[1][:, 5:], changed_steps[1][:, 5:]
    )  # of rounds that begin with entry 4 and later ones
    assert not torch.allclose(steps[1][:, 3], changed_steps[1][:, 3])


def test_training_attends_as_a_round_does() -> None:
    model = target("transformer")
    network = fitted_eagle(model).network
    tokens = torch.tensor([TEXT, TEXT[::-1]])
    with torch.no_grad():
        features = torch.randn(
            2, len(TEXT), model.hidden_size or 0, generator=torch.Generator().manual_seed(0)
        )
        embedded = model.embeddings(tokens)
        steps = rollouts(network, embedded, features, 3)
        # A single round: the entries up to its first, then its own outputs.
        for start in (0, 3, 5):
            end = start + 1
            (single_round,) = rollouts(network, embedded[:, :end], features[:, :end], 1)
            torch.testing.assert_close(single_round[:, -1], steps[0][:, start])
        changed = features.clone()
        changed[:, 4:] += 1.0
        changed_steps = rollouts(network, embedded, changed, 3)
    # The round that begins with entry 3 has no features after it.
    for step in range(3):
        torch.testing.assert_close(changed_steps[step][:, 3 + step], steps[step][:, 3 + step])
        assert not torch.allclose(changed_steps[step][:, 4 + step], steps[step][:, 4 + step])


@pytest.mark.parametrize("window", [1, 3, 6])
def test_each_entry_is_read_once_and_drafts_are_forgotten(window: int) -> None:
    model = target("transformer")
    drafter = fitted_eagle(model)
    session = Session(model, drafter, max_length=40, num_draft_tokens=window)
    row = session.add(TEXT, max_new_tokens=20)
    # The first round has no draft, since the target has read nothing yet.
    session.step()
    assert session.num_draft_calls == 0
    state: Any = session._batch.draft_state
    while row.live:
        assert state.num_known == [len(row.text) - 1]
        session.step()
        assert state.entry_cache.consumed[0] <= len(row.text) - 1
    assert (
        row.text[len(TEXT) :]
        == autoregressive_decode(model, TEXT, max_new_tokens=20).rows[0].tokens
    )


def test_it_drafts_better_than_chance_and_the_shapes_of_its_calls_do_not_depend_on_verdicts() -> (
    None
):
    model = target("transformer")
    drafter = fitted_eagle(model)
    copy = EagleDrafter(**drafter.arguments()).eval()
    copy.load_state_dict(drafter.state_dict())
    output_shapes = calls(copy.network.output_norm)
    input_shapes = calls(copy.network.inner_norm)
    session = Session(model, copy, max_length=60, num_draft_tokens=3)
    row = session.add(PROMPTS[1], max_new_tokens=40)
    while row.remaining > 4:  # after that windows are shorter
        session.step()
    efficiency = session.result().block_efficiency
    assert efficiency is not None and efficiency > 1.3
    assert set(output_shapes) == {(1, 16)}
    assert set(input_shapes[1:]) == {(1, 4, 16), (1, 1, 16)}  # the first one read the prompt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "a hidden size of 32 .*the target has 16"),
        ({"vocab_size": 12}, "a vocabulary of 12, the target has 16 and 11"),
        ({"feature_layers": [2]}, "reads layer 2, the target has the layers 0 to 1"),
    ],
)
def test_a_target_of_other_sizes_is_refused(changes: dict[str, Any], message: str) -> None:
    model = target("transformer")
    with pytest.raises(ValueError, match=message):
        EagleDrafter(**{**eagle(model).arguments(), **changes}).check_target(model)


def test_a_target_without_embeddings_is_refused() -> None:
    model = target("rnn")
    with pytest.raises(ValueError, match="embeddings"):
        eagle(model, layers=[0]).check_target(model)


def test_nan_after_a_rejection_changes_no_draft() -> None:
    model = target("transformer")
    drafter = fitted_eagle(model)
    drafts_by_garbage = []
    for garbage in (0.0, torch.nan):
        with torch.inference_mode():
            state = model.init_state(1, 40)
            memory = drafter.init_state(1, 40, TargetContext(model, state))
            for text, guesses in ((TEXT[:-1], []), (TEXT, [7, 7, 7])):  # none of which is kept
                read = torch.tensor([text[state.consumed[0] : -1] + guesses])
                output = model(read, state, features=drafter.features(model))
                features = {layer: hidden.clone() for layer, hidden in output.features.items()}
                for hidden in features.values():
                    hidden[:, hidden.shape[1] - len(guesses) :] += garbage
                drafter.observe(
                    memory, ModelOutput(output.logits[:, -len(guesses) - 1 :], features), [0]
                )
                state.truncate([len(text) - 1])
                request = DraftRequest(
                    [text],
                    last_two_tokens_of([text], model.device),
                    None,
                    vocab_size=model.vocab_size,
                )
                draft = drafter.propose(memory, request, [4], Sampling())
            drafts_by_garbage.append(draft.tokens.tolist())
    assert drafts_by_garbage[0] == drafts_by_garbage[1]


@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS], ids=len)
@pytest.mark.parametrize("bound", [0.3, 0.5, 1.0])
def test_a_draft_that_ends_early_costs_no_pass_after_its_end(
    bound: float,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside rows that have ended and need no draft tokens."""
    passes = []
    widths = []
    model = target("llama")

    class Counted(EagleDrafter):
        def _advance(self, *arguments: Any) -> Any:
            passes.append(1)
            return super()._advance(*arguments)

        def propose(self, *arguments: Any) -> Draft:
            num_passes_before = len(passes)
            draft = super().propose(*arguments)
            widths.append(draft.tokens.shape[1])
            assert len(passes) - num_passes_before == draft.num_calls <= widths[-1] + 1, (
                "a further pass tells where it ends"
            )
            return draft

    fitted = fitted_eagle(model)
    drafter = Counted(**{**fitted.arguments(), "min_confidence": bound}).eval()
    drafter.load_state_dict(fitted.state_dict())
    result = speculative_decode(
        model, drafter, prompts, max_new_tokens=20, num_draft_tokens=4, eos=EOS
    )
    assert result.num_draft_calls == len(passes) and (max(widths) > 0) == (bound < 1)


def test_min_confidence_may_be_given_to_a_head_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = write_text_model(tmp_path / "model")
    head = str(tmp_path / "head.safetensors")
    plain = SpeculativeDecoder.from_pretrained(home)
    plain.with_drafter(eagle(plain.target, min_confidence=0.25)).save_draft(head)
    bounds = []
    for kind in ("EagleDrafter", "NGramWithFallback"):
        for init_args in ({}, {"min_confidence": 1}):
            section = {"class_path": kind, "init_args": init_args}
            drafter: Any = SpeculativeDecoder.from_pretrained(home, head, drafter=section).drafter
            bounds.append(getattr(drafter, "fallback", drafter).settings.min_confidence)
    assert bounds == [0.25, 1, 0.25, 1]
    decode = (
        "decode",
        "--target",
        home,
        "--draft",
        head,
        "--repeats",
        "0",
        "--prompt",
        "the oak",
        "--drafter",
    )
    outcome = succeed(*decode, "EagleDrafter", "--drafter.min_confidence", "1")
    assert "output identical" in outcome.out
    message = "the draft is a EagleDrafter with its own settings: drop --drafter.head_size"
    refused(*decode, "EagleDrafter", "--drafter.head_size", "2", message=message)
    refused(
        *decode,
        "EagleDrafter",
        "--drafter.min_confidence",
        "2",
        message="min_confidence must be in [0, 1]",
    )
    plain.with_drafter(
        NGramWithFallback.for_target(plain.target, drafter.fallback.at(0))
    ).save_draft("joined.safetensors")
    section = {
        "class_path": "NGramWithFallback",
        "init_args": {"min_confidence": 1, "min_ngram": 3},
    }
    joined: Any = SpeculativeDecoder.from_pretrained(
        home, "joined.safetensors", drafter=section
    ).drafter
    assert (joined.lookup.settings.min_ngram, joined.fallback.settings.min_confidence) == (3, 1)
    model = ("decode", "--target", home, "--draft", home, "--drafter", "NGramWithFallback")
    refused(
        *model,
        "--drafter.min_confidence",
        "1",
        message="ModelDrafter has no min_confidence: drop it",
    )
