"""Laws of `sweep`: it tries what belongs to the target, proves what it recommends, and says what
became of everything else."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_fixtures import call, refused, succeed
from test_adapters import write_adapter
from tiny_models import write_drafts, write_text_model
from tiny_sweep import sweep_of_two_engines

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench import sweep as sweep_module
from lightning_specdec.bench.race import MeasuredRace
from lightning_specdec.bench.tournament import Tournament
from lightning_specdec.bench.verdict import Verdict

RNN = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
BRIEF = ("--minutes", "0.001", "--max_new_tokens", "6", "--num_draft_tokens", "2", "3")
LOOKUP = "prompt lookup"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models."""
    home = tmp_path_factory.mktemp("sweep")
    write_text_model(home / "target")
    write_drafts(home / "drafts.ckpt", "small")
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


@pytest.fixture(autouse=True)
def _ample_overtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tiny models the time that they need, so that nothing depends on the machine's load."""
    monkeypatch.setattr(sweep_module, "OVERTIME_SECONDS", 600.0)
    monkeypatch.setattr(sweep_module, "FEWEST_WARM_UP_SECONDS", 600.0)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the best way faster, whatever the short measurement says."""
    faster = Verdict("faster", "faster: 2.00x [1.90, 2.10]")
    monkeypatch.setattr(sweep_module, "judge", lambda *arguments, **options: faster)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            [],
            [
                LOOKUP,
                "small",
                f"{LOOKUP}, then small",
                "exit, exit 1",
                "exit, exit 2",
                f"{LOOKUP}, then exit, exit 1",
            ],
        ),
        (["--drafts", "small"], [LOOKUP, "small", f"{LOOKUP}, then small"]),
        (["--draft", "small"], [LOOKUP, "small", f"{LOOKUP}, then small"]),
        (
            ["--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "2"],
            ["EarlyExitDrafter(exit_layer=2)"],
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("proven")
def test_every_draft_and_window_is_a_row_and_the_command_decodes_like_the_best(
    arguments: list[str], names: list[str]
) -> None:
    document = succeed("sweep", "drafts.ckpt", *arguments, *BRIEF, "--output", "json").json
    assert not document["interrupted"]
    cells = {(row["draft"], row["num_draft_tokens"]) for row in document["rows"]}
    assert cells == {(name, window) for name in names for window in (2, 3)}
    for row in document["rows"]:
        assert row["same_tokens"]
        assert row["error"] is None
        assert row["walltime_speedup"] > 0

    command = shlex.split(document["command"])[1:]
    decoded = succeed(*command, "--repeats", "0", "--output", "json").json
    best_row = document["rows"][document["best"]]
    options = decoded["manifest"]["options"]
    assert options["num_draft_tokens"] == best_row["num_draft_tokens"]
    assert options["max_new_tokens"] == 6
    for prompt in decoded["prompts"]:
        assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"]

    namespace: dict[str, Any] = {}
    exec(document["python"], namespace)
    assert namespace["decoder"].num_draft_tokens == best_row["num_draft_tokens"]


def test_nothing_is_recommended_without_an_interval_that_proves_it() -> None:
    """A single turn proves nothing."""
    outcome = succeed("sweep", "--target", "target", *BRIEF, "--prompt", "the cat")
    assert "\nnothing here is proven faster than standard decoding: " in outcome.out
    assert "too few runs to tell" in outcome.out
    assert "<- best" not in outcome.out
    assert "lightning_specdec decode" not in outcome.out
    assert re.search(r"^method +window ", outcome.out, re.MULTILINE)


def test_nothing_is_saved_without_a_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("sweep", "--ckpt", RNN, *BRIEF, "--save", "mine")
    assert outcome.code == 1
    assert "nothing is saved: nothing is proven faster than standard decoding" in outcome.err
    assert outcome.out
    assert not Path("configs").exists()


@pytest.mark.usefixtures("proven")
def test_the_answer_is_a_sentence_a_command_and_a_line_of_python() -> None:
    text = succeed("sweep", "--target", "target", *BRIEF, "--prompt", "the cat").out
    assert text.count("<- best") == 1
    assert re.search(
        r"\nfastest: prompt lookup, \d draft tokens, faster: 2\.00x \[1\.90, 2\.10\].*\n"
        r"\nlightning_specdec decode --target target .*--num_draft_tokens \d.*\n"
        r"\nfrom lightning_specdec import SpeculativeDecoder\n"
        r"decoder = SpeculativeDecoder.from_pretrained\(\"target\", drafter=\"NGramDrafter\", "
        r"num_draft_tokens=\d\)\n",
        text,
    )
    assert "\nspeedups are over standard decoding in torch, 1 thread; 1 prompt, batch" in text


@pytest.mark.usefixtures("proven")
def test_the_fastest_is_saved_as_a_pair_that_decodes_by_its_name(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    target = str(home / "target")
    arguments = ("--target", target, *BRIEF, "--prompt", "the cat", "--threads", "1")
    outcome = succeed("sweep", *arguments, "--save", "mine")
    assert "saved in configs/pairs/mine.yaml: --pair mine (in this directory)" in outcome.out
    assert isinstance(SpeculativeDecoder.from_pair("mine").num_draft_tokens, int)
    succeed("decode", "--pair", "mine", "--prompt", "the cat", "--repeats", "0")
    refused("sweep", "--target", target, "--save", "mine", message="there is a pair mine already")

    # What the user chose is a part of the answer, and of the printed command.
    assert "--threads 1" in outcome.out
    assert yaml.safe_load(Path("configs/pairs/mine.yaml").read_text())["threads"] == 1

    succeed("sweep", "--ckpt", RNN, "--device", "cpu", *BRIEF, "--save", "recurrent")
    assert "device: cpu" in (tmp_path / "configs/pairs/recurrent.yaml").read_text()
    decoder = SpeculativeDecoder.from_pair("recurrent")
    assert decoder.prompts


def test_models_with_adapters_are_compared(home: Path) -> None:
    write_text_model(home / "draft", seed=2)
    write_adapter("tuned", "target")
    write_adapter("tuned_draft", "draft")
    document = succeed(
        *("sweep", "--target", "target", "--adapter", "tuned", "--prompt", "the cat"),
        *("--draft", "draft", "--draft_adapter", "tuned_draft", *BRIEF, "--output", "json"),
    ).json
    assert not document["failed"]
    drafts = {row["draft"] for row in document["rows"]}
    assert drafts == {LOOKUP, "draft", f"{LOOKUP}, then draft"}


def test_other_tokens_and_failures_are_shown_and_make_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MeasuredRace, "same_tokens", lambda *names: False)
        outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1
    assert outcome.out.count("OTHER TOKENS than standard decoding") == 6
    assert "no answer: nothing was measured that has the tokens" in outcome.out

    fail_at_window_three(monkeypatch)
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 1
    assert ", 3 draft tokens, in torch, 1 thread: out of memory\n" in outcome.out


def fail_at_window_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error in each round with three draft tokens."""
    open_stream = sweep_module.Case._open

    def failing_open(self: Any, number: int, repeat: int) -> Any:
        if self.config.num_draft_tokens == 3:
            raise RuntimeError("out of\nmemory")
        return open_stream(self, number, repeat)

    monkeypatch.setattr(sweep_module.Case, "_open", failing_open)


