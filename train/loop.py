"""The loop: one screen. What a step needs stands ready in `Run` (see `train.run`)."""

from pathlib import Path

from train.config import RunConfig
from train.preemption import Preempted
from train.profiling import profiling
from train.recording import batch_path, save_batch
from train.run import Options, Run, open_run, require_finite


def train(config: RunConfig, folder: Path, options: Options | None = None) -> None:
    """Runs from the newest checkpoint of the folder, or from the beginning, to `config.steps`.

    Raises:
      ValueError, OSError, TimeoutError, rollout_bridge.errors.BridgeError: what stopped it, in one sentence; the run
        goes on from its newest checkpoint when it is started again.
      Preempted: the machine is wanted back; likewise.
    """
    options = options or Options()
    with open_run(config, folder, options) as r:
        r.begin()  # the fleet first serves the version that the schedule asks for
        with options.preemption.held(), profiling(options.profile, folder, r.state.version, r.report.event) as profiler:
            try:
                while (version := r.state.version) < config.steps:
                    with profiler.step(version):
                        _step(r, version)
                    r.leave_if_asked()
            except Preempted:
                r.leave()
                raise
        r.finish()


def _step(r: Run, version: int) -> None:
    """One optimizer step: version s becomes s + 1."""
    if not r.minibatches:
        with r.phase("collect", watched=False):
            groups = r.take()
        with r.phase("assemble"):
            r.minibatches.extend(r.prepare(groups, version))
    minibatch = r.minibatches.popleft()
    batch = minibatch.batch
    if r.record:
        save_batch(batch_path(r.folder, version), batch)
    with r.phase("measure"):
        measurement = r.step.measure(r.state, batch)
        references = r.reference_logps(batch)
    with r.phase("publish"):
        r.publisher.wait()  # the next line donates the parameters
    with r.phase("update"):
        # Keeps the old state when not finite.
        r.state, done = r.step.update(r.state, batch, measurement, references, minibatch.prox_logps)
    require_finite(r, done, minibatch, references)  # stops the run with the batch saved; the version has not advanced
    r.note(version + 1, done, minibatch)
    try:
        r.at_edge(version + 1)  # a window's end: checkpoint, publish, evaluate
    finally:
        r.write()  # beside the push: samples wait for that one
