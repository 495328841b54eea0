"""The sampler against the trainer's own scoring, and bit for bit against itself in other company."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from sat_jax import sampler
from sat_jax.model import Policy, PolicyConfig
from sat_jax.routing import free_trace
from sat_jax.types import TokenBatch

SLOTS, POSITIONS = 12, 20
CONFIG = PolicyConfig.tiny(vocab_size=13, width=32, head_dim=8, expert_hidden=24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """One sequence to sample."""

    prompt: tuple[int, ...]
    new: int = 8
    sampled: int = 0
    seed: int = 0
    member: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[int, ...] = ()


def admission(asks: dict[int, Ask]) -> sampler.Admission:
    """Asks by slot number."""
    integer = functools.partial(np.zeros, SLOTS)
    terms = sampler.Terms(
        prompt_B=integer(np.int32),
        sampled_B=integer(np.int32),
        limit_B=integer(np.int32),
        seed_low_B=integer(np.uint32),
        seed_high_B=integer(np.uint32),
        member_B=integer(np.uint32),
        temperature_B=integer(np.float32),
        top_p_B=integer(np.float32),
        top_k_B=integer(np.int32),
        stop_ids=np.full((SLOTS, 2), -1, np.int32),
    )
    new_B, token_BS = np.zeros(SLOTS, bool), np.zeros((SLOTS, POSITIONS), np.int32)
    for slot, ask in asks.items():
        new_B[slot] = True
        token_BS[slot, : len(ask.prompt)] = ask.prompt
        values = (len(ask.prompt), ask.sampled, len(ask.prompt) - ask.sampled + ask.new, ask.seed % 2**32)
        values += (ask.seed >> 32, ask.member, ask.temperature, ask.top_p, ask.top_k)
        names = [field.name for field in dataclasses.fields(terms)][:-1]
        for name, value in zip(names, values, strict=True):
            getattr(terms, name)[slot] = value
        terms.stop_ids[slot, : len(ask.stop)] = ask.stop
    return sampler.Admission(new_B=new_B, token_BS=token_BS, terms=terms)


class Bench:
    """Compiled programs over one policy, and slots that are used again and again."""

    def __init__(self, dtype: str, **changes) -> None:
        self.config = dataclasses.replace(CONFIG, dtype=dtype, **changes)
        self.graph, weights = nnx.split(Policy(self.config, nnx.Rngs(3)), nnx.Param)
        self.mild = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
        # Sharper than at initialisation: routes and probabilities differ more from token to token, and so would bits.
        self.weights = jax.tree.map(lambda leaf: (leaf * (1 + 2 * (leaf.ndim > 1))).astype(dtype), weights)
        self.traces = 0

        def decode(weights, *arguments):
            self.traces += 1
            return sampler.decode(nnx.merge(self.graph, weights), *arguments)

        self.decode = jax.jit(decode, donate_argnums=1)
        self.admit = jax.jit(sampler.admit, donate_argnums=0)
        self.retract = jax.jit(sampler.retract, donate_argnums=0)
        self.take = jax.jit(sampler.take)
        self.score = jax.jit(
            lambda weights, batch, temperature: nnx.merge(self.graph, weights).score(batch, temperature)
        )
        self.logits = jax.jit(self._logits)
        self.slots = sampler.empty_slots(sampler.SlotsConfig(slots=SLOTS, positions=POSITIONS, stop_ids=2), self.config)

    def _logits(self, weights, input_BT):
        policy = nnx.merge(self.graph, weights)
        hidden_BTD, _ = policy(input_BT, jnp.ones_like(input_BT), jnp.arange(input_BT.shape[1])[None])
        return policy.logits(hidden_BTD)

    def start(self, asks: dict[int, Ask]) -> None:
        self.slots = self.admit(self.slots, admission(asks))

    def step(self, steps: int = 1000, version: int = 0, enough: int = SLOTS, weights=None) -> None:
        weights = self.weights if weights is None else weights
        self.slots = self.decode(weights, self.slots, np.int32(version), np.int32(steps), np.int32(enough))

    def read(self, slot: int) -> dict[str, np.ndarray]:
        """What the slot sampled, its routes included."""
        taken = jax.device_get(self.take(self.slots, jnp.array([slot])))
        known, prompt = int(self.slots.known_B[slot]), int(self.slots.terms.prompt_B[slot])
        return {
            "input": taken.token_BS[0, : known - 1],
            "tokens": taken.token_BS[0, prompt:known],
            "logp": taken.logp_BS[0, prompt:known],
            "version": taken.sampler_BS[0, prompt:known],
            "experts": taken.experts_BSLK[0, : known - 1],
            "router": taken.router_BS[0, : known - 1],
        }

    def run(self, asks: dict[int, Ask], steps: int = 1000, weights=None) -> dict[int, dict[str, np.ndarray]]:
        self.start(asks)
        while bool(self.slots.running_B.any()):
            self.step(steps, weights=weights)
        return {slot: self.read(slot) for slot in asks}


@functools.cache
def bench_of(dtype: str) -> Bench:
    return Bench(dtype)


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request):
    return bench_of(request.param)


@pytest.fixture
def bench32():
    return bench_of("float32")


def score(bench: Bench, got: dict[str, np.ndarray], temperature: float, weights=None) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's log-probs of what was sampled, and its own free routes."""
    length = len(got["input"])
    row = {name: np.zeros((1, POSITIONS), np.int32) for name in ("input", "target", "segment", "position", "lag")}
    row["input"][0, :length] = got["input"]
    row["target"][0, :length] = [*got["input"][1:], got["tokens"][-1]]
    row["segment"][0, :length], row["position"][0, :length] = 1, range(length)
    zero_BT, config = jnp.zeros((1, POSITIONS)), bench.config
    batch = TokenBatch(
        **{f"{name}_BT": jnp.asarray(array) for name, array in row.items()},
        loss_mask_BT=zero_BT > 0,
        behavior_logp_BT=zero_BT,
        advantage_BT=zero_BT,
        trace=free_trace(config.moe_layers, 1, POSITIONS, config.experts_per_token, config.experts),
    )
    output = bench.score(bench.weights if weights is None else weights, batch, jnp.float32(temperature))
    routes_TLK = np.moveaxis(np.asarray(output.trace.experts_LBTK[:, 0, :length]), 0, 1)
    return np.asarray(output.logp_BT[0, length - len(got["tokens"]) : length]), routes_TLK


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def some_asks(seed: int, count: int = SLOTS) -> list[Ask]:
    random = np.random.default_rng(seed)
    return [
        Ask(
            prompt=tuple(random.integers(0, 13, random.integers(1, 9)).tolist()),
            new=int(random.integers(3, 11)),
            seed=int(random.integers(2**62)),
            member=int(random.integers(8)),
            temperature=float(random.choice([0.0, 0.7, 1.0])),
            top_p=float(random.choice([0.8, 1.0])),
            top_k=int(random.choice([0, 5])),
            stop=(1,),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_routes_are_the_trainers(bench32, temperature):
    asks = {slot: Ask(prompt=(2, 3, 4 + slot % 3), seed=slot, temperature=temperature) for slot in range(SLOTS)}
    for got in bench32.run(asks, weights=bench32.mild).values():
        logp, routes_TLK = score(bench32, got, temperature, bench32.mild)
        np.testing.assert_allclose(got["logp"], logp, atol=1e-5)
        np.testing.assert_array_equal(got["experts"], routes_TLK)
        assert len(got["tokens"]) == 8
        assert len(got["experts"]) == 3 + 8 - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 4, "dense_layers": (0, 2), "dense_hidden": 40},
        {"experts": 0, "experts_per_token": 0, "expert_hidden": 0, "dense_layers": (0, 1), "dense_hidden": 40},
    ],
    ids=["mixed", "dense"],
)
def test_policies_with_dense_layers_sample_as_they_score(changes):
    bench = Bench("float32", **changes)
    asks = {slot: Ask(prompt=(2, 3, 4 + slot), seed=slot) for slot in range(3)}
    for got in bench.run(asks, weights=bench.mild).values():
        logp, routes_TLK = score(bench, got, 1.0, bench.mild)
        np.testing.assert_allclose(got["logp"], logp, atol=1e-5)
        np.testing.assert_array_equal(got["experts"], routes_TLK)
        assert got["experts"].shape[1] == bench.config.moe_layers


