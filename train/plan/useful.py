"""FLOPs that the mathematics of a step asks for, by hand: attention by segment, no rematerialisation, no padding."""

from sat_jax.model import PolicyConfig
from train.plan.load import Load

# A gradient is the forward pass and twice as much backward: by its input and by its weight.
GRADIENT = 3


def forward_flops(policy: PolicyConfig, load: Load, pairs: float) -> dict[str, float]:
    """Of one forward pass over all microbatches of a step, all devices together, by room.

    Args:
      policy: the architecture.
      load: the step.
      pairs: of a query and a key that see each other, of one full row and head.
    """
    positions = load.positions
    rows = load.sequences / load.per_row
    heads = policy.query_heads * policy.head_dim
    linear = policy.width * policy.head_dim * 2 * (policy.query_heads + policy.kv_heads)
    rooms = {
        "attention": policy.layers * (2.0 * positions * linear + 4.0 * heads * pairs * rows),
        "logprob": 2.0 * positions * policy.width * policy.vocab_size,
    }
    if policy.moe_layers:
        active = 3 * policy.experts_per_token * policy.expert_hidden
        rooms["router"] = policy.moe_layers * 2.0 * positions * policy.width * policy.experts
        rooms["experts"] = policy.moe_layers * 2.0 * positions * policy.width * active
    if policy.dense_layers:
        rooms["other"] = len(policy.dense_layers) * 2.0 * positions * policy.width * 3 * policy.dense_hidden
    return rooms
