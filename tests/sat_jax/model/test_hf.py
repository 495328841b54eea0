import dataclasses
import errno
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig, hf, hf_files
from sat_jax.model.hf_names import LAYOUTS

CONFIG = PolicyConfig.tiny(vocab_size=16, width=32, head_dim=8, expert_hidden=24)
NO_EXPERTS = {"experts": 0, "experts_per_token": 0, "expert_hidden": 0, "dense_layers": (0, 1), "dense_hidden": 40}
DENSE = PolicyConfig.tiny(width=32, head_dim=8, tie_embeddings=True, **NO_EXPERTS)
MIXED = dataclasses.replace(CONFIG, layers=5, dense_layers=(0, 3), dense_hidden=40)
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


def random_tensors(config):
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in hf.tensor_shapes(config).items()}


@pytest.fixture(scope="module")
def policy():
    return hf.import_tensors(CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="module")
def tensors(policy):
    return dict(hf.export_tensors(policy, CONFIG))


def parameters(policy):
    return nnx.to_pure_dict(nnx.state(policy, nnx.Param))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(parameters(one)), jax.tree.leaves(parameters(other)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_names_and_shapes_are_hugging_faces():
    shapes = hf.tensor_shapes(PolicyConfig.qwen3_30b_a3b())
    assert len(shapes) == 48 * (128 * 3 + 9) + 3
    layer = "model.layers.47."
    expected = {
        "model.embed_tokens.weight": (151936, 2048),
        "model.norm.weight": (2048,),
        "lm_head.weight": (151936, 2048),
        layer + "self_attn.q_proj.weight": (4096, 2048),
        layer + "self_attn.k_proj.weight": (512, 2048),
        layer + "self_attn.v_proj.weight": (512, 2048),
        layer + "self_attn.o_proj.weight": (2048, 4096),
        layer + "self_attn.q_norm.weight": (128,),
        layer + "self_attn.k_norm.weight": (128,),
        layer + "input_layernorm.weight": (2048,),
        layer + "post_attention_layernorm.weight": (2048,),
        layer + "mlp.gate.weight": (128, 2048),
        layer + "mlp.experts.127.gate_proj.weight": (768, 2048),
        layer + "mlp.experts.127.up_proj.weight": (768, 2048),
        layer + "mlp.experts.127.down_proj.weight": (2048, 768),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == PolicyConfig.qwen3_30b_a3b().num_parameters()


def test_names_of_a_dense_layer_are_hugging_faces():
    shapes = hf.tensor_shapes(MIXED)
    assert [name for name in shapes if name.startswith("model.layers.3.mlp.")] == [
        f"model.layers.3.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    ]
    assert shapes["model.layers.3.mlp.down_proj.weight"] == (32, 40)
    assert {name.split(".")[2] for name in shapes if "experts" in name} == {"1", "2", "4"}
    for config in (DENSE, MIXED):
        for layout in LAYOUTS:
            shapes = hf.tensor_shapes(config, layout)
            assert sum(int(np.prod(shape)) for shape in shapes.values()) == config.num_parameters()
    with pytest.raises(ValueError, match="layout: expected per-expert or fused, got 'split'"):
        hf.tensor_shapes(DENSE, "split")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_layers_of_both_kinds_keep_their_bits_and_places(config, axes):
    tensors = random_tensors(config)
    policy = hf.import_tensors(config, tensors, mesh=None if axes is None else make_mesh(MeshConfig(**axes)))
    exported = dict(hf.export_tensors(policy, config))
    assert list(exported) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor)
    last = config.dense_layers[-1]
    assert policy.dense_layers is not None
    np.testing.assert_array_equal(
        policy.dense_layers.down_FD[...][1], tensors[f"model.layers.{last}.mlp.down_proj.weight"].T
    )


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["sparse", "mixed"])
def test_the_fused_layout_holds_the_same_numbers(config, tmp_path):
    policy = hf.import_tensors(config, random_tensors(config))
    single, fused = (dict(hf.export_tensors(policy, config, layout=layout)) for layout in LAYOUTS)
    assert {name: tensor.shape for name, tensor in fused.items()} == hf.tensor_shapes(config, "fused")
    for expert in range(4):
        gate, up, down = (single[GATE.replace("3.gate", f"{expert}.{name}")] for name in ("gate", "up", "down"))
        together = fused["model.layers.1.mlp.experts.gate_up_proj"][expert]
        np.testing.assert_array_equal(together, np.concatenate([gate, up]))
        np.testing.assert_array_equal(fused["model.layers.1.mlp.experts.down_proj"][expert], down)
    hf.save(policy, tmp_path / "fused", layout="fused")
    assert set(load_file(tmp_path / "fused" / "model.safetensors")) == set(fused)
    assert_same_bits(hf.load(tmp_path / "fused"), policy)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    assert_same_bits(hf.load(tmp_path / "fused", mesh=mesh), policy)
    for layout, expected in zip(LAYOUTS, (single, fused), strict=True):
        again = dict(hf.read_tensors(tmp_path / "fused", config, layout=layout))
        assert list(again) == list(expected)
        assert all(np.array_equal(again[name], tensor) for name, tensor in expected.items())


def test_large_leaves_grow_piece_by_piece(policy, tensors, tmp_path, monkeypatch):
    hf.save(policy, tmp_path / "model")
    monkeypatch.setattr(hf, "_PIECE_BYTES", 1000)  # of an expert's matrix, 3072
    largest = 0
    read_piece = hf._read_piece

    def watched(*arguments):
        nonlocal largest
        piece = read_piece(*arguments)
        largest = max(largest, piece.nbytes)
        return piece

    monkeypatch.setattr(hf, "_read_piece", watched)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4])  # two shards, two devices each
    assert_same_bits(hf.load(tmp_path / "model", mesh=mesh), policy)
    assert 500 < largest <= 1000


