"""Laws of a benchmark: what its rows and manifest say, that it resumes however it was stopped, hashes, baselines."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import signal
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import tiny_bench
import torch
from tiny_bench import PROMPTS, config, measured, pair, plain

from lightning_specdec.bench import costs, huggingface
from lightning_specdec.bench import results as results_module
from lightning_specdec.bench import run as run_module
from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.huggingface import HuggingFace, best_setting
from lightning_specdec.bench.measure import Case
from lightning_specdec.bench.pairs import BenchPair
from lightning_specdec.bench.results import read
from lightning_specdec.bench.rows import comparisons
from lightning_specdec.data.prompts import Prompt
from lightning_specdec.decoding import PHASES, calibration
from lightning_specdec.drafters import ModelDrafter, NGramDrafter

ALPHAS, CALLS = run_module.alphas, run_module.timed_calls


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What comes before the cases takes longer than they do."""
    monkeypatch.setattr(run_module, "timed_calls", lambda *more: {})
    monkeypatch.setattr(run_module, "alphas", lambda *more: [])
    monkeypatch.setattr(costs, "SECONDS", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_row_says_what_its_run_did(tmp_path: Path) -> None:
    chosen = config(temperatures=[0, 1], num_draft_tokens=[1, 2], max_new_tokens=5, warmup=1)
    found = measured(tmp_path / "r", chosen)
    assert len(found.rows) == 2 * 2 * (1 + 2 * 2) and found.rows == read(tmp_path / "r").rows
    for row in found.rows:
        assert row.error is None and row.num_prompts == 2 and row.seed == row.repeat
        assert row.phase_seconds is not None and tuple(row.phase_seconds) == PHASES
        assert min(row.phase_seconds.values()) >= 0
        assert sum(row.phase_seconds.values()) == pytest.approx(row.seconds, rel=1e-9), "the phases add up to the whole"
        for steps, seconds, first in zip(row.token_seconds, row.prompt_seconds, row.time_to_first_token, strict=True):
            assert len(steps) == 5 and sum(steps) == pytest.approx(seconds, abs=1e-5) and steps[0] == first
        assert (row.seconds or 0.0) >= sum(row.prompt_seconds) and row.num_new_tokens == sum(
            row.prompt_new_tokens
        ) == 10
        if row.method == "speculative":
            tested, accepted = row.tested_at or [], row.accepted_at or []
            assert sum(row.histogram or []) == row.num_row_rounds == row.num_target_calls
            assert sum(tested) == (row.num_tested or 0) <= (row.num_proposed or 0)
            assert sum(accepted) == row.num_accepted == row.num_new_tokens - row.num_row_rounds
            assert all(kept <= tried for kept, tried in zip(accepted, tested, strict=True))
            assert len(tested) <= int(row.num_draft_tokens or 0)
        else:
            assert row.histogram is None and row.rule is None
        assert row.same_tokens is True, "ExactMatch gives standard decoding's tokens"
    assert any(sum(row.tested_at or []) > 0 for row in found.rows if row.draft == "model")
    order = [(row.temperature, row.repeat, row.draft, row.num_draft_tokens) for row in found.rows]
    each = [(None, None), ("model", 1), ("model", 2), ("ngram", 1), ("ngram", 2)]
    assert order == [(t, repeat, *one) for t in (0, 1) for repeat in range(2) for one in each], "cases take turns"


@pytest.mark.parametrize("others", [tiny_bench.OTHERS, {}], ids=["others", "none"])
def test_predictions_start_from_calls_and_from_no_prompt_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: Any
) -> None:
    monkeypatch.setattr(run_module, "timed_calls", CALLS)
    monkeypatch.setattr(run_module, "alphas", ALPHAS)
    decoded, read_prompts = costs.autoregressive_decode, list[list[int]]()

    def watched(target: Any, prompt: list[int], **more: Any) -> Any:
        read_prompts.append(prompt)
        return decoded(target, prompt, **more)

    monkeypatch.setattr(costs, "autoregressive_decode", watched)
    manifest = measured(tmp_path / "r", config(num_draft_tokens=[1, 3]), pair(others=others)).manifest
    measured_tokens = {prompt.tokens for prompt in PROMPTS["sequences"]}
    assert len(read_prompts) == 4 and all(tuple(each) not in measured_tokens for each in read_prompts)
    calls = manifest["calls"]["tiny"]
    assert calls["one_token_seconds"] > 0 and set(calls["wide_seconds"]) == {"2", "4"}
    assert set(calls["draft_step_seconds"]) == {"model", "ngram"}
    assert [each["draft"] for each in manifest["alpha_at"]["tiny"]] == (["model", "ngram"] if others else [])
    assert manifest["pairs"]["tiny"]["draft_parameters"]["ngram"] is None
    assert manifest["prompts"]["tiny"]["sequences"]["p0"] == cases.PROMPTS[0]
    assert {"threads", "processor", "cores", "memory_bytes", "cuda", "torch", "commit", "config"} <= manifest.keys()


