"""The local engine's thread, driven by hand: batching, and versions that change under running sequences."""

import dataclasses
import functools
import itertools
import queue
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_bridge.checks import check_completion
from rollout_bridge.errors import BridgeError, Busy, Fatal, NotStaged, Retryable
from rollout_bridge.messages import (
    Completion,
    Finish,
    InFlight,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    Sampling,
    Serving,
)
from sat_jax.logprob import token_logp
from sat_jax.model import Policy, PolicyConfig
from sat_jax.model.hf import export_tensors, import_tensors
from sat_jax.sampler import SlotsConfig
from train.compiles import CompileCounter
from train.local_worker import LocalWorker, StagedWeights, Ticket

CONFIG = PolicyConfig.tiny(vocab_size=13, width=32, head_dim=8, expert_hidden=24)
SLOTS, POSITIONS, STEPS = 4, 32, 2
MODEL = ModelInfo(
    model_digest=CONFIG.digest(),
    vocab_size=13,
    moe_layers=2,
    num_experts=4,
    top_k=2,
    max_tokens=POSITIONS,
    tensors=(),
    dtype="float32",
)
STOP = 1


def sharp_policy(seed: int) -> Policy:
    """Sharper than at initialisation, so that weights, routes and tokens matter."""
    graph, weights = nnx.split(Policy(CONFIG, nnx.Rngs(seed)), nnx.Param)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * (1 + 2 * (leaf.ndim > 1)), weights))


@functools.cache
def scorer(dtype: str):
    graph = nnx.split(Policy(dataclasses.replace(CONFIG, dtype=dtype)), nnx.Param)[0]

    @jax.jit
    def score(weights, tokens_BT):
        policy, input_BT = nnx.merge(graph, weights), tokens_BT[:, :-1]
        hidden_BTD, trace = policy(input_BT, jnp.ones_like(input_BT), jnp.arange(input_BT.shape[1])[None])
        return token_logp(hidden_BTD, policy.head_DV, tokens_BT[:, 1:])[0], trace.experts_LBTK

    return score


def probe_of(policy: Policy, tolerance: float = 1e-4, dtype: str = "float32", count: int = 257) -> Probe:
    """What a trainer of that type sends."""
    tokens = np.random.default_rng(0).integers(0, 13, count).astype(np.int32)
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(policy, nnx.Param))
    logp_BT, experts_LBTK = scorer(dtype)(weights, tokens[None])
    seen = [len(np.unique(layer)) for layer in np.asarray(experts_LBTK)]
    return Probe(
        tokens=tokens, lengths=(count,), logp=np.array(logp_BT[0]), tolerance=tolerance, expert_coverage=sum(seen) / 8
    )


def staged(policy: Policy, version: int, dtype: str = "float32", digest: str = "") -> StagedWeights:
    manifest = Manifest(version=version, model_digest=CONFIG.digest(), digest=digest or f"d{version}", tensors=())
    weights = nnx.state(policy, nnx.Param)
    return StagedWeights(manifest=manifest, weights=jax.tree.map(lambda leaf: leaf.astype(dtype), weights))


class Bench:
    """A worker and what its callers got."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        slots = SlotsConfig(slots=SLOTS, positions=POSITIONS, stop_ids=2)
        self.worker = LocalWorker("engine-1", dataclasses.replace(CONFIG, dtype=dtype), slots, STEPS)
        self.policy = sharp_policy(1)
        self.version = -1
        self.numbers = itertools.count()

    def commit(self, policy: Policy, in_flight: InFlight = InFlight.FINISH) -> "Future[ProbeReport]":
        """Pushes a policy as the next version."""
        self.version += 1
        self.worker.stage(staged(policy, self.version, self.dtype))
        done: Future[ProbeReport] = Future()
        self.worker.commit(self.version, probe_of(policy, dtype=self.dtype), in_flight, done)
        return done

    def fresh(self) -> "Bench":
        """Nothing runs, and the usual policy serves."""
        self.worker.resume()
        while self.worker.turn():
            pass
        self.commit(self.policy)
        return self

    def submit(self, **changes) -> "Call":
        fields = {"prompt": (2, 3, 4), "new": 9, "members": (0,), "seed": 7, "already": 0, "temperature": 1.0} | changes
        request = SampleRequest(
            request_id=f"r{next(self.numbers)}",
            prompt_tokens=np.array(fields["prompt"], np.int32),
            sampling=Sampling(
                max_new_tokens=fields["new"],
                stop_ids=fields.get("stop", ()),
                seed=fields["seed"],
                temperature=fields["temperature"],
            ),
            members=fields["members"],
            already_sampled=fields["already"],
            want_trace=fields.get("want_trace", True),
        )
        call = Call(request)
        self.worker.submit(call.tickets)
        return call

    def turns(self, count: int = 1000) -> None:
        for _ in range(count):
            if not self.worker.turn():
                return


class Call:
    """A request and its answers so far, each checked as a client would."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.reply: queue.SimpleQueue[Completion | BridgeError] = queue.SimpleQueue()
        self.tickets = [Ticket(request=request, member=member, reply=self.reply) for member in request.members]

    def answers(self) -> list[Completion | BridgeError]:
        found = [self.reply.get_nowait() for _ in range(self.reply.qsize())]
        for answer in found:
            if isinstance(answer, Completion):
                check_completion(answer, self.request, MODEL)
        return found

    def one(self) -> Completion:
        (answer,) = self.answers()
        assert isinstance(answer, Completion)
        return answer


