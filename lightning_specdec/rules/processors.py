"""Logits processors: scores that depend on the text before them, such as a penalty on repetition.

Whatever takes a prefix and its scores and gives scores will do; those of transformers have this form.

Theory: with processors the target's distribution is the processed one, so every position that is drawn from or judged
must be processed with its own prefix, drafted tokens included, as if the text had come there token by token. That holds
for functions of the prefix and the scores alone. A processor that remembers its calls would meet guesses that the
verdict rejects, other rows, and the draft's scores; so it is refused.
"""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Called with a prefix `[1, T]` and its float32 scores `[1, V]`; gives the scores `[1, V]` to draw from."""

MOST_GLIMPSED = 256
"""Values of a processor that are looked at each round."""


def flat(processors: object) -> tuple[LogitsProcessor, ...]:
    """The processors of a list of them, in their order; lists within it are opened.

    Raises:
        ValueError: for anything that cannot be called.
    """
    if isinstance(processors, list | tuple):
        return tuple(processor for item in processors for processor in _opened(item))
    raise ValueError(f"processors must be a list of logits processors, got {_name(processors)}: put it into a list")


def _opened(item: object) -> tuple[LogitsProcessor, ...]:
    if isinstance(item, list | tuple):  # transformers' list of processors can be called, but is a list
        return flat(item)
    if not callable(item):
        raise ValueError(f"a logits processor is called with a prefix and its scores, and {item!r} cannot be called")
    return (item,)


def process(
    processors: Sequence[LogitsProcessor],
    logits: Float[Tensor, "B N V"],
    texts: Sequence[Sequence[int] | None],
    guesses: Sequence[Sequence[int]] | None = None,
    *,
    stop_at_impossible: bool = False,
) -> Float[Tensor, "B N V"]:
    """What `Sampling.process` does, by these processors."""
    processed = logits.float().clone()
    before = [_glimpse(processor) for processor in processors]
    for row, text in enumerate(texts):
        if text is None:
            continue
        guessed = guesses[row] if guesses is not None else ()
        whole = torch.tensor([[*text, *guessed]], device=logits.device)
        for i in range(len(guessed) + 1):
            prefix, scores = whole[:, : len(text) + i], processed[row, i : i + 1].clone()
            for processor in processors:
                scores = _ask(processor, prefix, scores)
            processed[row, i] = scores[0]
            if stop_at_impossible and i < len(guessed) and scores[0, guessed[i]] == -torch.inf:
                break
    for processor, seen in zip(processors, before, strict=True):
        if not _unchanged(seen, _glimpse(processor)):
            raise _has_memory(processor)
    return processed


def check_memory(processor: LogitsProcessor, text: Sequence[int], scores: Float[Tensor, "1 V"]) -> None:
    """Raise ValueError for a processor that remembers its calls; prepare one that prepares itself on its first call.

    Theory: one copy is asked about a text and about the same text with one more token, then again; another copy is
    asked the other way round. Without a memory both always answer alike, hold the same things after their first call,
    and keep them as they are. The further token is the one that the processor itself likes best, so one that allows few
    texts is not asked about others. What it keeps outside itself (in a global, behind a pointer) shows only in its
    answers.

    Args:
        text: a prefix that the processor is about to be asked about.
        scores: that prefix's scores.
    """
    with torch.inference_mode(False), torch.no_grad():
        scores = scores.clone()
        device, closure = scores.device, _copy(processor, _closure(processor))
        first, second = _copy(processor, processor), _copy(processor, processor)
        short = torch.tensor([list(text)], device=device)
        answer = _ask(first, short, scores.clone())
        long = torch.cat((short, answer.argmax(-1, keepdim=True)), dim=1)
        next_answer = _ask(first, long, scores.clone())
        held = _copy(processor, first)
        for each in (first, second):
            alike = _same(_ask(each, long, scores.clone()), next_answer)
            alike = _same(_ask(each, short, scores.clone()), answer) and alike
            if not (alike and _same(each, held) and _same(closure, _closure(processor))):
                raise _has_memory(processor)
        _ask(processor, short, scores.clone())


def _ask(processor: LogitsProcessor, prefix: Tensor, scores: Tensor) -> Tensor:
    answer = processor(prefix, scores)
    if not isinstance(answer, Tensor) or answer.shape != scores.shape:
        found = tuple(answer.shape) if isinstance(answer, Tensor) else _name(answer)
        raise ValueError(f"the logits processor {_name(processor)} gave {found}: scores {tuple(scores.shape)} are due")
    return answer


def _has_memory(processor: LogitsProcessor) -> ValueError:
    return ValueError(
        f"the logits processor {_name(processor)} remembers its calls or draws at random, so guesses that are rejected "
        "would change what it does: use one that depends on the prefix and the scores alone"
    )


def _name(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__name__)


def _closure(processor: object) -> dict[str, Any]:
    """What a function has of the functions around it, and a method of its object: a copy would share these."""
    function = getattr(processor, "__func__", processor)
    if not isinstance(function, types.FunctionType) or function.__closure__ is None:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _copy(processor: LogitsProcessor, value: Any) -> Any:
    """A deep copy, but for networks: these are large, and their weights are no memory."""
    networks = {id(part): part for part in _parts(value) if isinstance(part, nn.Module)}
    try:
        return copy.deepcopy(value, networks)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"the logits processor {_name(processor)} cannot be copied, so whether it has a memory cannot be told "
            f"({error}): use one that depends on the prefix and the scores alone"
        ) from error


def _parts(value: Any) -> Iterator[Any]:
    """What an object holds, and what its dictionaries and objects hold."""
    for part in _held(value):
        yield part
        yield from _held(part)


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, types.MethodType):
        return vars(value.__self__).values() if hasattr(value.__self__, "__dict__") else ()
    if isinstance(value, nn.Module | type | types.ModuleType):
        return ()
    return getattr(value, "__dict__", {}).values()


def _glimpse(processor: LogitsProcessor) -> list[tuple[Any, Any]]:
    """What a processor holds at the moment, with how often tensors were written and how long lists are.

    Two levels deep and of bounded length: it is taken twice a round. Values are held on to, so that none can be
    replaced by another at its address.
    """
    seen = []
    for part in itertools.islice(_parts(processor), MOST_GLIMPSED):
        mark: Any = None
        if isinstance(part, Tensor):
            mark = None if part.is_inference() else part._version
        elif isinstance(part, list | dict | set):
            mark = len(part)
        seen.append((part, mark))
    return seen


def _unchanged(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> bool:
    return len(before) == len(after) and all(
        one is other and mark == now for (one, mark), (other, now) in zip(before, after, strict=True)
    )


def _same(one: Any, other: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values are alike in all that can be seen from outside; `compared` holds those around them."""
    if one is other or (id(one), id(other)) in compared:
        return True
    if type(one) is not type(other):
        return False
    compared |= {(id(one), id(other))}
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and bool(((one == other) | (one != one) & (other != other)).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key], compared) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*pair, compared) for pair in zip(one, other, strict=True))
    if hasattr(one, "tolist"):
        return bool(one.tolist() == other.tolist())
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and _same(one.__self__, other.__self__, compared)
    if hasattr(one, "__dict__"):
        return _same(vars(one), vars(other), compared)
    # An opaque value, such as a random generator that is seeded before each use, shows itself in what it does.
    return type(one).__eq__ is object.__eq__ or bool(one == other)
