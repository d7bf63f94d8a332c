"""Prompt sets: what ships, what is read, what is chosen, and what is refused in one line. No hub is ever asked."""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from cli_fixtures import call, succeed
from tiny_tokenizers import byte_level

from lightning_specdec import checkpoint, cli_options, cli_prompt_sets
from lightning_specdec.bench.prompts import Prompt, PromptDataset
from lightning_specdec.bench.prompts import sources as prompt_sources
from lightning_specdec.bench.prompts.prompt import MAX_ARTICLE_TOKENS, Wording
from lightning_specdec.bench.prompts.sources import INSTRUCTION, SHIPPED, TEXTS, build
from lightning_specdec.data.progressions import ArithmeticProgressions
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import RNN
from lightning_specdec.text.bytes import ByteTokenizer
from lightning_specdec.text.tokenizer import TextTokenizer

ROOT = Path(__file__).parent.parent
BYTES = ByteTokenizer()
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
HUMAN_EVAL = {
    "task_id": "HumanEval/7",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "",
    "test": "",
}
ROWS = {
    "openai/openai_humaneval": [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n"} for i in range(60)],
    "tatsu-lab/alpaca": [{"instruction": f"Say {i}.", "input": "aloud" if i % 2 else ""} for i in range(60)],
    "abisee/cnn_dailymail": [{"id": f"{i:040x}", "article": f"News {i}. " * 200} for i in range(60)],
}


def lines(path: Path, *rows: Any) -> str:
    """A file of JSON lines; what is a string already stays as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that answers, and `datasets` installed; gives what was asked of both."""
    asked: list[str] = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        assert streaming and (config == "3.0.0") == ("cnn" in name) and split in ("test", "train")
        asked.append(f"rows {name}")
        return iter(ROWS[name])

    module: Any = ModuleType("datasets")
    module.load_dataset, module.config = load, SimpleNamespace(STREAMING_READ_MAX_RETRIES=20)
    module.exceptions = SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda _, name, *, timeout: asked.append(f"{timeout:g} s {name}")
    )
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    yield asked


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A tokenizer with a chat template."""
    byte_level(chat_template=TEMPLATE).save_pretrained(tmp_path / "chats")
    return tmp_path / "chats"


def test_50_different_prompts_of_each_domain_ship() -> None:
    entries, origins = prompt_sources.read([SHIPPED])
    assert origins == dict.fromkeys(TEXTS, SHIPPED)
    for domain in TEXTS:
        texts = [entry.text for entry in entries if entry.domain == domain]
        assert len(set(texts)) == len(texts) == 50
        for text in texts:
            assert text is not None and text == text.lstrip()
            words = len(text.split())
            if domain == "code":
                (node,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
                assert ">>> " in (ast.get_docstring(node) or "") and text.endswith('"""\n')
            else:
                assert 120 <= words <= 400 if domain == "summarization" else 8 <= words <= 60
    assert len({entry.id for entry in entries}) == len(entries) == 150


def test_the_sequences_that_ship_are_those_that_the_rnn_has_not_learned() -> None:
    shipped = [list(prompt.tokens) for prompt in build(None, sources=[SHIPPED], domains=["sequences"])]
    splits = ArithmeticProgressions(batch_size=2).splits()
    assert shipped == [sequence[:3] for sequence in splits.test + splits.val]
    assert shipped[:3] == checkpoint.load(ROOT / "checkpoints" / "rnn.ckpt").prompts


def test_a_saved_set_is_the_loaded_one_and_is_named_by_the_lines_behind_its_first(tmp_path: Path) -> None:
    built = build(BYTES, sources=[SHIPPED], num_prompts=5)
    built.save(tmp_path / "set.jsonl")
    built.save(tmp_path / "set.jsonl")  # over another prompt set
    loaded = PromptDataset.load(tmp_path / "set.jsonl")
    assert loaded == built and len(loaded) == 15 and loaded.domains == TEXTS
    first, rest = (tmp_path / "set.jsonl").read_bytes().split(b"\n", 1)
    assert json.loads(first)["sha256"] == loaded.sha256 == hashlib.sha256(rest).hexdigest()
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="notes is kept as it is, for it is no prompt set"):
        built.save(tmp_path / "notes")
    (code, *others) = loaded.by_domain("code")
    assert len(others) == 4 and code.text is not None
    assert code.num_tokens == len(code.tokens) == len(code.text.encode()) and code.tokens == tuple(code.text.encode())