def test_ctrl_c_shows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    run_turn = Tournament.run_turn

    def interrupted_turn(self: Tournament) -> None:
        run_turn(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tournament, "run_turn", interrupted_turn)
    outcome = call("sweep", "--ckpt", RNN, *BRIEF, "--output", "json")
    assert outcome.code == 130
    assert outcome.json["interrupted"]
    assert len(outcome.json["rows"]) == 6

    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 130
    assert "interrupted: what is above was measured by then" in outcome.err
    assert re.search(r"\nModelDrafter +2 ", outcome.out)

    def interrupted_warm_up(self: MeasuredRace, seconds: float) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(MeasuredRace, "warm_up", interrupted_warm_up)
    outcome = call("sweep", "--ckpt", RNN, *BRIEF)
    assert outcome.code == 130
    assert "interrupted before anything was measured" in outcome.err


def test_ctrl_c_between_the_comparisons_of_engines_and_of_drafts_shows_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lookup runs with another window in the first comparison than in the second one."""
    sweep = sweep_of_two_engines("target", windows=[2], seconds=8.0)
    run_turn = MeasuredRace.run_turn

    def interrupted_turn(self: MeasuredRace, names: list[str]) -> None:
        is_of_drafts = any("2 draft tokens" in name for name in names)
        if is_of_drafts:
            raise KeyboardInterrupt
        run_turn(self, names)

    monkeypatch.setattr(MeasuredRace, "run_turn", interrupted_turn)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    standing = sweep.standing()
    assert standing.winner is not None
    assert standing.comparisons


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_draft_tokens", "0"], "num_draft_tokens must be"),
        (["--num_draft_tokens", "some"], "num_draft_tokens"),
        (["--minutes", "0"], "minutes must be"),
        (["--drafts", "tiny"], "there is no draft 'tiny' to choose"),
        (["--save", "a b"], "a pair is named by letters"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    refused("sweep", "--ckpt", RNN, *arguments, message=message)
