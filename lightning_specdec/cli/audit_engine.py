"""`audit --engine ADDRESS`: check that a running server's output is the target's."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_specdec.cli.common import counted, load_decoder, load_prompts, progress
from lightning_specdec.cli.options import OutputSettings, UsageError, chosen, pair_source
from lightning_specdec.config.checks import environment_key
from lightning_specdec.config.decoding import MAX_TOKENS, SamplingSettings
from lightning_specdec.config.settings import setting, setting_fields
from lightning_specdec.config.terminal import say

if TYPE_CHECKING:
    from lightning_specdec.audit.engine_audit import (
        EngineFindings,
        GreedyFindings,
        SampledFindings,
        WrongToken,
    )
    from lightning_specdec.audit.token_law import LawTest
    from lightning_specdec.text.prompts import Prompt

NUM_PROMPTS = 64
MAX_NEW_TOKENS = 160
ENGINE_DTYPES = ("float32", "bfloat16", "float16")
MAX_SHOWN = 10
"""Wrong tokens, and warnings, that are listed one by one."""

PAIR_FLAGS = ("drafts", "rules", "temperatures", "num_draft_tokens", "num_places", "draft")
"""Flags of `audit` that have no meaning for a server."""
UNKNOWN_SAMPLING = ("min_p", "repetition_penalty")
TEST_NAMES = {"likelihood": "mean log probability + entropy", "ranks": "ranks of the tokens"}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(OutputSettings):
    """Which server is audited, and how."""

    engine: str | None = setting(
        None,
        "audit the OpenAI-compatible server at this address, with the target as the reference",
        metavar="ADDRESS",
    )
    engine_model: str | None = setting(
        None, "the model's name there; default: the only one", metavar="NAME"
    )
    engine_dtype: str = setting(
        "bfloat16",
        "what the engine computes in: decides which differences rounding explains",
        choices=ENGINE_DTYPES,
    )
    temperature: float = setting(
        1.0, "temperature of the sampled check; 0 leaves it out", minimum=0
    )
    api_key_env: str | None = setting(
        None, "environment variable with the key that the engine requires", metavar="NAME"
    )
    baseline_engine: str | None = setting(
        None,
        "the same model without speculation at this address, to compare the speed with",
        metavar="ADDRESS",
    )
    clients: int = setting(4, "requests at a time", minimum=1, maximum=256)
    timeout: float = setting(600.0, "seconds that the engine may take for an answer", above=0)

    # These have their flags in the audit of a pair, with other defaults.
    num_prompts: int = setting(NUM_PROMPTS, minimum=1)
    max_new_tokens: int = setting(MAX_NEW_TOKENS, minimum=1, maximum=MAX_TOKENS)
    seed: int = setting(0, minimum=0, maximum=2**63 - 1)

    def api_key(self) -> str | None:
        """The key that the engine requires; None if it needs none.

        Raises:
            ValueError: the environment variable is not set, or is empty.
        """
        return environment_key(self.api_key_env)


def is_named(options: Namespace) -> bool:
    """Whether a server is audited.

    Raises:
        UsageError: there are flags that need one.
    """
    if "engine" in options:
        return True
    for field in setting_fields(EngineSettings):
        is_engine_flag = field.metadata.get("help") and field.name != "output"
        if is_engine_flag and field.name in options:
            advice = " or use --temperatures" if field.name == "temperature" else ""
            raise UsageError(f"--{field.name} needs a server: give --engine ADDRESS{advice}")
    return False


def run(options: Namespace) -> int:
    """Audit a server; returns 1 if its output is not the target's."""
    for name in (*PAIR_FLAGS, *UNKNOWN_SAMPLING):
        if name in options:
            raise UsageError(f"--{name} does not apply to a server: drop it, or drop --engine")
    settings = chosen(options, EngineSettings)
    sampling = chosen(options, SamplingSettings, temperature=settings.temperature)
    api_key = settings.api_key()
    source = pair_source(options)
    if source.dtype is None:
        source = source.changed(dtype="float32")
    # The plain layers in torch are the reference, whatever is faster.
    if source.backend == "auto":
        source = source.changed(backend="torch")

    # Imported here because torch takes a second.
    from lightning_specdec.audit.engine_audit import EngineAuditor, EnginePrompt
    from lightning_specdec.audit.engine_client import EngineClient
    from lightning_specdec.bench.manifest import made_on, manifest
    from lightning_specdec.rules import Sampling

    # The server is asked before the models are loaded, which may take minutes.
    client = EngineClient(
        str(settings.engine),
        model=settings.engine_model,
        api_key=api_key,
        timeout=settings.timeout,
    )
    baseline = None
    if settings.baseline_engine is not None:
        baseline = EngineClient(settings.baseline_engine, api_key=api_key, timeout=settings.timeout)

    decoder = load_decoder(options, source)
    prompts: list[EnginePrompt] = []
    for text, tokens in load_prompts(options, decoder, _shipped_prompts()):
        prompts.append(EnginePrompt(tokens, text))
    auditor = EngineAuditor(
        client,
        decoder.target,
        decoder.tokenizer,
        prompts,
        sampling=Sampling.of(sampling),
        engine_dtype=settings.engine_dtype,
        num_prompts=settings.num_prompts,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        num_clients=settings.clients,
        baseline=baseline,
    )
    findings = auditor.run(tell=lambda text: progress(text, often=True))

    recorded = {**source.to_dict(), **settings.to_dict(), **sampling.to_dict()}
    run_manifest = manifest(options=recorded, device=decoder.target.device)
    if settings.output == "json":
        say(json.dumps({**to_dict(findings), "manifest": run_manifest}))
    else:
        say(f"{report(findings, sampling, settings)}\n{made_on(run_manifest)}")
    for line in failures(findings):
        say(f"error: {line}", file=sys.stderr)
    return 1 if findings.failed else 0