def test_the_seed_chooses_by_the_ids_alone_and_fewer_are_some_of_more() -> None:
    entries: list[Any] = [Wording(f"a-{i}", "a", str(i)) for i in range(30)]
    ten = prompt_sources.choose(entries, 10, seed=0, domains=["a"])
    assert ten == prompt_sources.choose(entries, 10, seed=0, domains=["a"])
    assert set(ten) == set(prompt_sources.choose(entries[::-1], 10, seed=0, domains=["a"]))
    assert set(prompt_sources.choose(entries, 4, seed=0, domains=["a"])) < set(ten) < set(entries)
    assert set(prompt_sources.choose(entries, 10, seed=1, domains=["a"])) != set(ten)


def test_the_hub_is_taken_when_it_answers(hub: list[str], tmp_path: Path) -> None:
    outcome = succeed("prompts", "build", "--tokenizer", "bytes", "--output", str(tmp_path / "set.jsonl"))
    assert hub == [f"{kind} {name}" for name in ROWS for kind in ("5 s", "rows")] and outcome.err == ""
    built = PromptDataset.load(tmp_path / "set.jsonl")
    assert len(built) == 150 and built.recipe["sources"] == dict(zip(TEXTS, ROWS, strict=True))
    assert all(prompt.id.startswith("HumanEval/") for prompt in built.by_domain("code"))
    said = {prompt.id: prompt.text for prompt in build(BYTES, num_prompts=60, domains=["conversation"])}
    assert said["alpaca-2"] == "Say 2." and said["alpaca-3"] == "Say 3.\n\naloud"


def not_installed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "datasets", None)
    return "need the package datasets"


def not_reachable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.undo()  # ask in earnest, at a port where nobody is
    module: Any = ModuleType("datasets")
    module.config, module.exceptions = SimpleNamespace(), SimpleNamespace(DatasetsError=KeyError)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    return "cannot be had from http://127.0.0.1:9"


def offline(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    return "HF_HUB_OFFLINE is set"


def refused(monkeypatch: pytest.MonkeyPatch) -> str:
    def load(*_: object, **__: object) -> None:
        raise sys.modules["datasets"].exceptions.DatasetsError("no such\nsplit")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load)
    return "(no such split)"


def of_other_fields(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ROWS, "tatsu-lab/alpaca", [{"text": "Say it."}])
    return "(its rows have no instruction and input)"


