"""Fingerprints of a network's weights: a hash for files and caches, a checksum for each call."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

_SAMPLE_SIZE = 64
_ROW_BYTES = 8192
_BLOCK_ROWS = 512
"""Rows that a thread reads at a time: 4 MiB."""
_THREADED_BYTES = 2**24
"""Weights of at least this size are read by several threads."""
ROPE_TYPE = "longrope"
"""transformers' name of rotary positions whose frequencies change once (see `models.longrope`)."""


def _odd_factors() -> np.ndarray:
    generator = np.random.default_rng(0)
    words_per_row = _ROW_BYTES // 8
    numbers = generator.integers(2**62, size=words_per_row, dtype=np.int64)
    return 2 * numbers + 1


_FACTORS = _odd_factors()
"""An odd factor for each 64-bit word of a row, so that the order of the words counts."""


def weights_digest(module: nn.Module, *, is_unchanged: bool = False) -> str:
    """Hash of a network's weights, equal on every machine.

    Weights that were read from files are represented by the hashes of these files. A checksum of
    their present values is added, since they may have changed after they were read.

    Args:
        is_unchanged: whether weights from files are as they were read, since nobody else has the
            network yet. They are not read then, which a file that is mapped to memory would have to
            be for this alone.
    """
    digest = hashlib.sha256()
    ids_from_files: set[int] = set()
    for name, part in module.named_modules():
        origin = getattr(part, "origin", None)
        if origin is not None:
            digest.update(f"{name} {origin.sha256}".encode())
            for tensor in _tensors(part):
                ids_from_files.add(id(tensor))

    for name, tensor in _named_weights(module):
        digest.update(name.encode())
        values = tensor.detach()
        is_from_file = id(tensor) in ids_from_files
        if is_from_file and is_unchanged:
            digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
            continue

        # A quantized weight has no plain bytes; the hash of its file identifies it.
        if is_from_file and type(values) is not Tensor:
            digest.update(f"{values.dtype} {type(values).__name__}".encode())
            continue

        data = _plain_bytes(values).data
        if is_from_file:
            digest.update(zlib.crc32(data).to_bytes(4))
        else:
            digest.update(data)
    return digest.hexdigest()


def _plain_bytes(tensor: Tensor) -> np.ndarray:
    """A tensor's bytes in the order of its elements."""
    elements = tensor.cpu().flatten()
    return elements.view(torch.uint8).numpy()


def weights_checksum(tensors: Iterable[Tensor]) -> list[int]:
    """Checksum of each tensor over all of its bytes, at about the speed of reading memory.

    torch counts most writes to a tensor, but not those through `.data`, through a numpy view or by
    fused optimizers. Only the bytes themselves show these.

    A weight is read in rows of 1024 words, each of which counts with another factor. So every
    change within a word shows. Changes of several words cancel with a probability of 2^-63.
    """
    all_tensors = [tensor.detach() for tensor in tensors]
    num_threads = torch.get_num_threads()
    num_bytes = sum(tensor.nbytes for tensor in all_tensors if type(tensor) is Tensor)
    if num_threads == 1 or num_bytes < _THREADED_BYTES:
        return [_tensor_checksum(tensor, map) for tensor in all_tensors]
    # numpy lets other threads run while it adds numbers.
    with ThreadPoolExecutor(num_threads) as pool:
        return [_tensor_checksum(tensor, pool.map) for tensor in all_tensors]


def _tensor_checksum(tensor: Tensor, run_all: Callable[..., Iterable[bytes]]) -> int:
    """The checksum of one tensor.

    Args:
        run_all: `map`, or the same in several threads.
    """
    if type(tensor) is not Tensor:
        return _subclass_checksum(tensor)
    if tensor.is_meta or not tensor.numel():
        return 0
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()

    data = _plain_bytes(tensor)
    num_rows = data.size // _ROW_BYTES
    num_row_bytes = num_rows * _ROW_BYTES
    words = data[:num_row_bytes].view(np.int64)
    rows = words.reshape(num_rows, _FACTORS.size)
    blocks = [rows[start : start + _BLOCK_ROWS] for start in range(0, num_rows, _BLOCK_ROWS)]

    # The bytes after the last full row are few, so they are added directly.
    remainder = data[num_row_bytes:]
    digest = hashlib.blake2b(remainder.tobytes(), digest_size=8)
    for row_sums in run_all(_row_sums, blocks):
        digest.update(row_sums)
    return int.from_bytes(digest.digest())


def _row_sums(rows: np.ndarray) -> bytes:
    """The sum of each row's words times their factors, which wraps around at 64 bits."""
    return (rows @ _FACTORS).tobytes()


def _subclass_checksum(tensor: Tensor) -> int:
    """Checksum of a tensor that is made of others, as torchao's quantized weights are."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return 0
    names, _ = flatten()
    inner_tensors = [getattr(tensor, name) for name in names]
    inner_checksums = weights_checksum(inner_tensors)
    return zlib.crc32(repr(inner_checksums).encode())


WeightIdentity = tuple[int, int | None, torch.dtype]
"""A tensor's id, how often torch has written to it (None if torch does not count), its dtype."""


def weights_stamp(
    *modules: nn.Module,
    reads_values: bool = True,
) -> tuple[list[WeightIdentity], bytes]:
    """A value that changes when weights do, read from a sample of each weight.

    It holds each weight's identity, and some of its values. A write that torch does not count may
    change other values only. `weights_checksum` notices every write.

    Args:
        reads_values: whether it holds values. Without them, weights that are mapped from a file
            stay on the disk.
    """
    identities: list[WeightIdentity] = []
    samples: list[Tensor] = []
    for weight in chain.from_iterable(module.parameters() for module in modules):
        num_writes = None if weight.is_inference() else weight._version
        identities.append((id(weight), num_writes, weight.dtype))

        # Subclasses of Tensor, such as quantized weights, have no plain values to sample.
        if reads_values and type(weight.data) is Tensor:
            stride = max(1, weight.numel() // _SAMPLE_SIZE)
            sample = weight.data.flatten()[::stride].contiguous()
            samples.append(sample.view(torch.uint8).cpu())

    if not samples:
        return identities, b""
    sampled_bytes = torch.cat(samples).numpy().tobytes()
    return identities, sampled_bytes


def overwritten_buffers(module: nn.Module) -> tuple[str, ...]:
    """Names of the buffers of one module that its forward pass overwrites in each call.

    These are the frequencies that transformers chooses for a call. What it chooses from are other
    buffers.
    """
    if getattr(module, "rope_type", None) == ROPE_TYPE:
        return ("inv_freq",)
    return ()


def fixed_tensors(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers, without those that a forward pass overwrites."""
    overwritten_ids: set[int] = set()
    for part in module.modules():
        for name in overwritten_buffers(part):
            overwritten_ids.add(id(part._buffers.get(name)))
    return [tensor for tensor in _tensors(module) if id(tensor) not in overwritten_ids]


def _named_weights(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Names and values of all parameters and buffers, as they are before the first call."""
    original_tensors: dict[int, Tensor] = {}
    for part in module.modules():
        for name in overwritten_buffers(part):
            original_tensor = part._buffers.get(f"original_{name}")
            if original_tensor is not None:
                original_tensors[id(part._buffers[name])] = original_tensor
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        yield name, original_tensors.get(id(tensor), tensor)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())
