"""A push of weights as bytes: what the sender cuts into chunks and what the receiver puts together again.

Bytes are little endian and row major. Digest of a push: xxh3_128 over the bytes of all tensors in manifest order.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import xxhash

from rollout_bridge.errors import Fatal, Retryable
from rollout_bridge.messages import Chunk, Manifest, TensorSpec

DTYPES: Mapping[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """One version of the weights on the host of the sender.

    Attributes:
      version: optimizer steps applied to them.
      model_digest: of the architecture.
      tensors: float32 or bfloat16 (ml_dtypes) arrays by Hugging Face name. Read once for the digest and once per
        engine, again when an engine has to be restored; must not change meanwhile. A lazy mapping is fine.
    """

    version: int
    model_digest: str
    tensors: Mapping[str, np.ndarray]

    @functools.cached_property
    def manifest(self) -> Manifest:
        """What a push of them contains; computing it reads every tensor once.

        Raises:
          ValueError: a tensor's type cannot go over the wire, or this machine is big endian.
        """
        digest, specs = xxhash.xxh3_128(), []
        for name, array in self.tensors.items():
            digest.update(_bytes(name, array))
            specs.append(TensorSpec(name=name, dtype=array.dtype.name, shape=tuple(array.shape)))
        return Manifest(
            version=self.version, model_digest=self.model_digest, digest=digest.hexdigest(), tensors=tuple(specs)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec_bytes(spec) for spec in self.manifest.tensors)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Cuts all tensors, in manifest order, into chunks of at most `size` bytes; an empty tensor has none."""
        for index, spec in enumerate(self.manifest.tensors):
            view = _bytes(spec.name, self.tensors[spec.name])
            for offset in range(0, len(view), size):
                data = view[offset : offset + size]
                yield Chunk(tensor=index, offset=offset, data=data, checksum=xxhash.xxh3_64_intdigest(data))


class Assembly:
    """Puts a push together: takes its chunks in order and gives each tensor as it completes.

    Holds one tensor at a time; its size comes from a manifest that was checked against the model.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._digest = xxhash.xxh3_128()
        self._index = 0
        self._offset = 0
        self._buffer = np.empty(0, np.uint8)
        self.received = 0

    def ready(self) -> Iterator[tuple[str, np.ndarray]]:
        """Gives the tensors that are complete; call it before the first chunk and after each."""
        while self._index < len(self._manifest.tensors):
            spec = self._manifest.tensors[self._index]
            if self._offset < spec_bytes(spec):
                return
            array = self._buffer.view(DTYPES[spec.dtype]).reshape(spec.shape)
            self._buffer, self._offset, self._index = np.empty(0, np.uint8), 0, self._index + 1
            yield spec.name, array

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk.

        Raises:
          ValueError: it is not the next one, or reaches beyond its tensor.
          Retryable: its bytes do not have its checksum.
        """
        subject = f"push of version {self._manifest.version}: chunk of tensor {chunk.tensor} at byte {chunk.offset}"
        if self._index >= len(self._manifest.tensors):
            raise ValueError(f"{subject}: expected the end of the stream, all tensors are complete")
        spec = self._manifest.tensors[self._index]
        if (chunk.tensor, chunk.offset) != (self._index, self._offset):
            raise ValueError(f"{subject}: expected tensor {self._index} ({spec.name}) at byte {self._offset}")
        end, size = self._offset + len(chunk.data), spec_bytes(spec)
        if not self._offset < end <= size:
            raise ValueError(
                f"{subject}: expected 1 to {size - self._offset} bytes of {spec.name}, got {len(chunk.data)}"
            )
        if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
            raise Retryable(
                f"{subject}: expected checksum {chunk.checksum:016x}, the bytes of {spec.name} have another"
            )
        if self._offset == 0:
            self._buffer = np.empty(size, np.uint8)
        self._buffer[self._offset : end] = np.frombuffer(chunk.data, np.uint8)
        self._digest.update(chunk.data)
        self._offset = end
        self.received += len(chunk.data)

    def finish(self) -> None:
        """Checks that everything has come and is what the manifest promised.

        Raises:
          Retryable: the stream ended early.
          Fatal: the bytes have another digest: the tensors changed under the push.
        """
        manifest = self._manifest
        if self._index < len(manifest.tensors):
            raise Retryable(
                f"push of version {manifest.version}: expected {len(manifest.tensors)} tensors, the stream ended "
                f"in number {self._index} ({manifest.tensors[self._index].name}) at byte {self._offset}"
            )
        if self._digest.hexdigest() != manifest.digest:
            raise Fatal(
                f"push of version {manifest.version}: expected digest {manifest.digest}, got "
                f"{self._digest.hexdigest()}; the tensors changed between digest and push "
                "(were they views of donated memory?)"
            )


def is_finite(array: np.ndarray) -> bool:
    """Whether a float32 or bfloat16 array holds neither NaN nor infinity.

    Their exponent is all ones: seen as integers, the positive ones are the largest signed numbers, the negative ones
    the largest unsigned. Two maxima need no copy, and a hundredth of the time of `np.isfinite` on bfloat16.
    """
    if not array.size:
        return True
    size = array.dtype.itemsize
    infinity, minus = 0x7F80 << 8 * (size - 2), 0xFF80 << 8 * (size - 2)
    whole = array.reshape(-1)
    return bool(whole.view(f"i{size}").max() < infinity and whole.view(f"u{size}").max() < minus)


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor."""
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _bytes(name: str, array: np.ndarray) -> memoryview:
    if array.dtype not in DTYPES.values() or sys.byteorder != "little":
        raise ValueError(
            f"weights: expected little-endian {' or '.join(DTYPES)} tensors, got {name} of {array.dtype} on a "
            f"{sys.byteorder}-endian machine"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
