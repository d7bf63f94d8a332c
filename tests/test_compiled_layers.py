"""Laws of compiled transformers layers: the same output and few compilations, whatever the widths.

The compiler's front end decides when to compile, so that no backend here generates code. The first
family goes through everything before code generation, including the pass that makes in-place writes
functional. The second goes through the front end only, which takes a third of the time. The program
runs in a separate process, since the shape checks of the other tests would be compiled as well.
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
from lightning_specdec.drafters import EarlyExitDrafter, ModelDrafter, MedusaDrafter
from lightning_specdec.drafters import NGramDrafter, StagedDrafter
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.models import compiled
from lightning_specdec.models.huggingface import HuggingFaceLM

prompts = [[3], [1, 2, 3, 4, 5], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 60, 66]]
stats = counters["stats"]

def hold(family, backend):
    target = HuggingFaceLM(tiny(family)).record()
    num_before = stats["unique_graphs"]
    rows = []
    for prompt in prompts:
        rows += autoregressive_decode(target, prompt, max_new_tokens=16).tokens
    assert compiled.compile_layers(target, backend=backend) > 0
    compilations = stats["unique_graphs"]
    assert 0 < compilations - num_before <= 2, (num_before, compilations)
    for pass_index in range(2):
        for prompt, row in zip(prompts[1:], rows[1:], strict=True):
            assert autoregressive_decode(target, prompt, max_new_tokens=16).tokens == [row]
            for drafter in (ModelDrafter(target), EarlyExitDrafter(1)):
                result = speculative_decode(target, drafter, prompt, max_new_tokens=16)
                assert result.tokens == [row]
        assert pass_index == 0 or stats["unique_graphs"] == compilations, stats
        compilations = stats["unique_graphs"]
    heads = MedusaDrafter(2, hidden_size=32, vocab_size=67).init_from(target)
    exits = EarlyExitDrafter(2), StagedDrafter([NGramDrafter(), EarlyExitDrafter(1)])
    for drafter in (ModelDrafter(target), *exits, heads):
        assert speculative_decode(target, drafter, prompts, max_new_tokens=16).tokens == rows

hold("llama", "aot_eager")
hold("gpt2", "eager")
print("held")
"""


@pytest.mark.slow
def test_compiled_layers_decode_the_same_and_are_compiled_once_for_all_widths() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "held\n", done.stderr[-2000:]


def test_all_layers_share_what_is_compiled() -> None:
    """Layers with different options are compiled separately, and a pass equals only itself."""
    for one_token in (False, True):
        assert (
            compiled._options("inductor", one_token)
            == compiled._options("inductor", one_token)
            is not None
        )


def test_a_model_that_records_no_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="only calls that are recorded"):
        compiled.compile_layers(HuggingFaceLM(tiny("llama")))
