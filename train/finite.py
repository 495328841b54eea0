"""A step that was not finite stops the run; what made it so is named."""

from typing import TYPE_CHECKING

import jax

from sat_jax import objective as objectives
from train.export import whole
from train.recording import save_batch
from train.step import StepReport

if TYPE_CHECKING:
    from train.minibatches import Minibatch
    from train.run import Run


def require_finite(
    r: "Run", done: StepReport, minibatch: "Minibatch", references: tuple[jax.Array, ...] | None
) -> None:
    """Stops the run when a loss or gradient was not finite; the batch is saved, the state is as it was.

    Raises:
      ValueError: names the first cause that can be seen, and the saved batch.
    """
    if done.finite:
        return
    version, batch = r.state.version, minibatch.batch
    nothing = (None,) * len(batch)
    path = r.folder / f"nonfinite-v{version}.npz"
    save_batch(path, batch)
    causes = [
        cause
        for micro, output, prox_logp_BT, ref_logp_BT in zip(
            whole(batch),
            whole(r.step.score(r.state.params, batch)),
            whole(minibatch.prox_logps or nothing),
            whole(references or nothing),
            strict=True,
        )
        if (
            cause := objectives.first_nonfinite(
                output.logp_BT, micro, prox_logp_BT=prox_logp_BT, ref_logp_BT=ref_logp_BT
            )
        )
        is not None
    ]
    raise ValueError(
        f"step {version}: expected a finite loss and gradient, got loss {done.metrics['loss']}, gradient norm "
        f"{done.metrics['grad_norm']}; {causes[0] if causes else 'the log-probs are finite: the gradient overflowed'}; "
        f"the state is unchanged and the batch is in {path} (tools/replay_batch.py makes the step again)"
    )
