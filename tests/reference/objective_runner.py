"""Runs the objective under `jit`: one program per config for all tests of a process, as all shapes are the same."""

import functools

import jax
import numpy as np

from sat_jax.metrics import Metrics, values
from sat_jax.objective import ObjectiveConfig, denominator, policy_loss
from sat_jax.types import Measured
from tests.reference.batches import Example

ROWS, LENGTH = 3, 16


@functools.partial(jax.jit, static_argnums=1)
def _loss_and_gradient(example, config, measured, total):
    batch, prox_logp_BT, ref_logp_BT = example[1:]

    def scalar(logp_BT):
        return policy_loss(
            logp_BT,
            batch,
            config,
            measured=measured,
            prox_logp_BT=prox_logp_BT,
            ref_logp_BT=ref_logp_BT,
            denominator=total,
        ).loss

    return jax.value_and_grad(scalar)(example[0])


jitted_denominator = jax.jit(denominator, static_argnums=1)  # op by op it is a second, of sequences


@functools.partial(jax.jit, static_argnums=1)
def _metrics(example, config, measured):
    logp_BT, batch, prox_logp_BT, ref_logp_BT = example
    return policy_loss(
        logp_BT, batch, config, measured=measured, prox_logp_BT=prox_logp_BT, ref_logp_BT=ref_logp_BT
    ).metrics


def leaves(example: Example) -> tuple:
    """As `jit` takes it."""
    return example.logp_BT, example.batch, example.prox_logp_BT, example.ref_logp_BT


def loss_and_gradient(
    example: Example,
    config: ObjectiveConfig,
    measured: Measured | None = None,
    total: jax.Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Loss and its gradient in the log-probs, float32. `total` is the global denominator; None = the example's own."""
    total = jitted_denominator(example.batch, config) if total is None else total
    loss, gradient_BT = _loss_and_gradient(leaves(example), config, measured, total)
    return np.asarray(loss), np.asarray(gradient_BT)


def metrics_as_merged(example: Example, config: ObjectiveConfig, measured: Measured | None = None) -> Metrics:
    """The metrics in their mergeable form."""
    return _metrics(leaves(example), config, measured)


def metrics(example: Example, config: ObjectiveConfig, measured: Measured | None = None) -> dict[str, float]:
    """The metrics as Python floats."""
    return values(metrics_as_merged(example, config, measured))
