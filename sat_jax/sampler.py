"""Sampling with a KV cache, many sequences at once: one program, one token of every slot a step.

A slot holds one sequence. A step feeds each running slot its next known token: one of the prompt's while any is left,
then the one that it sampled last. Prompts go through the same step as sampled tokens and a slot never meets another,
so a sequence's bits depend on the weights and on itself alone: not on its slot, its companions, when it was admitted,
or whether a part of it came as the prompt of a continuation. `retract` rebuilds a cache under other weights by starting
over at position 0 with everything known.

All shapes follow from `SlotsConfig`, so a sampler compiles `admit`, `decode` and `take` once each. In array names B is
a slot and S a position of its sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sat_jax.model import Policy, PolicyConfig
from sat_jax.model.attention import attend
from sat_jax.model.layers import Layer
from sat_jax.routing import id_dtype
from sat_jax.shapes import check_shapes

# What the host fills in or reads is NumPy there and JAX on the device.
Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotsConfig:
    """How much is held at once.

    Attributes:
      slots: sequences; a step costs about the same whether few or all of them run.
      positions: longest prompt + completion, tokens. The cache holds slots * positions * layers * kv_heads * head_dim
        numbers of the compute type, twice.
      stop_ids: most stop ids of one sequence.

    Raises:
      ValueError: a count is below 1.
    """

    slots: int
    positions: int
    stop_ids: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"slots.{field.name}: expected at least 1, got {getattr(self, field.name)}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What is asked of each slot.

    Attributes:
      prompt_B: int32; tokens of the prompt, 1 .. S - 1.
      sampled_B: int32; how many trailing prompt tokens were sampled earlier (a continuation); 0 otherwise.
      limit_B: int32; most tokens of prompt and completion together, above `prompt_B`, at most S.
      seed_low_B: uint32; lower half of the seed.
      seed_high_B: uint32; upper half. Token number t of a completion (`sampled_B` tokens included) draws from a key of
        (seed, member, t) alone.
      member_B: uint32.
      temperature_B: float32, >= 0; 0 is greedy, with log-probs at temperature 1.
      top_p_B: float32 in (0, 1]; keeps the fewest most probable tokens that have this mass; 1 = off.
      top_k_B: int32; keeps this many most probable tokens; 0 = off. Both are measured on the untruncated distribution
        and a token must be kept by both; among equals the lowest id comes first.
      stop_ids: int32 [B, stop ids], filled up with -1; sampling one of them ends the sequence.
    """

    prompt_B: Array
    sampled_B: Array
    limit_B: Array
    seed_low_B: Array
    seed_high_B: Array
    member_B: Array
    temperature_B: Array
    top_p_B: Array
    top_k_B: Array
    stop_ids: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """New sequences; entries of slots where `new_B` is False are ignored.

    Attributes:
      new_B: bool; which slots take a new sequence.
      token_BS: int32; the prompt from position 0, anything after it.
      terms: what is asked of them.
    """

    new_B: Array
    token_BS: Array
    terms: Terms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """The sampler's whole state, on the device.

    Attributes:
      terms: what is asked of each slot.
      running_B: bool; whether the slot still samples.
      fed_B: int32; how many positions the cache holds.
      known_B: int32; tokens of prompt and completion so far. Of a finished slot the last one was never fed.
      token_BS: int32; those tokens.
      logp_BS: float32, nats, <= 0; log-prob of the sampled token at this position under softmax(logits / temperature),
        before truncation. Meaningless in the prompt.
      sampler_BS: int32; version of the weights that sampled the token at this position.
      router_BS: int32; version of the weights that routed this position when it was fed.
      experts_LBSK: uint8 or uint16; its routes, of the layers with experts.
      key_LBSGC: cached keys of all layers, compute type.
      value_LBSGC: cached values of all layers, compute type.
    """

    terms: Terms
    running_B: jax.Array
    fed_B: jax.Array
    known_B: jax.Array
    token_BS: jax.Array
    logp_BS: jax.Array
    sampler_BS: jax.Array
    router_BS: jax.Array
    experts_LBSK: jax.Array
    key_LBSGC: jax.Array
    value_LBSGC: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """What some slots hold, one row each, for the host; fields as in `Slots`, `experts_BSLK` position first."""

    token_BS: Array
    logp_BS: Array
    sampler_BS: Array
    router_BS: Array
    experts_BSLK: Array


