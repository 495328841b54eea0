"""TrainState and how it comes to be: parameters and optimizer state, born with their shardings.

Knows the policy and optax; knows nothing of rollouts, files or clocks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sat_jax.model import Policy, PolicyConfig
from train.moments import DEVICE, HOST, in_memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW after a linear warm-up, behind a global-norm clip.

    Attributes:
      peak_lr: learning rate after the warm-up, constant from there on.
      warmup: steps of the linear warm-up from peak_lr / warmup; 0 = none.
      beta1, beta2, eps, weight_decay: AdamW's (decoupled decay).
      clip_norm: the gradient is scaled down to this global norm.
      mu_dtype: how the mean of gradients is stored, "float32" or "bfloat16" (2 bytes a parameter less); the mean of
        their squares is float32 in either, since bfloat16 would lose small changes of it.
      moments_memory: where both are kept, "device" or "host": the host's memory, from where they visit the devices a
        slice at a time (`train.moments`; on a CPU that is the same RAM). It changes no number.
    """

    peak_lr: float
    warmup: int = 10
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    mu_dtype: str = "float32"
    moments_memory: str = DEVICE

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
          ValueError: a value is out of range.
        """
        for name, value, good, what in (
            ("peak_lr", self.peak_lr, self.peak_lr > 0, "> 0"),
            ("warmup", self.warmup, self.warmup >= 0, ">= 0"),
            ("beta1", self.beta1, 0 <= self.beta1 < 1, "in [0, 1)"),
            ("beta2", self.beta2, 0 <= self.beta2 < 1, "in [0, 1)"),
            ("eps", self.eps, self.eps > 0, "> 0"),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0, ">= 0"),
            ("clip_norm", self.clip_norm, self.clip_norm > 0, "> 0"),
            ("mu_dtype", self.mu_dtype, self.mu_dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
            ("moments_memory", self.moments_memory, self.moments_memory in (DEVICE, HOST), f"{DEVICE} or {HOST}"),
        ):
            if not good:
                raise ValueError(f"optim.{name}: expected {what}, got {value}")

    def learning_rate(self) -> optax.Schedule:
        """Learning rate by number of optimizer steps already applied."""
        if self.warmup == 0:
            return optax.constant_schedule(self.peak_lr)
        return optax.linear_schedule(self.peak_lr / self.warmup, self.peak_lr, max(self.warmup - 1, 1))

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer; `update` may be given the global norm of the gradients, and must be for a part of them."""
        return optax.chain(
            _clip_by_norm(self.clip_norm),
            optax.adamw(
                self.learning_rate(),
                b1=self.beta1,
                b2=self.beta2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mu_dtype=self.mu_dtype,
            ),
        )


def _clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that can be told the norm, so that it works on one parameter of many."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **_rest: Any) -> Any:
        del params
        whole = optax.tree.norm(updates) if norm is None else norm

        def clip(gradient: jax.Array) -> jax.Array:
            return jax.lax.select(whole < limit, gradient, (gradient / whole.astype(gradient.dtype)) * limit)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an optimizer step changes.

    Attributes:
      version: optimizer steps applied; a host integer, never read back from the device.
      params: the policy's parameters (nnx.State of Param, float32).
      opt_state: optax state; every leaf of a parameter's shape has that parameter's sharding, on the device or in the
        host's memory.
    """

    version: int
    params: nnx.State
    opt_state: Any


def init_policy(config: PolicyConfig, seed: int, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """Random parameters on the mesh, made there (no host copy).

    Returns:
      The policy split into its static part and its parameters.
    """
    policy = _maker(config, seed, mesh)()
    graph, params, rest = nnx.split(policy, nnx.Param, ...)
    assert not jax.tree.leaves(rest), "a policy holds nothing but parameters"
    return graph, params


@functools.lru_cache(maxsize=8)
def _maker(config: PolicyConfig, seed: int, mesh: Mesh) -> Callable[[], Policy]:
    """Kept, because compiling takes seconds however small the policy is, and a new function compiles anew."""
    return nnx.jit(lambda: Policy(config, rngs=nnx.Rngs(seed), mesh=mesh))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every leaf, from the parameters' own metadata (moments inherit it; counters are replicated).

    Args:
      tree: an `nnx.State` or an optax state over one; arrays or shape structs.
      mesh: the mesh.
    """
    specs = nnx.get_partition_spec(tree)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec if spec is not None else PartitionSpec()),
        specs,
        is_leaf=lambda node: node is None or isinstance(node, PartitionSpec),
    )


def init_state(
    params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh, moments_memory: str = DEVICE
) -> TrainState:
    """A state of version 0, its moments in that memory (`OptimConfig.moments_memory`).

    `out_shardings` is stated because moments made under `jit` are replicated otherwise.
    """
    abstract = jax.eval_shape(optimizer.init, params)
    placed = in_memory(abstract, shardings(abstract, mesh), moments_memory)
    opt_state = jax.jit(optimizer.init, out_shardings=placed)(params)
    return TrainState(version=0, params=params, opt_state=opt_state)
