"""The messages of a push, to bytes and back: a manifest, then chunks, of which small ones share a message.

A message costs a tenth of a millisecond beside its bytes, and a small model has hundreds of tensors of a few kilobytes.
"""

from collections.abc import Iterator, Sequence

from rollout_bridge.codec import decode_spec, encode_spec
from rollout_bridge.messages import Chunk, Manifest
from rollout_bridge.proto import rollout_pb2 as pb

_HEAD_BYTES = 64  # of a chunk, beside its data: at most, rounded up


def together(chunks: Iterator[Chunk], size: int) -> Iterator[tuple[Chunk, ...]]:
    """Chunks in their order, as many to a message as have `size` bytes with their heads; a large one stays alone."""
    gathered: list[Chunk] = []
    total = 0
    for chunk in chunks:
        total += len(chunk.data) + _HEAD_BYTES
        if gathered and total > size:
            yield tuple(gathered)
            gathered, total = [], len(chunk.data) + _HEAD_BYTES
        gathered.append(chunk)
    if gathered:
        yield tuple(gathered)


def serialize_part(part: Manifest | Sequence[Chunk]) -> bytes:
    """A message of a push, as its bytes: the manifest, or chunks.

    A chunk's data is copied once: protobuf would copy it into the message, into its parent, and out again, which costs
    more than sending it. Fields may come in any order, so the data comes last.
    """
    if isinstance(part, Manifest):
        specs = [encode_spec(spec) for spec in part.tensors]
        manifest = pb.Manifest(version=part.version, model_digest=part.model_digest, digest=part.digest, tensors=specs)
        return pb.StageRequest(manifest=manifest).SerializeToString()
    pieces = []
    for place, chunk in enumerate(part):
        head = pb.Chunk(tensor=chunk.tensor, offset=chunk.offset, checksum=chunk.checksum).SerializeToString()
        data_head = _bytes_head(pb.Chunk.DATA_FIELD_NUMBER, len(chunk.data))
        field = pb.StageRequest.TOGETHER_FIELD_NUMBER if place else pb.StageRequest.CHUNK_FIELD_NUMBER
        pieces += [_bytes_head(field, len(head) + len(data_head) + len(chunk.data)), head, data_head, chunk.data]
    return b"".join(pieces)


def decode_part(message: pb.StageRequest) -> Iterator[Manifest | Chunk]:
    """The manifest of a message of a push, or its chunks.

    Raises:
      ValueError: it has neither, or chunks beside a manifest.
    """
    kind = message.WhichOneof("part")
    if kind == "chunk":
        for chunk in (message.chunk, *message.together):
            yield Chunk(tensor=chunk.tensor, offset=chunk.offset, data=chunk.data, checksum=chunk.checksum)
        return
    if kind != "manifest" or message.together:
        raise ValueError(
            f"push: expected a manifest or a chunk, got {kind}"
            + (f" with {len(message.together)} chunks beside it" if message.together else "")
        )
    manifest = message.manifest
    yield Manifest(
        version=manifest.version,
        model_digest=manifest.model_digest,
        digest=manifest.digest,
        tensors=tuple(decode_spec(spec) for spec in manifest.tensors),
    )


def _bytes_head(field: int, length: int) -> bytes:
    """Tag and length of a length-delimited field (protobuf's wire type 2)."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