def test_a_config_comes_back_from_its_plain_values_whatever_their_order() -> None:
    more: dict[str, Any] = {"rules": [{"EpsilonThreshold": {"epsilon": 0.2}}, "ExactMatch"], "domains": "code"}
    more["pairs"] = {"a": {"target": "x", "dtype": "bfloat16", "drafts": {"b": {"draft": "y"}}}, "c": {"pair": "d"}}
    chosen = config(**more)
    turned = BenchConfig.from_dict(dict(reversed(list(plain(**more).items()))))
    assert turned == chosen == BenchConfig.from_dict(json.loads(json.dumps(chosen.to_dict())))
    source = chosen.pairs["a"].source("b", "cpu")
    assert (source.target, source.dtype, source.draft) == ("x", "bfloat16", "y")


def hashes(chosen: BenchConfig, given: BenchPair) -> list[str]:
    return [case.cell for group in given.cases(chosen) for case in group]


def test_the_hash_of_a_case_changes_with_what_it_decodes() -> None:
    chosen = config(temperatures=[0, 1], num_draft_tokens=[1, 2, 3, "auto"], rules=["ExactMatch", "RejectionSampling"])
    before = hashes(chosen, pair())
    assert len(set(before)) == len(before) == (1 + 2 * 4) + (1 + 2 * 4 * 2) and hashes(chosen, pair()) == before
    target = cases.MODELS["rnn"]()
    near = cases.near(target)
    for change in ("target", "draft", "prompt", "seed", "ignore_eos", "max_new_tokens", "warmup", "threads"):
        other, guess, prompts = deepcopy(target), deepcopy(near), dict(PROMPTS)
        if change == "prompt":
            prompts = {"sequences": [Prompt("p0", "sequences", (4,)), *prompts["sequences"][1:]]}
        elif change in ("target", "draft"):
            with torch.no_grad():
                next((other if change == "target" else guess).parameters())[0, 0] += 1e-6
        values: dict[str, Any] = {"seed": 9, "ignore_eos": True, "max_new_tokens": 4, "warmup": 2, "threads": 3}
        again = config(**chosen.to_dict() | {name: value for name, value in values.items() if name == change})
        drafts = {"model": ModelDrafter(guess), "ngram": NGramDrafter()}
        same = set(before) & set(hashes(again, pair(other, drafts, prompts=prompts, eos=(5,))))
        if change == "draft":
            assert not same, "EOS changed too"
            same = set(before) & set(hashes(again, pair(other, drafts, prompts=prompts)))
            assert len(same) == (1 + 4) + (1 + 4 * 2), "standard decoding and lookup are what they were"
        else:
            assert not same


