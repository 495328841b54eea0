"""Records to protobuf and back. The stubs' messages are seen here and in `codec_push` alone.

Decoding checks what protobuf cannot say (known enum values, shapes that fit their bytes, counts that add up) and raises
ValueError; what a record must be to be used is in `checks`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from rollout_bridge.errors import BridgeError, Fatal, NotStaged, Retryable
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    Finish,
    InFlight,
    LogprobDefinition,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    Sampling,
    Serving,
    Staged,
    StageReport,
    TensorSpec,
    Trace,
)
from rollout_bridge.proto import rollout_pb2 as pb
from rollout_bridge.runs import from_runs, to_runs

T = TypeVar("T")

# The requests and replies that say nothing but their name.
stage_reply = pb.StageReply.FromString
GetModel, Discard, Resume, Release = pb.GetModelRequest, pb.DiscardRequest, pb.ResumeRequest, pb.ReleaseRequest
Discarded, Paused, Resumed = pb.DiscardReply, pb.PauseReply, pb.ResumeReply
Aborted, Released = pb.AbortReply, pb.ReleaseReply
ERROR_KEY = "sat-jax-rollout-error-bin"
SERVICE = pb.DESCRIPTOR.services_by_name["RolloutBridge"].full_name

_FINISH = {finish: getattr(pb, f"FINISH_{finish.name}") for finish in Finish}
_IN_FLIGHT = {policy: getattr(pb, f"IN_FLIGHT_{policy.name}") for policy in InFlight}
_SERVING = {serving: getattr(pb, f"SERVING_{serving.name}") for serving in Serving}
_STAGED = {staged: getattr(pb.StageReply, f"STATE_{staged.name}") for staged in Staged}
_ERRORS = {  # the narrower class first
    NotStaged: pb.ErrorDetail.KIND_NOT_STAGED,
    Fatal: pb.ErrorDetail.KIND_FATAL,
    Retryable: pb.ErrorDetail.KIND_RETRYABLE,
}
_DTYPE = {"float32": pb.DTYPE_FLOAT32, "bfloat16": pb.DTYPE_BFLOAT16}
_ID_TYPES = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}


def encode_request(request: SampleRequest) -> pb.SampleRequest:
    """A request for the wire."""
    sampling = request.sampling
    return pb.SampleRequest(
        request_id=request.request_id,
        prompt_tokens_T=request.prompt_tokens.tolist(),
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=sampling.stop_ids,
            seed=sampling.seed,
        ),
        members=request.members,
        want_trace=request.want_trace,
        already_sampled=request.already_sampled,
    )


def encode_requests(requests: Sequence[SampleRequest]) -> pb.SampleRequest:
    """The requests of a call of `Sample`, one or more, for the wire: the first brings the others."""
    first, *others = map(encode_request, requests)
    first.together.extend(others)
    return first


def decode_requests(message: pb.SampleRequest) -> tuple[SampleRequest, ...]:
    """The requests of a call of `Sample`.

    Raises:
      ValueError: one of those that travel together with the first brings others of its own, or an id comes twice.
    """
    requests = tuple(decode_request(part) for part in (message, *message.together))
    if any(other.together for other in message.together):
        raise ValueError(
            f"request {message.request_id!r}: expected none together with it that brings others of its own, got one"
        )
    if len({request.request_id for request in requests}) != len(requests):
        raise ValueError(
            f"request {message.request_id!r}: expected others with other ids together with it, got "
            f"{[request.request_id for request in requests]}"
        )
    return requests


def decode_request(message: pb.SampleRequest) -> SampleRequest:
    """A request from the wire, by itself."""
    sampling = message.sampling
    return SampleRequest(
        request_id=message.request_id,
        prompt_tokens=np.array(message.prompt_tokens_T, np.int32),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=tuple(sampling.stop_ids),
            seed=sampling.seed,
        ),
        members=tuple(message.members),
        want_trace=message.want_trace,
        already_sampled=message.already_sampled,
    )


def encode_completion(completion: Completion) -> pb.Completion:
    """A completion for the wire."""
    return pb.Completion(
        request_id=completion.request_id,
        member=completion.member,
        tokens_T=completion.tokens.tolist(),
        behavior_logp_T=completion.behavior_logp.tolist(),
        version_T=_encode_runs(completion.version),
        trace=None if completion.trace is None else _encode_trace(completion.trace),
        finish=_FINISH[completion.finish],
        engine_id=completion.engine_id,
        logprob=pb.LogprobDefinition(
            temperature=completion.logprob.temperature, after_truncation=completion.logprob.after_truncation
        ),
        truncated_logp_T=() if completion.truncated_logp is None else completion.truncated_logp.tolist(),
    )


def decode_completions(message: pb.Completion) -> tuple[Completion, ...]:
    """The completions of a message of `Sample`: its own, and those that travel together with it.

    Raises:
      ValueError: as `decode_completion`; or one of those brings others of its own.
    """
    for other in message.together:
        if other.together:
            raise ValueError(
                f"completion {other.request_id}/{other.member} of engine {other.engine_id}: expected none together "
                f"with one that is itself together with another, got {len(other.together)}"
            )
    return tuple(decode_completion(part) for part in (message, *message.together))


def decode_completion(message: pb.Completion) -> Completion:
    """A completion from the wire.

    Raises:
      ValueError: an enum value is unknown, or a shape does not fit its bytes; names the completion.
    """
    subject = f"completion {message.request_id}/{message.member} of engine {message.engine_id}"
    return Completion(
        request_id=message.request_id,
        member=message.member,
        tokens=np.array(message.tokens_T, np.int32),
        behavior_logp=np.array(message.behavior_logp_T, np.float32),
        version=_decode_runs(message.version_T, len(message.tokens_T), f"{subject}: versions"),
        trace=_decode_trace(message.trace, subject) if message.HasField("trace") else None,
        finish=_known(_FINISH, message.finish, f"{subject}: finish"),
        engine_id=message.engine_id,
        logprob=LogprobDefinition(
            temperature=message.logprob.temperature, after_truncation=message.logprob.after_truncation
        ),
        truncated_logp=np.array(message.truncated_logp_T, np.float32) if message.truncated_logp_T else None,
    )


def encode_model(model: ModelInfo) -> pb.ModelInfo:
    """A model for the wire."""
    return pb.ModelInfo(
        model_digest=model.model_digest,
        vocab_size=model.vocab_size,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        max_tokens=model.max_tokens,
        tensors=[encode_spec(spec) for spec in model.tensors],
        dtype=_DTYPE[model.dtype],
    )


def decode_model(message: pb.ModelInfo) -> ModelInfo:
    """A model from the wire."""
    return ModelInfo(
        model_digest=message.model_digest,
        vocab_size=message.vocab_size,
        moe_layers=message.moe_layers,
        num_experts=message.num_experts,
        top_k=message.top_k,
        max_tokens=message.max_tokens,
        tensors=tuple(decode_spec(spec) for spec in message.tensors),
        dtype=_known(_DTYPE, message.dtype, f"model {message.model_digest}: dtype"),
    )


def encode_spec(spec: TensorSpec) -> pb.TensorSpec:
    """Name, type and shape of a tensor for the wire."""
    return pb.TensorSpec(name=spec.name, dtype=_DTYPE[spec.dtype], shape=spec.shape)


def decode_spec(message: pb.TensorSpec) -> TensorSpec:
    """Name, type and shape of a tensor from the wire.

    Raises:
      ValueError: the type is unknown, or a size negative; names the tensor.
    """
    if any(size < 0 for size in message.shape):
        raise ValueError(f"tensor {message.name}: expected sizes >= 0, got {list(message.shape)}")
    dtype = _known(_DTYPE, message.dtype, f"tensor {message.name}: dtype")
    return TensorSpec(name=message.name, dtype=dtype, shape=tuple(message.shape))


def encode_stage_report(report: StageReport) -> pb.StageReply:
    """The outcome of a push for the wire."""
    return pb.StageReply(
        state=_STAGED[report.staged],
        bytes=report.num_bytes,
        engine_id=report.engine_id,
        seconds_write=report.seconds_write,
    )


def decode_stage_report(message: pb.StageReply) -> StageReport:
    """The outcome of a push from the wire."""
    staged = _known(_STAGED, message.state, f"engine {message.engine_id}: outcome of a push")
    return StageReport(
        staged=staged,
        num_bytes=message.bytes,
        engine_id=message.engine_id,
        seconds_write=message.seconds_write,
    )


def encode_commit(version: int, digest: str, probe: Probe, in_flight: InFlight) -> pb.CommitRequest:
    """A commit for the wire."""
    return pb.CommitRequest(
        version=version,
        digest=digest,
        probe=pb.Probe(
            tokens_T=probe.tokens.tolist(),
            lengths=probe.lengths,
            logp_T=probe.logp.tolist(),
            tolerance=probe.tolerance,
            expert_coverage=probe.expert_coverage,
        ),
        in_flight=_IN_FLIGHT[in_flight],
    )


def decode_commit(message: pb.CommitRequest) -> tuple[int, str, Probe, InFlight]:
    """Version, digest, probe and in-flight policy of a commit."""
    probe = Probe(
        tokens=np.array(message.probe.tokens_T, np.int32),
        lengths=tuple(message.probe.lengths),
        logp=np.array(message.probe.logp_T, np.float32),
        tolerance=message.probe.tolerance,
        expert_coverage=message.probe.expert_coverage,
    )
    return message.version, message.digest, probe, decode_in_flight(message.in_flight)


def encode_commit_reply(report: ProbeReport, engine_id: str) -> pb.CommitReply:
    """The outcome of a commit."""
    return pb.CommitReply(engine_id=engine_id, **dataclasses.asdict(report))


def decode_commit_reply(message: pb.CommitReply) -> tuple[ProbeReport, str]:
    """Probe report and engine of a commit."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(ProbeReport)}
    return ProbeReport(**fields), message.engine_id


