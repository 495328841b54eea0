import dataclasses
import types

import numpy as np
import pytest

from tests.train.test_step import ASSEMBLY, advanced, build, groups, near
from train.assemble import assemble, place
from train.run import Minibatch, require_finite


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