def test_rules_and_windows_that_would_do_the_same_are_measured_once() -> None:
    lossy: Any = {"EpsilonThreshold": {"epsilon": 0.2}}
    chosen = config(temperatures=[0, 1], rules=[lossy, "RejectionSampling", "ExactMatch"])
    rules = [[case.row(0).rule for case in group if case.draft == "ngram"] for group in pair().cases(chosen)]
    assert rules == [["EpsilonThreshold(epsilon=0.2)", "RejectionSampling"], [*rules[0], "ExactMatch"]]
    target = cases.MODELS["transformer"]()
    drafts = {"heads": cases.DRAFTERS["heads"](target)}
    most = drafts["heads"].max_draft_tokens or 0
    group = pair(target, drafts).cases(config({"heads": {}}, num_draft_tokens=list(range(1, 10))))[0]
    assert [case.config.num_draft_tokens for case in group] == [None, *range(1, most + 1)]


def count_runs(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[Any]:
    """The cells and repeats that are measured from now on; the one of that number is interrupted."""
    runs: list[Any] = []
    run = Case.run

    def counted(self: Case, repeat: int) -> Any:
        if len(runs) == stop_at:
            raise KeyboardInterrupt
        runs.append((self.cell, repeat))
        return run(self, repeat)

    monkeypatch.setattr(Case, "run", counted)
    return runs


@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_a_run_that_was_interrupted_resumes_and_runs_no_finished_case_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    given = pair()
    with monkeypatch.context() as patch:
        runs = count_runs(patch, number)
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path / "r", config(), given)
    left = (tmp_path / "r" / "rows.jsonl").read_bytes()
    assert left.count(b"\n") == number and left[-1:] in (b"", b"\n")
    again = count_runs(monkeypatch)
    rows = measured(tmp_path / "r", config(), given).rows
    assert (tmp_path / "r" / "rows.jsonl").read_bytes().startswith(left)
    assert len(again) == 6 - number and not set(runs) & set(again)
    assert len({(row.cell, row.repeat) for row in rows}) == len(rows) == 6
    assert all(row.same_tokens for row in rows), "beside standard decoding of an earlier run too"
    measured(tmp_path / "r", config(), given)
    assert len(again) == 6 - number, "nothing is left to do"


def test_a_run_that_is_killed_twenty_times_has_every_finished_row_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    given, chosen, path = pair(), config(repeats=40), tmp_path / "r" / "rows.jsonl"
    draw, context, kept = random.Random(0), multiprocessing.get_context("fork"), b""
    for _ in range(20):
        child = context.Process(target=measured, args=(tmp_path / "r", chosen, given))
        child.start()
        assert child.pid is not None
        far = len(kept) + draw.choice((0, 0, 500, 1500, 3000))  # a row has about 1000 bytes; most are killed amid one
        while child.is_alive() and far and not (path.exists() and path.stat().st_size >= far):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        content = path.read_bytes() if path.exists() else b""
        finished = content[: content.rfind(b"\n") + 1]
        assert finished.startswith(kept), "a finished row stays as it is"
        kept = finished
    assert 5 < kept.count(b"\n") < 100, "cases that tell something"
    rows = measured(tmp_path / "r", chosen, given).rows
    assert path.read_bytes().startswith(kept)
    assert len({(row.cell, row.repeat) for row in rows}) == len(rows) == 3 * 40
    assert {row.same_tokens for row in rows} == {True}
    assert sorted(each.name for each in path.parent.iterdir()) == ["manifest.json", "rows.jsonl"]


@pytest.mark.parametrize("name", ["timed_calls", "alphas", "_write_manifest"])
def test_a_run_that_is_killed_while_it_learns_what_a_pair_is_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    torch.set_num_threads(1)
    given, module = pair(), results_module if name == "_write_manifest" else run_module
    write, written = getattr(module, name), list[int]()

    def killed(*more: Any) -> Any:
        written.append(1)
        if name != "_write_manifest" or len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*more)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        child = multiprocessing.get_context("fork").Process(target=measured, args=(tmp_path / "r", config(), given))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    found = measured(tmp_path / "r", config(), given)
    assert len(found.rows) == len({(row.cell, row.repeat) for row in found.rows}) == 6
    assert all("tiny" in found.manifest[each] for each in ("pairs", "prompts", "calls", "alpha_at"))


