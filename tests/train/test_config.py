import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from sat_jax.mesh import MeshConfig
from sat_jax.model import PolicyConfig
from sat_jax.objective import ObjectiveConfig, preset_names
from sat_jax.objective.config import used_fields
from train.config import RunConfig, load, to_toml
from train.staleness import BoundedSchedule, Schedule
from train.strict_toml import read_table

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


@pytest.fixture
def write(tmp_path):
    """Writes the quickstart with one piece of its text replaced."""

    def edit(old, new):
        text = QUICKSTART.read_text()
        assert text.count(old) == 1, old
        path = tmp_path / "edited.toml"
        path.write_text(text.replace(old, new))
        return path

    return edit


def test_the_quickstart_is_what_its_file_says():
    config = load(QUICKSTART)
    assert (config.name, config.steps, config.reward) == ("quickstart", 280, "exact_match")
    assert (config.batch.groups_per_step, config.batch.group_size) == (32, 8)
    assert config.objective.config == ObjectiveConfig.preset("sat_grpo", kl_coef=1e-3)
    assert (config.objective.replay, config.objective.advantage.std) == (True, "group")
    assert config.plan == Schedule(lag=4, steps=280, groups_per_step=32)
    assert config.mesh == MeshConfig()
    policy = config.policy.build(vocab_size=14, max_positions=48)
    assert (policy.vocab_size, policy.width, policy.experts, policy.max_positions) == (14, 64, 4, 48)


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward=random"],
        ["data.path=x.jsonl"],
        ["schedule.lag=0"],
        ["objective.preset=grpo"],
        ["objective.preset=dr_grpo", "objective.norm_length=4"],
        ["objective.advantage_std=none", "objective.advantage_baseline=leave_one_out"],
        ["tokenizer.alphabet=0123456789+="],
        ['prompt.template="Q: {prompt}\\nA:"', 'prompt.stop=["<eos>", "\\n"]'],
        ["rollout.engine=remote", 'rollout.endpoints=["a:1", "b:2"]'],
        ["mesh.data=4", "optim.peak_lr=1", "objective.kl_coef=0"],
        ["objective.threshold_min=0.01"],
    ],
)
def test_a_resolved_config_loads_back_equal(overrides, tmp_path):
    config = load(QUICKSTART, overrides)
    assert config != load(QUICKSTART)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(path) == config


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_configured_and_is_pinned_in_the_resolved_file(preset, tmp_path):
    config = load(QUICKSTART, [f"objective.preset={preset}"])
    assert config.objective.config == ObjectiveConfig.preset(preset, kl_coef=1e-3)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(path) == config
    written = tomllib.loads(path.read_text())["objective"]
    values = dataclasses.asdict(config.objective.config)
    assert {name: values[name] for name in used_fields(values) if values[name] is not None}.items() <= written.items()


