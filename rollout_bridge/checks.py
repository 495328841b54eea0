"""What is checked once, where a record arrives from a peer: a request, a completion, a manifest, a probe.

Every function raises ValueError in the form "subject: expected ..., got ... (where); remedy" and returns nothing.
"""

import collections
import math
from collections.abc import Callable, Sequence

import numpy as np

from rollout_bridge.messages import Completion, Finish, Manifest, ModelInfo, Probe, SampleRequest, TensorSpec, Trace

MIN_PROBE_TOKENS = 256
_NAMED = 4  # how many offenders an error names
_ROUTE_ROWS = 1 << 15  # (row, layer) pairs looked at together: their planes stay in cache


def id_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest unsigned type that holds expert ids below `num_experts`."""
    return np.uint8 if num_experts <= 256 else np.uint16


def check_request(request: SampleRequest, model: ModelInfo) -> None:
    """Checks a request against the model that shall serve it.

    Raises:
      ValueError: names the request and the field.
    """
    subject = f"request {request.request_id!r}"
    sampling = request.sampling
    count = len(request.prompt_tokens)
    _require(0 < len(request.request_id) <= 256, lambda: f"request id: expected 1 to 256 characters, got {subject}")
    _require(
        request.prompt_tokens.ndim == 1 and count > 0,
        lambda: f"{subject}: expected at least one prompt token, got none",
    )
    _check_ids(request.prompt_tokens, model, f"{subject}: prompt tokens")
    _require(
        len(request.members) > 0 and len(set(request.members)) == len(request.members) and min(request.members) >= 0,
        lambda: f"{subject}: expected distinct members >= 0, got {request.members}",
    )
    _require(
        0 <= request.already_sampled < min(count, sampling.max_new_tokens)
        and (request.already_sampled == 0 or len(request.members) == 1),
        lambda: (
            f"{subject}: expected already_sampled below prompt length {count} and max_new_tokens "
            f"{sampling.max_new_tokens}, of a single member, got {request.already_sampled} of members {request.members}"
        ),
    )
    longest = count - request.already_sampled + sampling.max_new_tokens
    _require(
        sampling.max_new_tokens >= 1 and longest <= model.max_tokens,
        lambda: (
            f"{subject}: expected prompt + new tokens of at most {model.max_tokens} (the engine's limit), got "
            f"{longest - sampling.max_new_tokens} + {sampling.max_new_tokens}; shorten the prompt or max_new_tokens"
        ),
    )
    _check_sampling(request, model, subject)


def check_completion(completion: Completion, request: SampleRequest, model: ModelInfo) -> None:
    """Checks a completion against the request that it answers; everything the trainer relies on.

    Raises:
      ValueError: names request, member, engine and version.
    """
    try:
        _check_completion(completion, request, model)
    except ValueError as error:
        version = completion.version
        versions = f"versions {version.min()} to {version.max()}" if len(version) else "no version"
        raise ValueError(f"{error} (engine {completion.engine_id}, {versions})") from error


def check_completions(completions: Sequence[Completion], request: SampleRequest, model: ModelInfo) -> None:
    """`check_completion` of each, their values together: a comparison of a few numbers costs what it is to begin it.

    Raises:
      ValueError: names request, member, engine and version of the first that is not as it must be.
    """
    if len(completions) > 1 and _sound(completions, request, model):
        return
    for completion in completions:
        check_completion(completion, request, model)


def _sound(completions: Sequence[Completion], request: SampleRequest, model: ModelInfo) -> bool:
    """Whether `check_completion` would let each of them pass; False also where that is too much trouble to say."""
    if not all(_formed(completion, request, model) for completion in completions):
        return False
    tokens, logp, version = (
        np.concatenate([getattr(completion, name) for completion in completions])
        for name in ("tokens", "behavior_logp", "version")
    )
    last = np.cumsum([len(completion.tokens) for completion in completions]) - 1
    stops = (tokens[:, None] == np.array(request.sampling.stop_ids, np.int32)).any(1)
    stopped = np.array([completion.finish is Finish.STOP for completion in completions])
    growth = np.diff(version)
    growth[last[:-1]] = 0  # from one completion to the next
    traces = [completion.trace for completion in completions if completion.trace is not None]
    return bool(
        tokens.min() >= 0
        and tokens.max() < model.vocab_size
        and (np.isfinite(logp) & (logp <= 0)).all()
        and version.min() >= 0
        and (growth >= 0).all()
        and (stops[last] == stopped).all()
        and stops.sum() == stopped.sum()
        and (not traces or np.concatenate([trace.version_T for trace in traces]).min() >= 0)
        and (not traces or _distinct(np.concatenate([t.experts_TLK for t in traces]), model.num_experts))
    )


def _formed(completion: Completion, request: SampleRequest, model: ModelInfo) -> bool:
    """All but the values of a plain completion: identity, lengths, definition, end, shape of the trace."""
    count, trace, definition = len(completion.tokens), completion.trace, completion.logprob
    sampling = request.sampling
    room = sampling.max_new_tokens - request.already_sampled
    ends = {Finish.STOP} | ({Finish.LENGTH} if count == room else {Finish.ABORT})
    if (
        completion.request_id != request.request_id
        or completion.member not in request.members
        or not 0 < count <= room
        or not count == len(completion.behavior_logp) == len(completion.version)
        or completion.truncated_logp is not None
        or definition.after_truncation
        or definition.temperature != (sampling.temperature or 1.0)
        or completion.finish not in ends
        or (trace is not None) != (request.want_trace and model.moe_layers > 0)
    ):
        return False
    if trace is None:
        return True
    prompt = len(request.prompt_tokens)
    rows = prompt + count - 1 - trace.first_row
    return (
        0 <= trace.first_row < prompt
        and trace.experts_TLK.shape == (rows, model.moe_layers, model.top_k)
        and trace.version_T.shape == (rows,)
        and trace.experts_TLK.dtype == id_dtype(model.num_experts)
    )


def check_manifest(manifest: Manifest, model: ModelInfo) -> None:
    """Checks that a push covers the model exactly: nothing unknown, missing, twice, or of another shape or type.

    Raises:
      ValueError: names the tensors.
    """
    subject = f"manifest of version {manifest.version}"
    _require(0 <= manifest.version < 1 << 31, lambda: f"{subject}: expected a version in [0, 2^31)")
    _require(
        manifest.model_digest == model.model_digest,
        lambda: (
            f"{subject}: expected model {model.model_digest} (the engine's), got {manifest.model_digest}; "
            "serve with the trainer's model config"
        ),
    )
    wanted = {spec.name: spec for spec in model.tensors}
    given = {spec.name: spec for spec in manifest.tensors}
    problems = []
    if len(given) != len(manifest.tensors):
        counts = collections.Counter(spec.name for spec in manifest.tensors)
        problems.append(f"twice: {_some(sorted(name for name, count in counts.items() if count > 1))}")
    if unknown := given.keys() - wanted.keys():
        problems.append(f"unknown: {_some(sorted(unknown))}")
    if missing := wanted.keys() - given.keys():
        problems.append(f"missing: {_some(sorted(missing))}")
    if other := [name for name in given.keys() & wanted.keys() if given[name] != wanted[name]]:
        texts = [f"{name} expected {_form(wanted[name])}, got {_form(given[name])}" for name in sorted(other)]
        problems.append(f"of another shape or type: {_some(texts)}")
    _require(
        not problems,
        lambda: f"{subject}: expected the engine's {len(wanted)} tensors exactly, got {'; '.join(problems)}",
    )


def check_probe(probe: Probe, model: ModelInfo) -> None:
    """Checks that a probe can decide anything.

    Raises:
      ValueError: names the field.
    """
    count = len(probe.tokens)
    _require(count >= MIN_PROBE_TOKENS, lambda: f"probe: expected at least {MIN_PROBE_TOKENS} tokens, got {count}")
    _check_ids(probe.tokens, model, "probe: tokens")
    _require(
        sum(probe.lengths) == count and min(probe.lengths) >= 2,
        lambda: f"probe: expected sequences of 2 or more tokens, {count} in all, got lengths {list(probe.lengths)}",
    )
    longest = max(probe.lengths)
    _require(
        longest <= model.max_tokens,
        lambda: f"probe: expected sequences of at most {model.max_tokens} tokens, got {longest}",
    )
    _require(len(probe.logp) == count - 1, lambda: f"probe: expected {count - 1} log-probs, got {len(probe.logp)}")
    bad = ~(np.isfinite(probe.logp) & (probe.logp <= 0)) & probe.compared
    _require(not bad.any(), lambda: f"probe: expected finite log-probs <= 0, got {_first(probe.logp, bad)}")
    _require(
        math.isfinite(probe.tolerance) and probe.tolerance > 0,
        lambda: f"probe: expected a tolerance > 0 nats, got {probe.tolerance}",
    )
    _require(
        0 <= probe.expert_coverage <= 1,
        lambda: f"probe: expected an expert coverage in [0, 1], got {probe.expert_coverage}",
    )


def _check_completion(completion: Completion, request: SampleRequest, model: ModelInfo) -> None:
    tokens, logp, version = completion.tokens, completion.behavior_logp, completion.version
    subject = f"completion {completion.request_id}/{completion.member}"
    _require(
        completion.request_id == request.request_id and completion.member in request.members,
        lambda: f"{subject}: expected an answer to request {request.request_id!r}, members {request.members}",
    )
    _require(
        len(tokens) == len(logp) == len(version),
        lambda: (
            f"{subject}: expected as many log-probs and versions as tokens, got {len(tokens)} tokens, {len(logp)} "
            f"log-probs, {len(version)} versions"
        ),
    )
    _check_definition(completion, request, f"{subject}: log-prob definition")
    _check_end(completion, request, subject)
    _check_ids(tokens, model, f"{subject}: tokens")
    bad = ~(np.isfinite(logp) & (logp <= 0))
    _require(not bad.any(), lambda: f"{subject}: expected finite log-probs <= 0, got {_first(logp, bad)}")
    _require(
        len(version) == 0 or (version[0] >= 0 and bool(np.all(version[1:] >= version[:-1]))),
        lambda: f"{subject}: expected versions >= 0 that never fall, got {version[:8].tolist()}...",
    )
    truncated = completion.truncated_logp
    _require(
        truncated is None
        or (len(truncated) == len(tokens) and bool((np.isfinite(truncated) & (truncated >= logp - 1e-3)).all())),
        lambda: (
            f"{subject}: expected a finite log-prob over the kept tokens for each of {len(tokens)}, none below that "
            f"over all tokens, got {truncated}"
        ),
    )
    _check_trace(completion, request, model)


def _check_sampling(request: SampleRequest, model: ModelInfo, subject: str) -> None:
    sampling = request.sampling
    _require(
        math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        lambda: f"{subject}: expected a temperature >= 0, got {sampling.temperature}",
    )
    _require(0 < sampling.top_p <= 1, lambda: f"{subject}: expected top_p in (0, 1], got {sampling.top_p}")
    _require(
        sampling.top_k == -1 or sampling.top_k >= 1,
        lambda: f"{subject}: expected top_k of -1 or >= 1, got {sampling.top_k}",
    )
    _require(0 <= sampling.seed < 1 << 63, lambda: f"{subject}: expected a seed in [0, 2^63), got {sampling.seed}")
    _check_ids(np.asarray(sampling.stop_ids, np.int64), model, f"{subject}: stop ids")


def _check_definition(completion: Completion, request: SampleRequest, subject: str) -> None:
    temperature = request.sampling.temperature or 1.0
    got = completion.logprob
    _require(
        got.temperature == temperature and not got.after_truncation,
        lambda: (
            f"{subject}: expected temperature {temperature} before top-p/top-k (what the trainer reproduces), got "
            f"temperature {got.temperature} {'after' if got.after_truncation else 'before'} truncation"
        ),
    )


def _check_end(completion: Completion, request: SampleRequest, subject: str) -> None:
    """An end must be what it says: the trainer trains a stop token, and an ABORT must be continuable."""
    tokens, finish = completion.tokens, completion.finish
    room = request.sampling.max_new_tokens - request.already_sampled
    stops = (tokens[:, None] == np.array(request.sampling.stop_ids, np.int32)).any(1)
    _require(len(tokens) <= room, lambda: f"{subject}: expected at most {room} tokens, got {len(tokens)}")
    _require(
        not stops[:-1].any(),
        lambda: f"{subject}: expected the end after a stop token, got more after {_first(tokens[:-1], stops[:-1])}",
    )
    stopped = bool(len(tokens)) and bool(stops[-1])
    expected = Finish.STOP if stopped else Finish.LENGTH if len(tokens) == room else Finish.ABORT
    _require(
        finish is expected,
        lambda: (
            f"{subject}: expected finish {expected.name} of {len(tokens)} tokens (at most {room}, the last is "
            f"{'a' if stopped else 'no'} stop token), got {finish.name}"
        ),
    )


def _check_trace(completion: Completion, request: SampleRequest, model: ModelInfo) -> None:
    subject, trace = f"trace of {completion.request_id}/{completion.member}", completion.trace
    wanted = request.want_trace and model.moe_layers > 0 and len(completion.tokens) > 0
    _require(
        (trace is not None) == wanted,
        lambda: (
            f"{subject}: expected {'routes' if wanted else 'none'}, got {'none' if wanted else 'some'}; "
            "the engine must return routed experts exactly when they are wanted"
        ),
    )
    if trace is None:
        return
    fed = len(request.prompt_tokens) + len(completion.tokens) - 1
    _require(
        0 <= trace.first_row < len(request.prompt_tokens) and trace.experts_TLK.ndim == 3,
        lambda: (
            f"{subject}: expected a first row within the prompt and [T, L, K] ids, got first row {trace.first_row}, "
            f"shape {trace.experts_TLK.shape}"
        ),
    )
    shape = (fed - trace.first_row, model.moe_layers, model.top_k)
    _require(
        trace.experts_TLK.shape == shape and trace.version_T.shape == shape[:1],
        lambda: (
            f"{subject}: expected {shape[0]} rows (prompt {len(request.prompt_tokens)} + {len(completion.tokens)} "
            f"tokens - 1 - first row {trace.first_row}), {shape[1]} layers, {shape[2]} experts, got shape "
            f"{trace.experts_TLK.shape} with {len(trace.version_T)} versions"
        ),
    )
    check_routes(trace, model.num_experts, subject)
    _require(
        bool(np.all(trace.version_T >= 0)),
        lambda: f"{subject}: expected row versions >= 0, got {trace.version_T.min()}",
    )


def check_routes(trace: Trace, num_experts: int, subject: str) -> None:
    """Checks that the K ids of every row and layer are distinct, below E, and of the smallest type.

    All-zero routes, what a buffer that was never written looks like, are caught by distinctness wherever K > 1.

    Raises:
      ValueError: names the first offending row and layer.
    """
    rows, layers, slots = trace.experts_TLK.shape
    _require(
        trace.experts_TLK.dtype == id_dtype(num_experts),
        lambda: f"{subject}: expected ids of type {np.dtype(id_dtype(num_experts))}, got {trace.experts_TLK.dtype}",
    )
    flat = trace.experts_TLK.reshape(rows * layers, slots)
    for begin in range(0, len(flat), _ROUTE_ROWS):
        block = flat[begin : begin + _ROUTE_ROWS]
        if not _distinct(block, num_experts):
            ordered = np.sort(block, axis=1)
            bad = (ordered[:, 1:] == ordered[:, :-1]).any(1) | (ordered[:, -1] >= num_experts)
            row, layer = divmod(begin + int(bad.argmax()), layers)
            raise ValueError(
                f"{subject}: expected {slots} distinct ids below {num_experts}, got "
                f"{trace.experts_TLK[row, layer].tolist()} in row {row}, layer {layer}"
            )


def _distinct(ids: np.ndarray, num_experts: int) -> bool:
    """Whether the last axis holds distinct ids below `num_experts` everywhere."""
    slots = ids.shape[-1]
    planes = np.ascontiguousarray(ids.reshape(-1, slots).T)  # a row per slot, so that comparisons run along memory
    return not (
        planes.max() >= num_experts or any((planes[shift:] == planes[:-shift]).any() for shift in range(1, slots))
    )


def _check_ids(ids: np.ndarray, model: ModelInfo, subject: str) -> None:
    bad = (ids < 0) | (ids >= model.vocab_size)
    _require(
        not bad.any(),
        lambda: f"{subject}: expected ids in [0, {model.vocab_size}), got {_first(ids, bad)}",
    )


def _first(values: np.ndarray, bad: np.ndarray) -> str:
    index = int(np.argmax(bad)) if len(bad) else 0
    return f"{values[index]} at token {index}" if len(values) else "none"


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _require(condition: bool | np.bool_, message: Callable[[], str]) -> None:
    """Raises with a message that is made only then: completions come by the thousand, and each passes some twenty."""
    if not condition:
        raise ValueError(message())
