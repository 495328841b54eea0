"""Collection, the buffer and assembly behind a real server and client, with an engine that misbehaves."""

import numpy as np
import pytest

from rollout_bridge import Fleet, serve
from rollout_bridge.engines.fake import FakeEngine, Fault
from rollout_bridge.messages import ModelInfo, TensorSpec
from sat_jax.advantages import AdvantageConfig
from train.assemble import AssembleConfig, BatchConfig, assemble
from train.buffer import Buffer
from train.collect import Collector, CollectSettings
from train.data import Encoding, PromptConfig, PromptData
from train.rewards import RandomReward
from train.tasks import Example
from train.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("0123456789=")
MODEL = ModelInfo(
    model_digest="m",
    vocab_size=TOKENIZER.vocab_size,
    moe_layers=2,
    num_experts=4,
    top_k=2,
    max_tokens=32,
    tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),),
    dtype="float32",
)
SETTINGS = CollectSettings(
    seed=1, group_size=4, temperature=1.0, max_new_tokens=5, stop_ids=(1,), want_trace=True, shown=1
)
ASSEMBLE = AssembleConfig(
    batch=BatchConfig(groups_per_step=4, minibatches=1, group_size=4, row_length=20, rows=8),
    advantage=AdvantageConfig(),
    vocab_size=TOKENIZER.vocab_size,
    moe_layers=2,
    experts=4,
    experts_per_token=2,
    temperature=1.0,
    replay=True,
)


@pytest.fixture(scope="module")
def data():
    examples = [Example(prompt=f"{i}=", answer="1", where=f"f:{i}") for i in range(100, 200)]
    prompt = PromptConfig(template="{prompt}", stop=("<eos>",))
    return PromptData(examples, [], Encoding(tokenizer=TOKENIZER, prompt=prompt, max_new_tokens=5, row_length=20), 0)


def collected(data, faults):
    engine = FakeEngine(MODEL, version=0)
    for fault in faults:
        engine.inject(fault, 2)
    server = serve(engine, "127.0.0.1:0")
    try:
        buffer = Buffer(max_lag=7, deadline=60.0)
        with Fleet([f"127.0.0.1:{server.port}"]) as fleet:
            fleet.wait_ready(30)
            with Collector(fleet, data, TOKENIZER, RandomReward(0), buffer, SETTINGS) as collector:
                collector.request(range(12), version=0)
                groups = [group for version in range(3) for group in buffer.take(4, version)]
        assert all(engine.struck[fault] == 2 for fault in faults)
        return groups, buffer.stats()
    finally:
        server.stop(1.0)


def test_an_engine_that_repeats_drops_and_loses_costs_no_prompt_and_changes_no_token(data):
    honest, _ = collected(data, [])
    faulty, stats = collected(data, [Fault.DUPLICATE, Fault.DROP, Fault.LOST, Fault.REFUSE])
    assert (stats.drawn, stats.trained, stats.out, stats.buffered) == (12, 12, 0, 0)
    for left, right in zip(honest, faulty, strict=True):
        assert left.ticket == right.ticket
        assert left.reward_M.tolist() == right.reward_M.tolist()
        for one, other in zip(left.completions, right.completions, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.behavior_logp, other.behavior_logp)
    made = assemble(faulty[:4], 2, ASSEMBLE)
    assert (made.stats.missing, made.stats.sequences, set(made.stats.lags)) == (0, 16, {2})


def test_what_the_bridge_refuses_is_raised_where_the_trainer_waits(data):
    with pytest.raises(Exception, match=r"t\d+.*(positive|at most 0|<= 0)"):
        collected(data, [Fault.POSITIVE_LOGP])