def _shipped_prompts() -> list[Prompt]:
    """Conversations and code in turn, so that few prompts have some of both."""
    from lightning_specdec.data.prompts import shipped_prompts

    conversations = shipped_prompts(["conversation"])
    code = shipped_prompts(["code"])
    prompts: list[Prompt] = []
    for pair in zip(conversations, code, strict=False):
        prompts += pair
    return prompts


def to_dict(findings: EngineFindings) -> dict[str, Any]:
    """Plain values for JSON."""
    greedy = asdict(findings.greedy)
    document: dict[str, Any] = {
        "passed": not findings.failed,
        "address": findings.address,
        "model": findings.model,
        "kind": findings.kind,
        "token_source": findings.token_source,
        "prompts_as_tokens": findings.prompts_as_tokens,
        "template": findings.template,
        "warnings": findings.warnings,
        "greedy": {**greedy, "failed": findings.greedy.failed},
        "sampled": None,
        "acceptance": None,
        "speed": None,
    }
    sampled = findings.sampled
    if sampled is not None:
        tests = [{**asdict(test), "failed": test.failed} for test in sampled.law.tests]
        document["sampled"] = {
            **asdict(sampled),
            "law": {**asdict(sampled.law), "tests": tests, "direction": sampled.law.direction},
            "failed": sampled.failed,
        }
    if findings.acceptance is not None:
        source = findings.acceptance_source
        document["acceptance"] = {**findings.acceptance.to_dict(), "source": source}
    if findings.speed is not None:
        document["speed"] = asdict(findings.speed)
    return document


def report(findings: EngineFindings, sampling: SamplingSettings, settings: EngineSettings) -> str:
    """The findings as text."""
    kind = f" ({findings.kind})" if findings.kind else ""
    sent = "tokens" if findings.prompts_as_tokens else "texts, without a chat template"
    lines = [
        f"engine    {findings.address}, model {findings.model}{kind}",
        f"tokens    {findings.token_source}; prompts are sent as {sent}",
    ]
    if findings.template:
        lines.append(f"template  {findings.template}")
    lines += ["", *_greedy_lines(findings.greedy, settings)]
    if findings.sampled is not None:
        lines += ["", *_sampled_lines(findings.sampled, sampling)]
    lines += ["", *_draft_lines(findings), ""]
    lines += [f"warning: {warning}" for warning in findings.warnings[:MAX_SHOWN]]
    num_hidden = len(findings.warnings) - MAX_SHOWN
    if num_hidden > 0:
        lines.append(f"warning: ... and {num_hidden} more (--output json has all)")

    if findings.failed:
        lines.append("FAILED: the engine's output is not the target's")
    elif findings.sampled is not None and not findings.sampled.law.has_power:
        lines.append("passed, without power: too few uncertain tokens for the sampled check")
    else:
        lines.append("passed: no difference from the target's output")
    return "\n".join(lines)


