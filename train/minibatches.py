"""Groups -> what the optimizer steps of a batch train on, on the mesh."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from train.alarms import too_few_sequences
from train.assemble import AssembleConfig, AssembleStats, assemble
from train.config import RunConfig
from train.freshness import mask_stale
from train.groups import Group
from train.place import place, place_part
from train.step import Batch, Step
from train.team import Team


@dataclasses.dataclass(frozen=True, kw_only=True)
class Minibatch:
    """What one optimizer step trains on.

    Attributes:
      batch: on the mesh.
      stats: what is in it.
      prox_logps: log-probs of every microbatch before the first step of the batch that this is a part of, nats; None
        where the objective does without.
      masked: tokens that were too old and are not trained on.
    """

    batch: Batch
    stats: AssembleStats
    prox_logps: tuple[jax.Array, ...] | None
    masked: int = 0


@dataclasses.dataclass(kw_only=True)
class Preparation:
    """How a run's groups become minibatches.

    Attributes:
      config, step, mesh, team: of the run.
      assembly: what a batch must look like.
      tell: takes a kind and a text, for warnings.
    """

    config: RunConfig
    assembly: AssembleConfig
    step: Step
    mesh: Mesh
    team: Team
    tell: Callable[[str, str], None]
    _few_said: bool = False

    def minibatches(self, groups: Sequence[Group], version: int, params: nnx.State) -> Iterator[Minibatch]:
        """Cuts the groups of a batch into its minibatches.

        Args:
          groups: of this process, in the order of the steps.
          version: of the trainer at the first of them.
          params: of that version.
        """
        share = self.team.share
        size = share.part(self.config.batch.groups_per_step, "batch.groups_per_step")
        put = place if share.processes == 1 else place_part
        for index in range(self.config.batch.minibatches):
            own = groups[index * size : (index + 1) * size]
            assembled = assemble(own, version + index, self.assembly, self.team.exchange)
            masked = 0
            if self.config.schedule.mode == "bounded" and self.config.schedule.too_old == "mask":
                assembled, masked = mask_stale(assembled, self.config.schedule.max_lag)
            self._say_if_few(assembled.stats)
            batch = put(assembled.microbatches, self.mesh)
            prox_logps = None
            if self.config.objective.config.needs_proximal:
                prox_logps = tuple(output.logp_BT for output in self.step.score(params, batch))
            yield Minibatch(batch=batch, stats=assembled.stats, prox_logps=prox_logps, masked=masked)

    def _say_if_few(self, stats: AssembleStats) -> None:
        objective = self.config.objective.config
        if self._few_said or objective.radii != "sat" or objective.mismatch == "token" or not objective.clips:
            return
        said = too_few_sequences(stats.sequences_each, objective.quantile, objective.quantile_scope)
        if said is not None:
            self._few_said = True
            self.tell("warning", said)