@pytest.mark.parametrize("absence", [not_installed, not_reachable, offline, refused, of_other_fields])
def test_what_ships_is_taken_and_said_at_once_where_the_hub_gives_nothing(
    absence: Callable[[pytest.MonkeyPatch], str],
    hub: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    reason, output = absence(monkeypatch), tmp_path / "set.jsonl"
    command = ["prompts", "build", "--tokenizer", "bytes", "--size", "tiny", "--output", str(output)]
    started = time.perf_counter()
    outcome = succeed(*command)
    assert time.perf_counter() - started < 5
    assert outcome.err.count("\n") == 1 and reason in outcome.err
    assert "the prompts that ship with lightning_specdec are taken instead" in outcome.err
    assert PromptDataset.load(output).prompts == build(BYTES, sources=[SHIPPED], num_prompts=5).prompts
    insisting = call(*command, "--source", "hub")
    assert insisting.code == 2 and reason in insisting.err and insisting.err.count("\n") == 1


def test_articles_are_cut_to_512_tokens_and_the_instruction_stays() -> None:
    tokenizer = TextTokenizer(byte_level())
    long = Wording("x", "summarization", "the cat sat on the café 🙂 " * 200, INSTRUCTION)
    (text,) = (prompt.text for prompt in PromptDataset.encode([long], tokenizer))
    assert text is not None and text.endswith(INSTRUCTION)
    kept = text.removesuffix(INSTRUCTION)
    assert MAX_ARTICLE_TOKENS - 4 <= len(tokenizer.encode_plain(kept)) <= MAX_ARTICLE_TOKENS
    assert long.text.startswith(kept)
    assert Wording("x", "summarization", "Short.", INSTRUCTION).said(tokenizer) == "Short." + INSTRUCTION
    assert Wording("x", "code", long.text).said(tokenizer) == long.text


def test_a_set_for_another_tokenizer_is_the_one_that_this_one_would_have_built(tmp_path: Path) -> None:
    article = "the cat sat on the mat and " * 200
    source = lines(tmp_path / "news.jsonl", {"article": article}, {"article": "Short."}, {"domain": "b", "prompt": "x"})
    built, other = (build(each, sources=[source]) for each in (BYTES, TextTokenizer(byte_level())))
    built.save(tmp_path / "set")
    again = PromptDataset.load(tmp_path / "set").for_tokenizer(TextTokenizer(byte_level()))
    assert again == other and again.sha256 == other.sha256
    assert len(built.prompts[0].text or "") < len(other.prompts[0].text or "")
    assert other.for_tokenizer(BYTES) == built
    assert build(TextTokenizer(byte_level()), sources=[str(tmp_path / "set")]).prompts == other.prompts


def test_each_target_takes_the_domains_that_it_can_read(tmp_path: Path) -> None:
    rows = [{"domain": "a", "prompt": "x"}, {"domain": "b", "tokens": [1, 2]}, {"domain": "a", "prompt": "y"}]
    built = build(BYTES, sources=[lines(tmp_path / "mixed.jsonl", *rows)])
    assert built.domains == ("a", "b")
    assert built.for_tokenizer(TextTokenizer(byte_level())).domains == built.for_tokenizer(BYTES).domains == ("a",)
    integers = built.for_tokenizer(None)
    assert integers.prompts == tuple(built.by_domain("b")) and integers.tokenizer is None
    assert integers.for_tokenizer(BYTES) is integers.for_tokenizer(None) is integers
    assert built.of(["b"]).for_tokenizer(BYTES).prompts == integers.prompts  # whoever names them knows whose they are
    with pytest.raises(ValueError, match="the prompts are all text, and this target has no tokenizer: choose prompts"):
        built.for_tokenizer(BYTES).for_tokenizer(None)


def test_what_is_null_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    row = {"id": None, "domain": None, "tokens": None, "article": None, "prompt": "Hello"}
    (prompt,) = build(BYTES, sources=[lines(tmp_path / "mine.jsonl", row)])
    assert (prompt.id, prompt.domain, prompt.text) == ("mine-1", "mine", "Hello")


def test_the_chat_template_goes_round_each_text_unless_it_is_raw(chats: Path, tmp_path: Path) -> None:
    command = ["prompts", "build", "--tokenizer", str(chats), "--source", SHIPPED, "--size", "tiny", "--output"]
    sets = []
    for name, *more in (("chat",), ("raw", "--raw")):
        succeed(*command, str(tmp_path / name), *more)
        sets.append(PromptDataset.load(tmp_path / name))
    tokenizer = TextTokenizer.load(chats)
    for framed, plain in zip(*sets, strict=True):
        assert framed.text == plain.text and plain.text is not None
        assert list(framed.tokens) == tokenizer.encode_chat([{"role": "user", "content": plain.text}])
        assert list(plain.tokens) == tokenizer.encode(plain.text) != list(framed.tokens)
    of_bytes = sets[0].for_tokenizer(BYTES)
    assert [prompt.tokens for prompt in of_bytes] == [tuple((prompt.text or "").encode()) for prompt in of_bytes]
    assert of_bytes.tokenizer == "bytes" and of_bytes.for_tokenizer(BYTES) is of_bytes
    assert of_bytes.for_tokenizer(tokenizer) == sets[0]


def test_files_of_every_kind_are_read(tmp_path: Path) -> None:
    questions = lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 161, "category": "rag", "turns": ["Look up."]},
    )
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(HUMAN_EVAL).encode()))
    mine = lines(
        tmp_path / "mine.jsonl", {"prompt": "Hello \ud800"}, "", {"id": "x", "domain": "news", "article": "A."}
    )
    numbers = lines(tmp_path / "numbers.jsonl", {"tokens": [1, 2]})
    rnn = str(ROOT / "checkpoints" / "rnn.ckpt")
    output = str(tmp_path / "set")
    sources = [part for source in (questions, packed, mine, numbers, rnn) for part in ("--source", str(source))]
    shown = succeed("prompts", "build", "--tokenizer", "bytes", *sources, "--output", output, "--log_level", "error")
    built = PromptDataset.load(output)
    assert [(prompt.id, prompt.domain, prompt.text) for prompt in built][:6] == [
        ("question-81", "conversation", "Write."),
        ("question-161", "rag", "Look up."),
        ("HumanEval/7", "code", "def f():\n"),
        ("mine-1", "mine", "Hello ?"),
        ("x", "news", "A." + INSTRUCTION),
        ("numbers-1", "numbers", None),
    ]
    assert [prompt.tokens for prompt in built.by_domain("sequences")] == [(19, 20, 21), (4, 8, 12), (4, 9, 14)]
    assert built.by_domain("numbers") == [Prompt("numbers-1", "numbers", (1, 2))]
    assert "rag" in shown.out