def test_slots_longer_than_the_policy_reaches_are_refused():
    slots = sampler.SlotsConfig(slots=1, positions=21)
    with pytest.raises(ValueError, match=r"slots.positions: expected at most max_positions = 20 .*, got 21"):
        sampler.empty_slots(slots, dataclasses.replace(CONFIG, max_positions=20))


def test_bfloat16_differs_from_float32_but_not_much(bench32):
    rough = bench_of("bfloat16")
    asks = {slot: Ask(prompt=(2, 3, 4), seed=slot) for slot in range(8)}
    differences = []
    for got in rough.run(asks, weights=rough.mild).values():
        differences.append(got["logp"] - score(bench32, got, 1.0, bench32.mild)[0])
    mismatch = np.abs(np.concatenate(differences))
    assert 1e-4 < mismatch.mean() < 0.05


def test_greedy_takes_the_most_probable_token_at_temperature_one(bench32):
    got = bench32.run({0: Ask(prompt=(5, 6), temperature=0.0, new=6)})[0]
    logits_TV = bench32.logits(bench32.weights, jnp.asarray(got["input"])[None])[0, 1:]
    np.testing.assert_array_equal(got["tokens"], jnp.argmax(logits_TV, axis=-1))
    np.testing.assert_allclose(got["logp"], jax.nn.log_softmax(logits_TV).max(axis=-1), atol=1e-4)


