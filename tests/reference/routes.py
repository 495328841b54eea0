"""The slow obvious twin of rollout_bridge.checks.check_routes."""


def first_bad_row(experts_TLK, num_experts):
    """(row, layer) of the first ids that are not K distinct ones below E; None if there are none."""
    for row, layers in enumerate(experts_TLK.tolist()):
        for layer, ids in enumerate(layers):
            if len(set(ids)) != len(ids) or max(ids) >= num_experts:
                return row, layer
    return None
