"""`decode` with a grammar: both methods have the same output, and it fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from cli_fixtures import here, refused, succeed
from text_model import model

__all__ = ["here", "model"]
SCHEMA = {
    "type": "object",
    "properties": {"oak": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["oak", "kind"],
    "additionalProperties": False,
}


def outputs(model: str, *flags: str) -> list[dict[str, str]]:
    words = ("--prompt", "the oak", "--repeats", "0", "--output", "json", "--temperature", "0.8")
    options = ("--max_new_tokens", "60", "--drafter", "NGramDrafter")
    document = succeed("decode", "--target", model, *words, *options, *flags).json
    return [document["prompts"][0][method] for method in ("standard", "speculative")]


def test_the_output_fits_the_grammar_both_ways(model: str, tmp_path: Path) -> None:
    schema_path = tmp_path / "schema.json"
    schema_path.write_text(json.dumps(SCHEMA))
    grammar_path = tmp_path / "grammar.lark"
    grammar_path.write_text('start: "<" start ">" | "x"\n')
    flags = [
        ("--json_schema", str(schema_path)),
        ("--regex", "[a-f]{4}"),
        ("--grammar", str(grammar_path)),
    ]
    for name, value in flags:
        standard, speculative = outputs(model, name, value)
        assert standard["tokens"] == speculative["tokens"]
        text = speculative["text"]
        if speculative["stop_reason"] == "length":
            continue
        if name == "--json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif name == "--regex":
            assert re.fullmatch("[a-f]{4}", text)
        else:
            assert re.fullmatch("<*x>*", text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--regex", "("), "the regular expression is refused"),
        (("--regex", "a", "--grammar", "x"), "exclude each other"),
        (("--json_schema", "missing.json"), "missing.json cannot be read: No such file"),
        (("--json_schema", "bad.json"), "the JSON schema is no JSON"),
        (("--json_schema", "other.json"), "the JSON schema is refused"),
        (("--regex", "a", "--ignore_eos"), "needs a token that ends a row"),
    ],
)
def test_a_grammar_that_is_refused_is_one_line(
    model: str, here: Path, flags: tuple[str, ...], message: str
) -> None:
    Path("bad.json").write_text("{")
    Path("other.json").write_text('{"type": "array", "uniqueItems": true}')
    refused("decode", "--target", model, "--prompt", "the", *flags, message=message)
