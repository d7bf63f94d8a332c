"""Run vLLM's OpenAI server on a CPU with one function fixed; use the Python of vLLM's environment.

    vllm/bin/python benchmarks/vllm_cpu.py --model DIR --speculative-config JSON ...    # the server
    vllm/bin/python benchmarks/vllm_cpu.py --verdict                                    # what the fault does

Without Triton, vLLM 0.32 replaces `expand_kernel`, which gives every draft token its request's temperature, by a
function that fills an int64 copy of its output and drops the copy. The temperatures that divide the target's logits are
therefore uninitialized memory. Greedy requests do not use them; at other temperatures the verification of draft tokens
is wrong, and so are the tokens drawn in their place.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import torch
from vllm.utils import cpu_triton_utils

BROKEN = cpu_triton_utils._expand_kernel_impl


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,  # the kernel's own name
) -> None:
    """Repeat each request's value for each of its draft tokens, up to its entry of `ends`."""
    kept = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    output.copy_(kept.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))


cpu_triton_utils._expand_kernel_impl = (
    expand  # workers import this file and look the function up by its name
)


def verdict(
    num_requests: int = 20_000, num_draft_tokens: int = 3, temperature: float = 0.7
) -> dict[str, Any]:
    """How often vLLM accepts the first 1, 2, 3 draft tokens if all are the target's most likely of 7 tokens."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    logits, none = 1.5 * torch.randn(7), torch.empty(0)
    probs, count = (logits / temperature).softmax(-1), num_requests * num_draft_tokens
    sampling = SamplingMetadata(
        temperature=torch.full((num_requests,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        output_token_ids=[],
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    ends = (torch.arange(1, num_requests + 1) * num_draft_tokens).int()
    divided = rejection_sampler.apply_sampling_constraints(logits.repeat(count, 1), ends, sampling)
    tokens = rejection_sampler.rejection_sample(
        torch.full((count,), int(logits.argmax()), dtype=torch.int32),
        [num_draft_tokens] * num_requests,
        num_draft_tokens,
        ends,
        None,  # a greedy draft
        divided,
        torch.multinomial(probs, num_requests, replacement=True)[:, None].contiguous(),
        sampling,
    )
    kept = [float((tokens[:, i] >= 0).float().mean()) for i in range(1, num_draft_tokens + 1)]
    first = torch.bincount(tokens[:, 0].long().clamp_min(0), minlength=7) / num_requests
    wanted = [float(probs.max()) ** i for i in range(1, num_draft_tokens + 1)]
    return {
        "kept": kept,
        "kept_expected": wanted,
        "first_token": first.tolist(),
        "target": probs.tolist(),
    }


if __name__ == "__main__":
    if sys.argv[1:] in (["--verdict"], ["--verdict", "--as_shipped"]):
        if "--as_shipped" in sys.argv:
            cpu_triton_utils._expand_kernel_impl = BROKEN
        print(json.dumps(verdict()))
    else:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
