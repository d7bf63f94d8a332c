"""Fingerprints of a network's weights: a hash for files and caches, a checksum for each call."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

_SAMPLE_SIZE = 64
_BLOCK_BYTES = 8192


def _odd_factors() -> np.ndarray:
    generator = np.random.default_rng(0)
    words_per_block = _BLOCK_BYTES // 8
    numbers = generator.integers(2**62, size=words_per_block, dtype=np.int64)
    return 2 * numbers + 1


_FACTORS = _odd_factors()
"""An odd factor for each 64-bit word of a block, so that the order of the words counts."""


def weights_digest(module: nn.Module) -> str:
    """Hash of a network's weights, equal on every machine.

    Weights that were read from files are represented by the hashes of these files. A checksum of
    their present values is added, since they may have changed after they were read.
    """
    digest = hashlib.sha256()
    ids_from_files: set[int] = set()
    for name, part in module.named_modules():
        origin = getattr(part, "origin", None)
        if origin is not None:
            digest.update(f"{name} {origin.sha256}".encode())
            for tensor in _tensors(part):
                ids_from_files.add(id(tensor))

    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        digest.update(name.encode())
        values = tensor.detach()
        is_from_file = id(tensor) in ids_from_files

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
    """
    return [_tensor_checksum(tensor.detach()) for tensor in tensors]


def _tensor_checksum(tensor: Tensor) -> int:
    if type(tensor) is not Tensor:
        return _subclass_checksum(tensor)
    if tensor.is_meta or not tensor.numel():
        return 0
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()

    data = _plain_bytes(tensor)
    num_blocks = data.size // _BLOCK_BYTES
    num_block_bytes = num_blocks * _BLOCK_BYTES
    words = data[:num_block_bytes].view(np.int64)
    blocks = words.reshape(num_blocks, _FACTORS.size)

    # The products wrap around at 64 bits. One result for each block, whose order counts as well.
    block_results = blocks @ _FACTORS
    checksum = zlib.crc32(block_results.tobytes())

    # The bytes after the last full block are few, so they are added directly.
    remainder = data[num_block_bytes:]
    return zlib.crc32(remainder.tobytes(), checksum)


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


def weights_stamp(*modules: nn.Module) -> tuple[list[WeightIdentity], bytes]:
    """A value that changes when weights do, read from a sample of each weight.

    It holds each weight's identity, and some of its values. A write that torch does not count may
    change other values only. `weights_checksum` notices every write.
    """
    identities: list[WeightIdentity] = []
    samples: list[Tensor] = []
    for weight in chain.from_iterable(module.parameters() for module in modules):
        num_writes = None if weight.is_inference() else weight._version
        identities.append((id(weight), num_writes, weight.dtype))

        # Subclasses of Tensor, such as quantized weights, have no plain values to sample.
        if type(weight.data) is Tensor:
            stride = max(1, weight.numel() // _SAMPLE_SIZE)
            sample = weight.data.flatten()[::stride].contiguous()
            samples.append(sample.view(torch.uint8).cpu())

    if not samples:
        return identities, b""
    sampled_bytes = torch.cat(samples).numpy().tobytes()
    return identities, sampled_bytes


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())