def test_the_table_counts_tokens_by_domain(tmp_path: Path) -> None:
    rows = [{"domain": "a", "prompt": "x" * count} for count in (1, 2, 6)] + [{"domain": "bc", "tokens": [5, 5]}]
    source = lines(tmp_path / "rows.jsonl", *rows)
    outcome = succeed(
        "prompts", "build", "--tokenizer", "bytes", "--source", source, "--output", str(tmp_path / "set"),
        "--num_prompts", "3",
    )  # fmt: skip
    first, head, *table = outcome.out.splitlines()
    assert first.endswith(f"4 prompts, sha256 {PromptDataset.load(tmp_path / 'set').sha256}")
    assert head.split() == ["domain", "n", "min", "mean", "max", "tokens,", "from"]
    assert [line.split() for line in table] == [
        ["a", "3", "1", "3.0", "6", "rows.jsonl"],
        ["bc", "1", "2", "2.0", "2", "rows.jsonl"],
        ["all", "4", "1", "2.8", "6"],
    ]
    assert outcome.err == "WARNING: bc has 1 of the 3 prompts wanted: that is all there are\n"


def test_the_tables_defaults_are_the_functions_own() -> None:
    owned = inspect.signature(build).parameters
    options = {option.name: option for option in cli_options.VERBS["prompts"].options}
    assert cli_prompt_sets.SIZES == {"full": owned["num_prompts"].default, "tiny": 5}
    assert tuple(cli_prompt_sets.SIZES) == options["size"].choices and options["size"].default == "full"
    assert options["seed"].default == owned["seed"].default
    assert options["domains"].help.startswith(", ".join((*TEXTS, "sequences")))


@pytest.mark.parametrize("action", [[], ["shred"]])
def test_an_action_is_named_and_known(action: list[str]) -> None:
    outcome = call("prompts", *action, "--output", "set")
    assert outcome.code == 2 and "ACTION" in outcome.err and outcome.err.count("\n") == 1


def cut_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"prompt": "x"}' * 50)[:-9])