def encode_pause(in_flight: InFlight) -> pb.PauseRequest:
    """A pause for the wire."""
    return pb.PauseRequest(in_flight=_IN_FLIGHT[in_flight])


def decode_in_flight(value: pb.InFlight) -> InFlight:
    """An in-flight policy from the wire."""
    return _known(_IN_FLIGHT, value, "in-flight policy")


def encode_abort(request_ids: tuple[str, ...] | None) -> pb.AbortRequest:
    """An abort of these requests; None means all."""
    return pb.AbortRequest(everything=request_ids is None, request_ids=request_ids or ())


def decode_abort(message: pb.AbortRequest) -> tuple[str, ...] | None:
    """The requests to abort; None means all."""
    return None if message.everything else tuple(message.request_ids)


def encode_status_request(follow_seconds: float, heartbeat_seconds: float) -> pb.StatusRequest:
    """Asks for the state, once (0) or for that long."""
    return pb.StatusRequest(follow_seconds=follow_seconds, heartbeat_seconds=heartbeat_seconds)


def encode_status(status: EngineStatus) -> pb.EngineStatus:
    """A state for the wire."""
    return pb.EngineStatus(
        engine_id=status.engine_id,
        serving=_SERVING[status.serving],
        version=status.version,
        staged_version=status.staged_version,
        running=status.running,
        waiting=status.waiting,
    )


