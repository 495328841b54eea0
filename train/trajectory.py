"""A completion that several calls to the fleet and some code made together."""

import dataclasses

import numpy as np

from rollout_bridge.messages import Completion


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory(Completion):
    """A completion of which code inserted some tokens; they have log-prob 0, which nobody reads.

    Attributes:
      sampled: bool[N], whether the policy sampled each token; the last one always was.
      last_turn: index of the first token of the last sampled stretch.
      turns: calls that sampled.
    """

    sampled: np.ndarray
    last_turn: int
    turns: int
