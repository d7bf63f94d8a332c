"""The rows of a session side by side: their slots, the states of both models, and their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.decoding.recorded import make_executor
from lightning_specdec.decoding.requests import Request, batch_size_for, num_shared
from lightning_specdec.decoding.timing import PhaseTimer
from lightning_specdec.drafters import Drafter, TargetContext
from lightning_specdec.drafters.user_drafts import check_state
from lightning_specdec.models import LanguageModel, RowCopy
from lightning_specdec.models.state import next_span
from lightning_specdec.rules import GREEDY, Purpose, RowSampling, Sampling, noise_table

if TYPE_CHECKING:
    from jaxtyping import Float

EMPTY = -1
"""Source of a slot that `select` fills with an empty row."""


@dataclass(frozen=True, eq=False)
class SavedText:
    """The states of both models after a text, from which other rows may continue.

    Args:
        tokens: the text.
        target_copy: what the target's state keeps of it.
        draft_copy: what the drafter's state keeps of it; None if the drafter reads it again.
        target: the model that read it.
        drafter: the drafter that read it.
        position_switch: of the target's state.
    """

    tokens: tuple[int, ...]
    target_copy: RowCopy
    draft_copy: Any
    target: LanguageModel
    drafter: Drafter
    position_switch: int | None = None

    def serves(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt has the positions that the text was read with."""
        if self.position_switch is None:
            return True
        is_long_prompt = len(prompt) > self.position_switch
        return is_long_prompt == self.target_copy.is_long


