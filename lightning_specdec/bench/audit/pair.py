"""A pair under audit: its decodes, both ways, and the places in its texts that are worth a closer look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import DecodeResult, autoregressive_decode, speculative_decode
from lightning_specdec.inference.limits import check_context
from lightning_specdec.inference.rows import check_batch, check_eos
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Sampling

CONTEXT = 16
"""Tokens of a text's end that samples and single rounds go on from."""
SAMPLE_PLACES = 2
"""Texts that samples go on from."""
BATCH = 256
"""Rows of a sample that are decoded together."""


class AuditedPair:
    """A target, what guesses for it, and prompts.

    Args:
        target, drafts: as they decode.
        prompts: tokens.
        num_draft_tokens: guesses per round.
        max_new_tokens: of each prompt, where whole outputs are compared.
        num_decodes: rows of each sample, of all places together.
        eos: tokens that end a row, where whole outputs are compared.
        seed: keys everything that is drawn.

    Raises:
        ValueError: for prompts, settings or drafts that the target cannot take.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafts: Mapping[str, Drafter],
        prompts: Sequence[Sequence[int]],
        *,
        num_draft_tokens: int,
        max_new_tokens: int,
        num_decodes: int,
        eos: int | Sequence[int] | None,
        seed: int,
    ) -> None:
        self.window = require_int("num_draft_tokens", num_draft_tokens, 1)
        self.num_decodes = require_int("num_decodes", num_decodes, 1)
        batch = check_batch(prompts, target.vocab_size, max_new_tokens=max_new_tokens, indices=None)
        self.target, self.drafts, self.prompts = target, drafts, [text for _, text in batch]
        self.max_new_tokens, self.eos = max_new_tokens, sorted(check_eos(eos, target.vocab_size))
        self.seed = require_int("seed", seed, 0, 2**63 - 1)
        for drafter in drafts.values():
            drafter.check_target(target)
            for text in self.prompts:
                check_context(len(text), max_new_tokens, target, drafter)
        self._standard: dict[Sampling, DecodeResult] = {}
        self._samples: dict[Sampling, list[list[list[int]]]] = {}

    def decode_standard(self, sampling: Sampling) -> DecodeResult:
        """What the target alone makes of the prompts; done once."""
        if sampling not in self._standard:
            self._standard[sampling] = self._decode(
                None, None, self.prompts, sampling, logprobs=True, **self._whole_outputs
            )
        return self._standard[sampling]

    def decode(self, draft: str, rule: AcceptanceRule, sampling: Sampling) -> DecodeResult:
        """What it makes of them with guesses."""
        return self._decode(draft, rule, self.prompts, sampling, logprobs=not rule.lossless, **self._whole_outputs)

    @property
    def _whole_outputs(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "eos": self.eos}

    def _decode(
        self,
        draft: str | None,
        rule: AcceptanceRule | None,
        texts: Sequence[Sequence[int]],
        sampling: Sampling,
        **settings: Any,
    ) -> DecodeResult:
        """How the texts go on: by the target alone where there is no draft and no rule."""
        settings |= {"sampling": sampling, "seed": self.seed}
        if draft is None or rule is None:
            return autoregressive_decode(self.target, texts, **settings)
        settings |= {"num_draft_tokens": self.window, "rule": rule}
        return speculative_decode(self.target, self.drafts[draft], texts, **settings)

    def sample_standard(self, sampling: Sampling) -> list[list[list[int]]]:
        """`sample` of the target alone; made once."""
        if sampling not in self._samples:
            self._samples[sampling] = self.sample(None, None, sampling)
        return self._samples[sampling]

    def sample(self, draft: str | None, rule: AcceptanceRule | None, sampling: Sampling) -> list[list[list[int]]]:
        """`num_decodes` rows of new tokens, a round's and one more, by what they go on from: the first prompt and a
        place that is less sure.

        Standard decoding and speculative decoding draw from noise of their own: with the same numbers `ExactMatch`
        would give the same rows. And neither from that which has led to the place: rows that chose it would not be
        like others.
        """
        contexts = [self.contexts[0], *self.uncertain_contexts(sampling)[len(self.contexts) :]][:SAMPLE_PLACES]
        most, found = math.ceil(self.num_decodes / len(contexts)), []
        for place, context in enumerate(contexts):
            rows: list[list[int]] = []
            first = len(self.prompts) + (2 * place + (rule is not None)) * most
            last = first + min(most, self.num_decodes - place * most)
            for start in range(first, last, BATCH):
                indices = range(start, min(start + BATCH, last))
                settings: dict[str, Any] = {"indices": indices, "max_new_tokens": self.window + 2}
                rows += self._decode(draft, rule, [context] * len(indices), sampling, **settings).tokens
            found.append(rows)
        return found

    @property
    def contexts(self) -> list[list[int]]:
        """The prompts' ends."""
        return [text[-CONTEXT:] for text in self.prompts]

    def uncertain_contexts(self, sampling: Sampling) -> list[list[int]]:
        """The prompts' ends, and then places in standard decoding's texts, before the least likely tokens first.

        Where the target is sure, and most drafts with it, few mistakes of a rule show.
        """
        places = []
        for row in self.decode_standard(sampling).rows:
            scored = zip(row.logprobs or (), range(len(row.tokens)), strict=True)
            places += [(score, [*row.prompt, *row.tokens[:i]][-CONTEXT:]) for score, i in scored if i]
        return self.contexts + [text for _, text in sorted(places)]


def perplexity(result: DecodeResult) -> float:
    """exp(-mean log probability of the new tokens under the target)."""
    scores = [score for row in result.rows for score in row.logprobs or ()]
    return math.exp(-math.fsum(scores) / len(scores))
