"""Statistics of a small sharded batch, found by every device for itself after one gather.

What asks all devices for one number after another waits for each answer: a threshold found by counting asks a dozen
times, and over a network the waiting is all there is to it. A few numbers a token are gathered in little more than one
such wait; every device then has the whole batch and does what a single one would. For a large batch this is wrong twice
over: in what travels, and in what is done more than once.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from sat_jax.mesh import LOGICAL, gather_over, spec

T = TypeVar("T")

_TOGETHER = 1 << 18  # numbers of an array up to which it is copied to travel with others


def everywhere(function: Callable[[Any], T], mesh: Mesh, tree: Any) -> T:
    """`function` of whole arrays, on every device.

    Args:
      function: of a tree like `tree`; pure, without collectives, over no array but these. Not differentiated.
      mesh: whose batch axes cut the rows.
      tree: arrays that lead with the batch rows, bool, int32 or float32; and scalars.

    Returns:
      What `function` gives, every device the same.
    """
    return jax.shard_map(
        lambda own: function(_whole(own)), mesh=mesh, in_specs=(row_specs(tree),), out_specs=spec(), check_vma=False
    )(tree)


def by_rows(function: Callable[[Any], T], mesh: Mesh, tree: Any) -> T:
    """`function` of every device's own rows, nobody waiting for anybody; its arrays are cut along their rows again.

    Args:
      function: of a tree like `tree`; of a row it says what that row alone gives.
      mesh: whose batch axes cut the rows.
      tree: arrays that lead with the batch rows.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=(row_specs(tree),), out_specs=spec("batch"), check_vma=False)(
        tree
    )


def value_everywhere(
    function: Callable[[jax.Array, Any], tuple[jax.Array, T]], mesh: Mesh, value_BT: jax.Array, tree: Any
) -> tuple[jax.Array, T]:
    """As `everywhere`, of a function that is differentiated.

    Args:
      function: of `value_BT` and a tree like `tree`; gives a scalar and what else it found.
      mesh: whose batch axes cut the rows.
      value_BT: float32; the scalar's gradient is with regard to it.
      tree: as `everywhere` takes it, without a gradient.

    Returns:
      What `function` gives. What else it found has no gradient.
    """
    result: Any = _value(function, mesh, value_BT, tree)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _value(function: Any, mesh: Mesh, value_BT: jax.Array, tree: Any) -> Any:
    return everywhere(lambda whole: function(*whole), mesh, (value_BT, tree))


def own_slope(
    function: Callable[[jax.Array, Any], tuple[jax.Array, T]], value_BT: jax.Array, tree: Any
) -> tuple[tuple[jax.Array, T], jax.Array]:
    """What `value_everywhere` gives, and its scalar's gradient with regard to the own rows; inside a `shard_map`."""
    result, slope_BT = jax.value_and_grad(function, has_aux=True)(*_whole((value_BT, tree)))
    rows = len(value_BT)
    return result, lax.dynamic_slice_in_dim(slope_BT, lax.axis_index(LOGICAL["batch"]) * rows, rows)


def total(tree: T) -> T:
    """The sum over all devices of every array; inside a `shard_map`. What is small travels together.

    Over a network each sum costs a wait, however little is in it, and gloo takes the arrays of a sum one by one.
    """
    leaves, structure = jax.tree.flatten(tree)
    small = [leaf for leaf in leaves if leaf.size <= _TOGETHER]
    if len({leaf.dtype for leaf in small}) > 1 or len(small) < 2:
        return lax.psum(tree, LOGICAL["batch"])
    summed = lax.psum(jnp.concatenate([leaf.ravel() for leaf in small]), LOGICAL["batch"])
    ends = itertools.accumulate(leaf.size for leaf in small)
    parts = iter(jnp.split(summed, list(ends)[:-1]))
    return structure.unflatten(
        [
            next(parts).reshape(leaf.shape) if leaf.size <= _TOGETHER else lax.psum(leaf, LOGICAL["batch"])
            for leaf in leaves
        ]
    )


def _forward(function: Any, mesh: Mesh, value_BT: jax.Array, tree: Any) -> tuple[Any, jax.Array]:
    own, out = (value_BT, tree), (spec(), spec("batch"))
    local = functools.partial(own_slope, function)
    return jax.shard_map(local, mesh=mesh, in_specs=row_specs(own), out_specs=out, check_vma=False)(*own)


def _backward(_function: Any, _mesh: Mesh, slope_BT: jax.Array, grads: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
    return grads[0] * slope_BT, None


_value.defvjp(_forward, _backward)


def row_specs(tree: Any) -> Any:
    """The partition of every array of a tree by its rows, which lead; a scalar is on every device."""
    return jax.tree.map(lambda leaf: spec("batch") if leaf.ndim else spec(), tree)


def _whole(own: Any) -> Any:
    """The arrays of all devices. They travel side by side as the words that they are: one gather, not a bit changed."""
    leaves, structure = jax.tree.flatten(own)
    arrays = [leaf for leaf in leaves if leaf.ndim]
    words = jnp.concatenate([_words(array).reshape(len(array), -1) for array in arrays], axis=1)
    words = gather_over(words, LOGICAL["batch"])
    ends = [0]
    for array in arrays:
        ends.append(ends[-1] + math.prod(array.shape[1:]))
    parts = (words[:, first:end] for first, end in itertools.pairwise(ends))
    whole = [_unword(part, like).reshape(-1, *like.shape[1:]) for part, like in zip(parts, arrays, strict=True)]
    filled = iter(whole)
    return jax.tree.unflatten(structure, [next(filled) if leaf.ndim else leaf for leaf in leaves])


def _words(array: jax.Array) -> jax.Array:
    return array.astype(jnp.int32) if array.dtype == bool else lax.bitcast_convert_type(array, jnp.int32)


def _unword(words: jax.Array, like: jax.Array) -> jax.Array:
    return words != 0 if like.dtype == bool else lax.bitcast_convert_type(words, like.dtype)
