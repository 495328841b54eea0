import dataclasses

import numpy as np

from tests.reference.rollouts import make_completion, make_group
from tests.train.test_assemble import config
from train.assemble import assemble
from train.freshness import mask_stale


def mixed_group():
    group = make_group(0, version=4)
    old = make_completion(0, 0, version=4, count=3)
    old = dataclasses.replace(old, version=np.array([1, 2, 4], np.int32))
    return dataclasses.replace(group, completions=(old, *group.completions[1:]))


def test_exactly_the_tokens_beyond_the_bound_are_not_trained_on():
    assembled = assemble([mixed_group()], 4, config())
    masked, count = mask_stale(assembled, 2)
    assert count == 1
    for before, after in zip(assembled.microbatches, masked.microbatches, strict=True):
        np.testing.assert_array_equal(after.loss_mask_BT, before.loss_mask_BT & (before.lag_BT != 3))
        np.testing.assert_array_equal(after.behavior_logp_BT, before.behavior_logp_BT)
    assert 3 not in masked.stats.lags
    assert masked.stats.tokens == assembled.stats.tokens - 1 == sum(masked.stats.lags.values())


def test_a_batch_within_the_bound_is_the_same_batch():
    assembled = assemble([mixed_group()], 4, config())
    assert mask_stale(assembled, 3) == (assembled, 0)
