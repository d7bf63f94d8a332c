"""docs/extending.md: its modules, written as they stand there, do what it says."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fixtures import succeed

from lightning_specdec import SpeculativeDecoder

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()
MODULES = dict(re.findall(r"<!-- file: (\w+)\.py -->\n```python\n(.*?)```", TEXT, flags=re.DOTALL))
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the page in the current directory, beside what ships."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    for name in ("checkpoints", "configs"):
        (tmp_path / name).mkdir()
        for path in (ROOT / name).glob("*.*"):
            (tmp_path / name / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_works(command: str) -> None:
    succeed(*shlex.split(command)[1:])


def test_the_drafter_changes_no_output_and_is_saved_and_loaded_by_whoever_names_it(tmp_path: Path) -> None:
    kind = importlib.import_module("my_drafter").BigramDrafter
    decoder = SpeculativeDecoder.from_checkpoint("checkpoints/text.safetensors").with_drafter(kind(length=3))
    prompt = "def f(x):\n    return x\n\n\ndef g(x):\n    return"
    result = decoder.decode(prompt, max_new_tokens=24)
    assert result.tokens == decoder.decode_standard(prompt, max_new_tokens=24).tokens
    assert result.counts is not None and result.counts.num_accepted
    decoder.save(tmp_path / "mine.safetensors")
    with pytest.raises(ValueError, match=r"my_drafter\.BigramDrafter"):
        SpeculativeDecoder.from_checkpoint(tmp_path / "mine.safetensors")
    loaded = SpeculativeDecoder.from_checkpoint(tmp_path / "mine.safetensors", drafter="my_drafter.BigramDrafter")
    assert loaded.decode(prompt, max_new_tokens=24).tokens == result.tokens