def test_advantages_follow_the_preset_unless_they_are_set():
    assert load(QUICKSTART, ["objective.preset=dr_grpo"]).objective.advantage.std == "none"
    changed = load(QUICKSTART, ["objective.preset=dr_grpo", "objective.advantage_std=group"])
    assert changed.objective.advantage.std == "group"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shedule.lag=4", r"shedule: expected a known key, got 'shedule'; did you mean 'schedule'\?"),
        ("schedule.lga=4", r"schedule\.lga: expected a known key, got 'lga'; did you mean 'lag'\?"),
        ("lag=4", r"lag: expected a known key, got 'lag'; did you mean 'schedule\.lag'\?"),
        ("objective.esp_low=0.1", r"objective\.esp_low: .*did you mean 'eps_low'\?"),
        ("schedule.lag=-1", r"schedule\.lag: expected at least 0, got -1"),
        ("schedule.lag=4.0", r"schedule\.lag: expected an integer, got 4\.0"),
        ("schedule.mode=bound", r"schedule\.mode: expected one of 'batch_wise', 'bounded', got \"bound\""),
        ("schedule.in_flight=wait", r"schedule\.in_flight: expected one of 'finish', 'retract', 'abort'"),
        ("batch.group_size=1", r"batch\.group_size: expected at least 2, got 1; .*groups of one"),
        ("batch.rows=0", r"batch\.rows: expected at least 1, got 0"),
        ("batch.row_length=4", r"batch\.row_length: expected more than sampling\.max_new_tokens = 4.*got 4"),
        ("steps=0", r"steps: expected at least 1, got 0"),
        ("steps=many", r"steps: expected an integer, got \"many\""),
        ("seed=4294967296", r"seed: expected at least 0 and below 4294967296, got 4294967296"),
        ("reward=exact", r"reward: expected one of 'exact_match', 'random', .*got 'exact'; did you mean 'exact_match'"),
        ("name=../x", r"name: expected letters, digits"),
        ("name=", r"name: expected letters, digits"),
        ("mesh.data=3", r"batch\.rows: expected a multiple of mesh data \* fsdp \* expert = 3, got 52; use 54"),
        ("mesh.data=0", r"mesh\.data: expected an integer of at least 1, got 0"),
        ("eval.prompts=513", r"eval\.prompts: expected at most data\.holdout = 512, got 513"),
        ("sampling.temperature=0", r"sampling\.temperature: expected above 0, got 0"),
        ("objective.preset=sat", r"objective preset: expected one of .*got 'sat'"),
        ("objective.exponent=two", r"objective\.exponent: expected a number, got \"two\""),
        ("objective.replay=1", r"objective\.replay: expected true or false, got 1"),
        ("objective.dual_cap=3", r"objective sat_grpo: expected fields that it uses .*got dual_cap"),
        ("objective.quantile=1.5", r"quantile: expected .*got 1\.5"),
        ("objective.advantage_std=batches", r"std: expected group, batch or none, got 'batches'"),
        ("objective=3", r"objective: expected a table, got 3"),
        ("policy.kv_heads=3", r"policy\.kv_heads: expected a divisor of query_heads = 4, got 3"),
        ("policy.experts_per_token=5", r"policy\.experts_per_token: expected at most experts = 4, got 5"),
        ("policy.dtype=fp8", r"policy\.dtype: expected one of 'float32', 'bfloat16', got \"fp8\""),
        ("optim.peak_lr=-1", r"optim\.peak_lr: expected > 0, got -1"),
        ("warm_start.noise=2", r"warm_start\.noise: expected in \[0, 1\], got 2"),
        ("rollout.engine=remote", r"rollout\.endpoints: expected at least one \"host:port\""),
        ('rollout.endpoints=["a:1"]', r"rollout\.endpoints: expected none with engine = \"local\".*got \['a:1'\]"),
        ("rollout.listen=here", r"rollout: expected addresses \"host:port\", got 'here'"),
        ("rollout.listen=127.0.0.1:65536", r"rollout: expected addresses \"host:port\", got '127.0.0.1:65536'"),
        ("checkpoint.keep=0", r"checkpoint\.keep: expected at least 1, got 0"),
        ("prompt.template=Q", r"prompt\.template: expected \{prompt\} exactly once"),
        ("tokenizer.kind=file", r"tokenizer\.path: expected the path of a tokenizer\.json"),
        ("data.task=subtraction", r"data\.task: expected one of 'addition', 'calculator', got \"subtraction\""),
    ],
)
def test_a_bad_setting_is_refused_with_file_and_key(override, message):
    with pytest.raises(ValueError, match=rf"quickstart\.toml with .*: {message}"):
        load(QUICKSTART, [override])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "keep = 2 ",
            "# keep = 2 ",
            r"checkpoint\.keep: expected a value, got none; a file holds every key of its run",
        ),
        ('preset = "sat_grpo"', "", r"objective\.preset: expected a value, got none"),
        ("[eval]", "[evla]", r"evla: expected a known key, got 'evla'; did you mean 'eval'\?"),
        ("steps = 280", "steps = ", r"expected TOML, got: Invalid value \(at line 6"),
        ("\nlag = 4", "\nlag = 4\nlag = 5", r"expected TOML, got: Cannot overwrite a value \(at line 13"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(write, old, new, message):
    with pytest.raises(ValueError, match=rf"edited\.toml: {message}"):
        load(write(old, new))


def test_settings_are_checked_also_when_they_do_not_come_from_a_file():
    config = load(QUICKSTART)
    with pytest.raises(ValueError, match=r"steps: expected at least 1, got -1"):
        dataclasses.replace(config, steps=-1)
    with pytest.raises(ValueError, match=r"batch\.rows: expected a multiple"):
        dataclasses.replace(config, mesh=MeshConfig(data=5))


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with the config of a small checkpoint, and a run's table that begins with it."""
    policy = PolicyConfig.tiny(vocab_size=40, max_positions=64, layers=3, dense_layers=(1,), dense_hidden=24)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(policy.to_hf()))
    table = tomllib.loads(QUICKSTART.read_text())
    table["policy"] = {"path": str(tmp_path / "model"), "dtype": "bfloat16", "remat": "none"}
    return policy, table


def test_a_policy_may_be_a_checkpoints(checkpoint, tmp_path):
    policy, table = checkpoint
    config = read_table(RunConfig, table)
    built = config.policy.build(vocab_size=30, max_positions=45)
    assert built == dataclasses.replace(policy, dtype="bfloat16", remat="none", max_positions=45)
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml") == config
    assert tomllib.loads(to_toml(config))["policy"] == table["policy"]
    # The rest of the file is what it is without a checkpoint.
    assert "path" not in tomllib.loads(to_toml(load(QUICKSTART)))["policy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, r"policy\.path: expected no key beside it that the checkpoint decides, got width; remove it"),
        ({"width": 64, "layers": 2}, r"policy\.path: .* got layers, width; remove them"),
        ({"wdith": 64}, r"policy\.wdith: expected a known key, got 'wdith'; did you mean 'width'\?"),
        ({"path": "nowhere"}, r"config of the policy: expected a readable JSON file, got .*nowhere"),
    ],
)
def test_what_contradicts_a_checkpoint_is_refused(checkpoint, change, message):
    _, table = checkpoint
    table["policy"] |= change
    with pytest.raises(ValueError, match=message):
        read_table(RunConfig, table)


def test_a_tokenizer_or_rows_beyond_the_checkpoint_are_refused(checkpoint):
    config = read_table(RunConfig, checkpoint[1])
    with pytest.raises(
        ValueError, match=r"tokenizer: expected at most 40 tokens, the vocabulary of .*model, got 41; set"
    ):
        config.policy.build(vocab_size=41, max_positions=45)
    with pytest.raises(ValueError, match=r"batch\.row_length: expected at most 64, the longest sequence of .*, got 65"):
        config.policy.build(vocab_size=40, max_positions=65)


def test_bounded_mode_has_a_schedule_of_its_own():
    config = load(QUICKSTART, ["schedule.mode=bounded", "schedule.max_lag=3"])
    assert config.plan == BoundedSchedule(max_lag=3, publish_every=1, steps=280, groups_per_step=32)
    with pytest.raises(ValueError, match=r"max_lag: expected at least schedule\.publish_every - 1 = 5, got 3"):
        load(QUICKSTART, ["schedule.mode=bounded", "schedule.max_lag=3", "schedule.publish_every=6"])
