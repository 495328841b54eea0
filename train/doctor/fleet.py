"""What the live fleet returned, against what the trainer makes of it. Pure functions of what was recorded."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rollout_bridge.messages import Completion, Finish
from train.doctor.finding import Finding, fail, ok, warn
from train.publish import Published

_AGREEMENT = 0.9  # least share of equal routes between a half-precision engine and the trainer
_SLOW_BYTES = 50e6  # a second, below which a large push is worth a look
_LARGE = 100e6  # bytes of a push


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Completions of one temperature, scored by the trainer.

    Attributes:
      temperature: of the sampling.
      mismatch: float32[N], trainer's less engine's log-prob of every sampled token, nats, at that temperature.
      other: the same with the trainer at another temperature: what a wrong temperature would look like.
      agreement: float32[R], share of the engine's routes that the trainer would have chosen, by row.
      missing: rows without a route.
    """

    temperature: float
    mismatch: np.ndarray
    other: np.ndarray
    agreement: np.ndarray
    missing: int


def check_weights(published: Published, tolerance: float) -> list[Finding]:
    """`fleet: weights`: the fleet reproduces the trainer's log-probs of the probe; `fleet: network`: how fast it came.

    Args:
      published: what the push reported.
      tolerance: rollout.probe_tolerance, nats.
    """
    mean, largest = published.probe_mean_abs, published.probe_max_abs
    said = (
        f"version {published.version}: |difference| of the probe's log-probs {mean:.2g} nats on average, {largest:.2g} "
        f"at most (tolerance {tolerance:g}); {published.expert_coverage:.0%} of the experts took part"
    )
    if not mean <= tolerance:  # also when it is NaN
        findings = [fail("fleet: weights", said, "the fleet holds other weights, or computes something else")]
    elif mean > tolerance / 2:
        findings = [warn("fleet: weights", said, "close to being refused: compare rollout.dtype with policy.dtype")]
    elif published.expert_coverage < 0.5:
        findings = [
            warn("fleet: weights", said, "a swapped expert could go unseen: the probe's problems are too alike")
        ]
    else:
        findings = [ok("fleet: weights", said)]
    speed = published.bytes / max(published.seconds_stage, 1e-6)
    sent = f"{published.bytes / 1e6:.1f} MB in {published.seconds_stage:.2f} s: {speed / 1e6:.0f} MB/s to every engine"
    if published.bytes > _LARGE and speed < _SLOW_BYTES:
        return [*findings, warn("fleet: network", sent, "publications will dominate: a nearer fleet, or a larger lag")]
    return [*findings, ok("fleet: network", sent)]


def check_logprobs(scored: Sequence[Scored], level: float) -> list[Finding]:
    """`fleet: log-probs at T`: the trainer reproduces what the engine reported, at each temperature.

    Args:
      scored: completions, by temperature.
      level: mean |difference| above which it fails, nats (alarms.mismatch_abs_mean).
    """
    findings = []
    for each in scored:
        check = f"fleet: log-probs at {each.temperature:g}"
        mean, wrong = float(np.abs(each.mismatch).mean()), float(np.abs(each.other).mean())
        largest = np.abs(each.mismatch).max()
        said = f"mean |difference| {mean:.2g} nats over {len(each.mismatch)} tokens, {largest:.2g} at most"
        if mean > level and wrong < mean / 2:
            remedy = (
                "the engine's log-probs are at another temperature: it must report those of the sampling temperature"
            )
            findings.append(fail(check, f"{said}; another temperature fits better ({wrong:.2g})", remedy))
        elif mean > level:
            findings.append(
                fail(
                    check,
                    f"{said}; at most {level:g} is normal",
                    "other weights or numerics: compare dtypes and attention kernels",
                )
            )
        elif wrong < 2 * mean:
            findings.append(
                warn(
                    check,
                    f"{said}; another temperature would fit as well ({wrong:.2g})",
                    "the policy is too flat to tell: run doctor again on a checkpoint",
                )
            )
        else:
            findings.append(ok(check, f"{said}; another temperature would give {wrong:.2g}"))
    return findings