def test_a_tied_head_is_no_tensor():
    config = PolicyConfig.tiny(tie_embeddings=True)
    shapes = hf.tensor_shapes(config)
    assert "lm_head.weight" not in shapes
    policy = hf.import_tensors(config, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    assert list(dict(hf.export_tensors(policy, config))) == list(shapes)


def test_tensors_come_in_the_order_and_shape_of_the_manifest(tensors):
    assert [(name, tensor.shape) for name, tensor in tensors.items()] == list(hf.tensor_shapes(CONFIG).items())
    assert all(tensor.flags.c_contiguous and tensor.dtype == np.float32 for tensor in tensors.values())


def test_a_linear_map_is_stored_as_out_by_in_heads_outermost(policy, tensors):
    x = np.random.default_rng(0).normal(size=CONFIG.width).astype(np.float32)
    layers = policy.layers
    query = np.einsum("d,dhc->hc", x, layers.query_DHC[...][1])
    np.testing.assert_allclose(tensors["model.layers.1.self_attn.q_proj.weight"] @ x, query.reshape(-1), atol=1e-5)
    output = np.einsum("hc,hcd->d", query, layers.output_HCD[...][0])
    np.testing.assert_allclose(tensors["model.layers.0.self_attn.o_proj.weight"] @ query.ravel(), output, atol=1e-5)
    np.testing.assert_array_equal(tensors[GATE], layers.gate_EDF[...][1, 3].T)
    np.testing.assert_array_equal(tensors["lm_head.weight"], policy.unembedding_DV[...].T)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], policy.embedding_VD[...])


def test_exported_tensors_survive_the_donation_of_the_parameters():
    policy = hf.import_tensors(CONFIG, random_tensors(CONFIG))
    params = nnx.state(policy, nnx.Param)
    views = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(params))]
    tensors = dict(hf.export_tensors(params, CONFIG))
    assert not any(np.shares_memory(tensor, view) for tensor in tensors.values() for view in views)
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    del views, policy
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda a: a + 1, p), donate_argnums=0)(params))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, before[name])


@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_export_and_import_give_the_same_bits_on_any_mesh(policy, tensors, axes):
    mesh = None if axes is None else make_mesh(MeshConfig(**axes))
    imported = hf.import_tensors(CONFIG, tensors, mesh=mesh)
    assert_same_bits(imported, policy)
    again = dict(hf.export_tensors(imported, CONFIG))
    assert all(np.array_equal(again[name], tensor) for name, tensor in tensors.items())
    if mesh is not None:
        assert imported.layers.down_EFD[...].addressable_shards[0].data.shape == (2, 2, 12, 16)


def test_a_function_may_give_the_tensors_by_name(policy, tensors):
    asked = []

    def give(name):
        asked.append(name)
        return tensors[name]

    assert_same_bits(hf.import_tensors(CONFIG, give), policy)
    assert sorted(asked) == sorted(tensors)


