"""The two-turn task on the real local engine, over the real bridge, into a real optimizer step."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from rollout_bridge import Fleet, serve
from sat_jax.advantages import AdvantageConfig
from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import Policy, PolicyConfig
from sat_jax.objective import ObjectiveConfig
from train.assemble import AssembleConfig, BatchConfig, assemble, place
from train.buffer import Buffer
from train.collect import Collector, CollectSettings
from train.data import Encoding, PromptConfig, PromptData
from train.local_engine import LocalEngine, LocalEngineConfig
from train.rewards import RandomReward
from train.rollout import CodeRollouts
from train.state import OptimConfig, TrainState, init_state
from train.step import Step
from train.tasks.calculator import ALPHABET, calculate, examples, rollout
from train.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer(ALPHABET)
EOS, ASK = TOKENIZER.token_id("<eos>"), TOKENIZER.token_id("?")
POLICY = PolicyConfig.tiny(vocab_size=TOKENIZER.vocab_size, layers=1, width=32, expert_hidden=32)
SETTINGS = CollectSettings(
    seed=1, group_size=4, temperature=0.7, max_new_tokens=16, stop_ids=(EOS,), want_trace=True, scorers=1
)
ASSEMBLE = AssembleConfig(
    batch=BatchConfig(groups_per_step=8, minibatches=1, group_size=4, row_length=24, rows=32),
    advantage=AdvantageConfig(),
    vocab_size=POLICY.vocab_size,
    moe_layers=POLICY.layers,
    experts=POLICY.experts,
    experts_per_token=POLICY.experts_per_token,
    temperature=0.7,
    replay=True,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def policy(mesh):
    """Random weights whose routes and log-probs differ from token to token."""
    policy = Policy(POLICY, rngs=nnx.Rngs(5), mesh=mesh)
    policy.final_norm_D[...] = policy.final_norm_D[...] * 3.0
    return policy


@pytest.fixture(scope="module")
def groups(policy):
    encoding = Encoding(
        tokenizer=TOKENIZER,
        prompt=PromptConfig(template="{prompt}", stop=("<eos>",)),
        max_new_tokens=16,
        row_length=24,
    )
    data = PromptData(examples()[1000:1100], [], encoding, 0)
    engine = LocalEngine(POLICY, LocalEngineConfig(dtype="float32", slots=32, max_tokens=24), initial=policy)
    server = serve(engine, "127.0.0.1:0")
    try:
        with Fleet([f"127.0.0.1:{server.port}"]) as fleet:
            fleet.wait_ready(120)
            code = CodeRollouts(rollout, fleet, TOKENIZER, lambda request_id: data[int(request_id[1:])], 16)
            buffer = Buffer(max_lag=0, deadline=120.0)
            with Collector(code, data, TOKENIZER, RandomReward(0), buffer, SETTINGS) as collector:
                collector.request(range(8), version=0)
                return buffer.take(8, 0)
    finally:
        server.stop(1.0)
        engine.close()


def trajectories(groups):
    """(tokens, which of them were sampled) of every completion."""
    return [(c.tokens, group.trained_tokens(c.member)) for group in groups for c in group.completions]


def said(question):
    """What the tool says to a question, its last token the call."""
    return calculate(TOKENIZER.decode(question[:-1]))


def test_every_token_is_masked_exactly_if_the_tool_wrote_it(groups):
    talked = 0
    for tokens, sampled in trajectories(groups):
        stretches = [
            (kind, [t for t, _ in run])
            for kind, run in itertools.groupby(zip(tokens, sampled, strict=True), lambda pair: pair[1])
        ]
        first = [int(token) for token in stretches[0][1]]
        if len(stretches) == 1:
            # It answered at once, used its room up, or left none for the tool and an answer.
            asked = first[-1] == ASK
            assert first[-1] == EOS or len(first) == 16 or (asked and len(first) + len(said(first)) >= 16)
            continue
        talked += 1
        assert [bool(kind) for kind, _ in stretches] == [True, False, True]
        assert first[-1] == ASK
        assert TOKENIZER.decode(stretches[1][1]) == said(first)
        answer = [int(token) for token in stretches[2][1]]
        assert EOS not in answer[:-1]
        assert answer[-1] == EOS or len(tokens) == 16
    assert talked >= 4


def test_the_trainer_reproduces_every_sampled_token_over_both_turns(groups, policy, mesh):
    made = assemble(groups, 0, ASSEMBLE)
    (micro,) = place(made.microbatches, mesh)
    output = nnx.jit(lambda policy, micro: policy.score(micro, 0.7))(policy, micro)
    active_BT = np.asarray(micro.loss_mask_BT)
    mismatch = (np.asarray(output.logp_BT) - np.asarray(micro.behavior_logp_BT))[active_BT]
    assert made.stats.missing == 0
    assert made.stats.tokens == active_BT.sum() == sum(int(mask.sum()) for _, mask in trajectories(groups))
    assert np.abs(mismatch).max() < 1e-4
    present_BT = np.asarray(micro.trace.present_BT)
    assert np.asarray(output.agreement_BT)[present_BT].min() == 1.0
    # What the tool wrote has no log-prob, and is what a token without a mask would be off by.
    inserted_BT = (np.asarray(micro.behavior_logp_BT) == 0) & (np.asarray(micro.segment_BT) > 0) & ~active_BT
    assert np.abs(np.asarray(output.logp_BT)[inserted_BT]).mean() > 0.1


@pytest.mark.slow
def test_an_optimizer_step_takes_them(groups, policy, mesh):
    graph, params = nnx.split(policy, nnx.Param)
    params = jax.tree.map(lambda leaf: leaf.copy(), params)
    optimizer = OptimConfig(peak_lr=1e-3, warmup=0).transformation()
    state = init_state(params, optimizer, mesh)
    step = Step(graph, optimizer, ObjectiveConfig.preset("sat_grpo"), 0.7, state)
    batch = place(assemble(groups, 0, ASSEMBLE).microbatches, mesh)
    before = step.score(state.params, batch)[0].logp_BT
    state, report = step.update(state, batch, step.measure(state, batch))
    assert isinstance(state, TrainState)
    assert (report.finite, state.version) == (True, 1)
    assert report.metrics["tokens"] == sum(int(mask.sum()) for _, mask in trajectories(groups))
    assert report.metrics["routing/missing"] == 0
    moved = np.asarray(step.score(state.params, batch)[0].logp_BT - before)
    # Towards what was rewarded: the advantage-weighted log-prob rises.
    weight = np.asarray(batch[0].advantage_BT) * np.asarray(batch[0].loss_mask_BT)
    assert (moved * weight).sum() > 0
