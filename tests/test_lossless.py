"""Laws 1, 3, 4: the tokens of standard decoding, all of a perfect draft, none of a wrong one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import cases
import oracle
import pytest
import torch
from families import placed

from lightning_specdec.checkpoints.checkpoint import load, save
from lightning_specdec.config.kinds import DRAFTERS
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.rules import Purpose, Sampling

GREEDY = Sampling()
SAMPLINGS = {
    "hot": Sampling(1.7),
    "top_k": Sampling(1.0, top_k=3),
    "top_p": Sampling(0.8, top_p=0.7),
    "all": Sampling(0.9, top_k=6, top_p=0.9, min_p=0.1),
}
SURELY_WRONG = [
    (rule, sampling)
    for rule in cases.LOSSLESS
    for sampling in (GREEDY, Sampling(1.0))
    # A draft is always wrong if the target is certain, or if the drafter draws with the target's
    # own numbers.
    if sampling.greedy or cases.RULES[rule].draft_purpose is Purpose.CORRECT
]


def test_every_registered_drafter_is_among_the_cases() -> None:
    named = {type(cases.drafter(name, target)) for target, name in cases.COMBINATIONS}
    assert {DRAFTERS.load(name) for name in DRAFTERS} <= named


def test_only_drafters_that_work_inside_a_target_are_particular_about_it() -> None:
    for target in cases.MODELS:
        for name in cases.DRAFTERS.keys() - set(cases.VARIANTS):
            assert (target, name) in cases.COMBINATIONS or cases.DRAFTERS[name](
                cases.target(target)
            ).inside_target
    assert {target for target, _ in cases.COMBINATIONS} == set(cases.MODELS)
    assert {name for _, name in cases.COMBINATIONS} == set(cases.DRAFTERS)


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS.values()], ids=["greedy", *SAMPLINGS])
@pytest.mark.parametrize("target", cases.MODELS)
def test_standard_decoding_equals_the_slow_oracle(target: str, sampling: Sampling) -> None:
    """The oracle has no cache, batch or recorded calls; `cases.standard` compares them too."""
    model = cases.target(target)
    options: dict[str, Any] = {"max_new_tokens": 10, "sampling": sampling, "seed": 3}
    result = autoregressive_decode(model, cases.PROMPTS, eos=cases.EOS, **options)
    for index, prompt in enumerate(cases.PROMPTS):
        expected = oracle.decode(model, prompt, eos=[cases.EOS], index=index, **options)
        assert result.tokens[index] == expected


@pytest.mark.parametrize(
    ("target", "drafter", "window", "rule"),
    [
        (*pair, *turn)
        for pair in cases.DISTINCT_COMBINATIONS
        for turn in cases.shared(
            cases.in_turn(cases.few(range(1, 9), *pair), cases.LOSSLESS, *pair), *pair
        )
    ],
)
def test_greedy_speculative_equals_autoregressive(
    target: str,
    drafter: str,
    window: int,
    rule: str,
) -> None:
    """At temperature 0 the output depends neither on the window nor on the rule."""
    result = cases.decode(
        target, drafter, max_new_tokens=10, num_draft_tokens=window, rule=rule, eos=cases.EOS
    )
    standard = cases.standard(target, GREEDY, 10)
    assert result.tokens == standard.tokens
    assert [row.stop_reason for row in result.rows] == [row.stop_reason for row in standard.rows]


@pytest.mark.parametrize("target", cases.MODELS)
def test_the_prompts_of_the_law_above_stop_at_eos_inside_a_block_and_at_their_length(
    target: str,
) -> None:
    result = cases.decode(target, "itself", max_new_tokens=10, eos=cases.EOS)
    assert {row.stop_reason for row in result.rows} == {"eos", "length"}

    stopped = [row for row in result.rows if row.stop_reason == "eos"]
    last_rounds = [row.rounds[-1] for row in stopped if row.rounds]
    assert any(last_round.next_token is None for last_round in last_rounds), (
        "no row stops before the end of its block"
    )
    different_rows = {tuple(tokens) for tokens in result.tokens}
    assert len(different_rows) == len(cases.PROMPTS), "mixed-up rows would not show"


@pytest.mark.parametrize(
    ("target", "drafter", "max_new_tokens", "rule"),
    [
        (*pair, *turn)
        for pair in cases.pairs(["near", "itself", "ragged", "early_exit"])
        for turn in cases.shared(
            cases.in_turn(cases.few([1, 2, 3], *pair), cases.LOSSLESS, *pair), *pair
        )
    ],
)
def test_a_window_larger_than_what_is_wanted_gives_no_token_too_many(
    target: str,
    drafter: str,
    max_new_tokens: int,
    rule: str,
) -> None:
    result = cases.decode(
        target, drafter, max_new_tokens=max_new_tokens, num_draft_tokens=8, rule=rule
    )
    assert result.tokens == cases.standard(target, GREEDY, max_new_tokens, None).tokens
    assert all(len(row.tokens) == max_new_tokens for row in result.rows)


@pytest.mark.parametrize(
    ("target", "drafter", "sampling", "window"),
    [
        (*pair, *turn)
        for pair in cases.DISTINCT_COMBINATIONS
        for turn in cases.shared(
            cases.in_turn(cases.few([*SAMPLINGS], *pair), cases.few((2, 5), *pair), *pair), *pair
        )
    ],
)
def test_exact_match_equals_autoregressive_at_every_temperature(
    target: str,
    drafter: str,
    sampling: str,
    window: int,
) -> None:
    result = cases.decode(
        target,
        drafter,
        max_new_tokens=10,
        num_draft_tokens=window,
        sampling=SAMPLINGS[sampling],
        eos=cases.EOS,
    )
    assert result.tokens == cases.standard(target, SAMPLINGS[sampling], 10).tokens


@pytest.mark.parametrize(
    ("target", "window_and_rule", "sampling"),
    [
        (target, *turn)
        for target in cases.MODELS
        for turn in cases.in_turn(
            [*itertools.product([1, 3, 5], cases.LOSSLESS)],
            [GREEDY, Sampling(1.0), Sampling(0.8, top_p=0.7)],
            target,
            "itself",
        )
    ],
)
def test_a_drafter_that_is_the_target_accepts_everything(
    target: str,
    window_and_rule: tuple[int, str],
    sampling: Sampling,
) -> None:
    window, rule = window_and_rule
    result = speculative_decode(
        cases.target(target),
        ModelDrafter(cases.target(target)),
        cases.PROMPTS,
        max_new_tokens=2 * (window + 1),
        num_draft_tokens=window,
        rule=cases.RULES[rule](),
        sampling=sampling,
    )
    assert result.acceptance_rate == 1.0
    assert result.block_efficiency == window + 1
    assert result.num_target_calls == 2
    assert all(len(row.tokens) == (window + 1) * row.num_rounds for row in result.rows)


@pytest.mark.parametrize("target", cases.MODELS)
def test_the_fused_target_as_the_draft_accepts_everything(target: str) -> None:
    model = cases.target(target)
    result = speculative_decode(
        model, ModelDrafter(model.fused()), cases.PROMPTS, max_new_tokens=12
    )
    assert result.block_efficiency == 4


@pytest.mark.parametrize(("rule", "sampling"), SURELY_WRONG)
@pytest.mark.parametrize("target", cases.MODELS)
def test_a_drafter_that_is_always_wrong_costs_target_calls_but_no_token(
    target: str,
    rule: str,
    sampling: Sampling,
) -> None:
    result = cases.decode(
        target, "wrong", max_new_tokens=8, num_draft_tokens=3, rule=rule, sampling=sampling
    )
    assert result.block_efficiency == 1.0
    assert result.acceptance_rate == 0.0
    assert result.tokens == cases.standard(target, sampling, 8, None).tokens


KINDS_OF_LAYERS = ("exit", "eagle", "block", "mtp")
"""Parts of the names of drafters that need the layers of a transformer."""
UNSAVED = ("ragged", "repeater", "wrong", "cross", "certain", "staged_three")
SAVED = [name for name in cases.DRAFTERS if name not in UNSAVED and "hotter" not in name]


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize("name", [*SAVED, "cross", "staged_three"])
def test_the_form_that_decodes_fastest_drafts_the_same_and_leaves_the_original_alone(
    name: str,
) -> None:
    target_name = cases.target_of(name)
    target = cases.target(target_name)
    drafter = cases.drafter(name, target_name)
    weights = {key: weight.clone() for key, weight in drafter.state_dict().items()}

    fused = drafter.fused()
    assert fused.fused() is fused or type(fused.fused()) is type(fused)
    # Without texts of earlier requests, which a drafter may remember.
    expected = speculative_decode(target, drafter.fresh(), cases.PROMPTS, max_new_tokens=12)
    result = speculative_decode(target, fused.fresh(), cases.PROMPTS, max_new_tokens=12)
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]
    for key, weight in drafter.state_dict().items():
        assert torch.equal(weight, weights[key])


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize("name", [name for name in SAVED if name not in ("fused", "transformer")])
def test_a_file_keeps_a_drafter_with_all_its_parts(name: str, tmp_path: Path) -> None:
    target_name = "llama" if any(kind in name for kind in KINDS_OF_LAYERS) else "rnn"
    target = cases.target(target_name)
    drafter = cases.drafter(name, target_name)
    save(tmp_path / "pair.safetensors", target, drafter)
    loaded = load(tmp_path / "pair.safetensors")
    assert type(loaded.drafter) is type(drafter)
    loaded_target = placed(loaded.target)
    loaded_drafter = placed(loaded.drafter)
    expected = speculative_decode(loaded_target, drafter.fresh(), cases.PROMPTS, max_new_tokens=9)
    result = speculative_decode(loaded_target, loaded_drafter, cases.PROMPTS, max_new_tokens=9)
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]


@pytest.mark.parametrize(
    "name", ["hotter", "certain", "early_exit_hotter", "cross", "staged_three"]
)
def test_what_a_file_cannot_keep_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a checkpoint keeps no"):
        cases.drafter(name, cases.target_of(name)).arguments()


SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 11, "num_heads": 2}
EAGLE = {"feature_layers": [0], **SIZES, "num_key_heads": 1, "intermediate_size": 16}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *(
        ("NGramDrafter", {}, {"max_ngram": value}, "max_ngram must be from 1 to 32")
        for value in (0, 33)
    ),
    ("NGramDrafter", {}, {"max_ngram": 2, "min_ngram": 3}, "min_ngram must be at most"),
    ("NGramDrafter", {}, {"min_ngram": 0}, "min_ngram must be"),
    ("NGramDrafter", {}, {"tokens_per_match": 0}, "tokens_per_match must be from 1"),
    *(("EarlyExitDrafter", {}, {"exit_layer": value}, "exit_layer must be") for value in (0, -1)),
    (
        "EarlyExitDrafter",
        {"exit_layer": 1},
        {"head_layers": [1], "hidden_size": 32},
        "hidden_size and vocab_size",
    ),
    (
        "EarlyExitDrafter",
        {"exit_layer": 1},
        {"head_layers": [1], "vocab_size": 67},
        "hidden_size and vocab_size",
    ),
    ("MedusaDrafter", SIZES, {"num_heads": 0}, "num_heads must be from 1 to 64"),
    ("MedusaDrafter", SIZES, {"num_blocks": 0}, "num_blocks must be from 1 to 16"),
    ("MedusaDrafter", SIZES, {"hidden_size": 0}, "hidden_size must be from 1"),
    ("MedusaDrafter", SIZES, {"vocab_size": 1}, "vocab_size must be from 2"),
    ("EagleDrafter", EAGLE, {"feature_layers": []}, "feature_layers must be one layer"),
    ("EagleDrafter", EAGLE, {"attention_window": 0}, "attention_window must be"),
    ("EagleDrafter", EAGLE, {"num_heads": 3}, "do not divide a hidden size of 16"),
    ("EagleDrafter", EAGLE, {"draft_vocabulary": [3, 2]}, "draft_vocabulary must ascend"),
    ("EagleDrafter", EAGLE, {"draft_vocabulary": [3, 11]}, "draft_vocabulary must be from 0 to 10"),
    ("EagleDrafter", EAGLE, {"draft_vocabulary": 12}, "draft_vocabulary must be from 2 to 11"),
]


@pytest.mark.parametrize(("kind", "sizes", "wrong", "message"), WRONG, ids=str)
def test_settings_that_make_no_sense_are_refused(
    kind: str,
    sizes: dict[str, Any],
    wrong: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        DRAFTERS.load(kind)(**{**sizes, **wrong})


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("llama", {"exit_layer": 3}, "exit_layer must be from 1 to 2, got 3"),
        (
            "llama",
            {"exit_layer": 1, "head_layers": [1], "hidden_size": 32, "vocab_size": 66},
            "a vocabulary of 66",
        ),
        (
            "llama",
            {"exit_layer": 1, "head_layers": [1], "hidden_size": 31, "vocab_size": 11},
            "a hidden size of 31",
        ),
        ("rnn", {"exit_layer": 1}, "has no layers to exit from"),
        ("transformer", {"exit_layer": 1}, "has no layers to exit from"),
    ],
)
def test_an_exit_that_the_target_does_not_have_is_refused(
    target: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        DRAFTERS.load("EarlyExitDrafter").for_target(cases.target(target), **settings)
