"""The project's one axis alphabet, and the check that makes a name's suffix a contract.

An array's name ends in its axes (`logp_BT`, `experts_LBTK`); a scalar carries none:

B packed row · T position (predicts `target_BT[b, t]`) · S attended position · V vocabulary · D width · H query head ·
G key/value head · C head channel · L MoE layer, forward order · E expert · K expert slot · F expert hidden ·
N routed token after dispatch · P prompt group · M member of a group
"""

from typing import Any

ALPHABET = "BTSVDHGCLEKFNPM"


def check_shapes(**arrays: Any) -> dict[str, int]:
    """Checks every array against the axes its name ends in; equal letters must have equal sizes.

    Runs at trace time only, so it costs nothing inside `jit`.

    Args:
      **arrays: arrays (or shape structs) by name, e.g. `logp_BT=logp_BT`. A name without a suffix is a scalar.
        `None` is skipped, so that optional arguments need no branch.

    Returns:
      The size of each letter.

    Raises:
      ValueError: a rank differs from its suffix, or two arrays disagree about a letter; both are named.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, array in arrays.items():
        if array is None:
            continue
        suffix = name.rsplit("_", 1)[-1]
        axes = suffix if suffix.isupper() and set(suffix) <= set(ALPHABET) else ""
        shape = tuple(array.shape)
        if len(shape) != len(axes):
            raise ValueError(f"{name}: expected {len(axes)} axes ({axes or 'scalar'}), got shape {shape}")
        for letter, size in zip(axes, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name}: expected axis {letter} of size {sizes[letter]} (from {owner[letter]}), got {size} "
                    f"in shape {shape}"
                )
            owner.setdefault(letter, name)
    return sizes
