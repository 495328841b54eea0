"""A run's batches on disk, so that an update can be made again without an engine.

`batches/v<version>.npz` holds what the step from that version on trained on, as it was assembled: tokens, log-probs,
advantages and replayed routes. A step that was not finite leaves its batch in the same form beside it.
"""

import dataclasses
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from sat_jax.types import RoutingTrace, TokenBatch
from train.assemble import place
from train.reference import Reference
from train.state import TrainState
from train.step import Batch, Step, StepReport, host_batch

BATCHES = "batches"
_NAME = re.compile(r"micro(\d+)\.(?:trace\.)?(\w+)")


def batch_path(folder: Path, version: int) -> Path:
    """Where the batch of the step from `version` on is, in a run folder."""
    return folder / BATCHES / f"v{version:06d}.npz"


def save_batch(path: Path, batch: Batch) -> None:
    """Writes a batch; the name is there only once the file is whole. Of several processes a collective; one writes.

    Raises:
      OSError: it cannot be written.
    """
    arrays = host_batch(batch)
    if jax.process_index():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial.npz")
    np.savez(temporary, allow_pickle=False, **arrays)  # pyright: ignore[reportArgumentType]
    temporary.replace(path)


def load_batch(path: Path) -> tuple[TokenBatch, ...]:
    """Reads a batch into host microbatches (NumPy leaves).

    Raises:
      ValueError: the file is not a batch.
      OSError: it cannot be read.
    """
    micros: dict[int, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            found = _NAME.fullmatch(name)
            if found is None:
                raise ValueError(f"{path}: expected arrays of microbatches, got {name!r}; is it a saved batch?")
            micros.setdefault(int(found[1]), {})[found[2]] = file[name]
    return tuple(_micro(micros[index], path) for index in sorted(micros))


def _micro(arrays: Mapping[str, np.ndarray], path: Path) -> TokenBatch:
    rest = dict(arrays)
    wanted = {field.name for kind in (TokenBatch, RoutingTrace) for field in dataclasses.fields(kind)} - {"trace"}
    if rest.keys() != wanted:
        raise ValueError(f"{path}: expected the arrays {sorted(wanted)}, got {sorted(rest)}")
    trace = RoutingTrace(experts_LBTK=rest.pop("experts_LBTK"), present_BT=rest.pop("present_BT"))  # type: ignore[arg-type]
    return TokenBatch(**rest, trace=trace)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayer:
    """Makes updates again.

    Attributes:
      step: the compiled functions of the run's objective.
      mesh: where the state lives; any that fits the batch.
      reference: of the k3 term, or None.
      minibatches: optimizer steps of a batch.
      proximal: whether the objective compares with the policy at the batch's start.
    """

    step: Step
    mesh: jax.sharding.Mesh
    reference: Reference | None
    minibatches: int
    proximal: bool

    def run(self, state: TrainState, paths: Iterator[Path]) -> Iterator[tuple[Path, TrainState, StepReport]]:
        """Updates by one file after the other; the first begins a batch.

        Args:
          state: to start from; its buffers are donated.
          paths: of the steps, in order.

        Yields:
          The file, the state after it, and what the step reported; ends after one that was not finite.
        """
        waiting: deque[tuple[Path, Batch, tuple[jax.Array, ...] | None]] = deque()
        while waiting or (waiting := self._batch(state, paths)):
            path, batch, prox_logps = waiting.popleft()
            measurement = self.step.measure(state, batch)
            references = None if self.reference is None else self.reference.logps(self.step, batch)
            state, done = self.step.update(state, batch, measurement, references, prox_logps)
            yield path, state, done
            if not done.finite:
                return

    def _batch(
        self, state: TrainState, paths: Iterator[Path]
    ) -> deque[tuple[Path, Batch, tuple[jax.Array, ...] | None]]:
        found: deque[tuple[Path, Batch, tuple[jax.Array, ...] | None]] = deque()
        for _, path in zip(range(self.minibatches), paths, strict=False):  # this way round: no path is lost
            batch = place(load_batch(path), self.mesh)
            prox_logps = None
            if self.proximal:
                prox_logps = tuple(output.logp_BT for output in self.step.score(state.params, batch))
            found.append((path, batch, prox_logps))
        return found