def test_bits_do_not_depend_on_slot_companions_order_or_stretch(bench):
    asks = some_asks(0)
    together = bench.run(dict(enumerate(asks)))
    random = np.random.default_rng(1)
    order = random.permutation(SLOTS)
    elsewhere = bench.run({int(order[i]): ask for i, ask in enumerate(asks)}, steps=3)
    for i in range(SLOTS):
        assert_same(together[i], elsewhere[int(order[i])])
    # One by one into other slots, beside strangers that come and go meanwhile.
    for i, ask in enumerate(asks[:4]):
        slot = int(order[-1 - i])
        strangers = some_asks(10 + i)
        bench.run({s: strangers[s] for s in range(SLOTS)})
        bench.start({s: strangers[s] for s in range(SLOTS) if s not in (slot, 3)})
        bench.step(2)
        bench.start({slot: ask})
        bench.step(3)
        bench.start({3 if slot != 3 else 4: strangers[0]})
        bench.step()
        assert_same(together[i], bench.read(slot))


def test_one_sequence_is_the_same_in_every_slot(bench):
    got = bench.run(dict.fromkeys(range(SLOTS), Ask(prompt=(2, 7, 1), new=12, seed=5, top_p=0.9)))
    for slot in range(1, SLOTS):
        assert_same(got[0], got[slot])


@pytest.mark.parametrize("split", [1, 4])
def test_a_continuation_gives_the_bits_of_the_undivided_sequence(bench, split):
    for ask in some_asks(2, 4):
        whole = bench.run({0: ask})[0]
        cut = min(split, len(whole["tokens"]) - 1)
        if cut < 1:
            continue
        prompt = (*ask.prompt, *whole["tokens"][:cut].tolist())
        rest = bench.run({5: dataclasses.replace(ask, prompt=prompt, sampled=cut)})[5]
        for name in ("tokens", "logp"):
            np.testing.assert_array_equal(rest[name], whole[name][cut:])
        np.testing.assert_array_equal(rest["experts"], whole["experts"])


def test_a_cache_rebuilt_under_the_same_weights_changes_nothing(bench):
    ask = Ask(prompt=(3, 4, 5), new=10, seed=9)
    whole = bench.run({0: ask})[0]
    bench.start({0: ask})
    bench.step(6)
    bench.slots = bench.retract(bench.slots)
    bench.step(2)
    bench.slots = bench.retract(bench.slots)
    bench.step()
    assert_same(whole, bench.read(0))


def test_a_retracted_sequence_goes_on_under_the_new_weights_and_says_so(bench32):
    mild, other = bench32.mild, bench32.weights
    bench32.start({0: Ask(prompt=(3, 4, 5), new=9, seed=11)})
    bench32.step(6, version=4, weights=mild)  # three positions of the prompt, then three more: four tokens
    bench32.slots = bench32.retract(bench32.slots)
    bench32.step(version=5, weights=other)
    got = bench32.read(0)
    np.testing.assert_array_equal(got["version"], [4] * 4 + [5] * 5)
    np.testing.assert_array_equal(got["router"], [5] * 11)
    before, _ = score(bench32, got, 1.0, mild)
    after, routes_TLK = score(bench32, got, 1.0, other)
    np.testing.assert_allclose(got["logp"][:4], before[:4], atol=1e-5)
    np.testing.assert_allclose(got["logp"][4:], after[4:], atol=1e-4)  # sharp weights amplify rounding
    assert np.abs(before - after).max() > 1e-3
    np.testing.assert_array_equal(got["experts"], routes_TLK)


def test_a_stop_token_is_sampled_and_ends_the_sequence(bench32):
    free = bench32.run({0: Ask(prompt=(2, 2), new=10, seed=1)})[0]["tokens"].tolist()
    stop = free[3]
    got = bench32.run({0: Ask(prompt=(2, 2), new=10, seed=1, stop=(stop, 12))})[0]["tokens"].tolist()
    assert got == free[: free.index(stop) + 1]


