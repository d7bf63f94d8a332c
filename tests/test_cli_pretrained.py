"""Laws of the command line with pretrained models: text in, text out, with every drafter."""

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
    """A read-only directory with tiny models and a pair of them."""
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

    pair = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    pair["target"]["source"] = "./target"
    pair["draft"]["source"] = "./draft"
    pair["num_draft_tokens"] = 5
    pairs_directory = home / "configs" / "pairs"
    pairs_directory.mkdir(parents=True)
    (pairs_directory / "mine.yaml").write_text(yaml.safe_dump(pair))
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    for prompt in document["prompts"]:
        assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"]
        assert prompt["standard"]["text"] == prompt["speculative"]["text"]
        assert prompt["standard"]["text"] is not None

    default_window = 3
    windows = {"draft of another vocabulary": 4, "adaptive": "auto", "pair": 5}
    options = document["manifest"]["options"]
    assert options["num_draft_tokens"] == windows.get(name, default_window)


def test_a_chat_template_is_used_where_there_is_one_unless_the_text_is_raw(home: Path) -> None:
    tokenizer = load_model(home / "target").tokenizer
    assert tokenizer is not None

    def prompt_tokens(*arguments: str) -> Any:
        document = succeed("decode", *BRIEF, "--prompt", "the cat", *arguments).json
        (prompt,) = document["prompts"]
        assert prompt["prompt_text"] == "the cat"
        return prompt["prompt"]

    chat = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert prompt_tokens("--target", "target") == chat
    assert prompt_tokens("target") == chat

    text = tokenizer.encode("the cat")
    assert prompt_tokens("--target", "target", "--raw") == text
    assert prompt_tokens("--target", "draft") == text


def test_prompts_come_from_files_and_stdin_as_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    lines = [
        "\ufeffthe cat",
        "",
        '{"prompt": "the dog\\nsat", "id": 3}',
        "{ not json",
        '{"prompt": "a\u2028b\x85c"}',
    ]
    path.write_text("".join(f"{line}\n" for line in lines))

    def prompt_texts(*arguments: str, stdin: str = "") -> list[str]:
        document = succeed("decode", "--target", "target", *BRIEF, *arguments, stdin=stdin).json
        return [prompt["prompt_text"] for prompt in document["prompts"]]

    file_texts = ["the cat", "the dog\nsat", "{ not json", "a\u2028b\x85c"]
    assert prompt_texts("--prompts_file", str(path)) == file_texts
    assert prompt_texts("--prompts_file", "-", stdin=path.read_text()) == file_texts

    # Flags are text: neither lines nor JSON.
    flag_texts = ["a\nb", '{"prompt": 1}', "\n"]
    flags = []
    for text in flag_texts:
        flags += ["--prompt", text]
    assert prompt_texts(*flags) == flag_texts
    assert prompt_texts() == list(OWN_PROMPTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere/at/all", "there is no directory nowhere/at/all"),
        ("target --draft nowhere.safetensors", "there is no draft file nowhere.safetensors"),
        ("broken", "broken/model.safetensors is truncated or damaged"),
        ("target --max_new_tokens 600", "context of 512"),
        ("target --prompt a --prompt=", "prompt number 2 is empty: give at least one token"),
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
def test_what_cannot_be_decoded_is_one_line_and_exit_code_2(arguments: str, message: str) -> None:
    Path("null.jsonl").write_text('{"prompt": "a"}\n{"prompt": null}\n')
    refused("decode", *arguments.split(), message=message)


def test_an_unreachable_hub_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for verb in ("decode", "info"):
        refused(verb, "lab/model", message="the Hub returned none")


def test_a_pair_fits_or_not_by_text_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "available_bytes", lambda device: 6 * 10**9)
    document = succeed("info", "gpt2", "--output", "json").json
    assert document["available_bytes"] == 6 * 10**9
    assert document["num_draft_tokens"] == 9
    assert document["fits"] is True
    assert "774,030,080 parameters" in document["target"]
    assert "124,439,808" in document["draft"]

    text = succeed("info", "--pair", "gpt2").out
    assert "fits" in text
    assert "6.0 GB" in text

    # These do not fit.
    assert call("info", "gpt2_dev").code == 1
    assert call("info", "llama3_self").code == 1

    # Without a known amount of memory, every pair fits.
    monkeypatch.setattr(info, "available_bytes", lambda device: None)
    assert call("info", "gpt2").code == 0
    refused("info", "--pair", "gpt3", message="there is no pair 'gpt3'")


def test_info_of_a_directory_loads_the_model() -> None:
    document = succeed("info", "target", "--dtype", "bfloat16", "--output", "json").json
    assert document["dtype"] == "bfloat16"
    assert document["context"] == 512
    assert document["chat_template"] is True

    text = succeed("info", "target", "--quantization", "int8").out
    assert "LlamaForCausalLM" in text
    assert "int8" in text
    refused("info", "target", "--quantization", "int4", message="CUDA GPU only")
