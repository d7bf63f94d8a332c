"""Laws of what a sweep tries without being told: it is found by what it is, it must qualify before
it costs much time, and every kind that is named in a table can be decoded by its command."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
from cli_fixtures import call, succeed
from test_tournament import tournament
from tiny_models import edit_config, write, write_text_model
from tiny_tokenizers import byte_level

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench import scouts
from lightning_specdec.bench.family import family_models, has_same_tokenizer
from lightning_specdec.bench.measure import Case
from lightning_specdec.bench.race import Entrant, MeasuredRace
from lightning_specdec.bench.recommendation import command, pair_values, python_lines
from lightning_specdec.bench.records import STANDARD
from lightning_specdec.bench.sweep import MOST_FINALISTS, Sweep
from lightning_specdec.bench.tournament import Tournament
from lightning_specdec.bench.ways import Drafting, Engine, Way, draftings
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.kinds import Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.pairs import write_pair
from lightning_specdec.decoding import Calibration
from lightning_specdec.drafters import EarlyExitDrafter, NGramWithFallback

LARGE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of four layers, a smaller model of its family, and models that are none."""
    home = tmp_path_factory.mktemp("candidates")
    models = home / "models"
    write_text_model(models / "target", **LARGE)
    write_text_model(models / "small", seed=2)
    write_text_model(models / "as_large", seed=3, **LARGE)
    write(models / "no_tokenizer", vocab_size=len(byte_level()))

    write_text_model(models / "other_tokens", seed=4)
    tokenizer_path = models / "other_tokens" / "tokenizer.json"
    tokenizer = json.loads(tokenizer_path.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    tokenizer_path.write_text(json.dumps(tokenizer))

    changes: dict[str, dict[str, Any]] = {
        "own_code": {"auto_map": {"AutoModelForCausalLM": "model.Own"}},
        "quantized": {"quantization_config": {"quant_method": "awq"}},
        "masked": {"architectures": ["BertForMaskedLM"]},
    }
    for name, values in changes.items():
        shutil.copytree(models / "small", models / name)
        edit_config(**values)(models / name)
    shutil.copytree(models / "small", models / "incomplete")
    (models / "incomplete" / "model.safetensors").unlink()
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "empty"))


def target_decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("models/target")


def test_a_smaller_model_with_the_same_tokenizer_is_found_beside_the_target(home: Path) -> None:
    models = family_models(target_decoder().target, cache=home / "empty")
    assert [(model.source, model.revision) for model in models] == [("models/small", None)]
    assert models[0].place == "beside the target"
    small = SpeculativeDecoder.from_pretrained("models/small").target
    assert models[0].num_parameters == pytest.approx(small.num_parameters, rel=0.2)


def test_nothing_is_loaded_to_find_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_decoder().target

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    assert family_models(target, cache=home / "empty")


