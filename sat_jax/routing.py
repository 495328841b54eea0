"""Routing traces: their id type, the empty trace, agreement, and what a trace from outside must obey."""

import jax
import jax.numpy as jnp
import numpy as np

from sat_jax.shapes import check_shapes
from sat_jax.types import RoutingTrace


def id_dtype(experts: int) -> np.dtype:
    """The smallest unsigned type that holds ids 0 .. experts - 1: uint8 up to 256 experts, then uint16.

    Without experts (a dense model's empty trace) it is uint8.

    Raises:
      ValueError: more than 65536 experts.
    """
    if not 0 <= experts <= 2**16:
        raise ValueError(f"experts: expected 0 to 65536, got {experts}")
    return np.dtype(np.uint8 if experts <= 2**8 else np.uint16)


def free_trace(layers: int, rows: int, positions: int, slots: int, experts: int) -> RoutingTrace:
    """A trace that replays nothing: `present_BT` is False everywhere, so every position routes freely.

    Args:
      layers: L, those with experts.
      rows: B.
      positions: T.
      slots: K.
      experts: E, which fixes the id type.
    """
    return RoutingTrace(
        experts_LBTK=jnp.zeros((layers, rows, positions, slots), id_dtype(experts)),
        present_BT=jnp.zeros((rows, positions), bool),
    )


def agreement(used_NK: jax.Array, live_NK: jax.Array) -> jax.Array:
    """Share of the used experts that are among the live router's own choices, whatever their slots.

    Args:
      used_NK: the ids that were used.
      live_NK: the ids that the live router chose, distinct within a row.

    Returns:
      agreement_N in [0, 1], float32.
    """
    check_shapes(used_NK=used_NK, live_NK=live_NK)
    found_NK = (used_NK[:, :, None] == live_NK[:, None, :]).any(-1)
    return found_NK.mean(-1, dtype=jnp.float32)


def check_trace(experts_LTK: np.ndarray, experts: int, where: str) -> None:
    """Checks routes from outside, on the host: every (layer, position) holds K distinct ids below E.

    All-zero rows (a capture that never ran) fail here because their ids repeat.

    Args:
      experts_LTK: the present rows of one completion; no absent rows among them.
      experts: E.
      where: whose trace it is, for the error.

    Raises:
      ValueError: with the first offending layer, position and ids.
    """
    check_shapes(experts_LTK=experts_LTK)
    if not np.issubdtype(experts_LTK.dtype, np.integer):
        raise ValueError(f"trace: expected integer expert ids, got {experts_LTK.dtype} ({where})")
    sorted_LTK = np.sort(experts_LTK, axis=-1)
    outside_LT = (sorted_LTK[..., -1] >= experts) | (sorted_LTK[..., 0] < 0)
    repeated_LT = (sorted_LTK[..., 1:] == sorted_LTK[..., :-1]).any(-1)
    bad_LT = outside_LT | repeated_LT
    if bad_LT.any():
        layer, position = (int(i) for i in np.argwhere(bad_LT)[0])
        raise ValueError(
            f"trace: expected {experts_LTK.shape[-1]} distinct expert ids below {experts}, "
            f"got {experts_LTK[layer, position].tolist()} in layer {layer}, position {position} ({where}; "
            f"{int(bad_LT.sum())} of {bad_LT.size} rows are wrong); check that the engine returns routed experts"
        )
