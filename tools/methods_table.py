"""Writes docs/methods.md from the presets (`python tools/methods_table.py`); a test refuses a stale one."""

import pathlib

from sat_jax.objective import METHODS, Method

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "methods.md"

_INTRODUCTION = """# Methods of the objective

`ObjectiveConfig.preset(name, **overrides)` gives each of these; in a run's file, `objective.preset`. This page is
written by `python tools/methods_table.py` from `sat_jax/objective/presets.py`.

pi is the live policy, mu the engine's own record, prox the trainer's log-probs before the batch's first step. r = pi
/ mu, rho = pi / prox, w = prox / mu (detached), s = the geometric mean of r over the active tokens of a response, A
the advantage, sg stops the gradient; clip(x) is clip(x, 1 - eps_low, 1 + eps_high), eps 0.2 unless a default says
otherwise. What is shown is maximised. A dropped token still counts in the denominator. *Extra pass* means that
`prox_logp_BT` must be given. With one optimizer step a batch rho = 1: the clip of every method with an extra pass is
inert, and `ppo` is plain policy gradient.

A default of a link, such as `gate: icepop`, can be exchanged too: every combination of links is a method, and a link
of strength zero changes no bit of the loss or its gradient. `kl_coef` is 0 everywhere; GRPO's authors used 0.04,
SAT's 0.001.

"""


def page() -> str:
    """The page as it ought to be."""
    head = (
        "| preset | maximised per token | unit | extra pass | defaults | source | known failure |\n"
        + "|---" * 7
        + "|\n"
    )
    return _INTRODUCTION + head + "".join(_row(method) for method in METHODS)


def _row(method: Method) -> str:
    defaults = [f"{name}: {value}" for name, value in method.defaults.items()]
    defaults += [f"advantages: std {method.std}"] if method.std != "group" else []
    cells = [
        f"`{method.name}`",
        method.formula.replace("|", "\\|"),
        method.unit,
        "yes" if method.extra_forward else "no",
        ", ".join(defaults) or "-",
        method.source,
        method.failure.replace("|", "\\|"),
    ]
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