def _greedy_lines(greedy: GreedyFindings, settings: EngineSettings) -> list[str]:
    answers = counted(greedy.num_answers, "answer")
    line = (
        f"greedy    {answers}, {counted(greedy.num_tokens, 'token')}: {greedy.num_equal} equal, "
        f"{counted(greedy.num_near_ties, 'near-tie')}, {len(greedy.wrong_tokens)} wrong"
    )
    if greedy.num_near_ties:
        line += f" (largest near-tie {greedy.largest_near_tie:.2g}, in {settings.engine_dtype})"
    lines = [line]
    lines += [f"          {describe(wrong)}" for wrong in greedy.wrong_tokens[:MAX_SHOWN]]
    if len(greedy.wrong_tokens) > MAX_SHOWN:
        lines.append(f"          ... and {len(greedy.wrong_tokens) - MAX_SHOWN} more")
    return lines


def describe(wrong: WrongToken) -> str:
    """A wrong token in words."""
    where = f"prompt {wrong.prompt + 1}, token {wrong.position + 1}: {wrong.text!r}"
    if wrong.gap is None:
        return f"{where} cannot be drawn"
    return (
        f"{where} instead of {wrong.best_text!r}, {wrong.gap:.2g} below it (rounding: up to "
        f"{wrong.bound:.2g})"
    )


def _sampled_lines(sampled: SampledFindings, sampling: SamplingSettings) -> list[str]:
    law = sampled.law
    words = [f"T={sampling.temperature:g}"]
    if sampling.top_p is not None:
        words.append(f"top_p={sampling.top_p:g}")
    if sampling.top_k is not None:
        words.append(f"top_k={sampling.top_k}")
    answers = counted(sampled.num_answers, "answer")
    lines = [
        f"sampled   {', '.join(words)}: {answers}, {counted(law.num_tokens, 'token')}; a correct "
        f"engine fails one of the tests in {law.false_alarm_odds:.1%} of audits"
    ]
    lines += [f"          {_describe_test(test)}" for test in law.tests]
    if sampling.top_p is not None or sampling.top_k is not None:
        lines.append(
            f"          {counted(len(sampled.outside), 'token')} cannot be drawn; "
            f"{sampled.num_border} at the border, not tested"
        )
    lines += [f"          {describe(wrong)}" for wrong in sampled.outside[:MAX_SHOWN]]
    if law.temperature_ratio is not None and law.temperature_error is not None:
        low = law.temperature_ratio - 2 * law.temperature_error
        high = law.temperature_ratio + 2 * law.temperature_error
        lines.append(
            f"          drawn as at {law.temperature_ratio:.3f} times the temperature "
            f"[{low:.3f}, {high:.3f}]"
        )
    if law.direction:
        lines.append(f"          {law.direction}")
    return lines


def _describe_test(test: LawTest) -> str:
    statistic = "z" if test.name == "likelihood" else "chi-square"
    verdict = "FAILED" if test.failed else "ok"
    odds = "under 1e-300" if test.p_value == 0 else f"{test.p_value:.2g}"
    return (
        f"{verdict}: {TEST_NAMES[test.name]}: {statistic} {test.statistic:.2f}, odds {odds} "
        f"(fails below {test.level:g})"
    )


def _draft_lines(findings: EngineFindings) -> list[str]:
    """What the engine reports about drafts, and its speed."""
    acceptance = findings.acceptance
    if acceptance is None or not acceptance.num_drafted:
        lines = ["drafts    not reported by the engine"]
    else:
        parts = []
        if acceptance.acceptance_length is not None:
            parts.append(f"acceptance length {acceptance.acceptance_length:.2f}")
        if acceptance.acceptance_rate is not None:
            parts.append(f"acceptance rate {acceptance.acceptance_rate:.2f}")
        rates = [f"{rate:.2f}" for rate in acceptance.acceptance_by_position]
        if rates:
            parts.append(f"by position {' '.join(rates)}")
        lines = [f"drafts    {', '.join(parts)} (from {findings.acceptance_source})"]
    speed = findings.speed
    if speed is not None and not math.isnan(speed.tokens_per_second):
        lines.append(
            f"speed     {speed.tokens_per_second:.1f} tokens/s, without speculation "
            f"{speed.baseline_tokens_per_second:.1f}: {speed.verdict.text}"
        )
    return lines


def failures(findings: EngineFindings) -> Sequence[str]:
    """What is wrong, a line each."""
    lines = []
    greedy = findings.greedy
    if greedy.failed:
        line = f"greedy: {len(greedy.wrong_tokens)} of {counted(greedy.num_tokens, 'token')} wrong"
        if greedy.looks_like_another_model:
            line += ": does the engine serve this model?"
        lines.append(line)
    sampled = findings.sampled
    if sampled is not None:
        if sampled.outside:
            lines.append(f"sampled: {len(sampled.outside)} tokens that cannot be drawn")
        if sampled.law.failed:
            lines.append(f"sampled: {sampled.law.direction}")
    return lines