def empty_slots(config: SlotsConfig, policy: PolicyConfig) -> Slots:
    """A sampler in which nothing runs; no two leaves share a buffer, so that all may be donated.

    Raises:
      ValueError: the slots are longer than the policy's longest sequence.
    """
    if config.positions > policy.max_positions:
        raise ValueError(
            f"slots.positions: expected at most max_positions = {policy.max_positions} (the policy's), got "
            f"{config.positions}; lower batch.row_length or sample from a policy that reaches further"
        )

    def zeros(*axes: int, dtype="int32"):
        return jnp.zeros((config.slots, *axes), dtype)

    def stacked(layers: int, *axes: int, dtype):
        return jnp.zeros((layers, config.slots, config.positions, *axes), dtype)

    terms = Terms(
        prompt_B=zeros(),
        sampled_B=zeros(),
        limit_B=zeros(),
        seed_low_B=zeros(dtype="uint32"),
        seed_high_B=zeros(dtype="uint32"),
        member_B=zeros(dtype="uint32"),
        temperature_B=zeros(dtype="float32"),
        top_p_B=zeros(dtype="float32"),
        top_k_B=zeros(),
        stop_ids=zeros(config.stop_ids),
    )
    return Slots(
        terms=terms,
        running_B=zeros(dtype="bool"),
        fed_B=zeros(),
        known_B=zeros(),
        token_BS=zeros(config.positions),
        logp_BS=zeros(config.positions, dtype="float32"),
        sampler_BS=zeros(config.positions),
        router_BS=zeros(config.positions),
        experts_LBSK=stacked(policy.moe_layers, policy.experts_per_token, dtype=id_dtype(policy.experts)),
        key_LBSGC=stacked(policy.layers, policy.kv_heads, policy.head_dim, dtype=policy.dtype),
        value_LBSGC=stacked(policy.layers, policy.kv_heads, policy.head_dim, dtype=policy.dtype),
    )


