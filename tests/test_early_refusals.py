"""Laws of early refusals: what small files show to be wrong is refused before weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_fixtures import refused, succeed
from multimodal import write_multimodal
from tiny_models import CHAT, write, write_text_model
from tiny_tokenizers import byte_level

from lightning_specdec.decoder import SpeculativeDecoder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model."""
    home = tmp_path_factory.mktemp("early")
    write_text_model(home / "target")
    Path(home / "schema.json").write_text('{"type": "objec"}')
    Path(home / "broken.json").write_text('{"type": ')
    Path(home / "broken.lark").write_text("start: foo bar(")
    shutil.copytree(home / "target", home / "scaled")
    config_path = home / "scaled" / "config.json"
    config = json.loads(config_path.read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    config_path.write_text(json.dumps(config))
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


@pytest.fixture
def _unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a verb begins to load a model."""

    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(SpeculativeDecoder, "load", load)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("decode --max_new_tokens 100000", "100000 new tokens do not fit the target's context of"),
        ("chat --max_new_tokens 100000", "target has no chat template"),
        ("audit --max_new_tokens 100000", "100000 new tokens do not fit the target's context of"),
        ("sweep --max_new_tokens 100000", "100000 new tokens do not fit the target's context of"),
        ("decode --eos 60000", "eos must be from 0 to"),
        ("decode --drafter EarlyExitDrafter --drafter.exit_layer 99", "exit_layer must be from 1"),
        ("decode --drafter MtpDrafter", "target holds no multi-token prediction layers"),
        ("sweep --drafter NGramWithFallback --drafter.mtp true", "target holds no multi-token"),
        ("serve --drafter EarlyExitDrafter --drafter.exit_layer 99", "exit_layer must be from 1"),
        (
            "decode --drafter SuffixCorpusDrafter --drafter.corpus nowhere",
            "corpus nowhere is no file or directory",
        ),
        (
            f"decode --draft {ROOT}/checkpoints/medusa.safetensors",
            f"holds its target itself, and decodes with no other: use --ckpt {ROOT}/checkpoints/"
            "medusa.safetensors without --target",
        ),
        (
            f"decode --draft {ROOT}/checkpoints/smollm2_eagle.safetensors --drafter NGramDrafter",
            "the draft is a EagleDrafter already: drop --drafter NGramDrafter",
        ),
        ("decode --regex a(b", "the regular expression is refused"),
        ("decode --json_schema schema.json", "the JSON schema is refused"),
        ("decode --json_schema broken.json", "the JSON schema is no JSON"),
        ("decode --grammar broken.lark", "the grammar is refused"),
    ],
)
@pytest.mark.usefixtures("_unloadable")
def test_a_mistake_that_small_files_show_is_refused_before_loading(
    words: str, message: str
) -> None:
    if "--regex" in words or "--json" in words or "--grammar" in words:
        pytest.importorskip("llguidance")
    verb, *options = words.split()
    refused(verb, "--target", "target", *options, message=message)


@pytest.mark.usefixtures("_unloadable")
def test_a_chat_without_a_template_is_refused_before_loading(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "target", tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    path = tmp_path / "plain" / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))
    refused("chat", str(tmp_path / "plain"), message="has no chat template")


def test_what_fits_only_with_scaled_positions_is_left_to_the_model(home: Path) -> None:
    limit = json.loads((home / "scaled" / "config.json").read_text())["max_position_embeddings"]
    command = ("decode", "--target", "scaled", "--prompt", "the cat", "--repeats", "0")
    succeed(*command, "--max_new_tokens", str(limit + 1), "--mode", "standard")


def test_a_chat_ends_its_answers_where_the_context_does(tmp_path: Path) -> None:
    """A chat may request more new tokens than fit, as it does for short contexts by default."""
    tokenizer = byte_level(chat_template=CHAT)
    target = write(tmp_path / "target", "llama", tokenizer=tokenizer, max_position_embeddings=64)
    assert succeed("chat", target, stdin="the cat\n").out.strip()


def test_entries_beside_the_part_for_texts_refuse_nothing(tmp_path: Path) -> None:
    target = Path(write_multimodal(tmp_path / "target", "llava", CHAT))
    path = target / "config.json"
    config = json.loads(path.read_text())
    num_tokens = config["text_config"]["vocab_size"]
    config |= {"vocab_size": 10, "max_position_embeddings": 4, "num_hidden_layers": 1}
    path.write_text(json.dumps(config))
    words = ["decode", "--target", str(target), "--prompt", "the cat", "--repeats", "0"]
    words += ["--max_new_tokens", "8", "--eos", str(num_tokens - 1)]
    succeed(*words, "--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "2")
    refused(*words, "--eos", str(num_tokens), message=f"eos must be from 0 to {num_tokens - 1}")


def test_settings_of_other_drafters_may_have_the_names_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_lookup.py").write_text(
        """
from dataclasses import dataclass

from lightning_specdec.config.settings import setting
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.drafters.ngram import NGramSettings


@dataclass(frozen=True)
class MySettings(NGramSettings):
    corpus: str = setting("books", "name of a corpus")
    exit_layer: int = setting(0, "any number")


class MyLookup(NGramDrafter):
    Settings = MySettings
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["decode", "--target", "target", "--prompt", "the cat", "--repeats", "0"]
    words += ["--max_new_tokens", "8", "--drafter", "my_lookup.MyLookup"]
    succeed(*words, "--drafter.corpus", "news", "--drafter.exit_layer", "99")
