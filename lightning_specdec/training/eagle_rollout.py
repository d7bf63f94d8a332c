"""An autoregressive head's rollouts from every place of known texts at once, as decoding would make them.

Theory: trained on the target's features alone, such a head would meet its own output only when it decodes, and guess
ever worse along a round. So it is trained on rollouts of its own (Li et al. 2025, "EAGLE-3", section 3: training-time
test). All rounds of a text can be made together: at step i, entry j belongs to the round whose first entry is j - i. It
reads the network's output of step i - 1 at entry j - 1 in the place of features, and attends to what that round has in
its memory: entries up to j - i as step 0 read them, then one entry of each step. Tokens are the text's own, as if every
guess before had been kept.

Shapes: B rows, T entries, D width, H heads that share G keys, E size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lightning_specdec.drafters.eagle_network import EagleNetwork, attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_SCORES_AT_ONCE = 2**20
"""Of attention, on a processor: few enough to stay in its cache, which halves the time for texts of 400 tokens."""


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

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        all_keys.append(keys)
        all_values.append(values)
        return attention_of_rounds(queries, all_keys, all_values, window=network.attention_window)

    for _ in range(num_steps):
        outputs.append(network.layer(embedded, features, positions, attend))
        features = _shifted(outputs[-1], 1)
    return outputs


def attention_of_rounds(
    queries: Float[Tensor, "B H T E"],
    keys: Sequence[Float[Tensor, "B G T E"]],
    values: Sequence[Float[Tensor, "B G T E"]],
    *,
    window: int | None = None,
) -> Float[Tensor, "B H T E"]:
    """What each entry of a step makes of its own round's memory, of the keys and values of all steps up to it.

    Of step 0 that memory has the entries before the round and its first; of each later step the round's one entry, the
    last of which is the entry itself. So beside one square of scores there are a few numbers for each entry. Of all
    these it sees the last `window` places.
    """
    num_heads, num_entries, step = queries.shape[1], queries.shape[2], len(keys) - 1
    entries = torch.arange(num_entries, device=queries.device)
    distances = entries[:, None] - entries
    seen = distances >= step if window is None else (distances >= step) & (distances < window)
    if step == 0:
        return attention(queries, keys[0], values[0], seen[None])
    oldest = 1 if window is None else max(1, step - window + 1)
    later_keys = [_shifted(each, step - i) for i, each in enumerate(keys) if i >= oldest]
    later_values = [_shifted(each, step - i) for i, each in enumerate(values) if i >= oldest]
    at_once = _SCORES_AT_ONCE if queries.device.type == "cpu" else _SCORES_AT_ONCE * 2**8
    size = max(1, at_once // (num_heads * num_entries**2))
    pieces = []
    for first in range(0, len(queries), size):
        rows = slice(first, first + size)
        theirs = [each[rows] for each in later_keys], [each[rows] for each in later_values]
        pieces.append(_attended(queries[rows], keys[0][rows], values[0][rows], *theirs, seen))
    return torch.cat(pieces)


def _attended(
    queries: Float[Tensor, "B H T E"],
    keys: Float[Tensor, "B G T E"],
    values: Float[Tensor, "B G T E"],
    later_keys: Sequence[Float[Tensor, "B G T E"]],
    later_values: Sequence[Float[Tensor, "B G T E"]],
    seen: Bool[Tensor, "T T"],
) -> Float[Tensor, "B H T E"]:
    """Attention to the entries that `seen` shows, and to the one of each later step that is at the same place."""
    num_entries = queries.shape[2]
    queries = queries.unflatten(1, (keys.shape[1], -1)) * queries.shape[3] ** -0.5
    square = queries.flatten(2, 3) @ keys.transpose(-1, -2)
    square = square.unflatten(2, (-1, num_entries)).masked_fill(~seen, -torch.inf)
    single = [(queries * each[:, :, None]).sum(-1, keepdim=True) for each in later_keys]
    weights = torch.cat([square, *single], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    output = (weights[..., :num_entries].flatten(2, 3) @ values).unflatten(2, (-1, num_entries))
    for number, each in enumerate(later_values, start=num_entries):
        output = output + weights[..., number : number + 1] * each[:, :, None]
    return output.flatten(1, 2)


def _shifted(entries: Float[Tensor, "*B T D"], places: int) -> Float[Tensor, "*B T D"]:
    """What was at entry j is at j + `places`; zeros come first."""
    return functional.pad(entries[..., : entries.shape[-2] - places, :], (0, 0, places, 0))
