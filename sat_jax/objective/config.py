"""What an objective is made of: one choice per link, and the numbers that the chosen links use."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from sat_jax.objective import presets
from sat_jax.trust_region import SatConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "anchor": ("behavior", "proximal", "interpolated"),
    "mismatch": ("token", "sequence", "sequence_token"),
    "radii": ("fixed", "sat", "m2po"),
    "surrogate": ("ppo", "dual_clip", "cispo", "sapo"),
    "gate": (
        *("none", "dppo_tv", "dppo_kl", "icepop", "kpop", "dis"),
        *("mis", "geo", "opsm", "trm_max_k2", "trm_mean_k3", "m2po_mask"),
    ),
    "weight": ("none", "tis", "tis_sequence", "icepop"),
    "aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"),
    "quantile_scope": ("batch", "microbatch"),
    "kl_kind": ("k1", "k2", "k3"),
}
_ALWAYS = {*CHOICES, "kl_coef", "kl_importance"}
_CLIPPING = ("ppo", "dual_clip")
_TWO_LIMITS = ("dppo_tv", "dppo_kl", "icepop", "dis", "mis", "geo")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """One method of ratio control; without arguments, GRPO against the engine's own log-probs.

    Log-ratios: pi is the live policy, mu the engine's record, prox the trainer's own before the batch's first step.

    Attributes:
      anchor: what pi is divided by in the clipped ratio: mu, prox, or A-3PO's interpolation of the two. Weights, and
        gates on a ratio, see anchor / mu (pi / mu where the anchor is mu).
      mismatch: unit of the clipped ratio and of the score. sequence: the length-normalised ratio of the whole
        response; sequence_token: its value, with each token's own gradient.
      radii: fixed: eps; sat: contracted on the tail; m2po: from the second moment of the outward tokens.
      surrogate: ppo: the minimum; dual_clip: also bounded by `dual_cap` where A < 0; cispo: detached, capped ratio
        times log pi; sapo: a sigmoid instead of the clip.
      gate: which tokens or sequences are dropped (they stay in the denominator).
      weight: factor anchor / mu, detached: tis and tis_sequence are clamped to the limits, icepop is 0 outside.
      aggregation: what is averaged; the denominator is global.
      quantile_scope: the pool of the batch statistic: optimizer batch, or each microbatch (as SAT published it).
      kl_coef: weight of the KL term against the reference, >= 0; 0 needs no reference.
      kl_kind: estimator of that KL (k1, k2, k3 of Schulman).
      kl_importance: multiply the KL term by pi / mu, which makes it unbiased off policy.
      eps_low: nominal radius below 1, in (0, 1); m2po: the floor of that radius.
      eps_high: nominal radius above 1, in (0, 1); m2po: the floor of that radius.
      quantile: SAT's alpha (`SatConfig`).
      exponent: SAT's kernel exponent (`SatConfig`).
      threshold_min: SAT (`SatConfig`), nats.
      threshold_max: SAT (`SatConfig`), nats.
      m2_budget: m2po: mean squared log-ratio of the outward tokens allowed, nats^2, > 0.
      dual_cap: dual clip's c > 1.
      cispo_low: absolute lower bound of CISPO's ratio, in [0, 1); 0 = off.
      cispo_high: absolute cap of CISPO's ratio, > 1.
      tau_positive: SAPO's temperature where A > 0, > 0.
      tau_negative: SAPO's temperature elsewhere, > 0.
      gate_low: lower limit of the gate's statistic (dppo: largest fall of the probability or KL, > 0).
      gate_high: upper limit of the gate's statistic (dppo: largest rise of the probability or KL, > 0).
      weight_low: lower limit of the weight, >= 0.
      weight_high: upper limit of the weight, > weight_low.
      norm_length: seq_mean_token_sum_norm: the constant length that sums are divided by, tokens, > 0.

    Raises:
      ValueError: an unknown choice, a value outside its range, or links that do not fit together.
    """

    anchor: str = "behavior"
    mismatch: str = "token"
    radii: str = "fixed"
    surrogate: str = "ppo"
    gate: str = "none"
    weight: str = "none"
    aggregation: str = "seq_mean_token_mean"
    quantile_scope: str = "batch"
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    kl_importance: bool = False
    eps_low: float = 0.2
    eps_high: float = 0.2
    quantile: float = 0.9
    exponent: float = 2.0
    threshold_min: float | None = None
    threshold_max: float | None = None
    m2_budget: float = 0.04
    dual_cap: float = 3.0
    cispo_low: float = 0.0
    cispo_high: float = 5.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    gate_low: float | None = None
    gate_high: float | None = None
    weight_low: float = 0.0
    weight_high: float | None = None
    norm_length: float = 1024.0

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, choices in CHOICES.items():
            if values[name] not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {values[name]!r}")
        _check_numbers(values)
        _check_limits(self)
        _check_links(self)
        _ = self.sat

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "ObjectiveConfig":
        """The method of that name with its authors' defaults, some of them overridden.

        Args:
          name: one of `preset_names()`.
          **overrides: fields of this class. Links may be exchanged too; a number must belong to a link in use.

        Raises:
          ValueError: an unknown name or field, a field that the resulting method does not use, or a bad value.
        """
        defaults = presets.find(name).defaults
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(overrides.keys() - known)
        if unknown:
            raise ValueError(
                f"objective {name}: expected fields among {', '.join(sorted(known))}, got {', '.join(unknown)}"
            )
        links = {field.name: field.default for field in dataclasses.fields(cls)} | {**defaults, **overrides}
        used = used_fields(links)
        unused = sorted(overrides.keys() - used)
        if unused:
            raise ValueError(
                f"objective {name}: expected fields that it uses ({', '.join(sorted(used))}), got {', '.join(unused)}; "
                "remove it, or choose the link that it belongs to"
            )
        return cls(**{**defaults, **overrides})

    @property
    def sat(self) -> SatConfig:
        """The trust region's part."""
        return SatConfig(
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            quantile=self.quantile,
            exponent=self.exponent,
            threshold_min=self.threshold_min,
            threshold_max=self.threshold_max,
        )

    @property
    def clips(self) -> bool:
        """Whether the surrogate has clip radii."""
        return self.surrogate in _CLIPPING

    @property
    def gate_limits(self) -> tuple[float, float]:
        """Lower and upper limit of the gate's statistic; infinite where it has none."""
        low = -math.inf if self.gate_low is None else self.gate_low
        return low, math.inf if self.gate_high is None else self.gate_high

    @property
    def needs_measure(self) -> bool:
        """Whether a statistic of the whole optimizer batch is needed before its first gradient."""
        return self.has_statistic and self.quantile_scope == "batch"

    @property
    def has_statistic(self) -> bool:
        """Whether radii or gate depend on a statistic of a pool of tokens (`batch_threshold`)."""
        return self.radii != "fixed" or self.gate == "m2po_mask"

    @property
    def needs_proximal(self) -> bool:
        """Whether `policy_loss` needs `prox_logp_BT`."""
        return self.anchor == "proximal"

    @property
    def needs_reference(self) -> bool:
        """Whether `policy_loss` needs `ref_logp_BT`."""
        return self.kl_coef > 0


