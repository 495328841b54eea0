import dataclasses
import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sat_jax.mesh import one_device_mesh
from sat_jax.model import PolicyConfig, hf
from sat_jax.model.hf_names import LAYOUTS
from train.buffer import BufferSnapshot
from train.checkpoint import Checkpoints, Cut, Identity
from train.cli import main
from train.config import load, to_toml
from train.convert import Options, convert
from train.state import OptimConfig, init_state

ROOT = Path(__file__).parents[2]
CONFIG = PolicyConfig.tiny(width=16, head_dim=4, expert_hidden=8, layers=3, dense_layers=(1,), dense_hidden=12)
POLICY = ("width=16", "head_dim=4", "expert_hidden=8", "layers=3", "dense_layers=[1]", "dense_hidden=12")


def random_tensors(config, seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in hf.tensor_shapes(config).items()}


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder as one finds them: keys of its own in the config, and files beside the weights."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG.to_hf() | {"eos_token_id": 7, "dtype": "float32"}))
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "optimizer.bin"):
        (source / name).write_text(f"content of {name}")
    save_file(random_tensors(CONFIG), source / "model.safetensors")
    return source


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with two checkpoints; the second one's parameters are those of seed 2."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [f"policy.{change}" for change in POLICY]
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_text(name)
    overrides += ["tokenizer.kind=file", f"tokenizer.path={tokenizer / 'tokenizer.json'}"]
    config = load(ROOT / "configs" / "quickstart.toml", overrides)
    (folder / "config.toml").write_text(to_toml(config))
    policy = config.policy.build(vocab_size=16, max_positions=config.batch.row_length)
    identity = Identity(policy=policy.digest(), tokenizer="", data="", reference="")
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        for version in (1, 2):
            weights = nnx.state(hf.import_tensors(policy, random_tensors(policy, seed=version)), nnx.Param)
            state = init_state(weights, OptimConfig(peak_lr=1e-3).transformation(), one_device_mesh())
            snapshot = BufferSnapshot()
            cut = Cut(
                identity=identity, state=dataclasses.replace(state, version=version), buffer=snapshot, counters={}
            )
            checkpoints.save(cut)
    return folder


def same_bits(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        np.testing.assert_array_equal(tensor, right[name], err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_becomes_one_of_the_other_layout_and_back(folder, tmp_path, layout):
    said = convert(folder, tmp_path / "there", Options(layout=layout))
    count = len(hf.tensor_shapes(CONFIG, layout))
    assert said.startswith(f"{count} tensors, ")
    assert set(load_file(tmp_path / "there" / "model.safetensors")) == set(hf.tensor_shapes(CONFIG, layout))
    convert(tmp_path / "there", tmp_path / "back", Options())
    same_bits(load_file(tmp_path / "back" / "model.safetensors"), random_tensors(CONFIG))


def test_what_stands_beside_the_weights_comes_along(folder, tmp_path):
    said = convert(folder, tmp_path / "there", Options(dtype="bfloat16"))
    assert said.endswith("beside tokenizer.json, generation_config.json, chat_template.jinja")
    names = {"tokenizer.json", "generation_config.json", "chat_template.jinja", "config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "there").iterdir()} == names
    assert (tmp_path / "there" / "tokenizer.json").read_text() == "content of tokenizer.json"
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (config["eos_token_id"], config["dtype"], config["torch_dtype"]) == (7, "bfloat16", "bfloat16")
    stored = load_file(tmp_path / "there" / "model.safetensors")
    expected = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_tensors(CONFIG).items()}
    same_bits(stored, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", [None, 1])
def test_a_runs_checkpoint_becomes_a_folder_that_loads(run, tmp_path, version, layout):
    said = convert(run, tmp_path / "there", Options(layout=layout, version=version))
    assert said.startswith(f"version {version or 2}: {len(hf.tensor_shapes(CONFIG, layout))} tensors, ")
    assert said.endswith("beside tokenizer.json, tokenizer_config.json")
    policy = hf.load(tmp_path / "there")
    assert policy.config.digest() == CONFIG.digest()
    same_bits(dict(hf.export_tensors(policy, CONFIG)), random_tensors(CONFIG, seed=version or 2))


def test_a_missing_version_or_checkpoint_is_named(run, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint: expected version 7, got versions 1, 2 \(.*checkpoints\)"):
        convert(run, tmp_path / "there", Options(version=7))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(ValueError, match=r"checkpoint: expected one, got none \(.*checkpoints\)"):
        convert(tmp_path / "empty", tmp_path / "there", Options())
    (tmp_path / "empty" / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoint 3: expected a whole one, got FileNotFoundError"):
        convert(tmp_path / "empty", tmp_path / "there", Options())
    assert not (tmp_path / "there").exists()


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    path = damaged / "checkpoints" / "2" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    name = "['params']['layers']['up_EDF'].value"
    digest = meta["arrays"][name]
    other = digest.replace(digest[:16], "0" * 16)
    path.write_text(path.read_text().replace(digest, other))
    expected = re.escape(f"checkpoint 2: expected {name} of digest {other}, got {digest} ")
    with pytest.raises(ValueError, match=expected + ".*convert another version"):
        convert(damaged, tmp_path / "there", Options())
    assert not (tmp_path / "there").exists()
    shutil.rmtree(damaged / "checkpoints" / "2" / "state" / "d")
    with pytest.raises(ValueError, match=r"checkpoint 2: expected \['params'\]\['embedding_VD'\].value, got "):
        convert(damaged, tmp_path / "there", Options())


def test_a_checkpoint_of_another_policy_is_refused(run, tmp_path):
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.toml").write_text((run / "config.toml").read_text().replace("rope_theta = 1", "rope_theta = 2"))
    (other / "checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(ValueError, match=r"checkpoint 2: expected the policy of .*config.toml .*, got another one"):
        convert(other, tmp_path / "there", Options())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere", "there"], "nowhere: expected a Hugging Face folder (config.json) or a run folder (config.toml)"),
        (["source", "source"], "weights: expected a new or empty folder, got one that holds something"),
        (["source", "there", "--version", "3"], "--version: expected a run folder, got a Hugging Face folder"),
        (["llama", "there"], "expected model_type qwen3_moe or qwen3, got 'llama'"),
        (["short", "there"], "tensors: expected exactly the model's"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(
    folder, tmp_path, monkeypatch, capsys, arguments, named
):
    monkeypatch.chdir(tmp_path)
    for name, config in (("llama", {"model_type": "llama"}), ("short", CONFIG.to_hf() | {"num_hidden_layers": 2})):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(config))
        (Path(name) / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert main(["convert", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sat-jax: error: ")
    assert named in said
    assert said.count("\n") == 1
    assert not Path("there").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_verb_says_what_it_wrote(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "there"), "--layout", "fused", "--dtype", "bfloat16"]) == 0
    assert f"tensors, 0.0 MiB in {tmp_path / 'there'} beside" in capsys.readouterr().err
