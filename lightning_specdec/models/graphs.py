"""CUDA graphs: a call's kernels are recorded once, then launched together over tensors that stay in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]
MOST_TOKENS = 32
"""Tokens of each row up to which a call is recorded; prompts are longer, and come in any length."""
SPAN_STEP = 256
"""Recorded calls look at so many slots, or twice, four times as many: few of them serve a text of any length."""


class GraphCache:
    """Recorded calls by key, and named buffers that outlive the sessions that use them.

    A call must be a pure function of its tensors: no read by the host, and the same result when it runs again. Its
    outputs are overwritten by its next run. On a CPU the call runs anew, over the same tensors and into the same
    outputs, which is how its laws are tested.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recordings: dict[Hashable, _Recording] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._addresses: set[int] = set()
        self._noted: list[Any] | None = None
        self._finished: list[Any] = []
        self._place: int | None = None
        """Of the next noted item that has run already; None where none has."""

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that stays where it is, zero when it is made."""
        key = name, tuple(shape), dtype
        if key not in self._buffers:
            self._buffers[key] = self._keep(torch.zeros(*shape, dtype=dtype, device=self.device))
        return self._buffers[key]

    def run(self, key: Hashable, call: Callable[..., Outputs], *inputs: Tensor | None) -> Outputs:
        """The call's outputs for these inputs. Inputs that stay where they are get read there, others are copied."""
        described = tuple(map(self._describe, inputs))
        recording = self._recordings.get((key, described))
        if recording is None:
            recording = self._recordings[key, described] = _Recording(
                call, inputs, [d[0] == "kept" for d in described]
            )
            for tensor in (*recording.inputs, *recording.outputs):
                if tensor is not None:
                    self._keep(tensor)
        return recording.outputs if self._has_run(recording) else recording.replay(inputs)

    def begin(self, *, repeated: bool) -> None:
        """Note what runs from now on, for `repeat`. What `repeat` has run already does not run again, up to the first
        call that differs."""
        self._noted, self._place = ([*self._finished], 0) if repeated else ([], None)

    def mark(self, call: Callable[[str], None], name: str) -> None:
        """Call a function of the host between recorded calls, and again when they are repeated."""
        if not self._has_run((call, name)):
            call(name)

    def _has_run(self, item: Any) -> bool:
        if self._noted is None:
            return False
        if self._place is not None:
            if self._noted[self._place : self._place + 1] == [item]:
                self._place += 1
                return True
            del self._noted[self._place :]
            self._place = None
        self._noted.append(item)
        return False

    def end(self) -> bool:
        """Note no more. Gives whether `repeat` may run the same again: it was so before, over inputs that stay."""
        before, self._finished, self._noted, self._place = (
            self._finished,
            self._noted or [],
            None,
            None,
        )
        copied = any(isinstance(item, _Recording) and item.copied for item in self._finished)
        return self._finished == before and not copied

    def repeat(self) -> None:
        """Run what was noted between `begin` and `end` once more."""
        for item in self._finished:
            if isinstance(item, _Recording):
                item.replay(())
            else:
                item[0](item[1])

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self._addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _describe(self, tensor: Tensor | None) -> tuple[Any, ...]:
        if tensor is None:
            return ("none",)
        if not tensor.numel() or tensor.untyped_storage().data_ptr() in self._addresses:
            return "kept", tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        return "copied", tensor.shape, tensor.dtype


class _Recording:
    """One call over tensors that stay."""

    def __init__(
        self, call: Callable[..., Outputs], inputs: Sequence[Tensor | None], kept: Sequence[bool]
    ) -> None:
        self.inputs = [
            tensor
            if stays or tensor is None
            else tensor.clone(memory_format=torch.contiguous_format)
            for tensor, stays in zip(inputs, kept, strict=True)
        ]
        self.copied = [i for i, stays in enumerate(kept) if not stays and inputs[i] is not None]
        self._call, self._graph = call, None
        device = next(tensor.device for tensor in inputs if tensor is not None)
        if device.type != "cuda":
            self.outputs = call(*self.inputs)
            return
        stream = torch.cuda.Stream(
            device
        )  # libraries set themselves up in a first run, which cannot be recorded
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call(*self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # freeing another graph would end the recording with an error
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.outputs = call(*self.inputs)
        finally:
            if collects:
                gc.enable()

    def replay(self, inputs: Sequence[Tensor | None]) -> Outputs:
        for i in self.copied:
            self.inputs[i].copy_(inputs[i])  # type: ignore[union-attr,arg-type]
        if self._graph is not None:
            self._graph.replay()
        else:
            for stays, made in zip(self.outputs, self._call(*self.inputs), strict=True):
                if stays is not None and made is not None:
                    stays.copy_(made)
        return self.outputs


def begin_read(values: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy values to the host; the result waits for them, and not for what is launched in the meantime."""
    if values.device.type != "cuda":
        return values.clone().tolist
    kept, copied = (
        torch.empty(values.shape, dtype=values.dtype, pin_memory=True),
        torch.cuda.Event(),
    )
    kept.copy_(values, non_blocking=True)
    copied.record(torch.cuda.current_stream(values.device))

    def read() -> list[Any]:
        copied.synchronize()
        found: list[Any] = kept.tolist()
        return found

    return read
