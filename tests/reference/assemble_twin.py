"""The slow, obvious twin of `train.assemble`: every position of every sequence, one at a time."""

import numpy as np


def positions(groups, version, advantage_PM, replay):
    """Per completion, one tuple a position: (input, target, position, active, logp, advantage, lag, routes)."""
    sequences = []
    for p, group in enumerate(groups):
        for m, completion in enumerate(group.completions):
            prompt = [int(token) for token in group.prompt_tokens]
            sampled = [int(token) for token in completion.tokens]
            tokens = prompt + sampled
            rows = []
            for t in range(len(tokens) - 1):  # the last sampled token is never fed
                number = t + 1 - len(prompt)  # which sampled token is predicted here; negative: a prompt token is
                active = number >= 0
                trace = completion.trace
                row = -1 if trace is None else t - trace.first_row
                routes = None
                if replay and trace is not None and row >= 0:
                    routes = tuple(trace.experts_TLK[row].ravel().tolist())
                rows.append(
                    (
                        tokens[t],
                        tokens[t + 1],
                        t,
                        active,
                        float(completion.behavior_logp[number]) if active else 0.0,
                        float(advantage_PM[p, m]) if active else 0.0,
                        version - int(completion.version[number]) if active else 0,
                        routes,
                    )
                )
            sequences.append(rows)
    return sequences


def unpacked(microbatches):
    """The same tuples, read back out of packed microbatches, per segment."""
    sequences = []
    for micro in microbatches:
        for b in range(micro.input_BT.shape[0]):
            for segment in range(1, int(micro.segment_BT[b].max()) + 1):
                rows = []
                for t in np.flatnonzero(micro.segment_BT[b] == segment):
                    present = bool(micro.trace.present_BT[b, t])
                    rows.append(
                        (
                            int(micro.input_BT[b, t]),
                            int(micro.target_BT[b, t]),
                            int(micro.position_BT[b, t]),
                            bool(micro.loss_mask_BT[b, t]),
                            float(micro.behavior_logp_BT[b, t]),
                            float(micro.advantage_BT[b, t]),
                            int(micro.lag_BT[b, t]),
                            tuple(micro.trace.experts_LBTK[:, b, t].ravel().tolist()) if present else None,
                        )
                    )
                sequences.append(rows)
    return sequences
