import contextlib
import dataclasses
import types
from collections import deque

import numpy as np
import pytest

from tests.train.test_step import ASSEMBLY, advanced, build, groups, near
from train import loop
from train.assemble import assemble, place
from train.buffer import Buffer
from train.run import Minibatch, Run, require_finite
from train.team import Alone


def test_a_step_that_is_not_finite_stops_the_run_with_its_batch_saved(tmp_path):
    step, state, mesh = build()
    assembled = assemble(groups(), 0, ASSEMBLY)
    whole = near(step, state, assembled.microbatches, mesh)
    logp_BT = whole[0].behavior_logp_BT.copy()
    row, position = (int(index) for index in np.argwhere(whole[0].loss_mask_BT)[3])
    logp_BT[row, position] = np.nan
    batch = place((dataclasses.replace(whole[0], behavior_logp_BT=logp_BT),), mesh)
    state, done = advanced(step, state, batch)
    run = types.SimpleNamespace(state=state, step=step, folder=tmp_path)
    minibatch = Minibatch(batch=batch, stats=assembled.stats, prox_logps=None)
    with pytest.raises(ValueError, match=rf"step 0: .*behavior_logp_BT.*row {row}, position {position}.*unchanged"):
        require_finite(run, done, minibatch, None)  # pyright: ignore[reportArgumentType]
    with np.load(tmp_path / "nonfinite-v0.npz") as saved:
        np.testing.assert_array_equal(saved["micro0.behavior_logp_BT"], logp_BT)
    good = place(whole, mesh)
    state, done = advanced(step, state, good)
    require_finite(run, done, dataclasses.replace(minibatch, batch=good), None)  # pyright: ignore[reportArgumentType]


def recorder(**answers):
    """Stands for whatever is called on it, and keeps the names in order."""
    names = []

    class Recorder:
        def __getattr__(self, name):
            def call(*_, **__):
                names.append(name)
                answer = answers.get(name)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return call

    return Recorder(), names


@pytest.mark.parametrize("failure", [None, OSError("no fleet")])
def test_a_push_begins_before_the_steps_row_is_written_and_loses_none(failure):
    calls, names = recorder(at_edge=failure)
    update = types.SimpleNamespace(finite=True)
    run = types.SimpleNamespace(
        minibatches=deque([types.SimpleNamespace(batch=(), prox_logps=None)]),
        record=False,
        state=None,
        phase=lambda name: contextlib.nullcontext(),
        step=types.SimpleNamespace(measure=lambda *_: None, update=lambda *_: (None, update)),
        publisher=types.SimpleNamespace(wait=lambda: None),
        reference_logps=lambda batch: None,
        note=calls.note,
        at_edge=calls.at_edge,
        write=calls.write,
    )
    with contextlib.nullcontext() if failure is None else pytest.raises(OSError, match="no fleet"):
        loop._step(run, 3)  # pyright: ignore[reportArgumentType]
    assert names == ["note", "at_edge", "write"]


def test_a_cut_finds_the_row_of_its_step_written():
    names = []
    run = types.SimpleNamespace(
        state=types.SimpleNamespace(version=4),
        team=Alone(),
        checkpoints=types.SimpleNamespace(latest=lambda: 3, save=lambda cut: names.append("save")),
        flow=types.SimpleNamespace(buffer=Buffer(max_lag=1, deadline=1.0)),
        phase=lambda name: contextlib.nullcontext(),
        step_groups=2,
        ledger=None,
        identity=None,
        counters={},
        _lock=contextlib.nullcontext(),
        _rewards=[0.5],
        write=lambda: names.append("write"),
    )
    Run.save(run)  # pyright: ignore[reportArgumentType]
    assert names == ["write", "save"]