def test_a_model_in_the_cache_of_the_hub_is_found_with_its_commit(
    home: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(home / "models" / "small", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    target = target_decoder().target
    sources = {
        (model.source, model.revision, model.place)
        for model in family_models(target, cache=tmp_path)
    }
    assert sources == {
        ("models/small", None, "beside the target"),
        ("someone/tiny", commit, "in the Hugging Face cache"),
    }


def test_tokenizers_are_equal_if_their_tokens_have_the_same_numbers(
    home: Path, tmp_path: Path
) -> None:
    models = home / "models"
    shutil.copytree(models / "small", tmp_path / "spaced")
    path = tmp_path / "spaced" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert has_same_tokenizer(tmp_path / "spaced", models / "target")
    path.write_text("{")
    assert not has_same_tokenizer(tmp_path / "spaced", models / "target")
    assert not has_same_tokenizer(models / "other_tokens", models / "target")
    assert not has_same_tokenizer(models / "no_tokenizer", models / "target")
    assert not has_same_tokenizer(models / "no_tokenizer", models / "no_tokenizer")


def names_of_scouts(source: PairSource, **options: Any) -> list[str]:
    decoder = target_decoder()
    kinds = draftings(decoder, source)
    return [scout.drafting.name for scout in scouts.scouts(decoder, source, kinds, **options)]


def test_exits_the_suffix_corpus_and_the_family_are_tried_unless_the_user_chose() -> None:
    source = PairSource(target="models/target")
    assert names_of_scouts(source) == ["suffix corpus", "exit 1", "exit 2", "small"]
    assert names_of_scouts(source, has_choice=True) == []
    for chosen in ({"drafter": Choice("NGramDrafter")}, {"draft_quantization": "int8"}):
        assert names_of_scouts(source.changed(**chosen)) == []


def test_a_draft_model_is_tried_in_int4_too_unless_its_weights_were_chosen() -> None:
    decoder = target_decoder()
    source = PairSource(target="models/target")
    kinds = draftings(decoder, source, ["models/small"])
    quantized = [kind for kind in kinds if kind.fields.get("draft_quantization") == "int4"]
    assert [kind.name for kind in quantized] == [
        "small in int4",
        "prompt lookup, then small in int4",
    ]
    assert {kind.backend for kind in quantized} == {"openvino"}
    found = scouts.scouts(decoder, source, draftings(decoder, source))[-1]
    assert found.followers[1:] == tuple(quantized)

    chosen = source.changed(draft_quantization="int8")
    kinds = draftings(decoder, chosen, ["models/small"])
    assert all("int4" not in kind.name for kind in kinds)


def test_exits_that_were_trained_for_the_target_replace_those_that_were_not(home: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained("models/target", pack=False)
    sizes = {"hidden_size": 64, "vocab_size": decoder.target.vocab_size}
    drafter = EarlyExitDrafter(1, head_layers=(1, 3), **sizes)
    path = home / "models" / "trained.safetensors"
    decoder.with_drafter(drafter).save_draft(path)
    try:
        source = PairSource(target="models/target")
        kinds = draftings(decoder, source)
        assert [kind.name for kind in kinds] == [
            "prompt lookup",
            "trained, exit 1",
            "prompt lookup, then trained, exit 1",
            "trained, exit 3",
            "prompt lookup, then trained, exit 3",
        ]
        assert kinds[-1].found == "beside the target: models/trained.safetensors"
        assert names_of_scouts(source) == ["suffix corpus", "small"]
        loaded = SpeculativeDecoder.load(source.changed(**kinds[-1].fields))
        assert isinstance(loaded.drafter, NGramWithFallback)
        assert loaded.drafter.fallback.exit_layer == 3
        assert loaded.drafter.fallback.head is not None
    finally:
        path.unlink()


def test_an_exit_after_lookup_needs_no_draft() -> None:
    arguments = ("--drafter", "NGramWithFallback", "--drafter.exit_layer", "2")
    document = succeed(
        *("decode", "--target", "models/target", *arguments, "--prompt", "the cat"),
        *("--repeats", "0", "--max_new_tokens", "8", "--output", "json"),
    ).json
    for prompt in document["prompts"]:
        assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"]
    outcome = call("decode", "--target", "models/target", "--drafter", "NGramWithFallback")
    assert outcome.code == 2
    assert "give --draft, --drafter.exit_layer N" in outcome.err
    with pytest.raises(ValueError, match="has no exit_layer"):
        NGramWithFallback.for_target(cases.target("llama"), cases.MODELS["llama"](2), exit_layer=1)


FIELD = {"lookup": 1.3, "better": 1.5, "helps": 1.15, "half": 0.5, "slow": 0.7}


@pytest.mark.quick_cases("bursts0")
@pytest.mark.parametrize("bursts", [(0.0, 1.0, 1.0), (0.1, 2.0, 3.0), (0.02, 10.0, 3.0)])
def test_what_helps_qualifies_and_what_cannot_win_is_dropped(
    bursts: tuple[float, float, float],
) -> None:
    """At odds of 1 in 20 for a mistake, more than 6 of 40 would be in 1 of 1,000 cases."""
    num_lost = 0
    num_slow = 0
    num_wasted = 0
    for seed in range(40):
        contest = tournament(FIELD, seed=seed, seconds=120.0, bursts=bursts)
        rivals = {"better": "lookup", "helps": None, "half": None, "slow": None}
        qualified = contest.qualify(rivals)
        num_lost += not {"better", "helps"} <= set(qualified)
        num_slow += "half" in qualified
        num_wasted += len(contest.race.pairs("half")) > 12
        assert qualified == sorted(qualified, key=lambda name: -estimate(contest, name, rivals))
    assert num_lost <= 6
    assert num_slow <= 6
    assert num_wasted <= 6


def estimate(contest: Any, name: str, rivals: dict[str, str | None]) -> float:
    """Speed of a candidate over its rival."""
    rival = rivals[name]
    interval = contest.speedup(name) if rival is None else contest.relative(name, rival)
    return float(interval.value)


def test_after_a_single_turn_the_estimate_decides() -> None:
    contest = tournament({"fast": 3.0, "slow": 0.3}, seconds=1e-9)
    assert contest.qualify({"fast": None, "slow": None}) == ["fast"]
    assert contest.num_turns == 1
    assert contest.set_aside == ["slow"]


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """End contests after three turns, so that nothing depends on the load of the machine."""
    monkeypatch.setattr("lightning_specdec.bench.tournament.MOST_TURNS", 3)
    monkeypatch.setattr("lightning_specdec.bench.tournament.ENOUGH_TURNS", 3)


AMPLE = 600.0
"""Seconds that no test takes."""


def make_sweep(
    seconds: float,
    windows: tuple[int | str, ...],
    *,
    engines: Sequence[Engine] = (Engine("torch", 1),),
    **options: Any,
) -> Sweep:
    source = PairSource(target="models/target", backend="torch")
    decoder = SpeculativeDecoder.load(source)
    kinds = draftings(decoder, source)
    return Sweep(
        decoder,
        source,
        [[1, 2, 3, 1, 2]],
        DecodingConfig(max_new_tokens=16),
        engines=engines,
        kinds=kinds,
        windows=windows,
        seconds=seconds,
        scouts=scouts.scouts(decoder, source, kinds),
        **options,
    )


def test_a_draft_in_int4_is_not_loaded_in_torch() -> None:
    sweep = make_sweep(AMPLE, (2,))
    kinds = [scout.drafting for scout in sweep.scouts if scout.loads_model]
    kinds += [kind for kind in sweep.scouts[-1].followers if kind.backend == "openvino"]
    assert len(kinds) == 3
    loaded = sweep._load(sweep.engines[0], kinds, [2])
    drafted = [entrant.way.drafting for entrant in loaded if entrant.way.drafting]
    assert drafted == kinds[:1]
    assert not sweep.failed


@pytest.mark.usefixtures("few_turns")
def test_a_draft_that_has_to_qualify_is_a_row_and_its_model_is_loaded_last() -> None:
    steps: list[str] = []
    sweep = make_sweep(AMPLE, (2,), watch=lambda progress: steps.append(progress.step))
    sweep.run()
    standing = sweep.standing()
    measured = {
        (comparison.case.draft, comparison.case.num_draft_tokens)
        for comparison in standing.comparisons
    }
    assert {("exit 1", 2), ("exit 2", 2), ("suffix corpus", 8), ("small", 4)} <= measured
    assert not standing.failed
    first_heat = steps.index("looking for drafts that may pay")
    assert first_heat < steps.index("loading small")
    assert all(comparison.same_tokens is not False for comparison in standing.comparisons)


@pytest.mark.usefixtures("few_turns")
@pytest.mark.parametrize("best", [0, 1])
def test_a_draft_has_to_beat_standard_decoding_on_its_own_engine(
    best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals: dict[str, str | None] = {}

    def qualify(self: Tournament, some_rivals: Any, watch: Any = None) -> list[str]:
        assert all(rival is None or rival in self.live for rival in some_rivals.values())
        rivals.update(some_rivals)
        return []

    engines = [Engine("torch", 1), Engine("torch", 2)]
    sweep = make_sweep(AMPLE, (2,), engines=engines)
    monkeypatch.setattr(Tournament, "qualify", qualify)
    monkeypatch.setattr(sweep, "_choose_engines", lambda: [engines[best]])
    sweep.run()

    exit_rivals = {rival for name, rival in rivals.items() if name.startswith("exit")}
    suffix_rivals = {rival for name, rival in rivals.items() if name.startswith("suffix")}
    # None is standard decoding on the first engine, to which every speedup refers.
    assert exit_rivals == {None if best == 0 else Way(engines[1]).name}
    assert suffix_rivals != exit_rivals


@pytest.mark.usefixtures("few_turns")
def test_a_model_that_does_not_fit_into_memory_is_skipped_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(what: str, needed: int, device: str) -> None:
        raise ValueError(f"not enough memory for {what}")

    sweep = make_sweep(AMPLE, (2,))
    monkeypatch.setattr("lightning_specdec.checkpoints.loading.require_memory", refuse)
    sweep.run()
    assert sweep.unavailable["small"] == "not enough memory for models/small"
    assert not sweep.standing().failed


def test_without_time_nothing_has_to_qualify_and_that_is_said() -> None:
    sweep = make_sweep(0.0, (2,))
    sweep.run()
    assert set(sweep.unavailable) == {"suffix corpus, exit 1, exit 2", "small"}
    assert {comparison.case.draft for comparison in sweep.standing().comparisons} == {
        "prompt lookup"
    }


@pytest.mark.usefixtures("few_turns")
def test_auto_is_measured_for_the_best_drafts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(target: Any, drafter: Any, config: Any = None, **options: Any) -> Calibration:
        measured.append(type(drafter).__name__)
        return Calibration((1, 3, 5), (1.0, 1.1, 1.2), (0.1, 0.1, 0.1), 0.01, 0.01, 0.01)

    monkeypatch.setattr("lightning_specdec.bench.measure.load_or_measure", measure)
    sweep = make_sweep(AMPLE, (2, "auto"))
    sweep.run()
    windows = [comparison.case.num_draft_tokens for comparison in sweep.standing().comparisons]
    assert 1 <= len(measured) <= MOST_FINALISTS
    assert windows.count("auto") == len(measured)


@pytest.mark.usefixtures("few_turns")
def test_measuring_costs_must_fit_into_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_specdec.bench.sweep.MEASURING_STEPS", 1e9)
    monkeypatch.setattr("lightning_specdec.bench.measure.stored", lambda *pair, **options: None)
    sweep = make_sweep(AMPLE, (2, "auto"))
    sweep.run()
    assert [name for name in sweep.unavailable if name.endswith(", auto draft tokens")]
    windows = [comparison.case.num_draft_tokens for comparison in sweep.standing().comparisons]
    assert "auto" not in windows


def test_warming_up_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece lasts a second on this clock, standard decoding first.

    A piece that would not end in time is not begun.
    """
    now = 0.0

    def run_piece(entrant: Any, tape: Any, goal: int) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr("lightning_specdec.bench.race._run_piece", run_piece)
    monkeypatch.setattr("lightning_specdec.bench.race.time.monotonic", lambda: now)
    target = cases.target("llama")
    case = Case(method=STANDARD, target=target, config=DecodingConfig(max_new_tokens=4), prompts=[])
    standard = Entrant(Way(Engine("torch", 1)), case)
    entrants = [
        Entrant(Way(Engine("torch", 1), Drafting("x"), window), case) for window in range(4)
    ]
    race = MeasuredRace(standard, entrants, piece_tokens=4)
    assert len(race.warm_up(2.5)) == 1
    assert len(race.warm_up(3.5)) == 2
    assert len(race.warm_up(0.0)) == 1
    assert len(race.warm_up()) == 4


def test_every_kind_that_is_tried_can_be_copied_as_a_command_and_as_python() -> None:
    source = PairSource(target="models/target")
    decoder = target_decoder()
    kinds: list[Drafting] = []
    for scout in scouts.scouts(decoder, source, draftings(decoder, source)):
        kinds += [scout.drafting, *scout.followers]
    head = Drafting(
        "head", {"draft": "models/small", "drafter": Choice("SuffixCorpusWithFallback")}
    )
    # Weights in int4 need OpenVINO, which is not asked to compute these tiny models.
    kinds = [kind for kind in kinds if kind.backend is None]
    assert len(kinds) == 7
    for kind in [*kinds, head]:
        way = Way(Engine("torch", 1), kind, 2)
        way_source = way.source(source)
        words = command(way, way_source, {"prompt": ["the cat"], "max_new_tokens": 6}, threads=1)
        succeed(*shlex.split(words)[1:], "--repeats", "0")
        namespace: dict[str, Any] = {}
        exec(python_lines(way, way_source, threads=1, prompt="the"), namespace)
        assert namespace["decoder"].num_draft_tokens == 2
        assert namespace["decoder"].decode([1, 2, 3], max_new_tokens=4).tokens


def test_a_kind_is_saved_as_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = target_decoder()
    source = PairSource(target=str(Path("models/target").absolute()))
    all_scouts = scouts.scouts(decoder, source, draftings(decoder, source))
    exit_scout = next(scout for scout in all_scouts if scout.drafting.name == "exit 2")
    monkeypatch.chdir(tmp_path)
    for number, kind in enumerate((exit_scout.drafting, *exit_scout.followers)):
        way = Way(Engine("torch", 1), kind, 2)
        values = pair_values(way, way.source(source), description="exit", threads=None)
        write_pair(f"saved{number}", values)
        loaded = SpeculativeDecoder.from_pair(f"saved{number}")
        exit_drafter = getattr(loaded.drafter, "fallback", loaded.drafter)
        assert exit_drafter.exit_layer == 2


@pytest.mark.usefixtures("few_turns")
def test_what_was_measured_in_another_contest_is_not_listed_as_missing() -> None:
    sweep = make_sweep(AMPLE, (2,))
    sweep.run()
    sweep.unavailable["prompt lookup, 2 draft tokens"] = "no time was left"
    sweep.unavailable["a large model"] = "not enough memory"
    assert sweep.not_measured == {"a large model": "not enough memory"}