@functools.cache
def bench_of(dtype: str) -> Bench:
    bench = Bench(dtype)
    assert bench.worker.status().serving is Serving.NOT_SERVING
    with pytest.raises(Retryable, match=r"expected a serving engine, got one without a verified version"):
        bench.submit()
    return bench


@pytest.fixture
def bench():
    return bench_of("float32").fresh()


def assert_same(left: Completion, right: Completion) -> None:
    for name in ("tokens", "behavior_logp"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    assert left.trace
    assert right.trace
    np.testing.assert_array_equal(left.trace.experts_TLK, right.trace.experts_TLK)


def test_more_members_than_slots_each_come_once(bench):
    calls = [bench.submit(members=(0, 1, 2, 5), seed=seed, new=3 + seed, stop=(STOP,)) for seed in range(5)]
    assert (bench.worker.status().running, bench.worker.status().waiting) == (0, 20)
    bench.worker.turn()
    assert bench.worker.status().running == SLOTS
    bench.turns()
    for call in calls:
        answers = call.answers()
        assert sorted(answer.member for answer in answers) == [0, 1, 2, 5]
        assert {answer.finish for answer in answers} <= {Finish.STOP, Finish.LENGTH}
    assert (bench.worker.status().running, bench.worker.status().waiting) == (0, 0)


def test_a_completion_does_not_depend_on_what_else_is_asked(bench):
    alone = bench.submit(members=(3,))
    bench.turns()
    strangers = [bench.submit(members=(0, 1, 2), seed=seed) for seed in (1, 2)]
    bench.turns(2)
    together = bench.submit(members=(3,))
    bench.turns()
    assert_same(alone.one(), together.one())
    assert all(len(stranger.answers()) == 3 for stranger in strangers)


def test_routes_come_only_when_wanted_and_greedy_reports_temperature_one(bench):
    call = bench.submit(want_trace=False, temperature=0.0)
    bench.turns()
    assert call.one().logprob.temperature == 1.0


def test_finish_lets_running_requests_end_on_the_old_weights_and_new_ones_wait(bench):
    running = bench.submit()
    bench.turns(2)
    old = bench.version
    done = bench.commit(sharp_policy(2), InFlight.FINISH)
    waiting = bench.submit()
    bench.turns(1)
    assert not done.done()
    assert (bench.worker.status().version, bench.worker.status().waiting) == (old, 1)
    with pytest.raises(Busy, match=r"pause: expected no other change under way, got one that waits for 1 running"):
        bench.worker.pause(InFlight.ABORT, Future())
    bench.turns()
    assert done.result(0).mean_abs < 1e-5
    assert set(running.one().version) == {old}
    assert set(waiting.one().version) == {old + 1}


def test_retract_goes_on_with_the_tokens_under_the_new_weights(bench):
    running = bench.submit()
    bench.turns(3)  # six positions: four tokens sampled
    old = bench.version
    done = bench.commit(sharp_policy(2), InFlight.RETRACT)
    assert done.done()
    bench.turns()
    completion = running.one()
    assert completion.trace
    np.testing.assert_array_equal(completion.version, [old] * 4 + [old + 1] * 5)
    np.testing.assert_array_equal(completion.trace.version_T, [old + 1] * 11)


def test_retract_under_equal_weights_changes_no_bit(bench):
    whole = bench.submit()
    bench.turns()
    again = bench.submit()
    for _ in range(3):
        bench.turns(2)
        bench.commit(bench.policy, InFlight.RETRACT)
    bench.turns()
    assert_same(whole.one(), again.one())


def test_abort_returns_what_is_there_and_a_continuation_completes_it_bit_for_bit(bench):
    whole = bench.submit(members=(2,))
    bench.turns()
    running, waiting = bench.submit(members=(2,)), [bench.submit(seed=seed) for seed in range(4)]
    bench.turns(3)
    bench.commit(bench.policy, InFlight.ABORT)
    partial = running.one()
    assert (partial.finish, len(partial.tokens)) == (Finish.ABORT, 4)
    bench.turns()
    assert waiting[-1].one().finish is Finish.LENGTH  # it had no slot yet, so nothing of it was lost
    rest = bench.submit(prompt=(2, 3, 4, *partial.tokens.tolist()), already=4, members=(2,))
    bench.turns()
    first, second, expected = partial, rest.one(), whole.one()
    for name in ("tokens", "behavior_logp"):
        joined = np.concatenate([getattr(first, name), getattr(second, name)])
        np.testing.assert_array_equal(joined, getattr(expected, name))
    assert second.trace
    assert expected.trace
    np.testing.assert_array_equal(second.trace.experts_TLK, expected.trace.experts_TLK)


def test_an_abort_while_a_cache_is_rebuilt_returns_no_tokens(bench):
    running = bench.submit(prompt=(2, 3, 4, 5, 6, 7))
    bench.turns(5)
    bench.commit(sharp_policy(2), InFlight.RETRACT)
    bench.turns(1)
    bench.worker.abort(None)
    completion = running.one()
    assert (completion.finish, len(completion.tokens), completion.trace) == (Finish.ABORT, 0, None)
    assert bench.worker.status().running == 0


def test_abort_by_name_ends_running_and_waiting_requests_alone(bench):
    calls = [bench.submit(members=(0, 1), seed=seed) for seed in range(3)]
    bench.turns(2)
    bench.worker.abort((calls[0].request.request_id, calls[2].request.request_id))
    assert [len(completion.tokens) for completion in calls[0].answers()] == [2, 2]
    assert [len(completion.tokens) for completion in calls[2].answers()] == [0, 0]
    bench.turns()
    assert {completion.finish for completion in calls[1].answers()} == {Finish.LENGTH}


def test_cancelled_tickets_free_their_slots_and_get_no_answer(bench):
    gone, kept = bench.submit(members=(0, 1, 2, 3, 4)), bench.submit()
    bench.turns(1)
    bench.worker.cancel(gone.tickets)
    assert (bench.worker.status().running, bench.worker.status().waiting) == (0, 1)
    bench.turns()
    assert gone.answers() == []
    assert kept.one().finish is Finish.LENGTH


def test_pause_holds_requests_and_resume_goes_on_bit_for_bit(bench):
    whole = bench.submit()
    bench.turns()
    held = bench.submit()
    bench.turns(2)
    done: Future[None] = Future()
    bench.worker.pause(InFlight.RETRACT, done)
    assert done.done()
    assert bench.worker.status().serving is Serving.PAUSED
    bench.turns(5)
    assert held.answers() == []
    with pytest.raises(Retryable, match=r"expected requests that can finish, got 1 that are paused; resume first"):
        bench.commit(bench.policy, InFlight.FINISH)
    bench.version -= 1
    bench.worker.resume()
    bench.turns()
    assert_same(whole.one(), held.one())


def test_pause_can_wait_for_running_requests(bench):
    running, done = bench.submit(), Future()
    bench.turns(1)
    bench.worker.pause(InFlight.FINISH, done)
    waiting = bench.submit()
    bench.turns()
    assert done.done()
    assert running.one().finish is Finish.LENGTH
    assert waiting.answers() == []
    bench.worker.resume()
    bench.turns()
    assert waiting.one().finish is Finish.LENGTH


def test_a_commit_is_idempotent_by_version_and_digest(bench):
    report = bench.commit(bench.policy).result(0)
    live, again = bench.version, Future()
    probe = probe_of(bench.policy)
    bench.worker.stage(staged(bench.policy, live))
    bench.worker.commit(live, probe, InFlight.FINISH, again)
    assert again.result(0) == report
    with pytest.raises(NotStaged, match=rf"commit of version {live + 1}: expected it to be staged, got nothing"):
        bench.worker.commit(live + 1, probe, InFlight.FINISH, Future())
    bench.worker.stage(staged(bench.policy, live - 1, digest="another"))  # of a resumed run: it may go back
    older = Future()
    bench.worker.commit(live - 1, probe, InFlight.FINISH, older)
    assert older.done()
    assert bench.worker.status().version == live - 1
    assert bench.worker.status().staged_version is None


def test_a_failed_probe_names_both_numbers_and_leaves_the_old_version_serving(bench):
    whole = bench.submit()
    bench.turns()
    running = bench.submit()
    bench.turns(2)
    bench.worker.stage(staged(sharp_policy(2), bench.version + 1))
    with pytest.raises(Fatal, match=r"expected mean .* of at most 0\.0001 nats, got [0-9.]+ .*serves on; check"):
        bench.worker.commit(bench.version + 1, probe_of(bench.policy), InFlight.ABORT, Future())
    status = bench.worker.status()
    assert (status.version, status.staged_version, status.running) == (bench.version, None, 1)
    bench.turns()
    assert_same(whole.one(), running.one())


def test_weights_that_are_not_numbers_fail_the_probe(bench):
    broken = nnx.clone(bench.policy)
    broken.final_norm_D[...] = jnp.full_like(broken.final_norm_D[...], jnp.nan)
    bench.worker.stage(staged(broken, bench.version + 1))
    with pytest.raises(Fatal, match=r"got nan"):
        bench.worker.commit(bench.version + 1, probe_of(bench.policy), InFlight.FINISH, Future())


def test_a_completion_that_overflows_is_an_error_of_its_own(bench):
    healthy = bench.submit()
    bench.turns()
    broken = nnx.clone(bench.policy)
    broken.embedding_VD[...] = broken.embedding_VD[...].at[4].set(jnp.inf)
    bench.worker.begin(broken, bench.version)
    harmed = bench.submit()
    bench.turns()
    (answer,) = harmed.answers()
    assert isinstance(answer, Fatal)
    assert f"{harmed.request.request_id}/0: expected finite log-probs, got nan at token 0" in str(answer)
    bench.worker.begin(bench.policy, bench.version)
    again = bench.submit()
    bench.turns()
    assert_same(healthy.one(), again.one())


def swapped(tensors: dict[str, np.ndarray], layer: int, left: int, right: int) -> dict[str, np.ndarray]:
    """The tensors with two experts under each other's names."""
    result = dict(tensors)
    for name in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.{layer}.mlp.experts.{e}.{name}.weight" for e in (left, right))
        result[one], result[other] = tensors[other], tensors[one]
    return result


def difference_of(bench: Bench, weights: StagedWeights, probe: Probe) -> float:
    """Commits and fails; the mean difference that the error names."""
    bench.worker.stage(weights)
    with pytest.raises(Fatal) as caught:
        bench.worker.commit(weights.manifest.version, probe, InFlight.FINISH, Future())
    return float(str(caught.value).split("nats, got ")[1].split()[0])


def test_two_swapped_experts_fail_the_probe_in_bfloat16():
    bench = bench_of("bfloat16").fresh()
    probe = probe_of(bench.policy, tolerance=0.01, dtype="bfloat16")  # what the wire carries, scored by the trainer
    assert probe.expert_coverage == 1.0
    honest = bench.commit(bench.policy).result(0).mean_abs
    tensors = dict(export_tensors(bench.policy, CONFIG, "bfloat16"))
    for layer, left, right in [(0, 0, 1), (0, 2, 3), (1, 0, 2), (1, 1, 3)]:
        policy = import_tensors(CONFIG, swapped(tensors, layer, left, right))
        assert difference_of(bench, staged(policy, bench.version + 1, "bfloat16"), probe) > max(10 * honest, 0.02)


def test_a_float32_trainer_sees_the_rounding_of_an_honest_push_and_a_swap_above_it():
    bench, policy = bench_of("bfloat16").fresh(), Policy(CONFIG, nnx.Rngs(1))
    bench.version += 1
    bench.worker.stage(staged(policy, bench.version, "bfloat16"))
    done: Future[ProbeReport] = Future()
    probe = probe_of(policy, tolerance=0.02)
    bench.worker.commit(bench.version, probe, InFlight.FINISH, done)
    honest = done.result(0).mean_abs
    assert 1e-4 < honest < 0.02
    tensors = dict(export_tensors(policy, CONFIG, "bfloat16"))
    wrong = staged(import_tensors(CONFIG, swapped(tensors, 0, 0, 1)), bench.version + 1, "bfloat16")
    assert difference_of(bench, wrong, probe) > 3 * honest


def test_nothing_compiles_once_it_is_warm(bench):
    with CompileCounter() as compiles:
        calls = [bench.submit(members=(0, 1, 2), seed=seed, new=2 + seed, stop=(STOP,)) for seed in range(4)]
        bench.turns(3)
        bench.worker.cancel(calls[0].tickets)
        bench.worker.abort((calls[1].request.request_id,))
        bench.worker.pause(InFlight.RETRACT, Future())
        bench.worker.resume()
        bench.turns()
    assert compiles.count == 0
