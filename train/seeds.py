"""Every random choice of a run follows from its one seed, by name and number; this is how."""

import hashlib


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A seed in [0, 2^31) that follows from its arguments alone, on every machine.

    The first four bytes, little endian, of blake2b over "seed/purpose/n1/n2/...", less the top bit, so that it fits an
    int32. Seeds of different purposes or numbers are unrelated, also those of neighbouring run seeds.

    Args:
      seed: of the run.
      purpose: what for, e.g. "sample".
      numbers: which one, e.g. a ticket.
    """
    text = "/".join(map(str, (seed, purpose, *numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
