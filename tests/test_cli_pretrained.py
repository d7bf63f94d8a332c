"""Laws of the command line with pretrained models: text in, text out, whatever guesses; one line for what cannot be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_fixtures import SCRIPT, call, ckpt, refused, shipped_run, succeed
from tiny_models import cut, write, write_drafts, write_text_model
from tiny_tokenizers import sentencepiece

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.cli import pairs as cli_pairs
from lightning_specdec.cli.common import OWN_PROMPTS
from lightning_specdec.cli.shown import outputs
from lightning_specdec.config.pairs import shipped_directory
from lightning_specdec.config.terminal import visible
from lightning_specdec.decoding import Counts, DecodeResult, Round, RowResult
from lightning_specdec.models.loading import load_model

__all__ = ["ckpt", "shipped_run"]
BRIEF = ("--repeats", "1", "--max_new_tokens", "8", "--output", "json")
SHOWN = ("--repeats", "1", "--max_new_tokens", "8")
EXIT = ("--target", "target", "--drafter", "EarlyExitDrafter", "--drafter.exit_layer")


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
    write_drafts(home / "sizes.ckpt", "small")
    write_text_model(home / "broken")
    cut(0.5)(home / "broken")
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    values["target"]["source"], values["draft"]["source"] = "./target", "./draft"
    (home / "configs" / "pairs").mkdir(parents=True)
    (home / "configs" / "pairs" / "mine.yaml").write_text(yaml.safe_dump({**values, "num_draft_tokens": 5}))
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tokens_of(document: Any) -> list[list[int]]:
    """Every prompt's new tokens, which must be the same both ways."""
    for each in document["prompts"]:
        assert each["standard"]["tokens"] == each["speculative"]["tokens"] and each["standard"]["text"] is not None
        assert each["standard"]["text"] == each["speculative"]["text"]
    return [each["speculative"]["tokens"] for each in document["prompts"]]


