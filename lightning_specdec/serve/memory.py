"""How much memory the states of a session use, to reserve it before requests are accepted."""

from __future__ import annotations

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.memory import available_bytes, gigabytes
from lightning_specdec.decoding import Session
from lightning_specdec.decoding.state_size import state_bytes
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

GROWTH = 1.5
"""Peak memory while a batch doubles, in multiples of the larger one: both halves are there."""


def check_memory(
    target: LanguageModel,
    drafter: Drafter,
    config: DecodingConfig,
    *,
    max_length: int,
    max_batch_size: int,
    cache_bytes: int,
) -> None:
    """Decode one token, and raise ValueError unless a full batch and the cache fit the memory."""
    session = Session(target, drafter, config, max_length=max_length)
    row = session.add([0], max_new_tokens=1)
    while row.live:
        session.step()

    row_bytes = state_bytes(session.states)
    needed = int(GROWTH * max_batch_size * row_bytes) + cache_bytes
    device = str(target.device)
    # What the trial uses is free again when the server begins.
    available = available_bytes(device)
    if available is not None and needed > available + row_bytes:
        raise ValueError(
            f"{max_batch_size} requests of {max_length} tokens need {gigabytes(needed)}, but "
            f"{gigabytes(available)} are free on {device}: lower --max_batch_size, --max_length, "
            "or --prefix_cache_megabytes"
        )


class DrafterTrial:
    """Decodes a few tokens with a drafter that is about to draft for a running server.

    It has a session of its own, whose rounds the server runs between those of its requests.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        config: DecodingConfig,
        *,
        max_length: int,
        max_batch_size: int,
    ) -> None:
        config = config.changed(eos=None, stop=())
        # The trial must leave nothing in what the drafter remembers of requests.
        self._session = Session(target, drafter.fresh(), config, max_length=max_length)
        self._max_length = max_length
        self._max_batch_size = max_batch_size
        # Enough for the round that reads the prompt, for a whole draft, and for a draft after a
        # draft.
        num_new = min(2 * self._session.window.largest + 3, max_length - 1)
        room = target.room_after(1)
        if room is not None:
            num_new = min(num_new, room)
        self._row = self._session.add([0], max_new_tokens=max(1, num_new))

    def step(self) -> bool:
        """Run one round. Returns whether it was the last one.

        Raises:
            ValueError: the states that a full batch needs of the drafter do not fit the memory that
                is free. Those of the drafter that it replaces are not free yet.
        """
        self._session.step()
        if self._row.live:
            return False
        self._check_memory()
        return True

    def _check_memory(self) -> None:
        target_state, draft_state = self._session.states
        # The drafter's state may refer to that of the target.
        row_bytes = state_bytes(target_state, draft_state) - state_bytes(target_state)
        needed = int(GROWTH * self._max_batch_size * row_bytes)
        device = str(self._session.target.device)
        available = available_bytes(device)
        if available is not None and needed > available:
            raise ValueError(
                f"its states for {self._max_batch_size} requests of {self._max_length} tokens need "
                f"{gigabytes(needed)}, but {gigabytes(available)} are free on {device}"
            )