def test_parameters_can_be_stored_and_exported_in_bfloat16(policy, tensors):
    half = dict(hf.export_tensors(policy, CONFIG, "bfloat16"))
    assert {tensor.dtype for tensor in half.values()} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(half[GATE], tensors[GATE].astype(ml_dtypes.bfloat16))
    stored = hf.import_tensors(CONFIG, half, param_dtype="bfloat16")
    assert stored.layers.gate_EDF[...].dtype == jnp.bfloat16
    assert dict(hf.export_tensors(stored, CONFIG))[GATE].dtype == ml_dtypes.bfloat16
    assert hf.import_tensors(CONFIG, half).layers.gate_EDF[...].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_policy_loads_with_the_same_bits(tmp_path, policy, dtype):
    hf.save(policy, tmp_path / "new" / "model", dtype)
    assert json.loads((tmp_path / "new" / "model" / "config.json").read_text())["torch_dtype"] == dtype
    assert sorted(p.name for p in (tmp_path / "new").rglob("*") if p.is_file()) == ["config.json", "model.safetensors"]
    expected = hf.import_tensors(CONFIG, dict(hf.export_tensors(policy, CONFIG, dtype)))
    loaded = hf.load(tmp_path / "new" / "model")
    assert_same_bits(loaded, expected)
    assert loaded.config.digest() == CONFIG.digest()
    sharded = hf.load(tmp_path / "new" / "model", config=CONFIG, mesh=make_mesh(MeshConfig(fsdp=2, expert=4)))
    assert_same_bits(sharded, expected)


def test_a_large_policy_is_cut_into_files_with_an_index(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(hf_files, "_FILE_BYTES", 20_000)
    hf.save(policy, tmp_path / "model")
    index = json.loads((tmp_path / "model" / hf_files._INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == 4 * CONFIG.num_parameters()
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "model" / file)
    assert_same_bits(hf.load(tmp_path / "model"), policy)


def test_missing_and_unexpected_tensors_are_named(tensors, tmp_path):
    wrong = dict(tensors, extra=np.zeros(1, np.float32))
    del wrong[GATE]
    named = rf"expected exactly the model's 45, got 1 missing \({GATE}\) and 1 unexpected \(extra\) "
    with pytest.raises(ValueError, match=named + r"\(the mapping\)"):
        hf.import_tensors(CONFIG, wrong)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=named):
        hf.load(tmp_path)
    few = {name: tensor for name, tensor in tensors.items() if "experts" not in name}
    with pytest.raises(ValueError, match=r"got 24 missing \(\S+, \S+, \S+, ...\) \(the mapping\)"):
        hf.import_tensors(CONFIG, few)


def test_a_misshapen_tensor_is_named(tensors, tmp_path):
    wrong = dict(tensors, **{GATE: np.ascontiguousarray(tensors[GATE].T)})
    named = rf"tensor {GATE}: expected shape \(24, 32\), got \(32, 24\)"
    with pytest.raises(ValueError, match=named):
        hf.import_tensors(CONFIG, wrong)
    with pytest.raises(ValueError, match=named):
        hf.import_tensors(CONFIG, wrong.__getitem__)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=named):
        hf.load(tmp_path)


def test_a_tensor_of_integers_is_refused(tensors):
    with pytest.raises(ValueError, match=rf"tensor {GATE}: expected a float type, got int8"):
        hf.import_tensors(CONFIG, dict(tensors, **{GATE: tensors[GATE].astype(np.int8)}))


def test_a_folder_without_whole_weights_is_refused(policy, tmp_path):
    hf.save(policy, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-100], whole[:50], b"", b"\xff" * 8 + whole[8:], whole[:40] + b"}" + whole[41:]):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"expected a whole safetensors file, got: .*model\.safetensors\)"):
            hf.load(tmp_path / "model")
    weights.unlink()
    with pytest.raises(ValueError, match=r"expected safetensors files, got none"):
        hf.load(tmp_path / "model")