def test_log_probs_are_of_the_untruncated_distribution(bench32):
    asks = {0: Ask(prompt=(2, 3), top_k=2, seed=3), 1: Ask(prompt=(2, 3), top_p=0.3, seed=3)}
    for truncated in bench32.run(asks, weights=bench32.mild).values():
        np.testing.assert_allclose(truncated["logp"], score(bench32, truncated, 1.0, bench32.mild)[0], atol=1e-5)
    alone = bench32.run({0: Ask(prompt=(2, 3), top_k=1, seed=3), 1: Ask(prompt=(2, 3), temperature=0.0)})
    np.testing.assert_array_equal(alone[0]["tokens"], alone[1]["tokens"])


def test_sampled_frequencies_are_the_probabilities(bench32):
    counts, rounds = np.zeros(13), 40
    for seed in range(rounds):
        bench32.start({slot: Ask(prompt=(4, 8), new=1, seed=seed << 33, member=slot) for slot in range(SLOTS)})
        bench32.step()
        counts += np.bincount(np.asarray(bench32.slots.token_BS[:, 2]), minlength=13)
    p_V = jax.nn.softmax(bench32.logits(bench32.weights, jnp.array([[4, 8]]))[0, 1])
    total = rounds * SLOTS
    chi_square = float((((counts - total * p_V) ** 2) / (total * p_V)).sum())
    assert chi_square < 40  # 12 degrees of freedom: exceeded once in 10,000


def test_every_part_of_the_key_matters(bench32):
    base = Ask(prompt=(4, 8), new=12)
    asks = [base, dataclasses.replace(base, member=1), dataclasses.replace(base, seed=1)]
    asks += [dataclasses.replace(base, seed=1 << 32), dataclasses.replace(base, seed=1 << 32, member=1)]
    got = bench32.run(dict(enumerate(asks)))
    assert len({tuple(one["tokens"].tolist()) for one in got.values()}) == len(asks)
    assert len(set(got[0]["tokens"].tolist())) > 1


def test_decoding_returns_when_enough_slots_are_free(bench32):
    bench32.start({slot: Ask(prompt=(2, 3), new=1 + slot) for slot in range(SLOTS)})
    bench32.step(3)
    np.testing.assert_array_equal(bench32.slots.fed_B, [2] + [3] * (SLOTS - 1))
    bench32.step(enough=4)
    assert int(bench32.slots.running_B.sum()) == SLOTS - 4
    bench32.step(enough=1000)
    assert not bench32.slots.running_B.any()
    np.testing.assert_array_equal(bench32.slots.known_B, np.arange(SLOTS) + 3)


def test_a_slot_that_overflowed_does_not_harm_its_next_sequence(bench32):
    ask = Ask(prompt=(2, 3, 4), seed=8)
    clean = bench32.run({0: ask})[0]
    poisoned = jnp.full_like(bench32.slots.value_LBSGC, jnp.nan)
    bench32.slots = dataclasses.replace(bench32.slots, value_LBSGC=poisoned)
    assert_same(clean, bench32.run({0: ask})[0])


def test_halted_slots_keep_what_they_have(bench32):
    bench32.start({0: Ask(prompt=(2, 3)), 1: Ask(prompt=(2, 3))})
    bench32.step(4)
    halted_B = np.arange(SLOTS) == 0
    bench32.slots = sampler.halt(bench32.slots, jnp.asarray(halted_B))
    bench32.step()
    assert (len(bench32.read(0)["tokens"]), len(bench32.read(1)["tokens"])) == (3, 8)


def test_a_warm_sampler_traces_nothing_again(bench32):
    bench32.run(dict(enumerate(some_asks(3))), steps=5)
    traces = bench32.traces
    bench32.run(dict(enumerate(some_asks(4, 3))))
    assert bench32.traces == traces


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.integers(0, 6))
def test_truncation_keeps_the_fewest_tokens_that_hold_the_mass(seed, top_p, top_k):
    logit_V = np.random.default_rng(seed).integers(-3, 3, 9).astype(np.float32)  # with ties
    logp_V = np.asarray(jax.nn.log_softmax(logit_V))
    kept_BV = sampler._kept(jnp.asarray(logp_V)[None], np.array([top_p], np.float32), np.array([top_k]))
    wanted, mass = set(), 0.0
    for rank, token in enumerate(sorted(range(9), key=lambda token: (-logp_V[token], token))):
        if rank and ((mass >= top_p - 1e-6 and top_p < 1) or (top_k and rank >= top_k)):
            break
        wanted.add(token)
        mass += float(np.exp(logp_V[token]))
    got = set(np.flatnonzero(kept_BV[0]).tolist())
    assert got == wanted or abs(mass - top_p) < 1e-5


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match=r"slots\.positions: expected at least 1, got 0"):
        sampler.SlotsConfig(slots=1, positions=0)