def used_fields(links: Mapping[str, Any]) -> frozenset[str]:
    """The fields that these choices of links read, in a mapping with all fields of `ObjectiveConfig`."""
    used = set(_ALWAYS)
    if links["surrogate"] in _CLIPPING:
        used |= {"eps_low", "eps_high"}
        used |= {"quantile", "exponent", "threshold_min", "threshold_max"} if links["radii"] == "sat" else set()
        used |= {"m2_budget"} if links["radii"] == "m2po" else set()
    used |= {
        "dual_clip": {"dual_cap"},
        "cispo": {"cispo_low", "cispo_high"},
        "sapo": {"tau_positive", "tau_negative"},
    }.get(links["surrogate"], set())
    used |= {"gate_low"} if links["gate"] in _TWO_LIMITS else set()
    used |= {"gate_high"} if links["gate"] != "none" else set()
    used |= {"weight_low", "weight_high"} if links["weight"] != "none" else set()
    used |= {"norm_length"} if links["aggregation"] == "seq_mean_token_sum_norm" else set()
    return frozenset(used)


def _check_numbers(values: dict[str, Any]) -> None:
    for name in ("m2_budget", "tau_positive", "tau_negative", "norm_length"):
        if not (values[name] > 0 and math.isfinite(values[name])):
            raise ValueError(f"{name}: expected a finite number > 0, got {values[name]}")
    for name in ("dual_cap", "cispo_high"):
        if not values[name] > 1:
            raise ValueError(f"{name}: expected a number > 1, got {values[name]}")
    if not 0 <= values["cispo_low"] < 1:
        raise ValueError(f"cispo_low: expected a number in [0, 1), got {values['cispo_low']}")
    if not (values["kl_coef"] >= 0 and math.isfinite(values["kl_coef"])):
        raise ValueError(f"kl_coef: expected a finite number >= 0, got {values['kl_coef']}")


def _check_limits(config: ObjectiveConfig) -> None:
    needed = {"gate_low": config.gate in _TWO_LIMITS, "gate_high": config.gate != "none"}
    needed["weight_high"] = config.weight != "none"
    limits = {"gate_low": config.gate_low, "gate_high": config.gate_high, "weight_high": config.weight_high}
    for name, value in limits.items():
        if needed[name] and (value is None or math.isnan(value)):
            link = f"weight {config.weight}" if name == "weight_high" else f"gate {config.gate}"
            raise ValueError(f"{name}: expected a limit for {link}, got {value}; the preset of that name has one")
    _check_gate_limits(config)
    if config.weight_high is not None and not 0 <= config.weight_low < config.weight_high:
        raise ValueError(
            f"weight_low: expected 0 <= weight_low < weight_high, got {config.weight_low} and {config.weight_high}"
        )


def _check_gate_limits(config: ObjectiveConfig) -> None:
    low, high = config.gate_low, config.gate_high
    if high is not None and not high > 0:
        raise ValueError(f"gate_high: expected a number > 0, got {high}")
    if low is None or high is None:
        return
    if config.gate.startswith("dppo") and not low > 0:
        raise ValueError(f"gate_low: expected a number > 0 for gate {config.gate}, got {low}")
    if not config.gate.startswith("dppo") and not 0 <= low < high:
        raise ValueError(f"gate_low: expected 0 <= gate_low < gate_high, got {low} and {high}")


def _check_links(config: ObjectiveConfig) -> None:
    if config.radii != "fixed" and not config.clips:
        raise ValueError(
            f"radii: expected fixed with surrogate {config.surrogate}, which has no clip, got {config.radii}"
        )
    if config.radii != "fixed" and config.anchor != "behavior":
        raise ValueError(
            f"anchor: expected behavior with radii {config.radii}, whose score is the clipped ratio itself, "
            f"got {config.anchor}"
        )
    if config.weight != "none" and config.anchor == "behavior":
        raise ValueError(
            f"anchor: expected proximal or interpolated with weight {config.weight}, got behavior: the ratio to mu is "
            "already in the surrogate; use surrogate cispo to cap it"
        )
    if config.gate == "m2po_mask" and (config.radii != "fixed" or config.mismatch != "token"):
        raise ValueError(
            f"gate: expected another than m2po_mask with radii {config.radii} and mismatch {config.mismatch}; it has a "
            "batch statistic of its own, over tokens"
        )
