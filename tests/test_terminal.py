"""Laws of text for a terminal: it never executes control characters from files or models."""

from __future__ import annotations

import ast

import pytest
import torch
from cli_fixtures import call, here, succeed
from test_borders import FILES, PACKAGE

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import RNN

__all__ = ["here"]
HOSTILE = "\x1b]52;c;aGk=\x07 \x1b[2J \x9b2J \x7f \r."
CONTROLS = {chr(code) for code in [*range(32), *range(127, 160)]} - {"\t", "\n"}


def test_all_text_is_printed_by_the_function_that_makes_it_visible() -> None:
    for file in FILES:
        if file == "config/terminal.py":
            continue
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", file


@pytest.mark.usefixtures("here")
def test_a_terminal_gets_no_control_characters_from_a_checkpoint_its_output_or_an_error() -> None:
    torch.manual_seed(0)
    prompt = list(HOSTILE.encode())
    checkpoint.save(
        "hostile.ckpt",
        RNN(256),
        NGramDrafter(),
        prompts=[prompt],
        tokenizer="bytes",
        recipe={HOSTILE: HOSTILE},
    )
    options = ("--repeats", "0", "--max_new_tokens", "40")
    decoded = succeed("decode", "--ckpt", "hostile.ckpt", *options)
    described = succeed("info", "hostile.ckpt")
    refused = call("info", "--ckpt", f"{HOSTILE}.ckpt")
    assert refused.code == 2
    for outcome in (decoded, described, refused):
        for text in (outcome.out, outcome.err):
            assert CONTROLS.isdisjoint(text), text
    assert r"\x1b]52;c;aGk=\x07 \x1b[2J \x9b2J \x7f" in decoded.out
