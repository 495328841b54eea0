"""The configs of Qwen3-30B-A3B are what their tool writes, and say what their names say."""

import math

import pytest

from sat_jax.model import PolicyConfig
from tools.make_configs import CONFIGS, METHODS, MODEL, files, main, topologies
from train.config import load
from train.plan.topology import parse

NAMES = [path for path, _ in files() if path.endswith(".toml")]


@pytest.mark.parametrize(("path", "text"), list(files()), ids=lambda value: value if len(value) < 80 else "")
def test_no_file_has_drifted_from_the_tool(path, text):
    assert (CONFIGS / path).read_text() == text, f"{path}: run python tools/make_configs.py"


def test_no_config_of_the_model_is_there_that_the_tool_does_not_write():
    assert sorted(path.name for path in CONFIGS.glob("qwen3_30b_a3b_*.toml")) == sorted(NAMES)


def test_every_method_is_there_with_and_without_replay_at_both_lags():
    expected = {
        f"qwen3_30b_a3b_{method}{replay}_lag{lag}.toml"
        for method in METHODS
        for replay in ("", "_r3")
        for lag in (1, 8)
    }
    assert len(expected) == 20
    assert expected <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_does_what_its_name_says_with_the_papers_settings(name):
    config = load(CONFIGS / name)
    assert config.objective.replay == ("_r3" in name)
    assert config.schedule.lag == (8 if "_lag8" in name else 1)
    assert ("sat" in name) == (config.objective.config.radii == "sat")
    assert ("gspo" in name) == (config.objective.config.mismatch == "sequence")
    assert (config.batch.groups_per_step, config.batch.group_size) == (256, 16)
    assert (config.objective.config.eps_low, config.objective.config.eps_high) == (0.2, 0.2)
    assert (config.objective.config.kl_coef, config.objective.config.kl_kind) == (1e-3, "k3")
    assert config.optim.peak_lr == 1e-6
    assert config.objective.advantage.std == "group"


@pytest.mark.parametrize("name", NAMES)
def test_the_mesh_of_a_config_has_as_many_devices_as_its_machine(name):
    _, sizes = parse(topologies()[name])
    assert math.prod(load(CONFIGS / name).mesh.shape) == math.prod(sizes)


def test_the_model_is_the_papers():
    assert PolicyConfig.from_hf(CONFIGS / MODEL, dtype="bfloat16") == PolicyConfig.qwen3_30b_a3b()


def test_the_tool_writes_where_it_is_told(tmp_path):
    main(tmp_path)
    assert len(list(tmp_path.rglob("*.toml"))) == len(NAMES)
