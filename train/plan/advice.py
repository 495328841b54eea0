"""What to change when a step does not fit: settings, in order of what they free."""

import dataclasses
import math

from sat_jax.model import PolicyConfig
from train.config import RunConfig
from train.moments import HOST
from train.plan.memory import Resident, saved_bytes

_REMAT = ("none", "projections", "attention", "full")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change.

    Attributes:
      settings: "a.b=c" each, as `--set` takes them.
      frees: bytes a device, estimated.
      why: a sentence.
      about: names the bytes, where other advice is about the same: only one of them is to be taken. Else "".
    """

    settings: tuple[str, ...]
    frees: int
    why: str
    about: str = ""


def advise(
    config: RunConfig, policy: PolicyConfig, resident: Resident, temporary: int, hosted: int
) -> tuple[Advice, ...]:
    """Changes that free memory, largest first.

    Args:
      config: the run.
      policy: its architecture.
      resident: what lives between programs.
      temporary: bytes a device of the fullest program's own, beyond what it was given.
      hosted: that the fullest moment is less by when the moments are in the host's memory.
    """
    found = [
        *_remat(config, policy),
        *_smaller(config, temporary),
        *_mesh(config, policy, resident),
        *_moments(config, resident, hosted),
    ]
    return tuple(sorted((one for one in found if one.frees > 0), key=lambda one: -one.frees))


def _remat(config: RunConfig, policy: PolicyConfig) -> list[Advice]:
    """The policies that keep less; of none, which keeps every intermediate value, not the one that keeps the most."""
    positions = config.batch.rows * config.batch.row_length // config.mesh.batch_shards

    def saved(remat: str) -> int | None:
        return saved_bytes(dataclasses.replace(policy, remat=remat), positions, config.mesh.tensor)

    before = saved(policy.remat)
    if before is None:
        # Inputs of every product: the norms', queries, keys, values, the experts' rows in and out.
        size = 2 if policy.dtype == "bfloat16" else 4
        before = (saved("attention") or 0) + policy.layers * positions * 8 * policy.width * size
    found = []
    for target, again in (("attention", "all but attention"), ("full", "all of a layer")):
        if _REMAT.index(target) > _REMAT.index(policy.remat):
            why = f"the backward pass computes {again} again"
            frees = before - (saved(target) or 0)
            found.append(Advice(settings=(f"policy.remat={target}",), frees=frees, why=why, about="layers"))
    return found


def _smaller(config: RunConfig, temporary: int) -> list[Advice]:
    """Half of a device's rows; where it has but one, rows of half the length."""
    batch, shards = config.batch, config.mesh.batch_shards
    if batch.rows > shards:
        rows = math.ceil(batch.rows / shards / 2) * shards
        share = 1 - rows / batch.rows
        why = "fewer rows of a microbatch: more microbatches a step"
        return [Advice(settings=(f"batch.rows={rows}",), frees=int(temporary * share), why=why)]
    length, prompt = batch.row_length // 2, batch.row_length - config.sampling.max_new_tokens
    if length <= prompt + 1:
        return []
    settings = (f"sampling.max_new_tokens={length - prompt}", f"batch.row_length={length}")
    why = "shorter completions and rows: a row has to fit one group of `tensor`, and here each has but one"
    return [Advice(settings=settings, frees=temporary // 2, why=why)]


def _mesh(config: RunConfig, policy: PolicyConfig, resident: Resident) -> list[Advice]:
    """Copies of the model become shards of it."""
    mesh = config.mesh
    width = mesh.fsdp * mesh.data
    if mesh.data == 1 or policy.width % width:
        return []
    held = resident.parameters + resident.optimizer + resident.accumulator + resident.reference
    why = "shards of every parameter in place of copies: more gathers"
    settings = ("mesh.data=1", f"mesh.fsdp={width}")
    return [Advice(settings=settings, frees=int(held * (1 - 1 / mesh.data)), why=why)]


def _moments(config: RunConfig, resident: Resident, hosted: int) -> list[Advice]:
    """Fewer bytes of them, or none on the device; what is advised of the mesh may leave but a part of them there."""
    if config.optim.moments_memory == HOST:
        return []
    found, copies = [], config.mesh.data
    if config.optim.mu_dtype != "bfloat16":
        why = "the mean of gradients in two bytes a parameter"
        found.append(("optim.mu_dtype=bfloat16", resident.parameters // 2, why))
    why = "the optimizer in the host's memory: each step its moments pass the link to the host and back"
    found.append((f"optim.moments_memory={HOST}", hosted, why))
    return [
        Advice(settings=(setting,), frees=frees // copies, why=why, about="moments") for setting, frees, why in found
    ]


def enough(advice: tuple[Advice, ...], missing: int) -> tuple[Advice, ...]:
    """The first of them that together free what is missing; all of them where they do not.

    Of those about the same bytes the one that frees least, where it does, and else the first.
    """
    freed, taken, settled = 0, [], set[str]()
    for one in advice:
        if freed >= missing:
            break
        if one.about in settled:
            continue
        rivals = [other for other in advice if one.about and other.about == one.about]
        # Largest first, so the last that does is the least.
        chosen = next((other for other in reversed(rivals) if freed + other.frees >= missing), one)
        settled |= {chosen.about} - {""}
        taken.append(chosen)
        freed += chosen.frees
    return tuple(taken)