def write(folder, config, files):
    """A folder of some files of tensors, without an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    for number, tensors in enumerate(files, start=1):
        save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


def test_half_of_the_experts_under_other_names_are_refused(tensors, tmp_path):
    renamed = {
        name.replace(".experts.2.", ".experts.02.").replace(".experts.3.", ".experts.03."): tensor
        for name, tensor in tensors.items()
    }
    first, other = "model.layers.0.mlp.experts.2.gate_proj.weight", "model.layers.0.mlp.experts.02.down_proj.weight"
    with pytest.raises(ValueError, match=rf"45, got 12 missing \({first}, .*\) and 12 unexpected \({other}, .*\)"):
        hf.load(write(tmp_path / "model", CONFIG, [renamed]))


def test_a_tensor_that_is_given_twice_is_named(policy, tensors, tmp_path):
    with pytest.raises(ValueError, match=rf"each tensor once, got {GATE} in .*model-1\S* and in .*model-2"):
        hf.load(write(tmp_path / "files", CONFIG, [tensors, {GATE: tensors[GATE]}]))
    fused = dict(hf.export_tensors(policy, CONFIG, layout="fused"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=rf"each expert in one layout, got .*layers.1.mlp.* and in {name} "):
        hf.load(write(tmp_path / "layouts", CONFIG, [tensors, {name: fused[name]}]))
    # Each layer may have its own layout.
    del fused["model.layers.0.mlp.experts.gate_up_proj"]
    gates = {n: tensor for n, tensor in tensors.items() if "layers.0" in n and ("gate_proj" in n or "up_proj" in n)}
    assert_same_bits(hf.load(write(tmp_path / "mixed", CONFIG, [fused | gates])), policy)


def test_a_fused_tensor_of_the_other_axis_order_is_refused(policy, tmp_path):
    fused = dict(hf.export_tensors(policy, CONFIG, layout="fused"))
    name = "model.layers.1.mlp.experts.down_proj"
    fused[name] = np.ascontiguousarray(fused[name].swapaxes(1, 2))
    with pytest.raises(ValueError, match=rf"tensor {name}: expected shape \(4, 32, 24\), got \(4, 24, 32\)"):
        hf.load(write(tmp_path / "model", CONFIG, [fused]))


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_named(tensors, tmp_path, number, dtype):
    wrong = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    wrong[GATE][3, 5] = number
    with pytest.raises(ValueError, match=rf"tensor {GATE}: expected finite numbers, got NaN or infinity \(.*model\)"):
        hf.load(write(tmp_path / "model", CONFIG, [wrong]))


def test_a_checkpoint_of_another_size_says_what_differs(tensors, tmp_path):
    folder = write(tmp_path / "model", CONFIG, [tensors])
    with pytest.raises(ValueError, match=r"11 missing .*; the weights have 2 layers, the config 3"):
        hf.load(folder, dataclasses.replace(CONFIG, layers=3, dense_layers=(2,), dense_hidden=8))
    with pytest.raises(ValueError, match=r"21 unexpected .*; the weights have 2 layers, the config 1"):
        hf.load(folder, dataclasses.replace(CONFIG, layers=1))
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight: .*; the weights have a vocabulary of 16, the config .*17"
    ):
        hf.load(folder, dataclasses.replace(CONFIG, vocab_size=17))
    with pytest.raises(ValueError, match=r"q_proj.weight: expected shape \(64, 32\), got \(32, 32\)"):
        hf.load(folder, dataclasses.replace(CONFIG, head_dim=16))


def test_integer_weights_are_refused_before_anything_is_read(tensors, tmp_path):
    wrong = dict(tensors, **{GATE: tensors[GATE].astype(np.int8)})
    with pytest.raises(ValueError, match=rf"tensor {GATE}: expected a float type, got I8 \(.*model-1"):
        hf.load(write(tmp_path / "model", CONFIG, [wrong]))


def test_an_index_must_agree_with_the_files(tensors, tmp_path):
    names = list(tensors)
    halves = [{name: tensors[name] for name in part} for part in (names[:20], names[20:])]
    folder = write(tmp_path / "model", CONFIG, halves)
    mapped = {name: f"model-{number}.safetensors" for number, half in enumerate(halves, 1) for name in half}
    index = folder / hf_files._INDEX
    for text, named in (
        ("{", "expected an index with a weight_map, got: JSONDecodeError"),
        ("{}", "expected an index with a weight_map, got: KeyError"),
        (json.dumps({"weight_map": mapped | {names[0]: "gone.safetensors"}}), r"every file of the index, got no gone"),
        (json.dumps({"weight_map": mapped | {names[0]: "model-2.safetensors"}}), rf"got {names[0]} elsewhere"),
        (json.dumps({"weight_map": mapped | {"more": "model-2.safetensors"}}), "got more elsewhere"),
        (json.dumps({"weight_map": {name: mapped[name] for name in names[1:]}}), rf"got {names[0]} elsewhere"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=named):
            hf.load(folder)
    index.write_text(json.dumps({"weight_map": mapped}))
    hf.load(folder)
    save_file(halves[0], folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected model\.safetensors or an index, got both"):
        hf.load(folder)


def test_a_folder_that_holds_something_is_not_overwritten(policy, tmp_path):
    hf.save(policy, tmp_path / "model")
    with pytest.raises(ValueError, match=r"expected a new or empty folder, got one that holds something"):
        hf.save(policy, tmp_path / "model")
    assert_same_bits(hf.load(tmp_path / "model"), policy)


def test_a_full_disk_leaves_nothing_behind(policy, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        hf.save(policy, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
