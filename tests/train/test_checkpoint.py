import dataclasses
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sat_jax.mesh import MeshConfig, make_mesh
from sat_jax.model import PolicyConfig
from tests.reference.rollouts import make_group
from train.buffer import BufferSnapshot
from train.checkpoint import Checkpoints, Cut, Identity, flatten, read_meta
from train.ledger import LedgerState
from train.moments import memory_of
from train.state import OptimConfig, TrainState, init_policy, init_state

IDENTITY = Identity(policy="p", tokenizer="t", data="d", reference="r")
POLICY = PolicyConfig(
    vocab_size=8,
    width=8,
    layers=2,
    query_heads=2,
    kv_heads=1,
    head_dim=4,
    experts=2,
    experts_per_token=1,
    expert_hidden=8,
)


def make_state(seed=0, devices=1, memory="device"):
    mesh = make_mesh(MeshConfig(data=devices), jax.devices()[:devices])
    _, params = init_policy(POLICY, seed, mesh)
    return init_state(params, OptimConfig(peak_lr=1e-3).transformation(), mesh, memory)


def make_cut(version=3, seed=0, memory="device"):
    state = dataclasses.replace(make_state(seed, memory=memory), version=version)
    groups = (make_group(6), make_group(7, counts=(1, 4)))
    books = LedgerState(
        next_ticket=9,
        out=(8,),
        buffered=(6, 7),
        attempts={8: 3},
        trained=4,
        dropped={"too_old": 2},
        reissued={"too_old": 3},
    )
    snapshot = BufferSnapshot(groups=groups, ledger=books)
    return Cut(identity=IDENTITY, state=state, buffer=snapshot, counters={"before/entropy": 0.5})


def assert_same_state(left: TrainState, right: TrainState):
    assert left.version == right.version
    for (name, a), (other, b) in zip(flatten(left).items(), flatten(right).items(), strict=True):
        assert name == other
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("atomic_rename", [True, False])
def test_a_cut_comes_back_bit_for_bit(tmp_path, atomic_rename):
    cut = make_cut()
    with Checkpoints(tmp_path, keep=2, atomic_rename=atomic_rename) as checkpoints:
        checkpoints.save(cut)
    with Checkpoints(tmp_path, keep=2, atomic_rename=atomic_rename) as checkpoints:
        back = checkpoints.restore(make_state(seed=1), IDENTITY)
    assert back is not None
    assert_same_state(back.state, cut.state)
    assert back.counters == cut.counters
    assert back.buffer.ledger == cut.buffer.ledger
    for saved, found in zip(cut.buffer.groups, back.buffer.groups, strict=True):
        assert saved.ticket == found.ticket
        np.testing.assert_array_equal(saved.reward_M, found.reward_M)
        for left, right in zip(saved.completions, found.completions, strict=True):
            np.testing.assert_array_equal(left.behavior_logp, right.behavior_logp)
            assert left.trace is not None
            assert right.trace is not None
            np.testing.assert_array_equal(left.trace.experts_TLK, right.trace.experts_TLK)


def test_a_cut_is_restored_onto_another_mesh(tmp_path):
    cut = make_cut()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(cut)
        back = checkpoints.restore(make_state(seed=1, devices=4), IDENTITY)
    assert back is not None
    assert_same_state(back.state, cut.state)
    assert len(jax.tree.leaves(back.state.params)[0].sharding.device_set) == 4


@pytest.mark.parametrize(("before", "after"), [("device", "host"), ("host", "device"), ("host", "host")])
def test_a_cut_is_restored_into_another_memory(tmp_path, before, after):
    cut = make_cut(memory=before)
    assert memory_of(cut.state.opt_state) == before
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(cut)
        back = checkpoints.restore(make_state(seed=1, devices=2, memory=after), IDENTITY)
    assert back is not None
    assert_same_state(back.state, cut.state)
    assert memory_of(back.state.opt_state) == after
    assert memory_of(back.state.params) == "device"


