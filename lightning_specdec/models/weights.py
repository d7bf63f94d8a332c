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
_FACTORS = np.random.default_rng(0).integers(2**62, size=_BLOCK_BYTES // 8, dtype=np.int64) * 2 + 1
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
            ids_from_files.update(id(tensor) for tensor in _tensors(part))

    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        values = tensor.detach()
        is_from_file = id(tensor) in ids_from_files
        digest.update(name.encode())

        # A quantized weight has no plain bytes; the hash of its file identifies it.
        if is_from_file and type(values) is not Tensor:
            digest.update(f"{values.dtype} {type(values).__name__}".encode())
            continue

        data = values.cpu().flatten().view(torch.uint8).numpy().data
        digest.update(zlib.crc32(data).to_bytes(4) if is_from_file else data)
    return digest.hexdigest()


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

    data = tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy()
    num_blocks = data.size // _BLOCK_BYTES
    num_block_bytes = num_blocks * _BLOCK_BYTES
    blocks = data[:num_block_bytes].view(np.int64).reshape(num_blocks, _FACTORS.size)

    # The products wrap around at 64 bits. One result for each block, whose order counts as well.
    checksum = zlib.crc32((blocks @ _FACTORS).tobytes())
    return zlib.crc32(data[num_block_bytes:].tobytes(), checksum)


def _subclass_checksum(tensor: Tensor) -> int:
    """Checksum of a tensor that is made of others, as torchao's quantized weights are."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return 0
    names, _ = flatten()
    parts = [getattr(tensor, name).detach() for name in names]
    return zlib.crc32(repr(weights_checksum(parts)).encode())


def weights_stamp(*modules: nn.Module) -> tuple[list[tuple[int, int | None, torch.dtype]], bytes]:
    """A value that changes when weights do, read from a sample of each weight.

    It holds each weight's identity, how often torch has written to it, and some of its values. A
    write that torch does not count may change others only: `weights_checksum` misses none.
    """
    weights: list[Tensor] = []
    for module in modules:
        weights.extend(module.parameters())

    identities: list[tuple[int, int | None, torch.dtype]] = []
    samples: list[Tensor] = []
    for weight in weights:
        num_writes = None if weight.is_inference() else weight._version
        identities.append((id(weight), num_writes, weight.dtype))
        if type(weight.data) is Tensor:
            stride = max(1, weight.numel() // _SAMPLE_SIZE)
            sample = weight.data.flatten()[::stride].contiguous()
            samples.append(sample.view(torch.uint8).cpu())
    return identities, torch.cat(samples).numpy().tobytes() if samples else b""


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())
