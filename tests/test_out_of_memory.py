"""Laws of memory that cannot be allocated: one line names its use, and shorter texts decode."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cli_fixtures import call, refused
from families import tiny
from tiny_models import write

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.cli import decode as decode_verb
from lightning_specdec.config.memory import is_out_of_memory

FREE_BYTES = 2**28
"""Memory that may still be allocated: too little for texts of a million tokens."""
MANY = 2**20
PROMPTS = [[3, 5, 7, 3, 5], [11, 2, 11, 2, 11, 2, 9]]


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the system refuse allocations of more than `FREE_BYTES` in total."""
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(status.partition("VmSize:")[2].split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + FREE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("drafts", [True, False])
def test_caches_without_memory_are_refused_and_shorter_texts_decode(drafts: bool) -> None:
    decoder = SpeculativeDecoder(tiny("llama", max_position_embeddings=2 * MANY))
    expected = decoder.decode_standard(PROMPTS, max_new_tokens=8).tokens
    decode = decoder.decode if drafts else decoder.decode_standard
    with little_memory():
        with pytest.raises(
            ValueError,
            match=r"not enough memory for the keys and values of 2 texts with up to 10\d+ tokens: "
            r".* MB .*fewer or shorter",
        ):
            decode(PROMPTS, max_new_tokens=MANY, eos=())
        assert decode(PROMPTS, max_new_tokens=8).tokens == expected


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_the_command_refuses_it_in_one_line(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "llama", max_position_embeddings=2 * MANY)
    monkeypatch.chdir(tmp_path)
    words = ("--prompt", "3 5 7", "--max_new_tokens", str(MANY), "--backend", backend)
    with little_memory():
        refused("decode", "--target", "llama", *words, message="not enough memory for the keys")


def test_any_other_allocation_that_fails_in_a_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        torch.zeros(2**40)
        return 0

    monkeypatch.setattr(decode_verb, "run", run)
    words = ("decode", "--target", "llama")
    with little_memory():
        refused(*words, message="error: out of memory (")
        with pytest.raises(RuntimeError, match="allocate memory"):
            call(*words, "--debug")


def test_other_errors_are_not_called_a_lack_of_memory() -> None:
    with little_memory(), pytest.raises(RuntimeError) as failure:
        torch.zeros(2**40)
    assert is_out_of_memory(failure.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as mistake:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not is_out_of_memory(mistake.value)