@pytest.mark.parametrize("missing", ["groups", "state", "meta/metadata"])
def test_a_checkpoint_with_a_part_missing_is_one_clear_error(tmp_path, missing):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(make_cut())
    part = tmp_path / "3" / missing
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(ValueError, match=r"checkpoint 3: expected whole files, got .*delete that folder to resume"),
    ):
        checkpoints.restore(make_state(), IDENTITY)


def test_reading_changes_nothing_in_the_folder(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(make_cut())
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()  # what a run in progress is saving
    with Checkpoints(tmp_path, keep=2, read_only=True) as checkpoints:
        assert checkpoints.latest() == 3
        assert checkpoints.restore(make_state(), IDENTITY) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "7.orbax-checkpoint-tmp"]


def test_whose_a_checkpoint_is_can_be_asked_before_anything_is_built(tmp_path):
    other = dataclasses.replace(IDENTITY, policy="another", reference="")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.check(other)
        checkpoints.save(make_cut())
        checkpoints.check(dataclasses.replace(IDENTITY, reference=""), but=("reference",))
        with pytest.raises(ValueError, match="expected the policy of this run"):
            checkpoints.check(other, but=("reference",))


def test_there_is_nothing_to_restore_in_an_empty_folder(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.restore(make_state(), IDENTITY) is None


def test_the_newest_ones_are_kept(tmp_path):
    cut = make_cut()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for version in (1, 2, 3):
            checkpoints.save(dataclasses.replace(cut, state=dataclasses.replace(cut.state, version=version)))
        assert checkpoints.latest() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert read_meta(tmp_path, 3)["version"] == 3


@pytest.mark.parametrize("what", ["policy", "tokenizer", "data", "reference"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, what):
    other = dataclasses.replace(IDENTITY, **{what: "another"})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(make_cut())
        with pytest.raises(ValueError, match=rf"checkpoint 3: expected the {what} of this run \(another\), got"):
            checkpoints.restore(make_state(), other)


def test_a_half_written_save_does_not_count_and_is_cleaned(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(make_cut())
    # What a process leaves that is killed while it saves.
    (tmp_path / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


class Held(threading.Event):
    error: OSError | None = None


@pytest.fixture
def held_back(monkeypatch):
    """The last act of a save waits for this, and fails with what is put into `error`."""
    release = Held()
    path_class = ocp.path.atomicity.AtomicRenameTemporaryPath
    finalize = path_class.finalize

    async def late(self, *arguments, **named):
        assert release.wait(60)
        if release.error is not None:
            raise release.error
        return await finalize(self, *arguments, **named)

    monkeypatch.setattr(path_class, "finalize", late)
    yield release
    release.set()


@pytest.mark.parametrize("memory", ["device", "host"])
def test_training_goes_on_while_a_cut_is_written_and_what_it_changes_is_not_in_it(tmp_path, held_back, memory):
    cut = make_cut(memory=memory)
    before = {name: np.array(array) for name, array in flatten(cut.state).items()}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(cut)
        assert not (tmp_path / "3").exists()
        kept = jax.tree.map(lambda leaf: leaf.sharding, (cut.state.params, cut.state.opt_state))
        advance = jax.jit(
            lambda tree: jax.tree.map(lambda leaf: leaf * 2 + 1, jax.device_put(tree, jax.memory.Space.Device)),
            donate_argnums=0,
            out_shardings=kept,
        )
        jax.block_until_ready(advance((cut.state.params, cut.state.opt_state)))
        other = make_state(seed=1, memory=memory)
        jax.block_until_ready(advance((other.params, other.opt_state)))  # takes whatever memory is free
        held_back.set()
        checkpoints.settle()
        back = checkpoints.restore(make_state(seed=1), IDENTITY)
    assert back is not None
    for name, array in flatten(back.state).items():
        np.testing.assert_array_equal(np.asarray(array), before[name])


def test_what_befalls_a_save_in_the_background_stops_the_run_and_leaves_earlier_cuts(tmp_path, held_back):
    cut = make_cut()
    held_back.set()
    expected = r"checkpoint: version 4 could not be written under .*no room.*earlier checkpoints are whole"
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(cut)
        checkpoints.settle()
        held_back.clear()
        held_back.error = OSError("no room")
        checkpoints.save(dataclasses.replace(cut, state=dataclasses.replace(cut.state, version=4)))
        checkpoints.raise_failed()  # nothing is known yet
        held_back.set()
        with pytest.raises(OSError, match=expected):
            checkpoints.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    with pytest.raises(OSError, match=expected), Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(dataclasses.replace(cut, state=dataclasses.replace(cut.state, version=4)))
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_where_folders_cannot_be_renamed_a_save_without_its_marker_does_not_count_and_is_cleaned(tmp_path):
    cut = make_cut()
    with Checkpoints(tmp_path, keep=3, atomic_rename=False) as checkpoints:
        for version in (3, 4):
            checkpoints.save(dataclasses.replace(cut, state=dataclasses.replace(cut.state, version=version)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    (tmp_path / "4" / "commit_success.txt").unlink()  # what a kill leaves: all but the last file
    with Checkpoints(tmp_path, keep=3, atomic_rename=False, read_only=True) as checkpoints:
        assert checkpoints.latest() == 3
    assert (tmp_path / "4").exists()
    with Checkpoints(tmp_path, keep=3, atomic_rename=False) as checkpoints:
        assert checkpoints.latest() == 3
        assert not (tmp_path / "4").exists()
        checkpoints.save(dataclasses.replace(cut, state=dataclasses.replace(cut.state, version=4)))
    assert (tmp_path / "4" / "commit_success.txt").exists()


def test_a_full_disk_is_one_clear_error_and_the_earlier_checkpoint_stays(tmp_path):
    script = """
        import resource, signal, sys
        from pathlib import Path
        import dataclasses
        from tests.train.test_checkpoint import IDENTITY, make_cut, make_state
        from train.checkpoint import Checkpoints
        cut = make_cut()
        with Checkpoints(Path(sys.argv[1]), keep=2) as checkpoints:
            checkpoints.save(cut)
            checkpoints.settle()
            # The kernel refuses to let a file grow: what a full disk looks like to every library below us.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            try:
                checkpoints.save(dataclasses.replace(cut, state=dataclasses.replace(cut.state, version=4)))
                checkpoints.settle()
            except OSError as error:
                print("error:", error)
            print("latest:", checkpoints.latest())
    """
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env=environment,
    )
    assert "error: checkpoint: version 4 could not be written under" in done.stdout
    assert "File too large" in done.stdout
    assert "free some space" in done.stdout
    assert "latest: 3" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.mark.parametrize("what", ["groups", "arrays"])
def test_damage_is_noticed(tmp_path, what):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(make_cut())
    meta = tmp_path / "3" / "meta" / "metadata"
    said = read_meta(tmp_path, 3)[what]
    digest = said["digest"] if what == "groups" else next(iter(said.values()))
    meta.write_text(meta.read_text().replace(digest, "0" * len(digest)))
    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(ValueError, match="the file is damaged: delete that folder"),
    ):
        checkpoints.restore(make_state(), IDENTITY)


def test_the_best_ones_are_kept_beside_the_newest(tmp_path):
    cut = make_cut()
    scores = {1: 0.2, 2: 0.9, 3: 0.1, 4: None, 5: 0.3, 6: 0.4}

    def save(checkpoints, version):
        state = dataclasses.replace(cut.state, version=version)
        checkpoints.save(dataclasses.replace(cut, state=state, score=scores[version]))

    with Checkpoints(tmp_path, keep=1, keep_best=1) as checkpoints:
        for version in (1, 2, 3):
            save(checkpoints, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    with Checkpoints(tmp_path, keep=1, keep_best=1) as checkpoints:  # what is on disk is judged as well
        for version in (4, 5, 6):
            save(checkpoints, version)
        assert checkpoints.latest() == 6
        best = checkpoints.restore(make_state(seed=1), IDENTITY, 2)
        assert best is not None
        assert best.state.version == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "6"]