GUESSING: dict[str, tuple[str, ...]] = {
    "lookup": (),
    "lookup by name": ("--drafter", "NGramDrafter", "--drafter.max_ngram", "4", "--drafter.min_ngram", "2"),
    "draft": ("--draft", "draft"),
    "draft of another vocabulary": ("--draft", "foreign", "--num_draft_tokens", "4"),
    "int8 copy": ("--draft_quantization", "int8"),
    "adaptive": ("--draft", "draft", "--num_draft_tokens", "auto"),
    "sampled": ("--draft", "draft", "--temperature", "1", "--seed", "3"),
    "early exit": ("--drafter", "EarlyExitDrafter", "--drafter.exit-layer", "2"),
    "early exit, sampled": ("--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "1", "--temperature", "1"),
    "early exit, int8": ("--drafter", "EarlyExitDrafter", "--drafter.exit_layer=1", "--quantization", "int8"),
}


@pytest.mark.parametrize("name", GUESSING)
def test_whatever_guesses_both_ways_give_the_same_text(name: str) -> None:
    outcome = succeed("decode", "--target", "target", *GUESSING[name], *BRIEF, "--prompt", "the cat sat")
    measuring = "INFO: measuring what draft and target cost, once for this machine: some seconds\n"
    assert outcome.err == (measuring if name == "adaptive" else "")
    tokens_of(outcome.json)
    options = outcome.json["manifest"]["options"]
    assert outcome.json["summary"]["standard"]["num_new_tokens"] <= 8 and options["target"] == "target"
    wanted = {"draft of another vocabulary": 4, "adaptive": "auto"}
    assert options["num_draft_tokens"] == wanted.get(name, 3)


def test_a_pair_decodes_by_its_name_with_its_own_window() -> None:
    document = succeed("decode", "--pair", "mine", *BRIEF, "--prompt", "the cat").json
    tokens_of(document)
    assert document["manifest"]["options"]["num_draft_tokens"] == 5


def test_a_chat_template_is_used_where_there_is_one_unless_text_shall_stay_raw(home: Path) -> None:
    tokenizer = load_model(home / "target").tokenizer
    assert tokenizer is not None

    def prompt(*arguments: str) -> Any:
        (each,) = succeed("decode", *BRIEF, "--prompt", "the cat", *arguments).json["prompts"]
        assert each["prompt_text"] == "the cat"
        return each["prompt"]

    chat = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert prompt("--target", "target") == prompt("target") == chat
    assert prompt("--target", "target", "--raw") == prompt("--target", "draft") == tokenizer.encode("the cat")


def test_prompts_come_from_files_and_stdin_as_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('the cat\n\n{"prompt": "the dog\\nsat", "id": 3}\n{ not json\n')

    def texts(*arguments: str, stdin: str = "") -> list[str]:
        document = succeed("decode", "--target", "target", *BRIEF, *arguments, stdin=stdin).json
        return [each["prompt_text"] for each in document["prompts"]]

    lines = ["the cat", "the dog\nsat", "{ not json"]
    assert texts("--prompts_file", str(path)) == lines
    assert texts("--prompts_file", "-", stdin=path.read_text()) == lines
    assert texts("--prompt", "a\nb", "--prompt", '{"prompt": 1}') == ["a\nb", '{"prompt": 1}']
    assert texts() == list(OWN_PROMPTS)


def test_stop_text_and_eos_end_a_row(home: Path) -> None:
    options = ("decode", "--target", "target", "--raw", "--prompt", "the cat", "--repeats", "1", "--output", "json")
    (whole,) = succeed(*options, "--max_new_tokens", "24", "--ignore_eos").json["prompts"]
    text, tokens = whole["standard"]["text"], whole["standard"]["tokens"]
    assert len(tokens) == 24
    stop = next(letter for letter in text[4:] if letter.isascii())
    (stopped,) = succeed(*options, "--max_new_tokens", "24", "--ignore_eos", "--stop", stop).json["prompts"]
    for side in ("standard", "speculative"):
        assert stopped[side]["stop_reason"] == "stop" and stopped[side]["text"] == text[: text.index(stop)]
    (ended,) = succeed(*options, "--max_new_tokens", "24", "--eos", str(tokens[3])).json["prompts"]
    assert ended["speculative"]["tokens"] == tokens[: tokens.index(tokens[3]) + 1]


def test_the_text_stands_clean_with_its_control_characters_visible_and_then_marked() -> None:
    document = succeed("decode", "--target", "target", *BRIEF, "--prompt", "the cat").json
    printed = succeed("decode", "--target", "target", *SHOWN, "--prompt", "the cat").out
    text = document["prompts"][0]["speculative"]["text"]
    assert "\x1b" not in printed and "prompt 0: the cat" in printed and "output identical\n\n" in printed
    assert f"\n    {visible(text.strip(chr(10)).split(chr(10))[0])}" in printed and "\n  by round\n" in printed


@pytest.mark.parametrize("colour", [True, False])
def test_marks_show_the_fate_of_each_piece_and_add_nothing(home: Path, colour: bool) -> None:
    decoder = SpeculativeDecoder.from_pretrained("target", "draft")
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    result = decoder.decode("the cat sat", max_new_tokens=24, eos=())
    printed = outputs(tokenizer, None, result, ["the cat sat"], colour=colour)
    clean, marked = printed.split("\n  by round\n")
    text = "".join(visible(result.rows[0].text or "").split())
    assert text in "".join(clean.split()) and ("\x1b[31;9m" in marked) == colour
    if colour:
        body = re.sub(r"\x1b\[31;9m.*?\x1b\[0m", "", marked.rsplit("\n", 1)[0], flags=re.DOTALL)
        assert "".join(re.sub(r"\x1b\[[0-9;]*m", "", body).split()) == text


def test_special_tokens_are_shown_by_their_text_whatever_became_of_them(home: Path) -> None:
    tokenizer = load_model(home / "target").tokenizer
    assert tokenizer is not None
    (token, text), *_ = tokenizer.vocabulary.special_texts.items()
    (letter,) = tokenizer.encode_plain("a")[:1]
    rounds = [Round([token, token], 1, letter), Round([letter], 1, token)]
    row = RowResult(0, [1], [token, letter, letter, token], "eos", 2, [0.1] * 4, Counts(), rounds, text="aa")
    result = DecodeResult([row], 1.0, {}, 2, 0, rule="ExactMatch")
    assert f"[{text}]-{text}-a[a]{text}" in outputs(tokenizer, None, result, ["x"], colour=False)


def test_look_up_serves_the_recurrent_pair_too(ckpt: str) -> None:
    options = ("decode", "--ckpt", ckpt, "--drafter", "NGramDrafter", "--drafter.min_ngram", "1", "--repeats", "1")
    document = succeed(*options, "--output", "json").json
    assert all(each["standard"]["tokens"] == each["speculative"]["tokens"] for each in document["prompts"])
    own = succeed("decode", "--ckpt", ckpt, "--repeats", "1", "--output", "json").json
    assert [each["standard"]["tokens"] for each in own["prompts"]] == [
        each["standard"]["tokens"] for each in document["prompts"]
    ]


@pytest.mark.parametrize(
    ("arguments", "kind", "layer"),
    [
        (["drafts.ckpt"], "EarlyExitDrafter", 1),
        (["drafts.ckpt", "--drafter", "EarlyExitDrafter"], "EarlyExitDrafter", 1),
        (["drafts.ckpt", "--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "2"], "EarlyExitDrafter", 2),
        (["drafts.ckpt", "--draft", "small"], "ModelDrafter", None),
        (["sizes.ckpt"], "ModelDrafter", None),
        (
            ["sizes.ckpt", "--draft", "exit", "--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "2"],
            "EarlyExitDrafter",
            2,
        ),
        (["sizes.ckpt", "--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "2"], "EarlyExitDrafter", 2),
        (["drafts.ckpt", "--drafter", "NGramDrafter"], "NGramDrafter", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_checkpoints_drafts_and_exits_are_chosen_when_decoding(
    arguments: list[str], kind: str, layer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    decode = SpeculativeDecoder.decode

    def watched(self: SpeculativeDecoder, *given: Any, **options: Any) -> DecodeResult:
        seen.append(self.drafter)
        return decode(self, *given, **options)

    monkeypatch.setattr(SpeculativeDecoder, "decode", watched)
    document = succeed("decode", "--ckpt", *arguments, "--repeats", "0", "--output", "json").json
    assert all(each["standard"]["tokens"] == each["speculative"]["tokens"] for each in document["prompts"])
    assert type(seen[0]).__name__ == kind and getattr(seen[0], "exit_layer", None) == layer


def test_a_target_without_a_tokenizer_is_decoded_by_tokens() -> None:
    options = ("decode", "--target", "tokens", "--repeats", "1", "--output", "json")
    (each,) = succeed(*options, "--prompt", "1 2 3", "--max_new_tokens", "6").json["prompts"]
    assert each["prompt"] == [1, 2, 3] and each["prompt_text"] is None
    assert each["standard"]["tokens"] == each["speculative"]["tokens"] and len(each["speculative"]["tokens"]) == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--target", "nowhere/at/all"], "nowhere/at/all: there is no such directory"),
        (["--target", "./nowhere"], "there is no directory ./nowhere: check the path"),
        (["--target", "configs/nowhere"], "there is no directory configs/nowhere"),
        (["--target", "target", "--draft", "configs/nowhere"], "there is no directory configs/nowhere"),
        (["--target", "configs"], "configs is not a model directory: it has no config.json"),
        (["--target", "broken"], "broken/model.safetensors is truncated or damaged"),
        (
            ["--target", "tokens", "--draft", "other", "--prompt", "1"],
            "a vocabulary of 71 tokens, the target one of 67",
        ),
        (["--target", "target", "--draft", "foreign", "--drafter", "ModelDrafter"], "draft with CrossVocabulary"),
        (
            ["--target", "target", "--draft", "foreign", "--drafter", "CrossVocabulary", "--drafter.min_share", "1"],
            "tokens in common",
        ),
        (["--target", "target", "--max_new_tokens", "600"], "and the target's context holds 512"),
        (["--target", "target", "--raw", "--prompt", "the cat " * 300], "shorten the prompt"),
        (["--target", "target", "--quantization", "int4"], "int4 weights have a kernel on a CUDA GPU only"),
        (["--target", "target", "--pair", "mine"], "got --pair and --target"),
        (["--pair", "mime"], "there is no pair 'mime': did you mean mine?"),
        (["--target", "target", "--drafter", "Ngram"], "there is no drafter 'Ngram'"),
        (
            ["--target", "target", "--drafter.max_ngram", "3"],
            "max_ngram needs the drafter's name",
        ),
        (["--target", "target", "--drafter", "NGramDrafter", "--drafter.max_ngram", "0"], "max_ngram must be"),
        (["--target", "target", "--drafter", "NGramDrafter", "--drafter.min_share", "1"], "min_share"),
        (["--target", "target", "--drafter", "NGramDrafter", "--draft", "draft"], "takes no draft model"),
        (["--target", "target", "--drafter", "EarlyExitDrafter"], "exit_layer"),
        (["--target", "target", "--drafter", "MultiTokenDrafter"], "MultiTokenDrafter"),
        ([*EXIT, "0"], "exit_layer must be at least 1, got 0"),
        ([*EXIT, "3"], "exit_layer must be from 1 to 2, got 3"),
        ([*EXIT, "1", "--draft", "draft"], "takes no draft model"),
        (["--target", "layered", "--drafter", "EarlyExitDrafter", "--drafter.exit_layer=1"], "cannot be taken"),
        (
            ["drafts.ckpt", "--drafter", "EarlyExitDrafter", "--drafter.exit_layer", "3"],
            "exit_layer must be from 1 to 2",
        ),
        (["sizes.ckpt", "--drafter", "EarlyExitDrafter"], "exit_layer"),
        (["--ckpt", "sizes.ckpt", "--draft", "smal"], "the checkpoint has no draft 'smal': it has small, exit"),
        (["--target", "target", "--prompt", " "], "--prompt 1: the prompt is empty"),
        (["--target", "target", "--prompts_file", "-"], "there is no prompt"),
        (["--target", "target", "--stop", ""], "a stop string is empty"),
        (["--target", "target", "--ignore_eos", "--eos", "3"], "--ignore_eos and --eos exclude each other"),
        (["--target", "tokens"], "the target keeps no prompts of its own"),
        (["--target", "tokens", "--prompt", "text"], "--prompt 1: 'text' is no token"),
        (["--target", "tokens", "--prompt", "1 99"], "--prompt 1 holds 99: tokens of this model are"),
        (["--target", "tokens", "--prompt", "1", "--stop", "x"], "--stop needs a tokenizer"),
        (["--ckpt", "x.ckpt", "--draft_dtype", "float32"], "--draft_dtype is for pretrained models"),
        (["sizes.ckpt", "--draft", "small", "--drafter", "NGramDrafter"], "the draft is a ModelDrafter already"),
        (["sizes.ckpt", "--drafter", "CrossVocabulary"], "CrossVocabulary needs a"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_what_cannot_be_decoded_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    refused("decode", *arguments, told=told)


def test_an_unreachable_hub_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("decode", "--target", "lab/model", told="the hub cannot be reached at http://127.0.0.1:9")
    refused("info", "lab/model", told="the hub cannot be reached at http://127.0.0.1:9")


def test_a_pair_whose_local_copy_is_missing_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("decode", "--pair", "smollm2", told="; or make checkpoints/smollm2: `make smollm2`")


def test_models_that_cannot_be_there_are_refused_without_torch() -> None:
    program = (
        "import sys; from lightning_specdec.cli.main import main\n"
        "try: main()\nexcept SystemExit as stop: sys.exit('torch' in sys.modules or stop.code != 2)"
    )
    for arguments in (
        ["decode"],
        ["decode", "--pair", "mime"],
        ["chat", "--target", "configs"],
        ["info", "./nowhere"],
        ["decode", "--target", "target", "--draft", "configs/nowhere"],
    ):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (arguments, done.stderr)


def test_a_process_of_its_own_writes_nothing_else(home: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [SCRIPT, "decode", "--target", "target", "--draft", "foreign", *BRIEF, "--prompt", "the cat"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    tokens_of(json.loads(done.stdout))


def test_pairs_lists_all_with_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_pairs, "available_bytes", lambda: 6 * 10**9)
    shown = succeed("pairs").out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert {"mine", "gpt2", "pythia", "smollm2", "llama3_self"} <= lines.keys()
    assert "memory: weights and caches of 2,048 tokens" in shown
    assert lines["pythia"].endswith("fits") and lines["phi3_llama3"].endswith("does not fit")
    assert lines["llama3_self"].endswith("needs a GPU") and "NGramDrafter" in lines["smollm2"]
    document = succeed("pairs", "--output", "json", "--context", "100").json
    found = {pair["name"]: pair for pair in document["pairs"]}
    assert document["available_bytes"] == 6 * 10**9 and found["gpt2"]["num_draft_tokens"] == 9
    assert found["gpt2"]["models"][0]["parameters"] == 774_030_080 and len(found["smollm2"]["models"]) == 1


def test_a_pair_fits_or_not_by_text_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_pairs, "available_bytes", lambda: 6 * 10**9)
    printed = succeed("pairs", "gpt2", "--context", "1024").out
    assert "free on cpu: 6.0 GB\nmemory: weights and caches of 1,024 tokens" in printed and printed.endswith(" fits\n")
    outcome = call("pairs", "gpt2_dev")
    assert outcome.code == 1 and "does not fit" in outcome.out
    sums = {
        context: succeed("pairs", "gpt2", "--context", context, "--output", "json").json["pairs"][0]
        for context in ("1024", "4096")
    }
    assert sums["1024"]["cache_bytes"] == sums["4096"]["cache_bytes"], "GPT-2 reads 1,024 tokens"
    refused("pairs", "gpt3", told="there is no pair 'gpt3'")
    refused("pairs", "gpt2", "--context", "0", told="context must be from 1")
    monkeypatch.setattr(cli_pairs, "available_bytes", lambda: None)
    assert call("pairs", "gpt2").code == 0


def test_the_registry_is_shown_without_torch() -> None:
    program = (
        "import sys; from lightning_specdec.cli.main import main\nsys.argv[1:] = ['pairs', 'gpt2']\n"
        "try: main()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
