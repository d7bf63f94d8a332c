"""An autoregressive head's rollouts from every place of known texts at once, as decoding would make them.

Knows nothing of losses, data or Lightning.

Theory: trained on the target's features alone, such a head would meet its own output only when it decodes, and guess
ever worse along a round. So it is trained on rollouts of its own (Li et al. 2025, "EAGLE-3", section 3: training-time
test). All rounds of a text can be made together: at step i, entry j belongs to the round whose first entry is j - i. It
reads the network's output of step i - 1 at entry j - 1 in the place of features, and attends to what that round has in
its memory: entries up to j - i as step 0 read them, then one entry of each step. Tokens are the text's own, as if every
guess before had been kept.

Shapes: B rows, T entries, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lightning_specdec.drafters.eagle_network import EagleNetwork, attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def rollouts(
    network: EagleNetwork, embedded: Float[Tensor, "B T D"], features: Float[Tensor, "B T D"], num_steps: int
) -> list[Float[Tensor, "B T D"]]:
    """The network's output at every entry, for each step of the rounds.

    Args:
        embedded: of the token after each entry's.
        features: of each entry's token, from the network's `features`.
        num_steps: guesses of a round.

    Returns:
        For step i, `[:, j]` scores token j + 2 where a round has begun with entry j - i; entries before i mean nothing.
    """
    positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
    all_keys: list[Tensor] = []
    all_values: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(num_steps):
        seen = seen_at(step, embedded.shape[1], embedded.device)

        def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor = seen) -> Tensor:
            all_keys.append(keys)
            all_values.append(values)
            return attention(queries, torch.cat(all_keys, dim=2), torch.cat(all_values, dim=2), seen)

        outputs.append(network.layer(embedded, features, positions, attend))
        features = functional.pad(outputs[-1][:, :-1], (0, 0, 1, 0))
    return outputs


def seen_at(step: int, num_entries: int, device: torch.device) -> Bool[Tensor, "1 T S"]:
    """What each entry of a step attends to, of the entries of all steps up to it, one step's behind the other's.

    Of step 0 the entries before the round and its first; of each later step the round's one entry, the last of which is
    the entry itself.
    """
    entries = torch.arange(num_entries, device=device)
    apart = entries[:, None] - entries
    blocks = [apart >= step, *(apart == step - later for later in range(1, step + 1))]
    return torch.cat(blocks, dim=1)[None]
