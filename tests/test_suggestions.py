"""A misspelled name is answered by the nearest one, and a misplaced option by what to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models
from cli_fixtures import call, ckpt, here, refused, shipped_run
from training_fixtures import RNN_CONFIG

from lightning_specdec.cli.main import TRAINER_VERBS, VERBS, _module, make_parser
from lightning_specdec.config.models import check_draft
from lightning_specdec.config.pairs import shipped_file
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.training.cli import _data_name

__all__ = ["ckpt", "here", "shipped_run"]

pytestmark = pytest.mark.usefixtures("here")
FIT = ["fit", "--config", str(RNN_CONFIG)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*FIT, "--data", "SequenceFil"], "there is no class 'SequenceFil': did you mean Sequence"),
        ([*FIT, "--model", "PairTrainin"], "'PairTrainin': did you mean PairTraining?"),
        ([*FIT, "--model", "Nothing"], "give an import path, for example my_data.MyData"),
        ([*FIT, "--config", "rate.yaml"], "did you mean learning_rate?"),
        ([*FIT, "--data.num_vall", "3"], "did you mean num_val?"),
        (["fit", "--config", "configs/rn.yaml"], "did you mean configs/rnn.yaml?"),
        (["bench", "--config", "configs/bench/rn.yaml"], "did you mean configs/bench/rnn.yaml?"),
        (["bench", "--config", "ngram.yaml"], "ngram.yaml: pairs: mine: drafts: ngram"),
        (["fit", "--recipe", "eagel", "--target", "x", "--text", "y"], "did you mean eagle?"),
        (["decode", "x.safetensors"], "did you mean xy.safetensors?"),
        (["decode", "t", "--drafter", "own_drafts.Bigra"], "own_drafts has no Bigra: did you mean"),
        (
            ["decode", "t", "--drafter", "own_drafts.Other"],
            "own_drafts has no Other: it has Bigram",
        ),
        (["decode", "t", "--drafter", "NGramDraftr"], "did you mean NGramDrafter?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_nearest_name_is_suggested(arguments: list[str], message: str) -> None:
    Path("rate.yaml").write_text(
        "model: {class_path: PairTraining, init_args: {lerning_rate: 0.1}}\n"
    )
    Path("ngram.yaml").write_text(
        "pairs: {mine: {target: t, drafts: {ngram: {drafter: NGramDraftr}}}}\n"
    )
    Path("xy.safetensors").write_bytes(b"")
    Path("own_drafts.py").write_text(
        "from lightning_specdec import Drafter\n\n\nclass Bigram(Drafter):\n    pass\n"
    )
    tiny_models.write(Path("t"))
    outcome = call(*arguments)
    assert outcome.code == 2
    if "ngram" in arguments[-1]:
        message = "did you mean NGramDrafter?"
        assert "ngram.there" not in outcome.err, "a sentence is no path"
    assert message in outcome.err, outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--target", "M"], "give --model GenerateText --model.target DIR --model.out"),
        (["test", "--minutes", "3"], "--minutes is an option of fit --recipe NAME; test takes --c"),
        (["fit", "--minutes", "3"], "--minutes is an option of --recipe NAME, which is missing"),
        (["export"], "MODEL is missing: give a checkpoint, or a draft as --draft FILE"),
        (["export", "a.ckpt", "--ckpt", "b.ckpt"], "name one checkpoint, got --ckpt and 'a.ckpt'"),
        (["decode", "t", "--drafter", "EarlyExitDrafter"], "--drafter.exit_layer N (exit_layer=N)"),
        (["decode", "t", "--draft", "nowhere.ckpt"], "there is no draft file nowhere.ckpt"),
        (["decode", "checkpoints/nothing.safetensors"], "are part of a clone of the repository"),
        (["decode", "checkpoints/smollm3"], "are part of a clone of the repository"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_to_type_instead_is_said(arguments: list[str], message: str) -> None:
    tiny_models.write(Path("t"))
    refused(*arguments, message=message)


def test_the_layers_to_exit_from_are_said() -> None:
    tiny_models.write(Path("t"))
    message = "give --drafter.exit_layer N (exit_layer=N), 1 to "
    refused("decode", "t", "--drafter", "EarlyExitDrafter", message=message)


def test_a_message_about_an_entry_has_its_place_before_it() -> None:
    @dataclass(frozen=True)
    class Positive(Settings):
        number: int = setting(help="how many", minimum=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.number == 13:
                raise ValueError("there is no thirteen")

    with pytest.raises(ValueError, match=r"^pairs\.mine: there is no thirteen$"):
        Positive.from_dict({"number": 13}, "pairs.mine.")
    with pytest.raises(ValueError, match=r"^pairs\.mine\.number must be at least 1, got 0$"):
        Positive.from_dict({"number": 0}, "pairs.mine.")
    with pytest.raises(ValueError, match=r"^pairs\.mine\.number is missing \(how many\)$"):
        Positive.from_dict({}, "pairs.mine.")


def test_the_help_of_a_kind_shows_limits_and_defaults() -> None:
    ngram = call("decode", "--drafter.help", "NGramDrafter").out
    assert re.search(r"--drafter.max_ngram .*\(1 to 32; default: 5\)", ngram)
    exits = call("decode", "--drafter.help", "EarlyExitDrafter").out
    assert re.search(r"--drafter.exit_layer .*\(1 or more; required\)", exits)
    rule = call("decode", "--rule.help", "EpsilonThreshold").out
    assert re.search(r"--rule.epsilon .*\(more than 0 to 1; default: 0.1\)", rule)
    assert "no settings" in call("decode", "--rule.help", "ExactMatch").out


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in TRAINER_VERBS])
def test_every_example_of_a_verbs_help_is_understood(verb: str) -> None:
    examples = _module(verb).EXAMPLES.replace("\\\n", " ")
    commands = re.findall(r"(?:^|\| )lightning_specdec (\S+) ?(.*)$", examples, re.MULTILINE)
    assert commands or verb not in VERBS
    for example_verb, words in commands:
        assert example_verb == verb
        # A remark follows in parentheses.
        arguments = shlex.split(re.sub(r"    \(.*\)$", "", words))
        make_parser(verb).read(arguments)


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_a_trainer_verb_lists_the_configs_that_it_can_use(verb: str) -> None:
    text = call(verb, "--help").out
    configs = re.search(r"configs that ship .*: (.*)", text)
    assert configs
    names = configs[1].split(", ")
    assert ("smollm2_generate" in names) == (verb == "generate")
    assert ("rnn" in names) == (verb != "generate")


def test_a_shipped_file_is_found_from_anywhere_and_an_own_one_first() -> None:
    found = Path(shipped_file("checkpoints/rnn.safetensors"))
    assert found.is_absolute()
    assert found.is_file()
    assert shipped_file("checkpoints/rnn") == "checkpoints/rnn", "runs are those of this directory"
    assert shipped_file("elsewhere/rnn.safetensors") == "elsewhere/rnn.safetensors"

    Path("checkpoints").mkdir()
    Path("checkpoints/rnn.safetensors").write_bytes(b"")
    assert shipped_file("checkpoints/rnn.safetensors") == "checkpoints/rnn.safetensors"


def test_a_directory_of_runs_is_a_draft_too() -> None:
    Path("runs/version_0").mkdir(parents=True)
    with pytest.raises(ValueError, match="is not a model directory"):
        check_draft("runs")
    Path("runs/version_0/best.ckpt").write_bytes(b"")
    check_draft("runs")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", None),
        ("--data.length 8", None),
        ("--data.path mine.csv", "mine"),
        ("--data SequenceFile --data.path=here/mine.csv", "mine"),
        ("--data my_data.Counting --data.length 8", "Counting"),
        ("--data.paths notes/**/*.md", "notes"),
        ("--data other.yaml", None),
        ("--data.path mine.csv --trainer.callbacks.dirpath here", None),
    ],
)
def test_a_run_of_other_data_is_named_after_them(words: str, name: str | None) -> None:
    assert _data_name(["--config", "a.yaml", *words.split()]) == name
    assert _data_name(words.split()) is None, "without a config, there is no name to complete"
