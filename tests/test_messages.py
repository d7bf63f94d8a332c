"""Messages about wrong input name what was given, what is possible, and the nearest name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cases
import pytest
import tiny_models
from cli_fixtures import TRAINER, call, here, refused, shipped_run
from training_fixtures import RNN_CONFIG, TrainedRun

from lightning_specdec import DecodingConfig, SpeculativeDecoder
from lightning_specdec.cli.main import make_parser
from lightning_specdec.config.models import advice_on_path
from lightning_specdec.config.pairs import nearest_config
from lightning_specdec.config.settings import NoSettings, check
from lightning_specdec.decoding.requests import Request
from lightning_specdec.drafters import NGramDrafter

__all__ = ["here", "shipped_run"]

pytestmark = pytest.mark.usefixtures("here")

BENCH = "pairs: {mine: {ckpt: checkpoints/rnm.safetensors}}\n"


def fit_refuses(old: str, new: str, message: str) -> None:
    """Check what `fit` says of the shipped config with a text replaced."""
    text = RNN_CONFIG.read_text()
    assert old in text
    Path("bad.yaml").write_text(text.replace(old, new, 1))
    outcome = call("fit", "--config", "bad.yaml", "--trainer.fast_dev_run", "true")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert message in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "max_epochs:",
            "max_epoch:",
            "unknown setting trainer.max_epoch: did you mean max_epochs?",
        ),
        ("model:\n", "modle:\n", "unknown setting modle: did you mean model?"),
        ("seed_everything:", "zzz:", "unknown setting zzz: choose from model, data, trainer"),
        (
            "max_epochs: 100",
            "max_epochs: lots",
            "trainer.max_epochs: must be an integer, got 'lots'",
        ),
        ("max_epochs: 100", "max_epochs: 2.5", "trainer.max_epochs: must be an integer, got 2.5"),
        (
            "max_epochs: 100",
            "limit_train_batches: few",
            "trainer.limit_train_batches: must be an integer or a number, got 'few'",
        ),
        (
            "hidden_size: 64",
            "hidden_size: big",
            "model.target.hidden_size: must be an integer, got 'big'",
        ),
        (
            "max_epochs: 100",
            "accelerator: [1]",
            "error: bad.yaml: trainer.accelerator: must be text, got [1]\n",
        ),
        ("model:\n", "model: [1, 2\n", "error: bad.yaml is not valid YAML: "),
    ],
)
def test_a_wrong_config_of_training_is_explained(old: str, new: str, message: str) -> None:
    fit_refuses(old, new, message)


def test_a_missing_best_checkpoint_is_answered_by_the_command_that_trains_it() -> None:
    config = str(RNN_CONFIG)
    refused(
        "validate",
        "--config",
        config,
        message=f"there is no best checkpoint, since there is no directory checkpoints/rnn: train "
        f"one with `lightning_specdec fit --config {config}`",
    )
    Path("checkpoints/rnn/version_0").mkdir(parents=True)
    refused(
        "validate",
        "--config",
        config,
        message=f"checkpoint in checkpoints/rnn: train one with `lightning_specdec fit --config "
        f"{config}`",
    )


def test_a_missing_checkpoint_of_a_benchmark_is_named_with_its_entry() -> None:
    Path("checkpoints").mkdir()
    Path("checkpoints/rnn.safetensors").write_bytes(b"")
    Path("mine.yaml").write_text(BENCH)
    message = (
        "mine.yaml: pairs.mine.ckpt: there is no checkpoint checkpoints/rnm.safetensors: did you "
        "mean checkpoints/rnn.safetensors?"
    )
    refused("bench", "--config", "mine.yaml", message=message)


def test_with_drafter_says_that_it_takes_an_object() -> None:
    decoder = SpeculativeDecoder(cases.target("rnn"))
    with pytest.raises(ValueError, match=r"NGramDrafter is a class: call it, as NGramDrafter\(\)"):
        decoder.with_drafter(NGramDrafter)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"in Python an object, got 5$"):
        decoder.with_drafter(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["sweep", "decode"])
def test_the_help_shows_that_a_window_is_an_integer_or_auto(verb: str) -> None:
    assert "--num_draft_tokens INT|auto" in make_parser(verb).format_help()


def test_settings_of_a_class_without_any_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^wd\.Repeat has no settings$"):
        NoSettings.from_dict({"length": 3}, "wd.Repeat.")


def test_a_misspelled_field_of_a_config_is_answered_by_the_nearest() -> None:
    with pytest.raises(ValueError, match="max_new_token: did you mean max_new_tokens?"):
        DecodingConfig(max_new_token=3)  # type: ignore[call-arg]


def test_names_that_are_far_off_are_not_suggested() -> None:
    Path("tiny.yaml").write_text("")
    Path("rnn.yaml").write_text("")
    assert nearest_config("nope.yaml") == ""
    assert nearest_config("rn.yaml") == ": did you mean rnn.yaml?"
    assert nearest_config("configs/bench/rn.yaml") == ": did you mean configs/bench/rnn.yaml?"
    assert "did you mean" not in advice_on_path(Path("nope.yaml"))

    limits = {"choices": ("float32", "float64")}
    with pytest.raises(ValueError, match=r"must be one of float32, float64, got 'float8'$"):
        check("dtype", "float8", str, limits)
    with pytest.raises(ValueError, match=r"got 'flaot32': did you mean float32\?$"):
        check("dtype", "flaot32", str, limits)


def test_a_prompt_of_the_command_line_is_called_by_its_number() -> None:
    tiny_models.write(Path("t"))
    Path("empty.txt").write_text("\n")
    refused("decode", "t", "--prompt", "1 2 999999", message="prompt number 1 holds 999999")
    refused("decode", "t", "--prompts_file", "empty.txt", message="empty.txt holds no prompt")
    outcome = call("decode", "t", "--prompts_file", "-")
    assert outcome.code == 2
    assert "stdin holds no prompt" in outcome.err


def test_a_model_without_snapshots_reports_none() -> None:
    tiny_models.write(Path("t"))
    outcome = call("info", "t")
    assert outcome.code == 0
    assert "snapshot" not in outcome.out


def test_chat_says_how_messages_are_given() -> None:
    refused(
        "chat", "t", "--prompt", "hello", message=": type messages, or pipe them in, one a line"
    )


def test_a_wrong_stop_string_is_refused_before_the_model_is_loaded() -> None:
    tiny_models.write(Path("t"))
    Path("t/model.safetensors").unlink()
    refused("decode", "t", "--stop", "", message="a stop string is empty")


def test_a_missing_extra_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tiny_models.write(Path("t"))
    Path("t/model.safetensors").unlink()
    message = "structured output needs llguidance: pip install '.[structured]'"
    refused("decode", "t", "--regex", "(", message=message)


def test_a_request_is_shown_on_one_short_line() -> None:
    request = Request(3, [1, 2], max_new_tokens=1, eos=frozenset(), speculative=False)
    assert repr(request) == "Request(index=3, 2 tokens, live)"
    request.stop_reason = "eos"
    assert repr(request) == "Request(index=3, 2 tokens, ended by 'eos')"


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_metrics_are_rounded(verb: str, shipped_run: TrainedRun) -> None:
    outcome = call(verb, *TRAINER, "--ckpt_path", str(shipped_run.best))
    assert outcome.code == 0, outcome.err
    figures = re.findall(r"\S+/loss +(\S+)", outcome.out)
    assert figures, outcome.out
    assert all(re.fullmatch(r"\d+\.\d{3}", figure) for figure in figures), outcome.out