def test_a_case_that_fails_is_shown_with_its_error_and_is_not_tried_again(tmp_path: Path) -> None:
    chosen = config({"ngram": {}, "torn": {}}, rules=["ExactMatch", "EpsilonThreshold"])
    given = pair(drafts={"ngram": NGramDrafter(), "torn": "this draft does not fit"})
    rows = measured(tmp_path / "r", chosen, given).rows
    failed = [(row.draft, row.rule, row.error) for row in rows if row.error is not None]
    wanted = [("torn", "ExactMatch"), ("torn", "EpsilonThreshold"), ("ngram", "EpsilonThreshold")]
    assert [each[:2] for each in failed] == wanted, "once each, however many repeats there are"
    assert failed[0][2] == "this draft does not fit" and "NGramDrafter has none" in str(failed[2][2])
    assert sum(row.error is None for row in rows) == 2 * 2
    assert {each.case.label: each.error is None for each in comparisons(rows)}["ngram 2 ExactMatch"]
    assert len(measured(tmp_path / "r", chosen, given).rows) == len(rows)


def test_a_draft_that_no_memory_is_left_for_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "fused", full)
        poor = pair()
    rows = measured(tmp_path / "r", config(), poor).rows
    errors = {row.error for row in rows if row.draft == "model"}
    assert errors == {"CUDA out of memory. Tried to allocate 2 GiB"}
    assert len(measured(tmp_path / "r", config(), poor).rows) == len(rows) == 5
    whole = measured(tmp_path / "r", config(), pair()).rows
    assert [row.draft for row in whole[5:]] == ["model"] * 2 and not any(row.error for row in whole[5:])


def test_other_weights_under_one_name_are_refused(tmp_path: Path) -> None:
    measured(tmp_path / "r", config())
    with pytest.raises(ValueError, match="another target_sha256 of tiny"):
        measured(tmp_path / "r", config(), pair(cases.MODELS["rnn"](3)))


def test_an_adaptive_window_is_recorded_and_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, where there should be a directory")
    monkeypatch.setattr(calibration, "calibrate", functools.partial(calibration.calibrate, seconds=0.01))
    rows = measured(tmp_path / "r", config(num_draft_tokens=["auto"], repeats=1)).rows
    assert all(row.error is None for row in rows)
    own = [row for row in rows if row.method == "speculative"]
    assert all(row.num_draft_tokens == "auto" and row.window and row.window["calibration"] for row in own)
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 1 and "cannot be written (Not a directory)" in told[0]


# --- Hugging Face's baselines ---


def transformer(**more: Any) -> BenchPair:
    target = cases.MODELS["llama"]()
    return pair(target, {"model": ModelDrafter(cases.near(target)), "ngram": NGramDrafter()}, **more)


def case_of(given: BenchPair, method: str, **more: Any) -> Case:
    groups = given.cases(config(baselines=[method], **more))
    return next(case for case in groups[0] if case.method == method)


def test_a_setting_is_warmed_up_and_the_fastest_median_of_turns_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[str, list[float]] = {"cold": [9, 1, 1, 1], "lucky": [0.9, 0.9, 1.3, 1.3], "slow": [2, 2, 2, 2]}
    calls: list[str] = []

    def decoded(self: Case, **more: Any) -> Any:
        assert self.setting is not None
        calls.append(self.setting["name"])
        return SimpleNamespace(seconds=seconds[calls[-1]][calls.count(calls[-1]) - 1])

    case = case_of(transformer(), "prompt_lookup")
    monkeypatch.setattr(Case, "decode", decoded)
    monkeypatch.setattr(HuggingFace, "settings", lambda method: [{"name": name} for name in seconds])
    best = best_setting(case, ())
    assert calls == [*seconds, *seconds, "cold", "lucky", "cold", "lucky"], "in turn; what is hopeless once is left"
    assert best["setting"] == {"name": "cold"} and [len(each["tries"]) for each in best["tried"]] == [3, 3, 1]


