"""Recorded calls: the kernels of a call are captured as a CUDA graph, then launched together.

A graph reads and writes fixed addresses. So its inputs and outputs are tensors that stay in place,
and its next run overwrites its outputs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]
Call = Callable[..., Outputs]

MOST_TOKENS = 32
"""Largest number of tokens of each row in a recorded call. Prompts are longer and come in any
length."""
SPAN_STEP = 256
"""Recorded calls attend over this number of slots, or 2, 4, 8, ... times as many, so that few are
recorded."""


NO_TENSOR = "none"
FIXED = "fixed"
COPIED = "copied"
"""The kinds of a recorded call's inputs: absent, read in place, copied before each run."""


class GraphCache:
    """Recorded calls by key, and named buffers that outlive the sessions that use them.

    A call must be a pure function of its tensors: no read by the host, and the same result when it
    runs again. On a CPU nothing is captured. A recorded call then runs again over the same tensors
    and copies its results to the same outputs, so tests on a CPU go through the same steps.

    The cache also remembers the calls of a round in their order, so that `repeat` can launch the
    same round again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recordings: dict[tuple[Hashable, Any], _Recording] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._fixed_addresses: set[int] = set()
        # Calls and marks of the current round (None between rounds), and of the last one.
        self._round: list[Any] | None = None
        self._last_round: list[Any] = []
        # Index in `_round` of the next item that `repeat` has run already; None if there is none.
        self._repeated: int | None = None

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that stays in place: the same one for the same arguments, zero at first."""
        key = (name, tuple(shape), dtype)
        if key not in self._buffers:
            buffer = torch.zeros(*shape, dtype=dtype, device=self.device)
            self._fix(buffer)
            self._buffers[key] = buffer
        return self._buffers[key]

    def run(self, key: Hashable, call: Call, *inputs: Tensor | None) -> Outputs:
        """Run a call, which is recorded at its first run.

        Inputs that stay in place are read there; others are copied. A call is recorded again if
        their places or shapes differ.
        """
        layouts = tuple(self._layout(tensor) for tensor in inputs)
        recording = self._recordings.get((key, layouts))
        if recording is None:
            copied = [i for i, (kind, *_) in enumerate(layouts) if kind == COPIED]
            recording = _Recording(call, inputs, copied)
            self._recordings[key, layouts] = recording

            # Other calls may read these tensors where they are.
            for tensor in (*recording.inputs, *recording.outputs):
                if tensor is not None:
                    self._fix(tensor)

        if self._has_run(recording):
            return recording.outputs
        return recording.replay(inputs)

    def forget(self, owners: Sequence[object]) -> None:
        """Drop the calls of these objects, between two rounds, with all that read their results.

        The key of such a call is a tuple that begins with the object. Whatever takes their place
        is recorded again, so nothing may be left at the addresses of their results.
        """
        if self.device.type == "cuda":
            # A graph that still runs must not be freed.
            torch.cuda.synchronize(self.device)
        self._last_round = []
        owner_ids = {id(owner) for owner in owners}
        buffer_addresses = {_address(buffer) for buffer in self._buffers.values()}
        freed_addresses: set[int] = set()

        dropped_keys = []
        for full_key in self._recordings:
            key, _ = full_key
            if isinstance(key, tuple) and id(key[0]) in owner_ids:
                dropped_keys.append(full_key)
        while dropped_keys:
            for full_key in dropped_keys:
                freed_addresses |= self._recordings.pop(full_key).own_addresses() - buffer_addresses
            dropped_keys = [
                full_key
                for full_key, recording in self._recordings.items()
                if not freed_addresses.isdisjoint(recording.read_addresses())
            ]

        for recording in self._recordings.values():
            # A result may be a part of another one, which stays.
            freed_addresses -= recording.own_addresses()
        self._fixed_addresses -= freed_addresses

    def begin(self, *, repeated: bool) -> None:
        """Begin a round.

        Args:
            repeated: whether `repeat` has launched this round. Then its calls do not run again, up
                to the first one that differs from the last round.
        """
        if repeated:
            self._round = list(self._last_round)
            self._repeated = 0
        else:
            self._round = []
            self._repeated = None

    def mark(self, call: Callable[[str], None], name: str) -> None:
        """Call `call(name)` on the host, and again whenever the round is repeated."""
        if not self._has_run((call, name)):
            call(name)

    def end(self) -> bool:
        """End a round.

        Returns whether `repeat` can run it again: its calls are those of the round before, and all
        their inputs stay in place.
        """
        previous_round = self._last_round
        self._last_round = self._round or []
        self._round = None
        self._repeated = None

        for item in self._last_round:
            if isinstance(item, _Recording) and item.copied:
                return False
        return self._last_round == previous_round

    def repeat(self) -> None:
        """Run the last round again, before the host knows its inputs."""
        for item in self._last_round:
            if isinstance(item, _Recording):
                item.replay(())
            else:
                call, name = item
                call(name)

    def _has_run(self, item: Any) -> bool:
        """Whether `repeat` has run this item of the round; if not, add it to the round."""
        if self._round is None:
            return False
        if self._repeated is not None:
            is_expected = self._repeated < len(self._round) and self._round[self._repeated] == item
            if is_expected:
                self._repeated += 1
                return True
            # From here on the round differs from the repeated one.
            del self._round[self._repeated :]
            self._repeated = None
        self._round.append(item)
        return False

    def _fix(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._fixed_addresses.add(_address(tensor))

    def _layout(self, tensor: Tensor | None) -> tuple[Any, ...]:
        """What a recording depends on: an input's shape, and its address if it stays in place."""
        if tensor is None:
            return (NO_TENSOR,)
        # An empty tensor has nothing to copy.
        stays_in_place = not tensor.numel() or _address(tensor) in self._fixed_addresses
        if stays_in_place:
            return (FIXED, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        return (COPIED, tensor.shape, tensor.dtype)


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory begins, which its views share."""
    return tensor.untyped_storage().data_ptr()


class _Recording:
    """One call over tensors that stay in place.

    Args:
        call: a function of the inputs.
        inputs: tensors of its first run.
        copied: which inputs do not stay in place, so that each run copies them.
    """

    def __init__(self, call: Call, inputs: Sequence[Tensor | None], copied: list[int]) -> None:
        self.copied = copied
        self.inputs = list(inputs)
        for i in copied:
            tensor = inputs[i]
            assert tensor is not None
            self.inputs[i] = tensor.clone(memory_format=torch.contiguous_format)

        self._call = call
        self._graph: torch.cuda.CUDAGraph | None = None
        device = next(tensor.device for tensor in inputs if tensor is not None)
        if device.type == "cuda":
            self._capture(device)
        else:
            self.outputs = call(*self.inputs)

    def _capture(self, device: torch.device) -> None:
        # Libraries initialize themselves in a first run, which cannot be captured.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._call(*self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)

        self._graph = torch.cuda.CUDAGraph()
        # Freeing another graph while this one is captured would end the capture with an error.
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.outputs = self._call(*self.inputs)
        finally:
            if collects_garbage:
                gc.enable()

    def own_addresses(self) -> set[int]:
        """The addresses of its results, and of its copies of inputs."""
        tensors = [*self.outputs, *(self.inputs[i] for i in self.copied)]
        return {_address(tensor) for tensor in tensors if tensor is not None}

    def read_addresses(self) -> set[int]:
        """The addresses of the inputs that it reads in place."""
        return {
            _address(tensor)
            for i, tensor in enumerate(self.inputs)
            if tensor is not None and i not in self.copied
        }

    def replay(self, inputs: Sequence[Tensor | None]) -> Outputs:
        """Run again. `inputs` may be empty if none is copied."""
        for i in self.copied:
            self.inputs[i].copy_(inputs[i])  # type: ignore[union-attr,arg-type]

        if self._graph is not None:
            self._graph.replay()
            return self.outputs

        results = self._call(*self.inputs)
        for output, result in zip(self.outputs, results, strict=True):
            if output is not None and result is not None:
                output.copy_(result)
        return self.outputs


def begin_read(values: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy values to the host.

    Returns:
        A function that returns them as a list. It waits for the copy, and not for work that is
        launched after it.
    """
    if values.device.type != "cuda":
        return values.clone().tolist

    host_values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copied = torch.cuda.Event()
    host_values.copy_(values, non_blocking=True)
    copied.record(torch.cuda.current_stream(values.device))

    def read() -> list[Any]:
        copied.synchronize()
        values_read: list[Any] = host_values.tolist()
        return values_read

    return read
