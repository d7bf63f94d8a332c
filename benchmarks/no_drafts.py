"""A drafter that proposes nothing, so that a server decodes without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_specdec.drafters import Draft, Drafter, DraftRequest
from lightning_specdec.rules import Sampling


class NoDrafts(Drafter):
    """Each round of a session is then one of standard decoding."""

    def needs_noise(self, sampling: Sampling) -> bool:
        return False

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        device = request.last_two_tokens.device
        return Draft(torch.empty(len(windows), 0, dtype=torch.long, device=device))
