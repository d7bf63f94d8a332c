"""Laws of compiled transformers layers: the same output, few compilations, whatever the widths, texts and sessions.

The compiler's front half is what decides when to compile, so no backend here generates code: that of the first family
goes through everything before that, writes in place made functional included, and that of the second through the front
half alone, which takes a third of the time. The program runs in a process of its own, without the shape checks of the
other tests, which would be compiled too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import tiny

from lightning_specdec.models import compiled
from lightning_specdec.models.huggingface import HuggingFaceLM

PROGRAM = """
from families import tiny
from torch._dynamo.utils import counters
from lightning_specdec.drafters import EarlyExitDrafter, ModelDrafter, MultiTokenDrafter, NGramDrafter, StagedDrafter
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.models import compiled
from lightning_specdec.models.huggingface import HuggingFaceLM

prompts = [[3], [1, 2, 3, 4, 5], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 60, 66]]
stats = counters["stats"]

def hold(family, backend):
    target, before = HuggingFaceLM(tiny(family)).record(), stats["unique_graphs"]
    alone = [autoregressive_decode(target, prompt, max_new_tokens=16).tokens[0] for prompt in prompts]
    assert compiled.compile_layers(target, backend=backend) > 0
    compilations = stats["unique_graphs"]
    assert 0 < compilations - before <= 2, (before, compilations)
    for again in range(2):
        for prompt, expected in zip(prompts[1:], alone[1:], strict=True):
            assert autoregressive_decode(target, prompt, max_new_tokens=16).tokens == [expected]
            for drafter in (ModelDrafter(target), EarlyExitDrafter(1)):
                assert speculative_decode(target, drafter, prompt, max_new_tokens=16).tokens == [expected]
        assert not again or stats["unique_graphs"] == compilations, stats
        compilations = stats["unique_graphs"]
    heads = MultiTokenDrafter(2, hidden_size=32, vocab_size=67).init_from(target)
    exits = EarlyExitDrafter(2), StagedDrafter([NGramDrafter(), EarlyExitDrafter(1)])
    for drafter in (ModelDrafter(target), *exits, heads):
        assert speculative_decode(target, drafter, prompts, max_new_tokens=16).tokens == alone

hold("llama", "aot_eager")
hold("gpt2", "eager")
print("held")
"""


def test_compiled_layers_decode_the_same_and_are_compiled_once_for_all_widths() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "held\n", done.stderr[-2000:]


def test_all_layers_share_what_is_compiled() -> None:
    """Layers are compiled each for itself where their options differ, and a pass is equal to itself alone."""
    for one_token in (False, True):
        assert (
            compiled._options("inductor", one_token)
            == compiled._options("inductor", one_token)
            is not None
        )


def test_a_model_that_records_no_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="only calls that are recorded"):
        compiled.compile_layers(HuggingFaceLM(tiny("llama")))