def test_what_transformers_does_by_default_is_among_the_settings() -> None:
    from transformers import GenerationConfig

    own = GenerationConfig._get_default_generation_params()
    assert HuggingFace.settings("assisted")[-1].items() <= own.items() and HuggingFace.settings("generate") == [{}]


def test_hugging_faces_methods_give_the_same_tokens_at_their_best_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "NUM_TRIES", 1)
    given = transformer()
    assert given.baseline is not None
    models = (given.baseline.target, given.baseline.assistants["model"])
    before = [(model.generation_config, model.config, model.config._attn_implementation) for model in models]
    values = [deepcopy((model.generation_config.to_dict(), model.config.to_dict())) for model in models]
    chosen = config(max_new_tokens=8, repeats=1, warmup=1, num_draft_tokens=[3])
    found = measured(tmp_path / "r", chosen, given)
    rows = {row.method: row for row in found.rows}
    assert set(rows) == {"standard", "speculative", "generate", "assisted", "prompt_lookup"}
    for method in ("generate", "assisted", "prompt_lookup"):
        row = rows[method]
        best = next(each for each in found.manifest["huggingface"]["tiny"] if each["method"] == method)
        assert row.error is None and row.same_tokens is True and row.setting == best["setting"]
        assert row.prompt_new_tokens == [8, 8] and all(len(each) == 8 for each in row.token_seconds)
        assert row.phase_seconds is None and row.seconds >= sum(row.prompt_seconds)
    assert rows["generate"].num_target_calls == 16 > rows["assisted"].num_target_calls
    assert [(model.generation_config, model.config, model.config._attn_implementation) for model in models] == before
    assert [(model.generation_config.to_dict(), model.config.to_dict()) for model in models] == values


def test_generate_decodes_batches_stops_and_draws_as_it_is_told() -> None:
    given = transformer()
    generate = functools.partial(case_of, given, "generate", max_new_tokens=6)

    def tokens(seed: int = 0, **more: Any) -> list[list[int]]:
        return replace(generate(**more), setting={}).decode(seed=seed).tokens

    alone = tokens()
    assert tokens(batch_sizes=[2]) == alone
    given.eos = (alone[0][2],)
    assert tokens(batch_sizes=[2])[0] == alone[0][: alone[0].index(alone[0][2]) + 1]
    given.eos, state = (), torch.get_rng_state()
    outputs = [tokens(seed, temperatures=[5.0], batch_sizes=[2]) for seed in (0, 0, 1)]
    assert outputs[0] == outputs[1] != outputs[2] and torch.equal(torch.get_rng_state(), state)


def test_the_clock_of_generate_starts_when_all_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    given, made, order = transformer(), torch.tensor, list[str]()
    assert given.baseline is not None

    def tensor(*more: Any, **others: Any) -> torch.Tensor:
        order.append("tensor")
        return made(*more, **others)

    def generate(texts: torch.Tensor, **others: Any) -> torch.Tensor:
        order.append("generate")
        return texts

    class Watch(huggingface._Watch):
        def __init__(self) -> None:
            order.append("clock")
            super().__init__()

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(huggingface, "_Watch", Watch)
    monkeypatch.setattr(given.baseline.target, "generate", generate)
    given.baseline.decode("generate", [[1, 2]], [0], case_of(given, "generate").config, setting={}, draft=None)
    assert order == ["tensor", "tensor", "clock", "generate"]


def test_assisting_a_batch_fails_by_name(tmp_path: Path) -> None:
    chosen = config(batch_sizes=[2], baselines=["assisted"], repeats=1)
    failed = [row for row in measured(tmp_path / "r", chosen, transformer()).rows if row.error is not None]
    assert [row.method for row in failed] == ["assisted"] and "batch" in str(failed[0].error)
