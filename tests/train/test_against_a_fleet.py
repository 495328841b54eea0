"""`eval` and `doctor` against a fleet that is there already: a local engine behind a bridge, as on another host."""

import contextlib
import json
from pathlib import Path

import jax
import pytest
from flax import nnx

from rollout_bridge import ClientOptions, Fleet, FleetOptions, Lease, serve
from rollout_bridge.client import Client
from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import Policy
from train.cli import main
from train.config import load, to_toml
from train.doctor import examine
from train.local_engine import LocalEngine, LocalEngineConfig
from train.setup import make_problem

pytestmark = pytest.mark.slow
SMALL = (
    "policy.width=16",
    "policy.layers=1",
    "policy.query_heads=2",
    "policy.kv_heads=1",
    "policy.head_dim=8",
    "policy.expert_hidden=16",
    "rollout.dtype=float32",
    "rollout.engine=remote",
    "batch.rows=8",
    "batch.group_size=4",
    "batch.groups_per_step=4",
    "eval.prompts=12",
    "eval.samples=2",
    "warm_start.steps=0",
)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """One of the tests' eight devices, as on another host."""
    monkeypatch.setattr(examine, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))


@pytest.fixture
def fleet(tmp_path):
    """Starts engines with a config's policy; gives the config that reaches them. Closes them afterwards."""
    opened = []

    def start(version, **changes):
        config = load(Path(__file__).parents[2] / "configs" / "quickstart.toml", [*SMALL, 'rollout.endpoints=["a:1"]'])
        policy = make_problem(config).policy
        initial = Policy(policy, rngs=nnx.Rngs(0), mesh=make_mesh(MeshConfig(), jax.devices()[:1]))
        settings = {"dtype": "float32", "slots": 16, "max_tokens": config.batch.row_length} | changes
        engine = LocalEngine(
            policy, LocalEngineConfig(**settings), initial=None if version is None else initial, version=version or 0
        )
        server = serve(engine, "127.0.0.1:0")
        opened.append((server, engine))
        path = tmp_path / "remote.toml"
        endpoint = f'rollout.endpoints=["127.0.0.1:{server.port}"]'
        path.write_text(to_toml(load(Path(__file__).parents[2] / "configs" / "quickstart.toml", [*SMALL, endpoint])))
        return path

    yield start
    for server, engine in opened:
        server.stop(1.0)
        engine.close()


def said(capsys):
    return json.loads(capsys.readouterr().out)


def test_what_a_fleet_serves_is_evaluated_and_nothing_is_published(fleet, capsys):
    config = fleet(7)
    assert main(["eval", str(config), "--json"]) == 0
    found = said(capsys)
    assert (found["version"], found["samples"], len(found["problems"])) == (7, 2, 12)
    assert main(["eval", str(config), "--set", "rollout.engine=local", "--set", "rollout.endpoints=[]"]) == 1


def test_doctor_publishes_to_a_fleet_what_the_run_would_and_may_do_so_twice(fleet, capsys, tmp_path):
    config = fleet(None)
    for _ in range(2):
        assert main(["doctor", str(config), "--runs", str(tmp_path / "runs"), "--json"]) == 0
        found = {finding["check"]: finding for finding in said(capsys)["findings"]}
        assert found["fleet: weights"]["found"].startswith("version 0")
        assert {found[f"fleet: {what}"]["status"] for what in ("weights", "routes", "tokens", "repeat")} == {"ok"}


def test_doctor_leaves_a_fleet_alone_whose_first_version_is_still_to_be_made(fleet, capsys, tmp_path):
    config = fleet(None)
    command = ["doctor", str(config), "--runs", str(tmp_path / "runs"), "--set", "warm_start.steps=5", "--json"]
    assert main(command) == 0
    found = {finding["check"]: finding["status"] for finding in said(capsys)["findings"]}
    assert found["fleet: weights"] == "warn"
    assert "fleet: routes" not in found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["policy.expert_hidden=32"], "expected the trainer's architecture"),
        (["rollout.dtype=bfloat16"], "expected engines of rollout.dtype bfloat16, got float32"),
        (["batch.row_length=64"], "expected engines that hold 64 tokens"),
    ],
)
def test_doctor_finds_a_fleet_that_a_run_could_not_use(fleet, capsys, tmp_path, overrides, expected):
    config = fleet(None)
    sets = [part for override in overrides for part in ("--set", override)]
    with pytest.raises(SystemExit):
        main(["doctor", str(config), "--runs", str(tmp_path / "runs"), "--json", *sets])
    failed = [finding for finding in said(capsys)["findings"] if finding["status"] == "fail"]
    assert [finding["check"] for finding in failed] == ["fleet: calls"]
    assert expected in failed[0]["found"]


def test_doctor_finds_a_fleet_that_another_run_holds(fleet, capsys, tmp_path):
    config = fleet(None)
    options = ClientOptions(lease=Lease(holder="training of elsewhere:/runs/other", start="now"))
    (address,) = load(config).rollout.endpoints
    with (
        Fleet([address], options=FleetOptions(client=options)),
        contextlib.closing(Client(address, options=options)) as c,
    ):
        c.discard()  # takes the lease; the fleet keeps it
        with pytest.raises(SystemExit):
            main(["doctor", str(config), "--runs", str(tmp_path / "runs"), "--json"])
        (failed,) = [finding for finding in said(capsys)["findings"] if finding["status"] == "fail"]
    assert "expected a free engine, got one that training of elsewhere:/runs/other" in failed["found"]


def test_doctor_leaves_a_fleet_free(fleet, capsys, tmp_path):
    config = fleet(None)
    for runs in ("others", "runs"):
        assert main(["doctor", str(config), "--runs", str(tmp_path / runs), "--json"]) == 0
        said(capsys)