class Batch:
    """Rows that come and go. The batch grows and shrinks to the sizes of `batch_size_for`.

    A row keeps its slot, which is its index in the batch, while the batch keeps its size. An empty
    slot has a row that has ended: it takes part in every call, and its tokens are dropped.

    Args:
        target: the model whose output is wanted.
        drafter: proposes draft tokens.
        timer: measures the phases of a round.
        batch_size: rows to allocate memory for at first.
        num_slots: most tokens of a row, draft tokens included.
        own_sampling: of rows that choose no other.

    Attributes:
        rows: the row of each slot.
        target_context: the target and its state.
        noise: each row's uniform numbers, from its first new token on; None if no row has drawn at
            random.
        executor: runs the calls of the batch.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        timer: PhaseTimer,
        *,
        batch_size: int,
        num_slots: int,
        own_sampling: Sampling,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.timer = timer
        self.device = target.device
        self.own_sampling = own_sampling
        self.num_slots = num_slots
        self.rows = [_empty_row() for _ in range(batch_size)]
        self.target_state = target.init_state(batch_size, num_slots)
        self.target_context = TargetContext(target, self.target_state)
        self.draft_state = drafter.init_state(batch_size, num_slots, self.target_context)
        check_state(drafter, self.draft_state)
        self.executor = make_executor(self.target_state, target.vocab_size, timer, drafter)

        self.noise: Float[Tensor, "B S 3"] | None = None

    def enter(self, row: Request, slot: int) -> None:
        """Put a row into a free slot, with noise that continues that of its earlier turns."""
        self.rows[slot] = row
        row.num_prompt_read = self.target_state.consumed[slot]
        # What a row shows if it ends before its first round: as much as an empty row, two tokens.
        num_visible = max(row.num_prompt_read + 1, 2)
        row.num_withheld = max(0, row.prompt_length - num_visible)
        if row.seed is not None:
            self._write_noise(slot, row.seed)

    def _write_noise(self, slot: int, seed: int) -> None:
        """Write the random numbers of a row, from its first new token on."""
        if self.noise is None:
            self.noise = self._new_noise()
        row = self.rows[slot]
        num_positions = row.num_drawn + row.max_length - row.prompt_length
        table = noise_table(seed, row.index, num_positions)
        unused = table[row.num_drawn :]
        self.noise[slot, : len(unused)] = unused.to(self.device)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Draft with another drafter from the next round on, in live rows too.

        Ended rows can be continued no more. If its state cannot be made, nothing has changed.
        """
        draft_state = drafter.init_state(len(self.rows), self.num_slots, self.target_context)
        check_state(drafter, draft_state)
        learns_from_target = drafter.inside_target or bool(drafter.features(self.target))
        reads_again = learns_from_target and not draft_state.take_over(self.draft_state)
        previous_drafter = self.drafter
        self.drafter = drafter
        self.draft_state = draft_state

        # Nobody continues an ended row, so its text is not read again.
        ended_slots = [slot for slot, row in enumerate(self.rows) if not row.live]
        for slot in ended_slots:
            self.rows[slot] = _empty_row()
        self.target_state.clear(ended_slots)
        if reads_again:
            # The new drafter has to see the target's calls from the first token on.
            self.target_state.clear(range(len(self.rows)))
        draft_state.clear(ended_slots)
        self.target_state.forget_calls(list(previous_drafter.modules()))
        self.executor = make_executor(
            self.target_state, self.target.vocab_size, self.timer, drafter
        )

        for slot, row in enumerate(self.rows):
            row.num_prompt_read = min(row.num_prompt_read, self.target_state.consumed[slot])
            # The previous drafter may have needed no random numbers for a greedy row.
            if row.live and row.seed is None and drafter.needs_noise(row.sampling):
                assert row.settings is not None
                row.seed = row.settings.seed
                self._write_noise(slot, row.seed)

    def _new_noise(self) -> Float[Tensor, "B S 3"]:
        """Room for the random numbers of all rows."""
        num_positions = self.num_slots
        if self.executor.is_recorded:
            # Recorded calls find noise of few shapes, so that few are recorded.
            num_positions = next_span(self.num_slots)
        shape = (len(self.rows), num_positions, len(Purpose))
        return self.executor.buffer("noise", shape, torch.float64).zero_()

    def sampling(self) -> Sampling:
        """How the tokens of all rows are drawn."""
        live_samplings = [row.sampling for row in self.rows if row.live]
        if not live_samplings:
            # All rows were cancelled while the device ran this round, so nobody reads its tokens.
            return GREEDY
        # Nobody reads the tokens of ended rows, so they follow a live one.
        samplings = [row.sampling if row.live else live_samplings[0] for row in self.rows]
        sampling = RowSampling.of_rows(samplings)
        if not self.executor.is_recorded or sampling in (self.own_sampling, GREEDY):
            return sampling
        # Calls are recorded for each sampling, and rows may choose any number of them.
        return RowSampling(rows=tuple(samplings))

    def free_slot(self) -> int:
        """An empty slot for a row. The batch grows if there is none."""
        for slot, row in enumerate(self.rows):
            if not row.live:
                if self.target_state.consumed[slot]:
                    self.target_state.clear([slot])
                    self.draft_state.clear([slot])
                return slot

        first_new_slot = len(self.rows)
        num_new_slots = batch_size_for(first_new_slot + 1, self.target_state) - first_new_slot
        new_slots = [EMPTY] * num_new_slots
        self._select([*range(first_new_slot), *new_slots])
        return first_new_slot

    def resume(self, row: Request, length: int, prompt_length: int) -> int | None:
        """Truncate an ended row to a length, from which another prompt continues.

        Args:
            prompt_length: of the whole other prompt.

        Returns:
            Its slot; None if another row is there now, if the target cannot truncate so far, or if
            the two prompts are on different sides of the target's position switch.
        """
        slot = self._slot_of(row)
        if slot is None or row.stop_reason == "failed":
            return None
        state = self.target_state
        if state.committed[slot] > length:
            return None
        if state.is_long_prompt(prompt_length) != state.is_long[slot]:
            return None
        lengths = list(self.target_state.consumed)
        lengths[slot] = min(lengths[slot], length)
        self.target_state.truncate(lengths)
        self.draft_state.resume(slot, length)
        return slot

    def save(self, row: Request) -> SavedText | None:
        """A copy of the states of a row; None if there is nothing to copy, or nothing can be."""
        slot = self._slot_of(row)
        if slot is None or row.stop_reason == "failed":
            return None
        length = min(self.target_state.consumed[slot], row.num_final)
        target_copy = self.target_state.save_row(slot, length) if length > 0 else None
        if target_copy is None:
            return None
        draft_copy = self.draft_state.save_row(slot, length)
        tokens = tuple(row.text[:length])
        return SavedText(
            tokens,
            target_copy,
            draft_copy,
            self.target,
            self.drafter,
            self.target_state.position_switch,
        )

    def load(self, slot: int, saved: SavedText, prompt: Sequence[int]) -> None:
        """Continue an empty slot from the beginning that a prompt shares with a saved text.

        The slot stays empty if the text was read with other positions than the prompt has.

        Raises:
            ValueError: another target or drafter read the saved text.
        """
        # A draft head also needs the target's hidden states of these tokens, so that another
        # drafter cannot continue the text either.
        if saved.target is not self.target or saved.drafter is not self.drafter:
            raise ValueError(
                "the saved text was read by another target or drafter, or before they changed: "
                "add the prompt without it"
            )
        if not saved.serves(prompt):
            return
        # At least the last token is read, since the logits after it are wanted.
        length = min(num_shared(prompt, saved.tokens), len(prompt) - 1)
        self.target_state.load_row(slot, saved.target_copy, length)
        if saved.draft_copy is not None:
            self.draft_state.load_row(slot, saved.draft_copy, length)

    def _slot_of(self, row: Request) -> int | None:
        for slot, row_there in enumerate(self.rows):
            if row_there is row:
                return slot
        return None

    def withhold(self, live_rows: Sequence[Request], max_prompt_tokens: int | None) -> None:
        """Choose how much of each prompt the next round reads.

        Args:
            live_rows: the oldest first.
            max_prompt_tokens: most tokens of all prompts together; None for whole prompts. At least
                one token of each prompt is read, since every row takes part in every call. Targets
                that read parts one token a call read whole prompts.
        """
        for row in self.rows:
            # A row that has ended keeps what it showed last: nobody needs the rest of its prompt,
            # and drafters have seen no less of its text.
            if row.live:
                row.num_withheld = 0
        if max_prompt_tokens is None or not self.target_state.reads_in_parts:
            return

        num_left = max_prompt_tokens
        for row in live_rows:
            if row.num_new > 0:
                continue
            num_unread = row.prompt_length - row.num_prompt_read
            num_read = min(num_unread, max(1, num_left))
            if num_unread - num_read == 1:
                # After a last part of one token, a draft head would know all hidden states that it
                # needs, and draft a round sooner than after the whole prompt.
                num_read = num_unread
            row.num_withheld = num_unread - num_read
            num_left -= num_read

    def truncate_target(self) -> list[list[int]]:
        """Truncate the target's state to the committed tokens.

        Returns:
            The visible tokens of each text that the target has not read, at least the last one.
        """
        state = self.target_state
        state.expect_prompts([row.prompt_length for row in self.rows])
        starts = []
        unread = []
        for row, num_consumed in zip(self.rows, state.consumed, strict=True):
            text = row.visible_text
            start = min(num_consumed, len(text) - 1)
            if row.live:
                start = min(start, row.num_final)
            starts.append(start)
            unread.append(text[start:])

        uploaded = None
        has_one_token_each = all(len(tokens) == 1 for tokens in unread)
        if has_one_token_each:
            # Each row starts at its last position, which the device may know already.
            uploaded = self.executor.last_positions
        state.truncate(starts, uploaded)
        state.commit(starts)
        return unread

    def next_noise(self, num_positions: int) -> Float[Tensor, "B N 3"] | None:
        """Each row's uniform numbers for N positions; None if nothing is drawn at random."""
        if self.noise is None:
            return None
        return self.executor.next_noise(self.noise, self.rows, num_positions)

    def shrink(self) -> None:
        """Drop ended rows if the live ones fit into a smaller batch."""
        if self.executor.has_pipelined_round:
            # The device runs the next round of these rows already.
            return

        live_slots = []
        ended_slots = []
        for slot, row in enumerate(self.rows):
            if row.live:
                live_slots.append(slot)
            else:
                ended_slots.append(slot)

        size = batch_size_for(len(live_slots), self.target_state)
        if size < len(self.rows):
            # Ended rows fill up the batch.
            num_ended = size - len(live_slots)
            self._select(live_slots + ended_slots[:num_ended])

    def _select(self, sources: Sequence[int]) -> None:
        """Change the batch: slot i gets the row of slot `sources[i]`, or an empty one."""
        self.target_state.select(sources)
        self.draft_state.select(sources)
        if self.noise is not None:
            # An empty slot gets noise when a row enters it.
            source_slots = [max(source, 0) for source in sources]
            noise = self.noise[torch.tensor(source_slots, device=self.device)]
            buffer = self.executor.buffer("noise", tuple(noise.shape), noise.dtype)
            self.noise = buffer.copy_(noise)
        self.rows = [_empty_row() if source == EMPTY else self.rows[source] for source in sources]
        self.executor.forget_batch()


def _empty_row() -> Request:
    """A row that has ended before it begins."""
    return Request(-1, [0, 0], max_new_tokens=0, eos=frozenset(), speculative=True)
