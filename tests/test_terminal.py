"""Laws of what reaches a terminal: nothing that others wrote is obeyed by it."""

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
    for file in (file for file in FILES if file != "config/terminal.py"):
        calls = [
            node.func
            for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
            if isinstance(node, ast.Call)
        ]
        assert not any(
            isinstance(function, ast.Name) and function.id == "print" for function in calls
        ), file


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
    decoded = succeed(
        "decode", "--ckpt", "hostile.ckpt", "--repeats", "0", "--max_new_tokens", "40"
    )
    shown = succeed("info", "hostile.ckpt")
    refused = call("info", "--ckpt", f"{HOSTILE}.ckpt")
    for text in (*decoded, *shown, *refused):
        assert not CONTROLS & set(str(text)), text
    assert r"\x1b]52;c;aGk=\x07 \x1b[2J \x9b2J \x7f" in decoded.out and refused.code == 2
