"""FLOPs by the walk, against products counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from sat_jax.mesh import MeshConfig, make_mesh, spec
from train.plan.walk import Rules, walk

NO_RULES = Rules(loops={}, kernels={})
X, W = jnp.ones((4, 8)), jnp.ones((8, 8))
PRODUCT = 2 * 4 * 8 * 8


def count(function, *arguments, devices=1, rules=NO_RULES):
    return walk(jax.jit(function).trace(*arguments).jaxpr, devices, rules)


def test_a_product_is_two_operations_a_pair_and_its_arrays_are_moved_once():
    work = count(lambda x, w: x @ w, X, W)
    assert work.total == PRODUCT
    assert work.bytes == 4 * (4 * 8 + 8 * 8 + 4 * 8)


def test_a_batched_product_counts_its_batch_once():
    assert (
        count(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), jnp.ones((3, 4, 8)), jnp.ones((3, 8, 8))).total
        == 3 * PRODUCT
    )


def test_a_scan_counts_its_length_and_nests():
    def outer(x):
        return jax.lax.scan(
            lambda c, _: (jax.lax.scan(lambda d, _: (d @ W, None), c, None, length=3)[0], None), x, None, 5
        )

    assert count(outer, X).total == 15 * PRODUCT


def test_a_rematerialised_product_is_counted_again():
    def loss(x, w):
        return jnp.sin(x @ w).sum()

    def again(x, w):
        return jax.checkpoint(loss)(x, w)

    assert count(jax.grad(loss, argnums=(0, 1)), X, W).total == 3 * PRODUCT
    assert count(jax.grad(again, argnums=(0, 1)), X, W).total == 4 * PRODUCT


def test_outside_a_shard_map_a_device_has_its_share_and_inside_its_own_work():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def mixed(x, w):
        inner = jax.shard_map(lambda a: a @ W, mesh=mesh, in_specs=spec("batch"), out_specs=spec("batch"))
        return inner(x) @ w

    assert count(mixed, X, W, devices=4).total == PRODUCT + PRODUCT / 4


def test_of_branches_the_costliest_counts():
    work = count(lambda flag, x: jax.lax.cond(flag, lambda a: a @ W @ W, lambda a: a @ W, x), True, X)
    assert work.total == 2 * PRODUCT


def while_of(x, stop):
    with jax.named_scope("some_rounds"):
        return jax.lax.while_loop(lambda c: c[0] < stop, lambda c: (c[0] + 1, c[1] @ W), (0, x))


def test_a_loop_over_data_runs_as_often_as_the_rule_of_its_scope_says():
    assert count(while_of, X, 3, rules=Rules(loops={"some_rounds": 2.5}, kernels={})).total == 2.5 * PRODUCT


def test_a_loop_over_data_without_a_rule_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="some_rounds"):
        count(while_of, X, 3)


def test_a_loop_over_data_without_products_needs_no_rule():
    assert (
        count(lambda x, n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, x)), X, 3).total
        == 0
    )


def kernel_call(x, name):
    def double(ref, out):
        out[...] = ref[...] * 2

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name=name)(x)


def test_a_kernel_counts_as_its_rule_says_and_one_without_a_rule_is_an_error_that_names_it():
    rules = Rules(loops={}, kernels={"known": lambda inputs, outputs: float(inputs[0].size + outputs[0].size)})
    assert count(functools.partial(kernel_call, name="known_kernel"), X, rules=rules).total == 64
    with pytest.raises(ValueError, match="strange"):
        count(functools.partial(kernel_call, name="strange"), X, rules=rules)


def test_a_call_out_of_the_program_is_an_error_that_names_it():
    def calls(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ValueError, match="pure_callback"):
        count(calls, X)


def test_flops_are_told_by_room_also_in_the_backward_pass():
    def loss(x, w):
        with jax.named_scope("experts"):
            y = x @ w
        with jax.named_scope("logprob"):
            return (y @ w).sum()

    work = count(jax.grad(loss, argnums=(0, 1)), X, W)
    assert work.flops == {"experts": 3 * PRODUCT, "logprob": 3 * PRODUCT}
