from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_ABORT: _ClassVar[Finish]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]

class InFlight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_UNSPECIFIED: _ClassVar[InFlight]
    IN_FLIGHT_FINISH: _ClassVar[InFlight]
    IN_FLIGHT_RETRACT: _ClassVar[InFlight]
    IN_FLIGHT_ABORT: _ClassVar[InFlight]

class Serving(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVING_UNSPECIFIED: _ClassVar[Serving]
    SERVING_SERVING: _ClassVar[Serving]
    SERVING_PAUSED: _ClassVar[Serving]
    SERVING_NOT_SERVING: _ClassVar[Serving]
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FINISH_ABORT: Finish
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
IN_FLIGHT_UNSPECIFIED: InFlight
IN_FLIGHT_FINISH: InFlight
IN_FLIGHT_RETRACT: InFlight
IN_FLIGHT_ABORT: InFlight
SERVING_UNSPECIFIED: Serving
SERVING_SERVING: Serving
SERVING_PAUSED: Serving
SERVING_NOT_SERVING: Serving

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "stop_ids", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("request_id", "prompt_tokens_T", "sampling", "members", "want_trace", "already_sampled", "together")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_T_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WANT_TRACE_FIELD_NUMBER: _ClassVar[int]
    ALREADY_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens_T: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    members: _containers.RepeatedScalarFieldContainer[int]
    want_trace: bool
    already_sampled: int
    together: _containers.RepeatedCompositeFieldContainer[SampleRequest]
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens_T: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., members: _Optional[_Iterable[int]] = ..., want_trace: bool = ..., already_sampled: _Optional[int] = ..., together: _Optional[_Iterable[_Union[SampleRequest, _Mapping]]] = ...) -> None: ...

