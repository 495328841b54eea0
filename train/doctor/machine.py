"""Disk, clock, memory, and the arithmetic of a batch."""

import dataclasses
import math

from train.alarms import too_few_sequences
from train.assemble import pack
from train.config import RunConfig
from train.doctor.finding import Finding, fail, ok, warn

_STATE_BYTES = 12  # float32 parameter and two moments, in memory and in a checkpoint
_GRADIENT_BYTES = 4
_SKEW_SECONDS = 5.0
_YEAR_2024 = 1_704_067_200  # seconds since 1970


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What was measured.

    Attributes:
      disk_free: bytes that are free where run folders are.
      memory: bytes of one device (of the host, where that is the device).
      devices: on the mesh.
      clock: seconds since 1970, of this process.
      disk_clock: the same, as the run folder's file system stamps a file written now.
    """

    disk_free: int
    memory: int
    devices: int
    clock: float
    disk_clock: float


def check_disk(machine: Machine, parameters: int, keep: int) -> Finding:
    """`machine: disk`: room for the checkpoints that are kept and the one that is being written."""
    needed = _STATE_BYTES * parameters * (keep + 1)
    said = f"{_size(machine.disk_free)} free, {keep + 1} checkpoints take {_size(needed)}"
    if machine.disk_free < needed:
        return fail("machine: disk", said, "free some, lower checkpoint.keep, or --runs DIR elsewhere")
    if machine.disk_free < 2 * needed:
        return warn("machine: disk", said, "logs and other runs need room, too")
    return ok("machine: disk", said)


def check_clock(machine: Machine) -> Finding:
    """`machine: clock`: the time is plausible, and that of the run folder's file system agrees."""
    skew = machine.disk_clock - machine.clock
    if machine.clock < _YEAR_2024 or abs(skew) > _SKEW_SECONDS:
        return fail(
            "machine: clock",
            f"this host says {machine.clock:.0f} s since 1970, the run folder's file system {skew:+.1f} s",
            "set both by NTP: certificates, logs and restarts compare times",
        )
    return ok("machine: clock", f"the run folder's file system differs by {skew:+.2f} s")


def check_memory(machine: Machine, config: RunConfig, parameters: int) -> Finding:
    """`machine: memory`: parameters, moments and gradients fit each device, with room for activations.

    A lower bound; `sat-jax plan` compiles the step and reads the real figure.
    """
    mesh = config.mesh
    shards = mesh.fsdp * mesh.expert * mesh.tensor
    state = (_STATE_BYTES + _GRADIENT_BYTES) * parameters / shards
    rows = config.batch.rows / mesh.batch_shards
    # The residual stream of every layer is kept for the backward pass, twice without remat for what is inside one.
    kept = config.policy.layers * (1 if config.policy.remat == "full" else 12)
    activations = 4 * rows * config.batch.row_length * config.policy.width * kept
    needed = int(state + activations)
    said = f"at least {_size(needed)} a device, {_size(machine.memory)} there ({parameters:,} parameters)"
    if needed > machine.memory:
        return fail(
            "machine: memory", said, "raise mesh.fsdp or mesh.expert, lower batch.rows, or set policy.remat=full"
        )
    if needed > 0.7 * machine.memory:
        return warn("machine: memory", said, "compile the real step first: sat-jax plan")
    return ok("machine: memory", said)


def check_batch(config: RunConfig, prompts: int, longest_prompt: int) -> list[Finding]:
    """`batch: arithmetic`, `batch: threshold` and `batch: epochs`.

    Args:
      config: of the run.
      prompts: training prompts.
      longest_prompt: tokens.
    """
    batch = config.batch
    sequences = batch.groups_per_step * batch.group_size
    positions = min(longest_prompt + config.sampling.max_new_tokens - 1, batch.row_length)
    micro = math.ceil(len(pack([positions] * sequences, batch.row_length)) / batch.rows)
    said = (
        f"{batch.groups_per_step} groups x {batch.group_size} = {sequences} sequences a step, at most {positions} "
        f"positions each: at most {micro} microbatches of {batch.rows} x {batch.row_length}; "
        f"lag at most {config.plan.max_lag}"
    )
    findings = [ok("batch: arithmetic", said)]
    if batch.rows * (batch.row_length // positions) > 2 * sequences:
        remedy = f"batch.rows={math.ceil(sequences / (batch.row_length // positions))} holds a whole step"
        findings = [warn("batch: arithmetic", f"{said}; more than half of every microbatch is padding", remedy)]
    elif micro > 64:
        findings = [warn("batch: arithmetic", said, "few rows at a time waste the device: raise batch.rows")]
    findings += _threshold(config, sequences, micro)
    groups = config.steps * batch.groups_per_step
    epochs = groups / prompts
    passes = f"{config.steps} steps take {groups} groups: {epochs:.1f} passes over {prompts} prompts"
    if batch.groups_per_step > prompts:
        findings.append(
            fail(
                "batch: epochs", f"{passes}; a step holds a prompt twice", "lower batch.groups_per_step, or add prompts"
            )
        )
    elif epochs > 50:
        findings.append(warn("batch: epochs", passes, "the answers may be learnt by heart: watch the evaluation"))
    else:
        findings.append(ok("batch: epochs", passes))
    return findings


def _threshold(config: RunConfig, sequences: int, micro: int) -> list[Finding]:
    objective = config.objective.config
    if objective.radii != "sat" or objective.mismatch == "token" or not objective.clips:
        return []
    each = [sequences // micro] * micro
    said = too_few_sequences(each, objective.quantile, objective.quantile_scope)
    if said is None:
        return [ok("batch: threshold", f"{sequences} sequences are enough for the quantile {objective.quantile:g}")]
    return [fail("batch: threshold", said, "without it the objective never contracts, and is its fixed-clip base")]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
