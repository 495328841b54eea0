"""Before the run: what a config's optimizer step needs on a machine that is not there. `make_plan` is the way in."""

from train.plan.plan import Plan, PlanOptions, make_plan

__all__ = ["Plan", "PlanOptions", "make_plan"]