def admit(slots: Slots, admission: Admission) -> Slots:
    """Puts new sequences into slots, replacing what was there; `decode` feeds their prompts."""
    check_shapes(new_B=admission.new_B, token_BS=admission.token_BS, running_B=slots.running_B)
    new_B = admission.new_B

    def replace(new, old):
        return jnp.where(new_B.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    # Positions not yet fed get weight 0 in attention; 0 * NaN, left by a sequence that overflowed, would not be 0.
    value_LBSGC = jnp.where(new_B[:, None, None, None], 0, slots.value_LBSGC)
    return dataclasses.replace(
        slots,
        terms=jax.tree.map(replace, admission.terms, slots.terms),
        running_B=new_B | slots.running_B,
        fed_B=replace(0, slots.fed_B),
        known_B=replace(admission.terms.prompt_B, slots.known_B),
        token_BS=replace(admission.token_BS, slots.token_BS),
        value_LBSGC=value_LBSGC,
    )


def retract(slots: Slots) -> Slots:
    """Makes every running slot feed all of its known tokens again; tokens, log-probs and their versions stay."""
    return dataclasses.replace(slots, fed_B=jnp.where(slots.running_B, 0, slots.fed_B))


def halt(slots: Slots, halted_B: Array) -> Slots:
    """Ends some slots where they are."""
    check_shapes(halted_B=halted_B, running_B=slots.running_B)
    return dataclasses.replace(slots, running_B=slots.running_B & ~halted_B)


def take(slots: Slots, slot_N: Array) -> Sequences:
    """Gathers what the slots numbered `slot_N` hold; a number may repeat."""
    check_shapes(slot_N=slot_N, token_BS=slots.token_BS)
    return Sequences(
        token_BS=slots.token_BS[slot_N],
        logp_BS=slots.logp_BS[slot_N],
        sampler_BS=slots.sampler_BS[slot_N],
        router_BS=slots.router_BS[slot_N],
        experts_BSLK=jnp.moveaxis(slots.experts_LBSK[:, slot_N], 0, 2),
    )


def decode(policy: Policy, slots: Slots, version: jax.Array, steps: jax.Array, enough: jax.Array) -> Slots:
    """Feeds every running slot up to `steps` tokens and samples where its known tokens are used up.

    Args:
      policy: the weights; its config is that of `empty_slots`.
      slots: the state.
      version: int32; recorded with every token sampled and every position routed here.
      steps: int32; most tokens a slot.
      enough: int32; returns early once this many slots are idle (all, if larger: it always returns when none runs).

    Returns:
      The state after it.
    """
    check_shapes(version=version, steps=steps, enough=enough, token_BS=slots.token_BS, running_B=slots.running_B)
    graph, weights = nnx.split(policy)
    idle_limit = jnp.minimum(enough, slots.running_B.shape[0])

    def unfinished(carry):
        step, slots = carry
        return (step < steps) & ((~slots.running_B).sum() < idle_limit)

    def advance(carry):
        step, slots = carry
        # Merged inside the loop: NNX modules may not cross into another trace.
        return step + 1, _step(nnx.merge(graph, weights, copy=True), slots, version)

    return lax.while_loop(unfinished, advance, (jnp.int32(0), slots))[1]


def _step(policy: Policy, slots: Slots, version: jax.Array) -> Slots:
    count, positions = slots.token_BS.shape
    row_B, at_B = jnp.arange(count), slots.fed_B
    fed_BT = jnp.take_along_axis(slots.token_BS, at_B[:, None], axis=1, mode="clip")
    hidden_BTD, slots = _feed(policy, slots, fed_BT)
    samples_B = slots.running_B & (at_B + 1 == slots.known_B)
    # Nothing is sampled while all slots are inside their prompts.
    token_B, logp_B = lax.cond(
        samples_B.any(),
        lambda: _sample(policy.logits(hidden_BTD)[:, 0], slots),
        lambda: (jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.float32)),
    )
    to_B = jnp.where(samples_B, slots.known_B, positions)  # out of bounds writes nothing
    known_B = slots.known_B + samples_B
    stopped_B = (token_B[:, None] == slots.terms.stop_ids).any(axis=-1) | (known_B >= slots.terms.limit_B)
    at_B = jnp.where(slots.running_B, at_B, positions)
    return dataclasses.replace(
        slots,
        running_B=slots.running_B & ~(samples_B & stopped_B),
        fed_B=slots.fed_B + slots.running_B,
        known_B=known_B,
        token_BS=slots.token_BS.at[row_B, to_B].set(token_B, mode="drop"),
        logp_BS=slots.logp_BS.at[row_B, to_B].set(logp_B, mode="drop"),
        sampler_BS=slots.sampler_BS.at[row_B, to_B].set(version, mode="drop"),
        router_BS=slots.router_BS.at[row_B, at_B].set(version, mode="drop"),
    )


