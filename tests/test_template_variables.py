"""Laws of the chat template's variables: `--chat_template_kwargs.NAME VALUE` in every verb."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import call, refused, succeed
from tiny_models import write
from tiny_tokenizers import byte_level

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.cli.options import TemplateSettings, join_template_variables
from lightning_specdec.data.corpus import read_manifest
from lightning_specdec.data.generated_text import GeneratedText

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
    "{% if language %}<in {{ language }}>{% endif %}"
)
OFF = ("--chat_template_kwargs.enable_thinking", "false")
BRIEF = ("--repeats", "1", "--max_new_tokens", "4", "--output", "json")
QUICK = (
    "--minutes=5",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.logger=false",
    "--trainer.accelerator=cpu",
)


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_level(chat_template=TEMPLATE)
    return write(Path("target"), tokenizer=tokenizer, max_position_embeddings=512)


def chat_tokens(decoder: SpeculativeDecoder, **variables: Any) -> list[int]:
    tokenizer: Any = decoder.tokenizer
    messages = [{"role": "user", "content": "the cat"}]
    text = tokenizer.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **variables
    )
    tokens: list[int] = tokenizer.encode_rendered(text)
    return tokens


def test_words_of_one_flag_are_joined() -> None:
    words = ["--a", "1", *OFF, "--chat-template-kwargs.n=3", "--chat_template_kwargs.t", "fr: no?"]
    *others, flag, value = join_template_variables(words)
    assert others == ["--a", "1"] and flag == "--chat_template_kwargs"
    expected = {"enable_thinking": False, "n": 3, "t": "fr: no?"}
    assert json.loads(value) == expected
    assert TemplateSettings(chat_template_kwargs=value).chat_template_kwargs == expected
    assert TemplateSettings().chat_template_kwargs == {}
    whole = ("--chat_template_kwargs", '{"n": 4, "m": null}')
    assert json.loads(join_template_variables([*OFF, *whole])[-1]) == {
        "enable_thinking": False,
        "n": 4,
        "m": None,
    }


def test_encode_chat_takes_variables() -> None:
    decoder = SpeculativeDecoder.from_pretrained("target")
    for variables in ({}, {"enable_thinking": False}, {"language": "French"}):
        tokens = decoder.encode_chat("the cat", chat_template_kwargs=variables)
        assert tokens == chat_tokens(decoder, **variables)
    assert decoder.encode_chat("the cat") == chat_tokens(decoder)


def test_decode_uses_and_records_the_variables() -> None:
    decoder = SpeculativeDecoder.from_pretrained("target")
    prompt = ("--prompt", "the cat", "--target", "target", *BRIEF)
    for words, variables in (
        ((), {}),
        (OFF, {"enable_thinking": False}),
        (("--chat_template_kwargs", '{"language": "French"}'), {"language": "French"}),
    ):
        document = succeed("decode", *prompt, *words).json
        assert document["prompts"][0]["prompt"] == chat_tokens(decoder, **variables)
        assert document["manifest"]["options"].get("chat_template_kwargs", {}) == variables

    refused("decode", *prompt, *OFF, "--raw", message="no")
    refused("decode", *prompt, OFF[0], message="expected a value")
    refused("decode", *prompt, "--chat_template_kwargs", "3", message="must be a JSON object")


def test_chat_uses_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_specdec.text.tokenizer import TextTokenizer

    seen: list[Any] = []
    encode_chat = TextTokenizer.encode_chat

    def watched(self: Any, messages: Any, **options: Any) -> list[int]:
        seen.append(options["chat_template_kwargs"])
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(TextTokenizer, "encode_chat", watched)
    chat = ("chat", "--target", "target", "--max_new_tokens", "3")
    succeed(*chat, *OFF, stdin="the cat\nand the dog\n")
    assert seen == [{"enable_thinking": False}] * 2


def write_chats() -> None:
    rows = []
    for number in range(400):
        question = {"role": "user", "content": f"where is cat {number}"}
        answer = {"role": "assistant", "content": f"cat {number} sat on the mat " * 4}
        rows.append(json.dumps({"messages": [question, answer]}))
    Path("chats.jsonl").write_text("\n".join(rows))


def test_a_draft_of_other_variables_is_named(caplog: pytest.LogCaptureFixture) -> None:
    write_chats()
    recipe = ("--recipe", "medusa", "--target", "target", "--text", "chats.jsonl")
    succeed("fit", *recipe, *QUICK, *OFF)
    file = str(next(Path("checkpoints").rglob("last.ckpt")))
    decoder = SpeculativeDecoder.from_checkpoint(file)
    variables = {"enable_thinking": False}
    assert decoder.recipe["data_arguments"]["chat_template_kwargs"] == variables

    prompt = ("--prompt", "the cat", "--ckpt", file, *BRIEF)
    named = "the draft was trained with chat_template_kwargs {'enable_thinking': False}"
    assert named in call("decode", *prompt).err
    assert named not in call("decode", *prompt, *OFF).err

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="lightning_specdec"):
        decoder.encode_chat("a", chat_template_kwargs=variables)
        assert named not in caplog.text
        decoder.encode_chat("a")
        decoder.encode_chat("b")
    assert caplog.text.count(named) == 1


def test_generated_text_remembers_the_variables_of_its_prompts() -> None:
    Path("prompts.txt").write_text("\n".join(f"where is cat {number}" for number in range(30)))
    arguments = (
        *("--model", "GenerateText", "--model.target", "target", "--model.max_new_tokens", "4"),
        *("--data", "PromptFiles", "--data.paths", "prompts.txt"),
        *("--trainer.accelerator", "cpu"),
    )
    succeed("generate", *arguments, "--model.output", "plain")
    succeed("generate", *arguments, "--model.output", "off", *OFF)
    variables = {"enable_thinking": False}
    assert read_manifest(Path("off"))["data"]["chat_template_kwargs"] == variables
    sizes: dict[str, Any] = {"vocab_size": 320, "num_val": 2, "num_test": 2}
    assert "chat_template_kwargs" not in GeneratedText("plain", **sizes).arguments()
    assert GeneratedText("off", **sizes).arguments()["chat_template_kwargs"] == variables
    both = GeneratedText(["plain", "off"], **sizes).arguments()["chat_template_kwargs"]
    assert both == [{}, variables]