class VersionRun(_message.Message):
    __slots__ = ("version", "length")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    version: int
    length: int
    def __init__(self, version: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LogprobDefinition(_message.Message):
    __slots__ = ("temperature", "after_truncation")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    AFTER_TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    after_truncation: bool
    def __init__(self, temperature: _Optional[float] = ..., after_truncation: bool = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("experts_TLK", "id_bytes", "rows_T", "layers_L", "slots_K", "first_row", "version_T")
    EXPERTS_TLK_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_T_FIELD_NUMBER: _ClassVar[int]
    LAYERS_L_FIELD_NUMBER: _ClassVar[int]
    SLOTS_K_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    VERSION_T_FIELD_NUMBER: _ClassVar[int]
    experts_TLK: bytes
    id_bytes: int
    rows_T: int
    layers_L: int
    slots_K: int
    first_row: int
    version_T: _containers.RepeatedCompositeFieldContainer[VersionRun]
    def __init__(self, experts_TLK: _Optional[bytes] = ..., id_bytes: _Optional[int] = ..., rows_T: _Optional[int] = ..., layers_L: _Optional[int] = ..., slots_K: _Optional[int] = ..., first_row: _Optional[int] = ..., version_T: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("request_id", "member", "tokens_T", "behavior_logp_T", "version_T", "trace", "finish", "engine_id", "logprob", "truncated_logp_T", "together")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_T_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGP_T_FIELD_NUMBER: _ClassVar[int]
    VERSION_T_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_LOGP_T_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    member: int
    tokens_T: _containers.RepeatedScalarFieldContainer[int]
    behavior_logp_T: _containers.RepeatedScalarFieldContainer[float]
    version_T: _containers.RepeatedCompositeFieldContainer[VersionRun]
    trace: Trace
    finish: Finish
    engine_id: str
    logprob: LogprobDefinition
    truncated_logp_T: _containers.RepeatedScalarFieldContainer[float]
    together: _containers.RepeatedCompositeFieldContainer[Completion]
    def __init__(self, request_id: _Optional[str] = ..., member: _Optional[int] = ..., tokens_T: _Optional[_Iterable[int]] = ..., behavior_logp_T: _Optional[_Iterable[float]] = ..., version_T: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., finish: _Optional[_Union[Finish, str]] = ..., engine_id: _Optional[str] = ..., logprob: _Optional[_Union[LogprobDefinition, _Mapping]] = ..., truncated_logp_T: _Optional[_Iterable[float]] = ..., together: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_digest", "vocab_size", "moe_layers", "num_experts", "top_k", "max_tokens", "tensors", "dtype")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    vocab_size: int
    moe_layers: int
    num_experts: int
    top_k: int
    max_tokens: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    dtype: DType
    def __init__(self, model_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., moe_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "model_digest", "digest", "tensors")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    version: int
    model_digest: str
    digest: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, version: _Optional[int] = ..., model_digest: _Optional[str] = ..., digest: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("tensor", "offset", "data", "checksum")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    offset: int
    data: bytes
    checksum: int
    def __init__(self, tensor: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("manifest", "chunk", "together")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    chunk: Chunk
    together: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., together: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class StageReply(_message.Message):
    __slots__ = ("state", "bytes", "engine_id", "seconds_write")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[StageReply.State]
        STATE_RECEIVED: _ClassVar[StageReply.State]
        STATE_ALREADY_STAGED: _ClassVar[StageReply.State]
        STATE_ALREADY_LIVE: _ClassVar[StageReply.State]
    STATE_UNSPECIFIED: StageReply.State
    STATE_RECEIVED: StageReply.State
    STATE_ALREADY_STAGED: StageReply.State
    STATE_ALREADY_LIVE: StageReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_WRITE_FIELD_NUMBER: _ClassVar[int]
    state: StageReply.State
    bytes: int
    engine_id: str
    seconds_write: float
    def __init__(self, state: _Optional[_Union[StageReply.State, str]] = ..., bytes: _Optional[int] = ..., engine_id: _Optional[str] = ..., seconds_write: _Optional[float] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("tokens_T", "logp_T", "tolerance", "expert_coverage", "lengths")
    TOKENS_T_FIELD_NUMBER: _ClassVar[int]
    LOGP_T_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    tokens_T: _containers.RepeatedScalarFieldContainer[int]
    logp_T: _containers.RepeatedScalarFieldContainer[float]
    tolerance: float
    expert_coverage: float
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens_T: _Optional[_Iterable[int]] = ..., logp_T: _Optional[_Iterable[float]] = ..., tolerance: _Optional[float] = ..., expert_coverage: _Optional[float] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("version", "digest", "probe", "in_flight")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    probe: Probe
    in_flight: InFlight
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., in_flight: _Optional[_Union[InFlight, str]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("mean_abs", "max_abs", "engine_id", "checksum", "seconds_held", "seconds_load", "seconds_verify")
    MEAN_ABS_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SECONDS_HELD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LOAD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_VERIFY_FIELD_NUMBER: _ClassVar[int]
    mean_abs: float
    max_abs: float
    engine_id: str
    checksum: str
    seconds_held: float
    seconds_load: float
    seconds_verify: float
    def __init__(self, mean_abs: _Optional[float] = ..., max_abs: _Optional[float] = ..., engine_id: _Optional[str] = ..., checksum: _Optional[str] = ..., seconds_held: _Optional[float] = ..., seconds_load: _Optional[float] = ..., seconds_verify: _Optional[float] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiscardReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: InFlight
    def __init__(self, in_flight: _Optional[_Union[InFlight, str]] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("everything", "request_ids")
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    everything: bool
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, everything: bool = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("follow_seconds", "heartbeat_seconds")
    FOLLOW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    follow_seconds: float
    heartbeat_seconds: float
    def __init__(self, follow_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "serving", "version", "staged_version", "running", "waiting")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGED_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    serving: Serving
    version: int
    staged_version: int
    running: int
    waiting: int
    def __init__(self, engine_id: _Optional[str] = ..., serving: _Optional[_Union[Serving, str]] = ..., version: _Optional[int] = ..., staged_version: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "engine_id", "version")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ErrorDetail.Kind]
        KIND_RETRYABLE: _ClassVar[ErrorDetail.Kind]
        KIND_FATAL: _ClassVar[ErrorDetail.Kind]
        KIND_NOT_STAGED: _ClassVar[ErrorDetail.Kind]
    KIND_UNSPECIFIED: ErrorDetail.Kind
    KIND_RETRYABLE: ErrorDetail.Kind
    KIND_FATAL: ErrorDetail.Kind
    KIND_NOT_STAGED: ErrorDetail.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorDetail.Kind
    engine_id: str
    version: int
    def __init__(self, kind: _Optional[_Union[ErrorDetail.Kind, str]] = ..., engine_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...