def check_routes(scored: Sequence[Scored], replay: bool, exact: bool) -> Finding:
    """`fleet: routes`: every fed token has a route, and the trainer would have chosen about the same.

    Args:
      scored: completions with their routes.
      replay: whether the run wants any.
      exact: whether engine and trainer compute in the same float32.
    """
    if not replay:
        return ok("fleet: routes", "not wanted: objective.replay = false")
    missing = sum(each.missing for each in scored)
    rows = sum(len(each.agreement) for each in scored)
    if missing:
        return fail(
            "fleet: routes",
            f"{missing} of {rows + missing} fed tokens have no route",
            "start the engine with routed experts returned, without prefix reuse that drops them",
        )
    agreement = float(np.concatenate([each.agreement for each in scored]).mean())
    least = 0.999 if exact else _AGREEMENT
    said = f"{rows} rows, {agreement:.2%} as the trainer would have chosen"
    if agreement < least:
        return fail(
            "fleet: routes",
            f"{said}; at least {least:.1%} is normal",
            "layers or experts in another order, or other weights",
        )
    return ok("fleet: routes", said)


def check_repeat(first: Sequence[Completion], again: Sequence[Completion]) -> Finding:
    """`fleet: repeat`: the same request gives the same tokens, log-probs and routes."""
    for one, other in zip(first, again, strict=True):
        where = f"{one.request_id}/{one.member}"
        if one.tokens.tolist() != other.tokens.tolist():
            return warn(
                "fleet: repeat",
                f"{where} gave {one.tokens[:8].tolist()}..., then {other.tokens[:8].tolist()}...",
                "a resumed run will end with other parameters: the engine ignores the seed, or depends on its batch",
            )
        if (
            one.trace is not None
            and other.trace is not None
            and not np.array_equal(one.trace.experts_TLK, other.trace.experts_TLK)
        ):
            return warn(
                "fleet: repeat",
                f"{where} took other routes the second time",
                "the engine's numerics depend on its batch",
            )
    return ok("fleet: repeat", f"{len(first)} completions came twice alike")


def check_tokens(whole: Sequence[Completion], halves: Sequence[Completion], cut: Sequence[int]) -> Finding:
    """`fleet: tokens`: a completion that is asked for in two parts, by its token ids, is the undivided one.

    An engine that turns tokens into text and back, adds a token, or begins a continuation anew fails this.

    Args:
      whole: undivided completions.
      halves: what followed after the first `cut` tokens of each.
      cut: tokens that were given back.
    """
    for one, rest, count in zip(whole, halves, cut, strict=True):
        expected = one.tokens[count:].tolist()
        if rest.tokens.tolist() != expected:
            return fail(
                "fleet: tokens",
                f"{one.request_id}/{one.member} after its first {count} tokens: expected {expected[:8]}, got "
                f"{rest.tokens[:8].tolist()}",
                "the engine must take and return token ids as they are, and draw token t from (seed, member, t)",
            )
    return ok("fleet: tokens", f"{len(whole)} completions, cut and continued, are the undivided ones")


def check_ends(completions: Sequence[Completion], trained: bool) -> Finding:
    """`fleet: ends`: some completions stop by themselves.

    Args:
      completions: sampled at the training temperature.
      trained: whether the weights are of a checkpoint; random ones need not know how to stop.
    """
    stopped = sum(completion.finish is Finish.STOP for completion in completions)
    said = f"{stopped} of {len(completions)} completions stopped, the others were cut"
    if stopped or not completions:
        return ok("fleet: ends", said)
    if trained:
        return fail(
            "fleet: ends", said, "the stop token never comes: look at prompt.stop, and raise sampling.max_new_tokens"
        )
    return warn("fleet: ends", f"{said}; the weights are random", "run doctor again on a checkpoint")