def decode_status(message: pb.EngineStatus) -> EngineStatus:
    """A state from the wire."""
    return EngineStatus(
        engine_id=message.engine_id,
        serving=_known(_SERVING, message.serving, f"engine {message.engine_id}: serving"),
        version=message.version,
        staged_version=message.staged_version if message.HasField("staged_version") else None,
        running=message.running,
        waiting=message.waiting,
    )


def encode_error(error: BridgeError, engine_id: str, version: int) -> bytes:
    """The detail that travels with a failed call, under ERROR_KEY."""
    kind = next(number for record, number in _ERRORS.items() if isinstance(error, record))
    return pb.ErrorDetail(kind=kind, engine_id=engine_id, version=version).SerializeToString()


def decode_error(data: bytes) -> tuple[type[BridgeError], str, int]:
    """Kind, engine and serving version of a failed call.

    Raises:
      ValueError: not such a detail.
    """
    try:
        detail = pb.ErrorDetail.FromString(data)
    except DecodeError as error:
        raise ValueError(f"error detail: expected an ErrorDetail, got {len(data)} other bytes") from error
    return _known(_ERRORS, detail.kind, "error detail: kind"), detail.engine_id, detail.version


def _encode_trace(trace: Trace) -> pb.Trace:
    ids = trace.experts_TLK
    rows, layers, slots = ids.shape
    return pb.Trace(
        experts_TLK=np.ascontiguousarray(ids, _ID_TYPES[ids.dtype.itemsize]).tobytes(),
        id_bytes=ids.dtype.itemsize,
        rows_T=rows,
        layers_L=layers,
        slots_K=slots,
        first_row=trace.first_row,
        version_T=_encode_runs(trace.version_T),
    )


def _decode_trace(message: pb.Trace, subject: str) -> Trace:
    shape = (message.rows_T, message.layers_L, message.slots_K)
    dtype = _ID_TYPES.get(message.id_bytes)
    if dtype is None or min(shape) < 0 or math.prod(shape) * dtype.itemsize != len(message.experts_TLK):
        raise ValueError(
            f"{subject}: expected a trace of rows x layers x slots ids of 1 or 2 bytes, got {shape} ids of "
            f"{message.id_bytes} bytes in {len(message.experts_TLK)} bytes"
        )
    return Trace(
        experts_TLK=np.frombuffer(message.experts_TLK, dtype).reshape(shape),
        first_row=message.first_row,
        version_T=_decode_runs(message.version_T, message.rows_T, f"{subject}: trace versions"),
    )


def _encode_runs(version: np.ndarray) -> list[pb.VersionRun]:
    return [pb.VersionRun(version=value, length=length) for value, length in to_runs(version)]


def _decode_runs(runs: Sequence[pb.VersionRun], length: int, subject: str) -> np.ndarray:
    return from_runs([run.version for run in runs], [run.length for run in runs], length, subject)


def _known(table: Mapping[T, int], value: int, subject: str) -> T:
    for record, number in table.items():
        if number == value:
            return record
    raise ValueError(f"{subject}: expected one of {sorted(table.values())}, got {value}; is the peer newer?")
