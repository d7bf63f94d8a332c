"""The compiled draft guesses what the uncompiled one guesses. One compilation of about 20 seconds serves all tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec.drafters import Context, ModelDrafter
from lightning_specdec.drafters import compiled as module
from lightning_specdec.drafters.compiled import CompiledDrafter, CompilerMissing
from lightning_specdec.inference import autoregressive_decode, speculative_decode
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling

WINDOW = 2
SAMPLED = Sampling(0.9)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler on this machine"
)


def draft_model(seed: int = 8) -> LanguageModel:
    return cases.MODELS["rnn"](seed)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def _short_reads() -> Iterator[None]:
    """Half of what users' roll-outs can read: as many forms, compiled in less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_READ", 4)
        yield


@pytest.fixture(scope="module")
def compiled(cache: Path) -> CompiledDrafter:
    return CompiledDrafter(ModelDrafter(draft_model()), num_draft_tokens=WINDOW, sampling=SAMPLED, cache_dir=cache)


def runs(drafter: CompiledDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call of the compiled function."""
    calls: list[int] = []

    def counted(run: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[list[Tensor]], list[Tensor]]:
        def call(inputs: list[Tensor]) -> list[Tensor]:
            calls.append(1)
            return run(inputs)

        return call

    monkeypatch.setattr(drafter, "_run", {num_read: counted(run) for num_read, run in drafter._run.items()})
    return calls


LONG_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2]
"""Longer than what the compiled function reads."""


@needs_compiler
@pytest.mark.parametrize("window", [WINDOW, 1, WINDOW + 1])
@pytest.mark.parametrize("rule", cases.RULES)
def test_decodes_with_the_compiled_draft_equal_those_without(
    compiled: CompiledDrafter, rule: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = runs(compiled, monkeypatch)
    for prompt in [*cases.PROMPTS, LONG_PROMPT]:
        one, other = (
            speculative_decode(
                cases.target("rnn"),
                drafter,
                prompt,
                max_new_tokens=10,
                num_draft_tokens=window,
                rule=cases.RULES[rule](),
                sampling=SAMPLED,
                seed=3,
            )
            for drafter in (compiled, ModelDrafter(draft_model()))
        )
        assert one.tokens == other.tokens
        assert one.counts == other.counts
    assert calls, "nothing was compiled after all"


@needs_compiler
def test_compiled_guesses_and_probabilities_are_those_of_the_model(compiled: CompiledDrafter) -> None:
    texts, uniform = [[1, 2, 3, 4]], torch.tensor([[0.1, 0.9]])
    context = Context(texts, torch.tensor([[3, 4]]), uniform, wants_logits=True)
    with torch.inference_mode():
        first, second = (
            drafter.propose(drafter.init_state(1, 16), context, [WINDOW], SAMPLED)
            for drafter in (compiled, ModelDrafter(draft_model()))
        )
    assert first.tokens.tolist() == second.tokens.tolist()
    torch.testing.assert_close(first.probs, second.probs)
    torch.testing.assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_what_the_compiled_form_cannot_do_takes_the_uncompiled_way(
    compiled: CompiledDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = runs(compiled, monkeypatch)
    batch = speculative_decode(cases.target("rnn"), compiled, cases.PROMPTS, max_new_tokens=8)
    assert batch.tokens == autoregressive_decode(cases.target("rnn"), cases.PROMPTS, max_new_tokens=8).tokens
    greedy = speculative_decode(cases.target("rnn"), compiled, [1, 2, 3], max_new_tokens=8)
    assert greedy.tokens == autoregressive_decode(cases.target("rnn"), [1, 2, 3], max_new_tokens=8).tokens
    assert not calls


@needs_compiler
def test_one_compiled_file_serves_every_checkpoint_of_a_shape(
    compiled: CompiledDrafter, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(cache.rglob("*"))
    model = draft_model(seed=21)
    other = CompiledDrafter(ModelDrafter(model), num_draft_tokens=WINDOW, sampling=SAMPLED, cache_dir=cache)
    assert sorted(cache.rglob("*")) == before
    calls = runs(other, monkeypatch)
    options = {"max_new_tokens": 10, "num_draft_tokens": WINDOW, "sampling": SAMPLED}
    one, two = (
        speculative_decode(cases.target("rnn"), drafter, [1, 2, 3], **options)  # type: ignore[arg-type]
        for drafter in (other, ModelDrafter(model))
    )
    assert one.tokens == two.tokens and one.counts == two.counts and calls


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerMissing, match="no C"):
        CompiledDrafter(ModelDrafter(draft_model()), num_draft_tokens=2, sampling=SAMPLED, cache_dir=tmp_path)


def test_a_draft_that_is_not_recurrent_is_refused(tmp_path: Path) -> None:
    drafter = ModelDrafter(cases.target("transformer"))
    with pytest.raises(ValueError, match="only a recurrent draft on a CPU .* TinyTransformer on cpu"):
        CompiledDrafter(drafter, num_draft_tokens=2, sampling=SAMPLED, cache_dir=tmp_path)
