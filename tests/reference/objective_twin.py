"""A slow, obvious twin of every objective preset: float64, one token at a time, each method written out by itself.

Nothing here reads `ObjectiveConfig`: formulas and defaults are typed in from the papers, so that a wrong default is
found too. Detached quantities are computed from `fixed`, which equals `live` in value; differences are taken over
`live` alone, which makes the gradient that of the method and not that of its value.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tests.reference.batches import Example
from tests.reference.trust_region_twin import sat_factors, tail_threshold

NORM_LENGTH = 1024


@dataclasses.dataclass(frozen=True)
class Token:
    """One active token. Sequence numbers are those of its own sequence; `lag` is a version gap."""

    live: float
    fixed: float
    mu: float
    prox: float
    advantage: float
    lag: int
    sequence: "Sequence"


@dataclasses.dataclass
class Sequence:
    """The active tokens of a (row, segment) pair."""

    tokens: list[Token] = dataclasses.field(default_factory=list)

    def mean(self, value: Callable[[Token], float]) -> float:
        return sum(value(token) for token in self.tokens) / len(self.tokens)


def sequences_of(example: Example, live_BT: np.ndarray) -> list[list[tuple[tuple[int, int], Token]]]:
    """Every sequence with an active token, as ((row, position), token)."""
    batch, found = example.batch, []
    for row in range(batch.segment_BT.shape[0]):
        for segment in range(1, int(batch.segment_BT[row].max()) + 1):
            sequence, members = Sequence(), []
            for t in np.flatnonzero((batch.segment_BT[row] == segment) & batch.loss_mask_BT[row]):
                token = Token(
                    live=float(live_BT[row, t]),
                    fixed=float(example.logp_BT[row, t]),
                    mu=float(batch.behavior_logp_BT[row, t]),
                    prox=float(example.prox_logp_BT[row, t]),
                    advantage=float(batch.advantage_BT[row, t]),
                    lag=int(batch.lag_BT[row, t]),
                    sequence=sequence,
                )
                sequence.tokens.append(token)
                members.append(((row, int(t)), token))
            if members:
                found.append(members)
    return found


def ppo(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def _r(t: Token) -> float:
    return math.exp(t.live - t.mu)


def _r_fixed(t: Token) -> float:
    return math.exp(t.fixed - t.mu)


def _rho(t: Token) -> float:
    return math.exp(t.live - t.prox)


def _w(t: Token) -> float:
    return math.exp(t.prox - t.mu)


def _s(t: Token) -> float:
    return math.exp(t.sequence.mean(lambda u: u.live - u.mu))


def _s_fixed(t: Token) -> float:
    return math.exp(t.sequence.mean(lambda u: u.fixed - u.mu))


def _bernoulli_kl(left: float, right: float) -> float:
    p, q = math.exp(left), math.exp(right)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _dual_clip(t: Token) -> float:
    value = ppo(_r(t), t.advantage)
    return max(value, 3 * t.advantage) if t.advantage < 0 else value


def _cispo(cap: float) -> Callable[[Token], float]:
    return lambda t: min(_r_fixed(t), cap) * t.advantage * t.live


def _sapo(t: Token) -> float:
    tau = 1.0 if t.advantage > 0 else 1.05
    return 4 / tau / (1 + math.exp(-tau * (_r(t) - 1))) * t.advantage


def _gspo_token(t: Token) -> float:
    return ppo(_s_fixed(t) * math.exp(t.live - t.fixed), t.advantage, 3e-4, 4e-4)


def _kpop(t: Token) -> float:
    worst = max(_bernoulli_kl(t.prox, t.mu), _bernoulli_kl(t.mu, t.prox))
    return ppo(_rho(t), t.advantage) if worst <= 2.0 else 0.0


def _dppo_keeps(t: Token, limit: float) -> bool:
    rise = math.exp(t.fixed) - math.exp(t.mu)
    return rise <= limit if t.advantage > 0 else -rise <= limit


def _dppo_kl(t: Token) -> float:
    outward = (t.fixed > t.mu) == (t.advantage > 0)
    if outward and _bernoulli_kl(t.mu, t.fixed) > 0.05:
        return 0.0
    return _cispo(20.0)(t)


def _a3po(t: Token) -> float:
    alpha = 0.0 if t.lag <= 1 else (t.lag - 1) / t.lag
    prox = t.mu + alpha * (t.fixed - t.mu)
    weight = math.exp(prox - t.mu)
    return (weight if weight <= 5 else 0.0) * ppo(math.exp(t.live - prox), t.advantage)


def _interval(value: float, low: float, high: float, then: float) -> float:
    return then if low <= value <= high else 0.0


def _product(t: Token) -> float:
    return math.exp(sum(u.prox - u.mu for u in t.sequence.tokens))


def _geometric(t: Token) -> float:
    return math.exp(t.sequence.mean(lambda u: u.prox - u.mu))


def _trm_max_k2(t: Token) -> float:
    worst = max((u.fixed - u.mu) ** 2 / 2 for u in t.sequence.tokens)
    return ppo(_r(t), t.advantage) if worst <= 0.01 else 0.0


def _trm_mean_k3(t: Token) -> float:
    mean = t.sequence.mean(lambda u: _r_fixed(u) - 1 - (u.fixed - u.mu))
    return ppo(_r(t), t.advantage) if mean <= 0.01 else 0.0


def _opsm(t: Token) -> float:
    fall = t.sequence.mean(lambda u: u.mu - u.fixed)
    return 0.0 if t.advantage < 0 and fall > 1e-4 else ppo(_r(t), t.advantage)


POINTWISE: dict[str, Callable[[Token], float]] = {
    "ppo": lambda t: ppo(_rho(t), t.advantage),
    "dual_clip": _dual_clip,
    "grpo": lambda t: ppo(_r(t), t.advantage),
    "dr_grpo": lambda t: ppo(_r(t), t.advantage),
    "dapo": lambda t: ppo(_r(t), t.advantage, 0.2, 0.28),
    "gspo": lambda t: ppo(_s(t), t.advantage, 3e-4, 4e-4),
    "gspo_token": _gspo_token,
    "cispo": _cispo(5.0),
    "sapo": _sapo,
    "tis": lambda t: min(_w(t), 2.0) * ppo(_rho(t), t.advantage),
    "tis_sequence": lambda t: min(_product(t), 5.0) * ppo(_rho(t), t.advantage),
    "tis_pg": _cispo(2.0),
    "icepop": lambda t: _interval(_w(t), 0.5, 5.0, _w(t)) * ppo(_rho(t), t.advantage),
    "icepop_mask": lambda t: _interval(_w(t), 0.5, 5.0, 1.0) * ppo(_rho(t), t.advantage),
    "kpop": _kpop,
    "mis": lambda t: _interval(_product(t), 0.5, 2.0, 1.0) * ppo(_rho(t), t.advantage),
    "geo_mask": lambda t: _interval(_geometric(t), 0.999, 1.001, 1.0) * ppo(_rho(t), t.advantage),
    "seq_clip": lambda t: _interval(_s_fixed(t), 0.995, 1.005, 1.0) * ppo(_r(t), t.advantage),
    "dppo": lambda t: _cispo(20.0)(t) if _dppo_keeps(t, 0.15) else 0.0,
    "dppo_kl": _dppo_kl,
    "dppo_clip": lambda t: ppo(_r(t), t.advantage) if _dppo_keeps(t, 1e-3) else 0.0,
    "decoupled_ppo": lambda t: (_w(t) if _w(t) <= 5 else 0.0) * ppo(_rho(t), t.advantage),
    "a3po": _a3po,
    "trm_max_k2": _trm_max_k2,
    "trm_mean_k3": _trm_mean_k3,
    "opsm": _opsm,
    "sao": lambda t: _r_fixed(t) * t.advantage * t.live if 0.7 < _r_fixed(t) < 6 else 0.0,
}

TOKEN_MEAN = {
    *("ppo", "dual_clip", "dapo", "cispo", "m2po", "m2po_mask", "decoupled_ppo", "a3po", "sao"),
}
SUM_NORM = {"dr_grpo", "dppo", "dppo_kl"}


def _m2po_method(tokens: list[Token]) -> Callable[[Token], float]:
    outward = sorted(
        (t.fixed - t.mu) ** 2
        for t in tokens
        if (t.advantage > 0 and t.fixed > t.mu) or (t.advantage < 0 and t.fixed < t.mu)
    )
    low, high = 1.0, 1e5 - 1
    if outward and sum(outward) / len(outward) > 0.04:
        # tau^2 lies where the smaller squares as they are, and the rest capped, meet the budget.
        target, below = 0.04 * len(outward), 0.0
        for index, square in enumerate(outward):
            tau_square = (target - below) / (len(outward) - index)
            if tau_square <= square:
                break
            below += square
        low, high = 1 - math.exp(-math.sqrt(tau_square)), math.exp(math.sqrt(tau_square)) - 1
    return lambda t: ppo(_r(t), t.advantage, max(low, 0.3), max(high, 0.5))


def _m2po_mask_method(tokens: list[Token]) -> Callable[[Token], float]:
    kept = sorted((t.prox - t.mu) ** 2 for t in tokens)
    while len(kept) > 1 and sum(kept) / len(kept) >= 0.04:
        kept.pop()
    return lambda t: ppo(_rho(t), t.advantage) if (t.prox - t.mu) ** 2 <= kept[-1] else 0.0


def _sat_method(tokens: list[Token], sequence: bool) -> Callable[[Token], float]:
    def score(t: Token) -> float:
        return t.sequence.mean(lambda u: u.fixed - u.mu) if sequence else t.fixed - t.mu

    scores = np.array([score(t) for t in tokens])
    threshold = tail_threshold(scores, np.ones_like(scores, bool), 0.9)

    def value(t: Token) -> float:
        low, high = sat_factors(score(t), threshold)
        return ppo(_s(t) if sequence else _r(t), t.advantage, 0.2 * low, 0.2 * high)

    return value


def method_of(name: str, tokens: list[Token]) -> Callable[[Token], float]:
    """The surrogate of one token, given all tokens of the pool."""
    if name == "m2po":
        return _m2po_method(tokens)
    if name == "m2po_mask":
        return _m2po_mask_method(tokens)
    if name in ("sat_grpo", "sat_gspo"):
        return _sat_method(tokens, name == "sat_gspo")
    return POINTWISE[name]


def names() -> list[str]:
    return sorted({*POINTWISE, "m2po", "m2po_mask", "sat_grpo", "sat_gspo"})


def default_aggregation(name: str) -> str:
    if name in TOKEN_MEAN:
        return "token_mean"
    return "seq_mean_token_sum_norm" if name in SUM_NORM else "seq_mean_token_mean"


def aggregate(values: list[list[float]], aggregation: str) -> float:
    """Values per sequence and token to a scalar."""
    if not values:
        return 0.0
    if aggregation == "token_mean":
        return sum(map(sum, values)) / sum(map(len, values))
    if aggregation == "seq_mean_token_mean":
        return sum(sum(sequence) / len(sequence) for sequence in values) / len(values)
    return sum(sum(sequence) / NORM_LENGTH for sequence in values) / len(values)


def loss(name: str, example: Example, live_BT: np.ndarray, aggregation: str | None = None) -> float:
    """The method's loss at `live_BT`, everything detached being held at `example.logp_BT`."""
    sequences = sequences_of(example, live_BT)
    method = method_of(name, [token for members in sequences for _, token in members])
    values = [[method(token) for _, token in members] for members in sequences]
    return -aggregate(values, aggregation or default_aggregation(name))


def gradient(name: str, example: Example, aggregation: str | None = None, step: float = 1e-5) -> np.ndarray:
    """Central differences over the live log-probs, in float64."""
    live_BT = example.logp_BT.astype(np.float64)
    result_BT = np.zeros_like(live_BT)
    for row, t in np.argwhere(example.batch.loss_mask_BT):
        ends = []
        for sign in (1, -1):
            moved_BT = live_BT.copy()
            moved_BT[row, t] += sign * step
            ends.append(loss(name, example, moved_BT, aggregation))
        result_BT[row, t] = (ends[0] - ends[1]) / (2 * step)
    return result_BT


def reference_kl(kind: str, logp: float, ref: float) -> float:
    """One token's estimate of KL(pi || reference)."""
    difference = logp - ref
    if kind == "k1":
        return difference
    return difference**2 / 2 if kind == "k2" else math.exp(-difference) - 1 + difference
