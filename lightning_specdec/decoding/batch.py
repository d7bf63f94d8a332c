"""The rows of a session side by side: their places, what both models remember of them, and their noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.decoding.rows import Row, power_of_two
from lightning_specdec.drafters import Drafter, TargetContext
from lightning_specdec.drafters.base import tail_of
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.graphs import GraphCache, Outputs
from lightning_specdec.models.state import next_span
from lightning_specdec.rules import Purpose, noise_table

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Batch:
    """Rows that come and go; the batch grows and shrinks to powers of two.

    Args:
        batch_size: rows to make room for at once.
        num_slots: tokens of a row at most, draft tokens included.
        seed: keys the noise, together with each row's index; None where nothing is drawn at random.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        batch_size: int,
        num_slots: int,
        seed: int | None,
    ) -> None:
        self.device, self.seed = target.device, seed or 0
        self.rows = [_vacant() for _ in range(batch_size)]
        self.target_state = target.init_state(batch_size, num_slots)
        self.draft_state = drafter.init_state(
            batch_size, num_slots, TargetContext(target, self.target_state)
        )
        self.noise: Float[Tensor, "B S 3"] | None = None
        """Each row's uniform numbers, from its first new token on."""
        if seed is not None:
            size = num_slots if self.graphs is None else next_span(num_slots)  # of few shapes
            self.noise = self._steady(
                "noise", (batch_size, size, len(Purpose)), torch.float64
            ).zero_()
        self._upload: Upload | None = None

    @property
    def graphs(self) -> GraphCache | None:
        """The target's recorded calls; None where it records none."""
        return getattr(self.target_state, "graphs", None)

    def _steady(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the device, the same one for each session where calls are recorded."""
        if self.graphs is not None:
            return self.graphs.buffer(name, shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def upload(self, windows: Sequence[int], *, ahead: bool) -> Upload | None:
        """The round's numbers on the device, in one copy if they are not `ahead` there; None where calls are not
        recorded."""
        if self.graphs is None:
            return None
        if self._upload is None:
            values = self._steady("round", (len(self.rows), Upload.WIDTH), torch.long)
            self._upload = Upload(self.graphs, values)
        return self._upload if ahead else self._upload.fill(self.rows, windows)

    def enter(self, row: Row, place: int) -> None:
        """Give a row its place, and its noise behind that of its earlier turns."""
        self.rows[place] = row
        if self.noise is not None:
            table = noise_table(self.seed, row.index, row.num_drawn + row.remaining)[
                row.num_drawn :
            ]
            self.noise[place, : len(table)] = table.to(self.device)

    def make_place(self) -> int:
        """An empty place for a row; the batch grows where there is none."""
        place = next((i for i, row in enumerate(self.rows) if not row.live), None)
        if place is None:
            place = len(self.rows)
            self._select([*range(place), *[-1] * (power_of_two(place + 1) - place)])
        elif self.target_state.consumed[place]:
            self.target_state.clear([place])
            self.draft_state.clear([place])
        return place

    def go_back(self, row: Row, length: int) -> int | None:
        """Forget all but so many tokens of a row, as another prompt continues from them.

        Returns:
            Its place; None where that has gone to another row, or the target has committed more.
        """
        place = next((i for i, other in enumerate(self.rows) if other is row), None)
        if (
            place is None
            or row.stop_reason == "failed"
            or self.target_state.committed[place] > length
        ):
            return None
        lengths = list(self.target_state.consumed)
        lengths[place] = min(lengths[place], length)
        self.target_state.truncate(lengths)
        self.draft_state.resume(place, length)
        return place

    def rewind(self, upload: Upload | None = None) -> list[list[int]]:
        """Take the target back to what is committed; gives what it has not read of each text, its last token at
        least."""
        state, texts = self.target_state, [row.text for row in self.rows]
        starts = [
            min(length, len(text) - 1) for length, text in zip(state.consumed, texts, strict=True)
        ]
        caught_up = upload is not None and starts == [len(text) - 1 for text in texts]
        state.truncate(starts, upload.starts if upload is not None and caught_up else None)
        state.commit(starts)
        return [text[start:] for start, text in zip(starts, texts, strict=True)]

    def round_noise(
        self, num_positions: int, upload: Upload | None = None
    ) -> Float[Tensor, "B N 3"] | None:
        """Each row's uniform numbers for the next N positions; None where nothing is drawn at random."""
        if self.noise is None:
            return None

        def gather(noise: Tensor, num_new: Tensor) -> Outputs:
            places = (
                num_new[:, None, None] + torch.arange(num_positions, device=noise.device)[:, None]
            )
            return (
                noise.gather(
                    1, places.clamp(max=noise.shape[1] - 1).expand(-1, -1, noise.shape[2])
                ),
            )

        if upload is not None:
            return upload.graphs.run(("noise", num_positions), gather, self.noise, upload.num_new)[
                0
            ]
        done = [row.num_new for row in self.rows]
        if min(done) == max(done):
            return self.noise[:, done[0] : done[0] + num_positions]
        return gather(self.noise, torch.tensor(done, device=self.device))[0]

    def shrink(self) -> bool:
        """Leave finished rows behind once the live ones fit a smaller power of two; gives whether any is live."""
        live = [i for i, row in enumerate(self.rows) if row.live]
        if live and (size := power_of_two(len(live))) < len(self.rows):
            idle = [i for i, row in enumerate(self.rows) if not row.live]
            self._select(live + idle[: size - len(live)])
        return bool(live)

    def _select(self, sources: list[int]) -> None:
        """Row i becomes the former row `sources[i]`, or a vacant one where that is -1."""
        self.target_state.select(sources)
        self.draft_state.select(sources)
        if self.noise is not None:
            taken = self.noise[torch.tensor(sources, device=self.device).clamp(min=0)]
            self.noise = self._steady("noise", tuple(taken.shape), taken.dtype).copy_(taken)
        self.rows, self._upload = [_vacant() if i < 0 else self.rows[i] for i in sources], None


class Upload:
    """What a round tells the device of each row, in one copy from pinned memory.

    Args:
        graphs: the target's recorded calls.
        values: `[B, WIDTH]`, a tensor that stays where it is. Its last column is the most tokens of a text, less two.
    """

    WIDTH = 7

    def __init__(self, graphs: GraphCache, values: Int[Tensor, "B 7"]) -> None:
        self.graphs, self.values = graphs, values
        self.tail, self.starts, self.num_new, self.num_added, self.windows, _ = (
            values[:, :2],
            *values[:, 2:].unbind(1),
        )
        self._host = torch.empty(
            values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda"
        )

    def fill(self, rows: Sequence[Row], windows: Sequence[int]) -> Upload:
        """Send the rows' present numbers. The round's only read waits for the copy too, so the memory is free again by
        then."""
        numbers = [
            (
                *tail_of(row.text),
                len(row.text) - 1,
                row.num_new,
                row.num_added,
                window,
                (row.max_length - 2) * row.live,
            )
            for row, window in zip(rows, windows, strict=True)
        ]
        self._host.copy_(torch.tensor(numbers))
        self.values.copy_(self._host, non_blocking=True)
        return self

    def go_on(self, outcome: Tensor, width: int, vocab_size: int) -> None:
        """Make them the next round's, of at most `width` draft tokens, from an outcome of as many that the host has not
        read; only those of rows that have ended or end by it are not what `fill` would send."""

        def follow(values: Tensor, outcome: Tensor) -> Outputs:
            kept, endings, drafted = (
                outcome[:, : 3 * width + 1].long().split((width, width + 1, width), dim=1)
            )
            accepted = kept.cumprod(1).sum(1, keepdim=True)
            tokens = torch.cat((endings, values[:, 1:2], drafted), dim=1)
            # The last two of a text: what ends the round, and the accepted token or the text's last one before it.
            places = accepted + torch.arange(width + 1, -1, -width - 1, device=values.device)
            tail = tokens.gather(1, places).clamp(max=vocab_size - 1)
            added, most = accepted + 1, values[:, 6:]
            starts = values[:, 2:4] + added
            windows = (most - starts[:, :1]).clamp(0, width)
            return (torch.cat((tail, starts, added, windows, most), dim=1),)

        made = self.graphs.run(("go on", width), follow, self.values, outcome)[0]
        assert made is not None
        self.values.copy_(made)


def _vacant() -> Row:
    """A row that wants nothing: it takes part in every call like a finished one, and its tokens go nowhere."""
    return Row(-1, [0, 0], max_new_tokens=0, eos=frozenset(), speculative=True)
