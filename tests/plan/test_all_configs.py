"""Every 30B config on its TPU topology: an hour or more; equal programs are compiled once, kept in runs/plan-cache."""

from collections.abc import Iterator

import pytest

from tools.make_configs import CONFIGS, topologies
from train.config import load
from train.plan import PlanOptions, make_plan

TPU = [(name, topology) for name, topology in topologies().items() if topology.startswith("v")]


@pytest.fixture(scope="module", autouse=True)
def _libtpu_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        yield


@pytest.mark.plan_full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "topology"), TPU)
def test_a_30b_config_fits_its_machine(name, topology):
    options = PlanOptions(topology=topology, cache=CONFIGS.parent / "runs" / "plan-cache")
    plan = make_plan(load(CONFIGS / name), options, lambda line: print(line, flush=True))
    assert plan.fits, f"{plan.fullest.name} needs {plan.fullest.need} of {plan.available}"