def _feed(policy: Policy, slots: Slots, fed_BT: jax.Array) -> tuple[jax.Array, Slots]:
    """Runs one token of each slot through the layers, at position `fed_B`, and caches it."""
    count, positions = slots.token_BS.shape
    row_B, running_BT = jnp.arange(count), slots.running_B[:, None]
    position_BT = slots.fed_B[:, None]
    visible_BTS = jnp.arange(positions) <= position_BT[..., None]
    write_B = jnp.where(slots.running_B, slots.fed_B, positions)  # out of bounds writes nothing
    free_BTK = jnp.zeros((count, 1, policy.config.experts_per_token), slots.experts_LBSK.dtype)
    nowhere_BT = jnp.zeros((count, 1), bool)

    def run_layer(layer: Layer, carry, number, routed):
        x_BTD, key_LBSGC, value_LBSGC, experts_LBSK = carry
        q_BTHC, k_BTGC, v_BTGC = layer.project(x_BTD, position_BT)
        key_LBSGC = key_LBSGC.at[number, row_B, write_B].set(k_BTGC[:, 0], mode="drop")
        value_LBSGC = value_LBSGC.at[number, row_B, write_B].set(v_BTGC[:, 0], mode="drop")
        x_BTD = layer.merge(x_BTD, attend(q_BTHC, key_LBSGC[number], value_LBSGC[number], visible_BTS))
        replayed_BTK = None if routed is None else free_BTK
        x_BTD, experts_BTK, _ = layer.feed_forward(x_BTD, replayed_BTK, nowhere_BT, running_BT)
        if experts_BTK is not None:
            experts_LBSK = experts_LBSK.at[routed, row_B, write_B].set(experts_BTK[:, 0], mode="drop")
        return (x_BTD, key_LBSGC, value_LBSGC, experts_LBSK), None

    carry = (policy.embed(fed_BT), slots.key_LBSGC, slots.value_LBSGC, slots.experts_LBSK)
    carry, _ = policy.over_layers(run_layer, carry, jnp.arange(policy.config.moe_layers))
    x_BTD, key_LBSGC, value_LBSGC, experts_LBSK = carry
    slots = dataclasses.replace(slots, key_LBSGC=key_LBSGC, value_LBSGC=value_LBSGC, experts_LBSK=experts_LBSK)
    return policy.final(x_BTD), slots


def _sample(logit_BV: jax.Array, slots: Slots) -> tuple[jax.Array, jax.Array]:
    """A token of each slot and its log-prob, nats, before truncation."""
    terms = slots.terms
    greedy_B = terms.temperature_B == 0
    logp_BV = jax.nn.log_softmax(logit_BV / jnp.where(greedy_B, 1, terms.temperature_B)[:, None])
    truncates_B = (terms.top_p_B < 1) | (terms.top_k_B > 0)
    kept_BV = lax.cond(
        (truncates_B & slots.running_B).any(),
        lambda: _kept(logp_BV, terms.top_p_B, terms.top_k_B),
        lambda: jnp.ones(logp_BV.shape, bool),
    )
    number_B = slots.known_B - terms.prompt_B + terms.sampled_B
    noise_BV = jax.vmap(_noise, in_axes=(0, 0, 0, 0, None))(
        terms.seed_low_B, terms.seed_high_B, terms.member_B, number_B, logp_BV.shape[1]
    )
    # Gumbel: the argmax of log-prob plus such noise is a sample of the (kept, renormalised) distribution.
    race_BV = jnp.where(greedy_B[:, None], logp_BV, jnp.where(kept_BV, logp_BV + noise_BV, -jnp.inf))
    token_B = jnp.argmax(race_BV, axis=-1).astype(jnp.int32)
    logp_B = jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0]
    return token_B, jnp.minimum(logp_B, 0)


def _noise(seed_low: Array, seed_high: Array, member: Array, number: Array, size: int) -> jax.Array:
    key = jax.random.key(seed_low, impl="threefry2x32")
    for word in (seed_high, member, number):
        key = jax.random.fold_in(key, word)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _kept(logp_BV: jax.Array, top_p_B: Array, top_k_B: Array) -> jax.Array:
    """Which tokens both top-p and top-k keep; the most probable one always is."""
    token_BV = jnp.broadcast_to(jnp.arange(logp_BV.shape[1]), logp_BV.shape)
    falling_BV, order_BV = lax.sort((-logp_BV, token_BV), dimension=-1, num_keys=2)
    p_BV = jnp.exp(-falling_BV)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    within_p_BV = (before_BV < top_p_B[:, None]) | (top_p_B >= 1)[:, None]
    within_k_BV = (token_BV < top_k_B[:, None]) | (top_k_B <= 0)[:, None]
    # Both keep a prefix of the sorted tokens, so the last one that both keep says of every token whether it is kept.
    last = jnp.maximum((within_p_BV & within_k_BV).sum(axis=-1, keepdims=True) - 1, 0)
    least = -jnp.take_along_axis(falling_BV, last, axis=-1)
    latest = jnp.take_along_axis(order_BV, last, axis=-1)
    return (logp_BV > least) | ((logp_BV == least) & (token_BV <= latest))
