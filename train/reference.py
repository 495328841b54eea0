"""The frozen reference of the k3 term: its own weights on disk, named by a digest, never the restored policy.

It is scored without replay: the routes that the sampler chose are the policy's, not the reference's.
"""

import dataclasses
from collections import deque
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rollout_bridge.fleet import Weights
from sat_jax.model import Policy, PolicyConfig, hf, hf_files
from sat_jax.types import TokenBatch
from train.export import Export, is_local
from train.step import Batch, Step


@dataclasses.dataclass(frozen=True)
class Reference:
    """Frozen weights.

    Attributes:
      params: float32, on the mesh.
      digest: of their bytes by name; the checkpoint remembers it.
      path: the folder that holds them.
    """

    params: nnx.State
    digest: str
    path: Path

    @classmethod
    def load(cls, path: Path, config: PolicyConfig, mesh: Mesh) -> "Reference":
        """Reads a Hugging Face folder.

        Raises:
          ValueError: it is not this architecture.
        """
        policy = hf.load(path, config=config, mesh=mesh)
        params = nnx.state(policy, nnx.Param)
        return cls(params=params, digest=digest(params, config), path=path)

    @classmethod
    def freeze(cls, graph: nnx.GraphDef, params: nnx.State, config: PolicyConfig, path: Path) -> "Reference":
        """Writes `params` to a folder and keeps a copy of them (the run goes on to donate the originals)."""
        export = Export(config)
        if is_local(params):
            policy: Policy = nnx.merge(graph, params)
            hf.save(policy, path)
        elif jax.process_index() == 0:
            hf_files.write_folder(export.tensors(params), config.to_hf(), path)
        else:
            deque(export.tensors(params), maxlen=0)  # the exchange needs every process
        return cls(params=jax.tree.map(jnp.copy, params), digest=digest(params, config), path=path)

    def logps(self, step: Step, batch: Batch) -> tuple[jax.Array, ...]:
        """Log-probs of every microbatch's targets under the reference, nats, free routing."""
        free = tuple(_without_replay(micro) for micro in batch)
        return tuple(output.logp_BT for output in step.score(self.params, free))


def digest(params: nnx.State, config: PolicyConfig) -> str:
    """Digest of a policy's weights, of their float32 bytes in the order of their Hugging Face names."""
    tensors = dict(Export(config, np.float32).tensors(params))
    return Weights(version=0, model_digest=config.digest(), tensors=tensors).manifest.digest


def _without_replay(micro: TokenBatch) -> TokenBatch:
    trace = dataclasses.replace(micro.trace, present_BT=jnp.zeros_like(micro.trace.present_BT))
    return dataclasses.replace(micro, trace=trace)
