"""Laws of the baselines: transformers' own ways give the same tokens, each at its best setting, alike in every call."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import tiny_bench
import torch
from tiny_bench import config, measured, subject

from lightning_specdec.bench import isolated, outside
from lightning_specdec.bench import run as run_module
from lightning_specdec.bench.isolated import best_setting
from lightning_specdec.bench.matrix import Cell
from lightning_specdec.bench.outside import DEFAULT_GUESSES, Outside
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.ways import Prepared, decode, way_of
from lightning_specdec.drafters import ModelDrafter, NGramDrafter


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "timed_calls", lambda *more: {})
    monkeypatch.setattr(run_module, "alphas", lambda *more: [])


def transformer(**more: Any) -> Subject:
    target = cases.MODELS["llama"]()
    return subject(target, {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}, outside=True, **more)


def test_a_setting_is_warmed_up_and_the_fastest_median_of_turns_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[str, list[float]] = {"cold": [9, 1, 1, 1], "lucky": [0.9, 0.9, 1.3, 1.3], "slow": [2, 2, 2, 2]}
    calls: list[str] = []

    def decoded(way: Any, *more: Any) -> Any:
        calls.append(way["layers"])
        return SimpleNamespace(seconds=seconds[calls[-1]][calls.count(calls[-1]) - 1])

    monkeypatch.setattr(isolated, "way_of", lambda *more, **others: more[3].setting)
    monkeypatch.setattr(isolated, "decode", decoded)
    monkeypatch.setattr(Outside, "settings", lambda *more: [{"layers": name} for name in seconds])
    best = best_setting(Cell("tiny", "generate", "sequences", 0.0, 1), transformer(), config())
    assert calls == [*seconds, *seconds, "cold", "lucky", "cold", "lucky"], "in turn; what is hopeless once is left"
    assert best["setting"] == {"layers": "cold"}
    assert [(each["seconds"], len(each["tries"])) for each in best["tried"]] == [(1, 3), (1.3, 3), (2, 1)]


def test_what_transformers_does_by_default_is_among_the_settings() -> None:
    given = transformer().outside
    assert given is not None
    default = {"layers": "plain", "num_assistant_tokens_schedule": "constant", "num_assistant_tokens": DEFAULT_GUESSES}
    assert default in given.settings("assisted")
    from transformers import GenerationConfig

    own = GenerationConfig._get_default_generation_params()
    assert default.items() - {("layers", "plain")} <= own.items()


def test_every_call_of_a_cell_guesses_as_when_its_setting_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given, chosen = transformer(), config(max_new_tokens=9)
    assert given.outside is not None
    target, assistant = given.outside.target.plain, given.outside.assistants["model"].plain
    generate, began, left = target.generate, [], []

    def spied(*more: Any, **others: Any) -> Any:
        began.append(others["assistant_model"].generation_config.num_assistant_tokens)
        output = generate(*more, **others)
        left.append(others["assistant_model"].generation_config.num_assistant_tokens)
        return output

    monkeypatch.setattr(target, "generate", spied)
    schedule = {"layers": "plain", "num_assistant_tokens_schedule": "heuristic"}
    monkeypatch.setattr(Outside, "settings", lambda *more: [schedule])
    cell = Cell("tiny", "assisted", "sequences", 0.0, 1, "model")
    best = best_setting(cell, given, chosen)
    setting = best["setting"]
    assert began[1:] == left[:-1] and len(set(left)) > 1, "while it is chosen the schedule goes on, as it does in use"
    assert setting == {**schedule, "num_assistant_tokens": left[-1]}
    tried = best["tried"][0]
    assert tried["began_with"] == began[1:] and tried["ended_with"] == left[-1], "both are kept, each as what it is"
    assert schedule.items() <= tried.items() and "num_assistant_tokens" not in tried
    del began[:]
    for _ in range(2):
        way = way_of(cell, given, chosen, Prepared(setting=setting), seed=0)
        decode(way, tiny_bench.PROMPTS["sequences"], 1)
    assert began == [setting["num_assistant_tokens"]] * 4
    assert assistant.generation_config.num_assistant_tokens is None


def test_transformers_ways_give_the_same_tokens_at_their_best_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "NUM_TRIES", 1)
    given = transformer()
    assert given.outside is not None
    models = (given.outside.target.plain, given.outside.assistants["model"].plain)
    before = [(model.generation_config, model.config, model.config._attn_implementation) for model in models]
    values = [deepcopy((model.generation_config.to_dict(), model.config.to_dict())) for model in models]
    chosen = config(max_new_tokens=8, repeats=1, warmup=1, num_draft_tokens=[3])
    found = measured(tmp_path / "r", chosen, given)
    rows = {row["way"]: row for row in found.rows}
    assert set(rows) == {"standard", "speculative", "generate", "assisted", "prompt_lookup"}
    for way in ("generate", "assisted", "prompt_lookup"):
        row, best = rows[way], next(each for each in found.manifest["outside"]["tiny"] if each["way"] == way)
        assert row["error"] is None and row["same_tokens"] is True and row["setting"] == best["setting"]
        fastest = min(best["tried"], key=lambda each: float(each["seconds"]))
        known = {**fastest, "num_assistant_tokens": fastest.get("ended_with", fastest.get("num_assistant_tokens"))}
        assert best["setting"].items() <= known.items() and len(best["tried"]) >= 2
        assert row["prompt_new_tokens"] == [8, 8] and all(len(each) == 8 for each in row["token_seconds"])
        assert row["phase_seconds"] is None and row["seconds"] >= sum(row["prompt_seconds"])
    assert rows["generate"]["num_target_calls"] == 16 > rows["assisted"]["num_target_calls"]
    assert [(model.generation_config, model.config, model.config._attn_implementation) for model in models] == before
    assert [(model.generation_config.to_dict(), model.config.to_dict()) for model in models] == values


def test_transformers_generates_batches_and_draws_as_it_is_told() -> None:
    given, chosen = transformer(), config(max_new_tokens=6)
    cell = Cell("tiny", "generate", "sequences", 0.0, 2)
    prepared = Prepared(setting=best_setting(cell, given, chosen)["setting"])
    alone = decode(way_of(cell, given, chosen, prepared, seed=0), tiny_bench.PROMPTS["sequences"], 1)
    batch = decode(way_of(cell, given, chosen, prepared, seed=0), tiny_bench.PROMPTS["sequences"], 2)
    assert batch.tokens == alone.tokens and batch.num_target_calls == 6
    eos = alone.tokens[0][2]
    given.stops = (eos,)
    cut = decode(way_of(cell, given, chosen, prepared, seed=0), tiny_bench.PROMPTS["sequences"], 2)
    assert cut.tokens[0] == alone.tokens[0][: alone.tokens[0].index(eos) + 1]
    given.stops = ()
    state = torch.get_rng_state()
    drawn = Cell("tiny", "generate", "sequences", 5.0, 2)
    outputs = [
        decode(way_of(drawn, given, chosen, prepared, seed=seed), tiny_bench.PROMPTS["sequences"], 2).tokens
        for seed in (0, 0, 1)
    ]
    assert outputs[0] == outputs[1] != outputs[2] and torch.equal(torch.get_rng_state(), state)


def test_the_clock_starts_when_all_is_ready_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given, made, order = transformer(), torch.tensor, list[str]()
    assert given.outside is not None

    def tensor(*more: Any, **others: Any) -> torch.Tensor:
        order.append("tensor")
        return made(*more, **others)

    def generate(texts: torch.Tensor, **others: Any) -> torch.Tensor:
        order.append("generate")
        return texts

    class Watch(outside._Watch):
        def __init__(self) -> None:
            order.append("clock")
            super().__init__()

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(outside, "_Watch", Watch)
    monkeypatch.setattr(given.outside.target.plain, "generate", generate)
    way = way_of(
        Cell("tiny", "generate", "sequences", 0.0, 1), given, config(), Prepared(setting={"layers": "plain"}), seed=0
    )
    way([[1, 2]], [0])
    assert order == ["tensor", "tensor", "clock", "generate"]


def test_assisting_a_batch_fails_by_name(tmp_path: Path) -> None:
    rows = measured(tmp_path / "r", config(batch_sizes=[2], outside=["assisted"], repeats=1), transformer()).rows
    failed = [row for row in rows if row["error"] is not None]
    assert [row["way"] for row in failed] == ["assisted"] and "batch" in failed[0]["error"]
