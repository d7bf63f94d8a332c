"""Checks what a user's acceptance rule returns, so that a mistake in it is named.

Rules of this package are not checked: tests hold them to the same.
"""

from __future__ import annotations

from torch import Tensor

from lightning_specdec.config.kinds import described, is_user_class, path_of
from lightning_specdec.rules.acceptance import AcceptanceRule, Draft, Verdict
from lightning_specdec.rules.sampling import Sampling


def judged(
    rule: AcceptanceRule,
    draft: Draft,
    target_logits: Tensor,
    sampling: Sampling,
    noise: Tensor | None,
) -> Verdict:
    """Call `rule.judge`, and check the verdict of a user's rule.

    Raises:
        ValueError: it is no verdict on this draft; the message names the class.
    """
    verdict = rule.judge(draft, target_logits, sampling, noise)
    if is_user_class(type(rule)):
        _check_verdict(rule, verdict, draft, target_logits)
    return verdict


def _check_verdict(
    rule: AcceptanceRule,
    verdict: object,
    draft: Draft,
    target_logits: Tensor,
) -> None:
    where = f"{path_of(type(rule))}.judge"
    if not isinstance(verdict, Verdict):
        raise ValueError(
            f"{where} must return a Verdict, got {described(verdict)}: "
            "return Verdict(accepted, endings)"
        )

    batch_size, num_draft_tokens = draft.tokens.shape
    expected_shapes = {
        "accepted": (batch_size, num_draft_tokens),
        "endings": (batch_size, num_draft_tokens + 1),
    }
    if verdict.changed is not None:
        expected_shapes["changed"] = (batch_size, num_draft_tokens)
    for name, shape in expected_shapes.items():
        value = getattr(verdict, name)
        if not isinstance(value, Tensor) or value.shape != shape or value.is_floating_point():
            dtype = "integers" if name == "endings" else "booleans"
            raise ValueError(
                f"{where} must return {name} as {dtype} {list(shape)}, got {described(value)}"
            )

    if verdict.endings.device.type != "cpu":
        return  # Reading values would wait for the device.
    vocab_size = target_logits.shape[-1]
    lowest = int(verdict.endings.min())
    highest = int(verdict.endings.max())
    # `vocab_size` itself marks a token that could not be drawn.
    if lowest < 0 or highest > vocab_size:
        wrong_token = lowest if lowest < 0 else highest
        raise ValueError(
            f"{where} returned token {wrong_token} in endings, and the target has the tokens "
            f"0 to {vocab_size - 1}"
        )
