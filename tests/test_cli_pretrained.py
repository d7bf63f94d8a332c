"""Laws of the command line with pretrained models: text in, text out, by every drafter; one line for bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_fixtures import call, refused, succeed
from tiny_models import cut, write, write_drafts, write_text_model
from tiny_tokenizers import sentencepiece

from lightning_specdec.cli import info
from lightning_specdec.cli.common import OWN_PROMPTS
from lightning_specdec.config.pairs import shipped_directory
from lightning_specdec.models.loading import load_model

BRIEF = ("--repeats", "0", "--max_new_tokens", "8", "--output", "json")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny models and a pair of them. Read it, do not write to it."""
    home = tmp_path_factory.mktemp("pretrained")
    write_text_model(home / "target", chat=True)
    write_text_model(home / "draft", "gpt2", seed=2, n_layer=1, n_positions=512)
    write(home / "foreign", "qwen2", tokenizer=sentencepiece(), max_position_embeddings=512)
    write(home / "tokens")
    write(home / "other", vocab_size=71)
    write(home / "layered", "gemma3_text")
    write_drafts(home / "drafts.ckpt", "exit")
    write_text_model(home / "broken")
    cut(0.5)(home / "broken")
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    values["target"]["source"], values["draft"]["source"] = "./target", "./draft"
    (home / "configs" / "pairs").mkdir(parents=True)
    (home / "configs" / "pairs" / "mine.yaml").write_text(
        yaml.safe_dump({**values, "num_draft_tokens": 5})
    )
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


DRAFTING: dict[str, tuple[str, ...]] = {
    "lookup": ("--target", "target"),
    "draft": ("--target", "target", "--draft", "draft"),
    "draft of another vocabulary": (
        "--target",
        "target",
        "--draft",
        "foreign",
        "--num_draft_tokens",
        "4",
    ),
    "int8 copy": ("--target", "target", "--draft_quantization", "int8"),
    "adaptive": ("--target", "target", "--draft", "draft", "--num_draft_tokens", "auto"),
    "sampled": ("--target", "target", "--draft", "draft", "--temperature", "1", "--seed", "3"),
    "early exit": ("--target", "target", "--drafter", "EarlyExitDrafter", "--drafter.exit-layer=2"),
    "pair": ("--pair", "mine"),
}


@pytest.mark.parametrize("name", DRAFTING)
def test_both_methods_give_the_same_text(name: str) -> None:
    document = succeed("decode", *DRAFTING[name], *BRIEF, "--prompt", "the cat sat").json
    for each in document["prompts"]:
        assert each["standard"]["tokens"] == each["speculative"]["tokens"]
        assert each["standard"]["text"] == each["speculative"]["text"] is not None
    wanted = {"draft of another vocabulary": 4, "adaptive": "auto", "pair": 5}
    assert document["manifest"]["options"]["num_draft_tokens"] == wanted.get(name, 3)


def test_a_chat_template_is_used_where_there_is_one_unless_the_text_is_raw(home: Path) -> None:
    tokenizer = load_model(home / "target").tokenizer
    assert tokenizer is not None

    def prompt(*arguments: str) -> Any:
        (each,) = succeed("decode", *BRIEF, "--prompt", "the cat", *arguments).json["prompts"]
        assert each["prompt_text"] == "the cat"
        return each["prompt"]

    chat = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert prompt("--target", "target") == prompt("target") == chat
    assert (
        prompt("--target", "target", "--raw")
        == prompt("--target", "draft")
        == tokenizer.encode("the cat")
    )


def test_prompts_come_from_files_and_stdin_as_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(
        '\ufeffthe cat\n\n{"prompt": "the dog\\nsat", "id": 3}\n{ not json\n{"prompt": "a\u2028b\x85c"}\n'
    )

    def texts(*arguments: str, stdin: str = "") -> list[str]:
        document = succeed("decode", "--target", "target", *BRIEF, *arguments, stdin=stdin).json
        return [each["prompt_text"] for each in document["prompts"]]

    lines = ["the cat", "the dog\nsat", "{ not json", "a\u2028b\x85c"]
    assert texts("--prompts_file", str(path)) == lines
    assert texts("--prompts_file", "-", stdin=path.read_text()) == lines
    assert texts("--prompt", "a\nb", "--prompt", '{"prompt": 1}', "--prompt", "\n") == [
        "a\nb",
        '{"prompt": 1}',
        "\n",
    ]
    assert texts() == list(OWN_PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nowhere/at/all", "there is no directory nowhere/at/all"),
        ("target --draft nowhere.safetensors", "there is no draft file nowhere.safetensors"),
        ("broken", "broken/model.safetensors is truncated or damaged"),
        ("target --max_new_tokens 600", "context of 512"),
        ("target --prompt a --prompt=", "--prompt 2 is empty: give at least one token"),
        (
            "target --prompts_file null.jsonl",
            "null.jsonl, line 2 is empty: give at least one token",
        ),
        ("--pair mime", "there is no pair 'mime': did you mean mine?"),
        ("target --drafter.max_ngram 3", "max_ngram needs the drafter's name"),
        (
            "target --drafter NGramDrafter --drafter.max_ngram x",
            "--drafter.max_ngram must be an integer",
        ),
        ("layered --drafter EarlyExitDrafter --drafter.exit_layer=1", "cannot be taken"),
        ("target --ignore_eos --eos 3", "--ignore_eos and --eos exclude each other"),
        ("tokens", "the target stores no prompts"),
        ("--ckpt x.ckpt --draft_dtype float32", "--draft_dtype is for pretrained models"),
    ],
)
def test_what_cannot_be_decoded_is_one_line_and_exit_code_2(arguments: str, told: str) -> None:
    Path("null.jsonl").write_text('{"prompt": "a"}\n{"prompt": null}\n')
    refused("decode", *arguments.split(), told=told)


def test_an_unreachable_hub_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for verb in ("decode", "info"):
        refused(verb, "lab/model", told="the Hub returned none")


def test_a_pair_fits_or_not_by_text_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "available_bytes", lambda device: 6 * 10**9)
    document = succeed("info", "gpt2", "--output", "json").json
    assert (
        document["available_bytes"] == 6 * 10**9
        and document["num_draft_tokens"] == 9
        and document["fits"] is True
    )
    assert "774,030,080 parameters" in document["target"] and "124,439,808" in document["draft"]
    shown = succeed("info", "--pair", "gpt2").out
    assert "fits" in shown and "6.0 GB" in shown
    assert call("info", "gpt2_dev").code == 1 and call("info", "llama3_self").code == 1
    monkeypatch.setattr(info, "available_bytes", lambda device: None)
    assert call("info", "gpt2").code == 0
    refused("info", "--pair", "gpt3", told="there is no pair 'gpt3'")


def test_info_of_a_directory_loads_the_model() -> None:
    document = succeed("info", "target", "--dtype", "bfloat16", "--output", "json").json
    assert (document["dtype"], document["context"], document["chat_template"]) == (
        "bfloat16",
        512,
        True,
    )
    shown = succeed("info", "target", "--quantization", "int8").out
    assert "LlamaForCausalLM" in shown and "int8" in shown
    refused("info", "target", "--quantization", "int4", told="CUDA GPU only")
