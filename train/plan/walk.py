"""FLOPs of a traced program, per device: a walk of its jaxpr.

Matrix products are counted, two operations for a multiplication and an addition; elementwise work is not. A scan counts
its length times, a body inside `shard_map` for the device itself, everything outside for its share of the mesh. What
the jaxpr does not say, how often a loop runs whose bound is data and what a Pallas kernel multiplies, the caller's
rules say (`train.plan.rules`): a loop or kernel with products in it and without a rule is an error that names it.
XLA's own `cost_analysis` is not used: it counts the body of a loop once and a kernel not at all.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Rooms that named scopes tell apart; what is in none of them is "other".
ROOMS = ("attention", "experts", "router", "logprob", "objective", "optimizer")
_DOTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
# Their bodies run once, where they stand.
_PLAIN = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
        "scatter-add",
        "scatter",
        "reduce",
        "sort",
        "run_state",
    }
)
_OPAQUE = frozenset({"custom_call", "ffi_call", "pure_callback", "io_callback", "xla_call", "tpu_custom_call"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What a jaxpr does not say.

    Attributes:
      loops: by the named scope around a loop: how often it runs on the busiest device.
      kernels: by the kernel's name: FLOPs of one call, from the shapes and types of its inputs and outputs.
    """

    loops: Mapping[str, float]
    kernels: Mapping[str, Callable[[list[Any], list[Any]], float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one execution of a program is for the busiest device.

    Attributes:
      flops: by room.
      bytes: operands and results of its matrix products and kernels, each moved once between memory and chip; what is
        elementwise is thought fused with them.
    """

    flops: Mapping[str, float]
    bytes: float

    @property
    def total(self) -> float:
        """FLOPs of all rooms."""
        return sum(self.flops.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _At:
    """Where the walk is: the multiplicity of the place, its names, and the mesh if it is one device's own."""

    times: float
    share: float
    names: tuple[str, ...]


def walk(jaxpr: Any, devices: int, rules: Rules) -> Work:
    """Counts a program.

    Args:
      jaxpr: `Traced.jaxpr`.
      devices: of the mesh.
      rules: see `Rules`.

    Raises:
      ValueError: a loop, kernel or call that no rule describes.
    """
    flops: dict[str, float] = {}
    moved = _walk(jaxpr, _At(times=1.0, share=1 / devices, names=()), rules, flops)
    return Work(flops=dict(flops), bytes=moved)


def _walk(jaxpr: Any, at: _At, rules: Rules, flops: dict[str, float]) -> float:
    moved = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        here = dataclasses.replace(at, names=(*at.names, *_names(equation)))
        if name in _DOTS:
            _add(flops, _room(here.names), here.times * here.share * _dot(equation))
            moved += here.times * here.share * _moved(equation)
        elif name == "pallas_call":
            _add(flops, _room(here.names), here.times * here.share * _kernel(equation, here, rules))
            moved += here.times * here.share * _moved(equation)
        else:
            moved += _nested(equation, here, rules, flops)
    return moved


def _add(flops: dict[str, float], room: str, count: float) -> None:
    flops[room] = flops.get(room, 0.0) + count


def _nested(equation: Any, at: _At, rules: Rules, flops: dict[str, float]) -> float:
    name, parameters = equation.primitive.name, equation.params
    if name in _OPAQUE:
        raise ValueError(f"plan: expected programs of known primitives, got {name} in {'/'.join(at.names)}; no rule")
    inner = _jaxprs(parameters)
    if not inner:
        return 0.0
    if name == "scan":
        at = dataclasses.replace(at, times=at.times * parameters["length"])
    elif name == "shard_map":
        at = dataclasses.replace(at, share=1.0)
    elif name == "while":
        return _loop(parameters["body_jaxpr"], at, rules, flops)
    elif name == "cond":
        return _branches(inner, at, rules, flops)
    elif name not in _PLAIN and not _is_empty(inner, at, rules):
        raise ValueError(
            f"plan: expected a primitive whose body runs a known number of times, got {name} with products in it "
            f"({'/'.join(at.names)}); give train.plan.walk a rule for it"
        )
    return sum(_walk(body, at, rules, flops) for body in inner)


def _loop(body: Any, at: _At, rules: Rules, flops: dict[str, float]) -> float:
    if _is_empty([body], at, rules):
        return 0.0
    scope = next((scope for scope in reversed(at.names) if scope in rules.loops), None)
    if scope is None:
        raise ValueError(
            f"plan: expected a rule for every loop whose bound is data and that has products in it, got none for the "
            f"one in {'/'.join(at.names) or 'the program itself'}; put a named scope around it and its trip count into "
            "train.plan.rules"
        )
    return _walk(body, dataclasses.replace(at, times=at.times * rules.loops[scope]), rules, flops)


def _branches(bodies: list[Any], at: _At, rules: Rules, flops: dict[str, float]) -> float:
    """The costliest branch."""
    seen: list[tuple[float, dict[str, float], float]] = []
    for body in bodies:
        own: dict[str, float] = {}
        moved = _walk(body, at, rules, own)
        seen.append((sum(own.values()), own, moved))
    _, own, moved = max(seen, key=lambda branch: branch[0])
    for room, count in own.items():
        _add(flops, room, count)
    return moved


def _is_empty(bodies: list[Any], at: _At, rules: Rules) -> bool:
    """Whether there is no product in them, at any depth."""
    for body in bodies:
        for equation in getattr(body, "jaxpr", body).eqns:
            if equation.primitive.name in (*_DOTS, "pallas_call", *_OPAQUE):
                return False
            if not _is_empty(_jaxprs(equation.params), at, rules):
                return False
    return True


def _jaxprs(parameters: Mapping[str, Any]) -> list[Any]:
    def is_jaxpr(value: Any) -> bool:
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    return [value for value in jax.tree.leaves(list(parameters.values()), is_leaf=is_jaxpr) if is_jaxpr(value)]


def _names(equation: Any) -> list[str]:
    """Named scopes of an equation and the name of the function that it calls, outermost first."""
    scopes = str(equation.source_info.name_stack).replace("transpose(", "").replace("jvp(", "").replace(")", "")
    names = [scope for scope in scopes.split("/") if scope]
    called = equation.params.get("name")
    return [*names, called] if isinstance(called, str) and called else names


def _room(names: tuple[str, ...]) -> str:
    return next((name for name in reversed(names) if name in ROOMS), "other")


def _dot(equation: Any) -> float:
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    if equation.primitive.name != "dot_general":
        raise ValueError(f"plan: expected dot_general or a registered kernel, got {equation.primitive.name}; no rule")
    (_, contracted), (_, batched) = equation.params["dimension_numbers"]
    free = math.prod(size for axis, size in enumerate(right) if axis not in contracted and axis not in batched)
    return 2.0 * math.prod(left) * free


def _kernel(equation: Any, at: _At, rules: Rules) -> float:
    named = equation.params.get("name") or ""
    for key, rule in rules.kernels.items():
        if key in named or key in at.names:
            return rule([v.aval for v in equation.invars], [v.aval for v in equation.outvars])
    raise ValueError(
        f"plan: expected a rule for every Pallas kernel, got none for {named or 'an unnamed one'} in "
        f"{'/'.join(at.names)}; known: {', '.join(rules.kernels)} (train.plan.rules)"
    )


def _moved(equation: Any) -> float:
    variables = (*equation.invars, *equation.outvars)
    arrays = [v.aval for v in variables if hasattr(v.aval, "shape")]
    return float(sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays))