BAD: dict[str, tuple[Any, list[str] | None, str]] = {
    "no such prompts file": (None, ["--source", "gone.jsonl"], "there is no prompts file gone.jsonl"),
    "a directory": (None, ["--source", "."], ". is a directory"),
    "a bad line": (['{"prompt": "x"}', "{no"], [], "in.jsonl, line 2: this is no JSON"),
    "no object": (['"x"'], [], "in.jsonl, line 1: this is no object"),
    "no prompt in it": ([{"question": "x"}], [], "in.jsonl, line 1: a row needs a prompt.*this one has question"),
    "an empty prompt": ([{"prompt": " "}], [], "in.jsonl, line 1: the prompt is empty"),
    "bad tokens": ([{"tokens": [1, -2]}], [], 'in.jsonl, line 1: "tokens" must be'),
    "an empty name of a domain": ([{"prompt": "x", "domain": ""}], [], 'in.jsonl, line 1: "domain" must be a name'),
    "an empty file": ([], [], "in.jsonl holds no prompt"),
    "an empty domain": ([{"prompt": "x"}], ["--domains", "code"], "in.jsonl has no prompt of code: choose from in"),
    "an unknown domain": ([{"prompt": "x"}], ["--domains", "odes"], "'odes' is no domain of in.jsonl: choose from in"),
    "an unknown public domain": (None, ["--domains", "odes"], "'odes' is no domain of the public prompts"),
    "an id that is none": ([{"id": [1], "prompt": "x"}], [], '"id" must be a name or an integer, got '),
    "an empty id": ([{"id": " ", "prompt": "x"}], [], '"id" must be a name or an integer, got '),
    "text and integers in one domain": (
        [{"prompt": "x"}, {"tokens": [1]}],
        [],
        "domain in holds text .'in-1'. and integers .'in-2'.: give each a domain of its own",
    ),
    "an id of two lines": (
        [{"id": "a\nb", "prompt": "x"}],
        [],
        'in.jsonl, line 1: "id" must be a name or an integer, got ',
    ),
    "a domain that no file can hold": ([{"domain": "\ud800", "prompt": "x"}], [], '"domain" must be a name, got '),
    "an output that is a device": ([{"prompt": "x"}], ["--output", "/dev/full"], "/dev/full is kept as it is"),
    "two of one id": ([{"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}], [], "two prompts are called '1'"),
    "a tokenizer that is none": ([{"prompt": "x"}], ["--tokenizer", "./nobody"], "no such directory"),
    "a directory without one": ([{"prompt": "x"}], ["--tokenizer", "."], "holds no tokenizer"),
    "no tokenizer for text": ([{"prompt": "x"}], None, "name the tokenizer"),
    "no number of prompts": ([{"prompt": "x"}], ["--num_prompts", "0"], "num_prompts must be at least 1, got 0"),
    "hub and a file": ([{"prompt": "x"}], ["--source", "hub"], "'hub' is a source by itself"),
    "an output that is no prompt set": ([{"prompt": "x"}], ["--output", "in.jsonl"], "in.jsonl is kept as it is"),
    "an output that is a directory": ([{"prompt": "x"}], ["--output", "."], "is kept as it is"),
    "a broken archive": (cut_gz, [], "in.jsonl.gz cannot be unpacked"),
    "no checkpoint": (None, ["--source", "gone.ckpt"], "there is no checkpoint gone.ckpt"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, options, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    source = []
    if callable(content):
        content(tmp_path / "in.jsonl.gz")
        source = ["--source", "in.jsonl.gz"]
    elif content is not None:
        source = ["--source", Path(lines(tmp_path / "in.jsonl", *content)).name]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tokenizer = [] if options is None else ["--tokenizer", "bytes"]
    outcome = call("prompts", "build", *tokenizer, *source, "--output", "set", *(options or []))
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1
    assert re.search(message, outcome.err), outcome.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tokenizer": "bytes", "prompts": [[1]]}, "reads text: .* --tokenizer bytes"), ({}, "keeps no prompts")],
)
def test_a_checkpoint_that_keeps_no_sequences_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = RNN(256)
    checkpoint.save(tmp_path / "pair.ckpt", model, ModelDrafter(model), **options)
    with pytest.raises(ValueError, match=message):
        build(None, sources=[str(tmp_path / "pair.ckpt")])


def break_line(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def change_text(path: Path) -> None:
    path.write_text(path.read_text().replace("shipped", "shaped").replace("def ", "DEF ", 1))


def another_version(path: Path) -> None:
    path.write_text(path.read_text().replace('"prompt_set": 1', '"prompt_set": 2'))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "there is no prompts file .*prompts build. writes one"),
    "empty": (lambda path: path.write_text(""), "should be a prompt set and is none"),
    "plain": (lambda path: path.write_text('{"prompt": "x"}\n'), "is none: .*prompts build --source"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not text"),
    "half a line": (break_line, "line 16: this is no JSON"),
    "another text": (change_text, "are not those that its first line names"),
    "another version": (another_version, "is of another version"),
    "its first line alone": (lambda path: path.write_text(path.read_text().split("\n")[0]), "there is no prompt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_set_that_is_not_as_it_was_written_is_refused(name: str, tmp_path: Path) -> None:
    harm, message = BROKEN[name]
    path = tmp_path / "set.jsonl"
    build(BYTES, sources=[SHIPPED], num_prompts=5).save(path)
    harm(path)
    with pytest.raises(ValueError, match=message) as raised:
        PromptDataset.load(path)
    assert "\n" not in str(raised.value)


def test_a_domain_without_prompts_and_one_that_nobody_knows_are_told_apart() -> None:
    built = build(BYTES, sources=[SHIPPED], domains=["code"], num_prompts=1)
    with pytest.raises(ValueError, match="the prompt set has no prompt of conversation: choose from code"):
        built.by_domain("conversation")
    with pytest.raises(ValueError, match="'poetry' is no domain of the prompt set: choose from code"):
        built.by_domain("poetry")
