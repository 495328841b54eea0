"""The methods by name: formula, defaults and source. The documentation's table is checked against this one.

Ratios: r = pi / mu, rho = pi / prox, w = prox / mu (detached), s = the sequence's geometric mean of r; sg detaches.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One named method.

    Attributes:
      name: of the preset.
      formula: what is maximised per token (or sequence).
      unit: token, sequence, or both.
      extra_forward: whether the trainer's own log-probs before the first step are needed.
      source: paper or code that the definition and the defaults come from.
      failure: its known weakness.
      defaults: fields of `ObjectiveConfig` that differ from its defaults.
      std: how its authors scale group advantages (`AdvantageConfig.std`).
    """

    name: str
    formula: str
    unit: str
    extra_forward: bool
    source: str
    failure: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    std: str = "group"


def preset_names() -> tuple[str, ...]:
    """All names that `ObjectiveConfig.preset` knows."""
    return tuple(method.name for method in METHODS)


def find(name: str) -> Method:
    """The method of that name.

    Raises:
      ValueError: there is none; the nearest name is suggested.
    """
    for method in METHODS:
        if method.name == name:
            return method
    near = difflib.get_close_matches(name, preset_names(), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"objective preset: expected one of {', '.join(preset_names())}, got {name!r}{hint}")


METHODS = (
    Method(
        name="ppo",
        formula="min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)",
        unit="token",
        extra_forward=True,
        source="arXiv 1707.06347, eq. 7",
        failure="inert with one step a batch (rho = 1); a fixed radius over-clips rare tokens",
        defaults={"anchor": "proximal", "aggregation": "token_mean"},
    ),
    Method(
        name="dual_clip",
        formula="A < 0: max(min(r A, clip(r) A), c A); else min(r A, clip(r) A)",
        unit="token",
        extra_forward=False,
        source="arXiv 1912.09729; c = 3 and token mean as verl",
        failure="bounds the loss, not the drift",
        defaults={"surrogate": "dual_clip", "aggregation": "token_mean"},
    ),
    Method(
        name="grpo",
        formula="min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)",
        unit="token",
        extra_forward=False,
        source="arXiv 2402.03300",
        failure="length bias (1 / |y|), difficulty bias (1 / std), zero-std groups",
    ),
    Method(
        name="dr_grpo",
        formula="as grpo; sums over a constant length, advantages without std",
        unit="token",
        extra_forward=False,
        source="arXiv 2503.20783",
        failure="the scale of the learning rate changes with the divisor",
        defaults={"aggregation": "seq_mean_token_sum_norm"},
        std="none",
    ),
    Method(
        name="dapo",
        formula="as grpo with eps 0.2 / 0.28, averaged over all tokens",
        unit="token",
        extra_forward=False,
        source="arXiv 2503.14476",
        failure="oversampling cost of dynamic sampling, drift of the prompt mix",
        defaults={"eps_high": 0.28, "aggregation": "token_mean"},
    ),
    Method(
        name="gspo",
        formula="min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)",
        unit="sequence",
        extra_forward=False,
        source="arXiv 2507.18071, eq. 5 and 7, section 5.1 for eps",
        failure="token errors cancel inside a sequence",
        defaults={"mismatch": "sequence", "eps_low": 3e-4, "eps_high": 4e-4},
    ),
    Method(
        name="gspo_token",
        formula="as gspo with sg[s] pi / sg[pi] for s",
        unit="sequence value, token gradient",
        extra_forward=False,
        source="arXiv 2507.18071, eq. 13 and 14",
        failure="equals gspo when A is constant in a response",
        defaults={"mismatch": "sequence_token", "eps_low": 3e-4, "eps_high": 4e-4},
    ),
    Method(
        name="cispo",
        formula="sg[clip(r, 0, 5)] A log pi",
        unit="token",
        extra_forward=False,
        source="arXiv 2506.13585, eq. 4 and 5; cap 5 as ScaleRL",
        failure="no trust region: mismatch keeps growing",
        defaults={"surrogate": "cispo", "aggregation": "token_mean"},
    ),
    Method(
        name="sapo",
        formula="(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A",
        unit="token",
        extra_forward=False,
        source="arXiv 2511.20347",
        failure="the weight is never zero far out of range",
        defaults={"surrogate": "sapo"},
    ),
    Method(
        name="tis",
        formula="min(w, 2) min(rho A, clip(rho) A)",
        unit="token",
        extra_forward=True,
        source="Yao et al. 2025; slime vanilla_tis_function",
        failure="delays, but does not prevent, the collapse at long horizons",
        defaults={"anchor": "proximal", "weight": "tis", "weight_high": 2.0},
    ),
    Method(
        name="tis_sequence",
        formula="min(prod w, 5) min(rho A, clip(rho) A)",
        unit="token, weight per sequence",
        extra_forward=True,
        source="Yao et al. 2025; cap 5 as SkyRL",
        failure="the product's variance grows with length",
        defaults={"anchor": "proximal", "weight": "tis_sequence", "weight_high": 5.0},
    ),
    Method(
        name="tis_pg",
        formula="sg[min(r, 2)] A log pi: the weight in place of the minimum",
        unit="token",
        extra_forward=False,
        source="arXiv 2607.18722, eq. 41; the cap, not stated there, as verl",
        failure="no trust region",
        defaults={"surrogate": "cispo", "cispo_high": 2.0},
    ),
    Method(
        name="icepop",
        formula="k min(rho A, clip(rho) A), k = w if 0.5 <= w <= 5 else 0",
        unit="token",
        extra_forward=True,
        source="Ling team 2025; slime icepop_function",
        failure="drops tokens that would pull back",
        defaults={"anchor": "proximal", "weight": "icepop", "weight_low": 0.5, "weight_high": 5.0},
    ),
    Method(
        name="icepop_mask",
        formula="min(rho A, clip(rho) A) if 0.5 <= w <= 5 else 0",
        unit="token",
        extra_forward=True,
        source="Ling team 2025; the 0/1 form",
        failure="as icepop",
        defaults={"anchor": "proximal", "gate": "icepop", "gate_low": 0.5, "gate_high": 5.0},
    ),
    Method(
        name="kpop",
        formula="min(rho A, clip(rho) A) if both Bernoulli KLs of prox, mu are <= 2 else 0",
        unit="token",
        extra_forward=True,
        source="AReaL binary_kl, its example's limit",
        failure="as icepop",
        defaults={"anchor": "proximal", "gate": "kpop", "gate_high": 2.0},
    ),
    Method(
        name="mis",
        formula="min(rho A, clip(rho) A) if 0.5 <= prod w <= 2 over the sequence else 0",
        unit="token, gate per sequence",
        extra_forward=True,
        source="verl rollout correction",
        failure="length trap: discards long answers",
        defaults={"anchor": "proximal", "gate": "mis", "gate_low": 0.5, "gate_high": 2.0},
    ),
    Method(
        name="geo_mask",
        formula="min(rho A, clip(rho) A) if 0.999 <= geometric mean of w <= 1.001 else 0",
        unit="token, gate per sequence",
        extra_forward=True,
        source="verl rollout correction (Geo-RS)",
        failure="a tight interval keeps few sequences",
        defaults={"anchor": "proximal", "gate": "geo", "gate_low": 0.999, "gate_high": 1.001},
    ),
    Method(
        name="seq_clip",
        formula="min(r A, clip(r) A) if 0.995 <= s <= 1.005 else 0",
        unit="token, gate per sequence",
        extra_forward=False,
        source="GradLoc, in arXiv 2607.18722, table 3",
        failure="as geo_mask",
        defaults={"gate": "geo", "gate_low": 0.995, "gate_high": 1.005},
    ),
    Method(
        name="dppo",
        formula="sg[min(r, 20)] A log pi, dropped if A > 0 and pi - mu > 0.15, or A < 0 and mu - pi > 0.15",
        unit="token",
        extra_forward=False,
        source="arXiv 2602.04879; verl dppo_tv",
        failure="biased unless the truncation cap is large",
        defaults={
            "surrogate": "cispo",
            "cispo_high": 20.0,
            "gate": "dppo_tv",
            "gate_low": 0.15,
            "gate_high": 0.15,
            "aggregation": "seq_mean_token_sum_norm",
        },
        std="none",
    ),
    Method(
        name="dppo_kl",
        formula="as dppo with the Bernoulli KL(mu, pi) > 0.05 in the outward direction",
        unit="token",
        extra_forward=False,
        source="arXiv 2602.04879; verl dppo_kl",
        failure="as dppo",
        defaults={
            "surrogate": "cispo",
            "cispo_high": 20.0,
            "gate": "dppo_kl",
            "gate_low": 0.05,
            "gate_high": 0.05,
            "aggregation": "seq_mean_token_sum_norm",
        },
        std="none",
    ),
    Method(
        name="dppo_clip",
        formula="min(r A, clip(r) A), dropped as dppo at 1e-3",
        unit="token",
        extra_forward=False,
        source="the baseline of arXiv 2607.18722, table 9",
        failure="150 times tighter than its authors' limit",
        defaults={"gate": "dppo_tv", "gate_low": 1e-3, "gate_high": 1e-3},
    ),
    Method(
        name="m2po",
        formula="min(r A, clip(r, 1 - l, 1 + h) A), 1 - l = e^-tau, 1 + h = e^tau, l >= 0.3, h >= 0.5; tau: outward "
        "tokens meet mean min(log r, tau)^2 = 0.04",
        unit="token, batch budget",
        extra_forward=False,
        source="arXiv 2510.01161; official compute_m2po_policy_loss",
        failure="never tighter than its floors",
        defaults={"radii": "m2po", "eps_low": 0.3, "eps_high": 0.5, "aggregation": "token_mean"},
    ),
    Method(
        name="m2po_mask",
        formula="min(rho A, clip(rho) A), the largest |log w| dropped until the mean square of the rest is < 0.04",
        unit="token, batch budget",
        extra_forward=True,
        source="AReaL _apply_m2po_masking",
        failure="drops tokens that would pull back",
        defaults={"anchor": "proximal", "gate": "m2po_mask", "gate_high": 0.04, "aggregation": "token_mean"},
    ),
    Method(
        name="decoupled_ppo",
        formula="w min(rho A, clip(rho) A), w = 0 above 5",
        unit="token",
        extra_forward=True,
        source="arXiv 2110.00641, 2505.24298 (AReaL)",
        failure="cost of prox; with one step a batch the clip is inert",
        defaults={"anchor": "proximal", "weight": "icepop", "weight_high": 5.0, "aggregation": "token_mean"},
    ),
    Method(
        name="a3po",
        formula="as decoupled_ppo with log prox = log mu + (1 - 1 / lag) log r",
        unit="token",
        extra_forward=False,
        source="arXiv 2512.06547",
        failure="needs the version of every token",
        defaults={"anchor": "interpolated", "weight": "icepop", "weight_high": 5.0, "aggregation": "token_mean"},
    ),
    Method(
        name="trm_max_k2",
        formula="min(r A, clip(r) A), a sequence dropped if max (log r)^2 / 2 > 0.01",
        unit="token, gate per sequence",
        extra_forward=False,
        source="arXiv 2512.23075, sampled proxy; verl seq_max_k2",
        failure="keeps few sequences at a long horizon",
        defaults={"gate": "trm_max_k2", "gate_high": 0.01},
    ),
    Method(
        name="trm_mean_k3",
        formula="min(r A, clip(r) A), a sequence dropped if mean (r - 1 - log r) > 0.01",
        unit="token, gate per sequence",
        extra_forward=False,
        source="arXiv 2512.23075, sampled proxy; verl seq_mean_k3",
        failure="as trm_max_k2",
        defaults={"gate": "trm_mean_k3", "gate_high": 0.01},
    ),
    Method(
        name="opsm",
        formula="min(r A, clip(r) A), a sequence dropped if A < 0 and mean(-log r) > 1e-4",
        unit="token, gate per sequence",
        extra_forward=False,
        source="DeepSeek-V3.2; limit as slime compute_opsm_mask",
        failure="the limit needs tuning (0.05 to 0.5 elsewhere)",
        defaults={"gate": "opsm", "gate_high": 1e-4},
    ),
    Method(
        name="sao",
        formula="sg[r] A log pi if 0.7 < r < 6 else 0",
        unit="token",
        extra_forward=False,
        source="arXiv 2607.07508, the maths setting",
        failure="needs a good critic",
        defaults={
            "surrogate": "cispo",
            "cispo_high": 6.0,
            "gate": "dis",
            "gate_low": 0.7,
            "gate_high": 6.0,
            "aggregation": "token_mean",
        },
    ),
    Method(
        name="sat_grpo",
        formula="as grpo with eps c, c = 1 / (1 + (|d| / q)^2) on d's side where |d| > q > 0; d = log r, q its 0.9 "
        "tail",
        unit="token",
        extra_forward=False,
        source="arXiv 2607.18722, eq. 13-20",
        failure="switches itself off once q >= log(1 + eps_high)",
        defaults={"radii": "sat"},
    ),
    Method(
        name="sat_gspo",
        formula="as sat_grpo with s for r; eps 0.2 as its paper",
        unit="sequence",
        extra_forward=False,
        source="arXiv 2607.18722, section 4",
        failure="cannot fire with fewer than 10 sequences in the pool",
        defaults={"mismatch": "sequence", "radii": "sat"},
    ),
)
