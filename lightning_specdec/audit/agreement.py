"""Compare the outputs of standard and speculative decoding, and explain a difference."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from lightning_specdec.audit.identity import find_divergence
from lightning_specdec.rules import Sampling

if TYPE_CHECKING:
    from lightning_specdec.config.decoding import DecodingConfig
    from lightning_specdec.decoder import SpeculativeDecoder
    from lightning_specdec.decoding import DecodeResult, RowResult

RowPair = tuple["RowResult", "RowResult"]
"""One prompt's result of standard decoding, and of speculative decoding."""


@dataclass(frozen=True)
class OutputAgreement:
    """Whether speculative decoding produced the tokens of standard decoding, and why not.

    Args:
        kind: "identical"; "lossy" for a rule or a target that may change the output; "random" for
            two draws of one distribution; "near-tie" for a difference that rounding explains;
            "fault" for one that nothing explains.
        text: the finding in a few words.
    """

    kind: Literal["identical", "lossy", "random", "near-tie", "fault"]
    text: str


def compare_outputs(
    decoder: SpeculativeDecoder,
    standard: DecodeResult,
    speculative: DecodeResult,
    config: DecodingConfig,
) -> OutputAgreement:
    """Compare two results for the same prompts.

    Args:
        decoder: the decoder of both results. Its target is called to explain a difference.
        config: the settings of both results.
    """
    pairs = list(zip(standard.rows, speculative.rows, strict=True))
    if speculative.lossy_reason is not None:
        num_equal = sum(plain.tokens == drafted.tokens for plain, drafted in pairs)
        plural = "" if len(pairs) == 1 else "s"
        equal = f"{num_equal} of {len(pairs)} output{plural} equal"
        return OutputAgreement("lossy", f"NOT LOSSLESS: {speculative.lossy_reason}; {equal}")
    if not speculative.lossless:
        return OutputAgreement("lossy", _describe_loss(pairs, speculative))

    differing_pairs = [
        (plain, drafted) for plain, drafted in pairs if plain.tokens != drafted.tokens
    ]
    if not differing_pairs:
        return OutputAgreement("identical", "output identical")

    share = ""
    if len(pairs) > 1:
        share = f" in {len(differing_pairs)} of {len(pairs)} prompts"
    if config.temperature and speculative.rule != "ExactMatch":
        return OutputAgreement(
            "random", f"output differs{share}, as two draws of the same distribution do"
        )
    return _explain(decoder, differing_pairs[0], config, share)


def _describe_loss(pairs: list[RowPair], speculative: DecodeResult) -> str:
    num_tokens = 0
    num_differing = 0
    for plain, drafted in pairs:
        for plain_token, drafted_token in zip_longest(plain.tokens, drafted.tokens):
            num_tokens += 1
            num_differing += plain_token != drafted_token

    num_changed = speculative.num_changed or 0
    plural = "" if num_changed == 1 else "s"
    return (
        f"LOSSY: {num_differing} of {num_tokens} new tokens differ from the standard output, and "
        f"{speculative.rule} kept {num_changed} draft token{plural} that the target would not have "
        "drawn"
    )


def _explain(
    decoder: SpeculativeDecoder,
    pair: RowPair,
    config: DecodingConfig,
    share: str,
) -> OutputAgreement:
    """Find where two outputs that should be equal part, and whether rounding explains it.

    Args:
        share: how many of the prompts differ, as text; empty for a single prompt.
    """
    standard, speculative = pair
    target, _ = decoder.ready()
    draft_lengths = [len(round_.drafted) for round_ in speculative.rounds or []]
    divergence = find_divergence(
        target,
        standard.prompt,
        standard.tokens,
        speculative.tokens,
        prompt_index=standard.index,
        sampling=Sampling.of(config),
        seed=config.seed,
        width=1 + max(draft_lengths, default=0),
    )
    assert divergence is not None

    where = f"at token {divergence.position + 1}"
    if share:
        finding = f"output differs{share}, first {where} of prompt {standard.index}"
    else:
        finding = f"output differs {where}"

    dtype = str(next(target.parameters()).dtype).removeprefix("torch.")
    near_tie = f"near-tie in {dtype}"
    if divergence.verdict == "tie":
        return OutputAgreement("near-tie", f"{finding} ({near_tie})")
    return OutputAgreement(
        "fault", f"{finding} (NOT a {near_tie}: `lightning_specdec audit` looks closer)"
    )
