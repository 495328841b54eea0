"""Bytes in, NumPy out: the typed gRPC bridge between a trainer and its rollout engines. Importable without JAX."""

from rollout_bridge.client import Client, ClientOptions
from rollout_bridge.engine import Engine, StageSink
from rollout_bridge.errors import BridgeError, Busy, Fatal, NotStaged, Retryable
from rollout_bridge.fleet import CommitReport, Fleet, FleetOptions
from rollout_bridge.lease import Lease
from rollout_bridge.messages import (
    Completion,
    EngineStatus,
    Finish,
    InFlight,
    LogprobDefinition,
    Manifest,
    ModelInfo,
    Probe,
    ProbeReport,
    SampleRequest,
    Sampling,
    Serving,
    TensorSpec,
    Trace,
)
from rollout_bridge.server import Server, ServerOptions, serve
from rollout_bridge.transport import ClientTls, Security, ServerTls
from rollout_bridge.weights import Weights

__all__ = [
    "BridgeError",
    "Busy",
    "Client",
    "ClientOptions",
    "ClientTls",
    "CommitReport",
    "Completion",
    "Engine",
    "EngineStatus",
    "Fatal",
    "Finish",
    "Fleet",
    "FleetOptions",
    "InFlight",
    "Lease",
    "LogprobDefinition",
    "Manifest",
    "ModelInfo",
    "NotStaged",
    "Probe",
    "ProbeReport",
    "Retryable",
    "SampleRequest",
    "Sampling",
    "Security",
    "Server",
    "ServerOptions",
    "ServerTls",
    "Serving",
    "StageSink",
    "TensorSpec",
    "Trace",
    "Weights",
    "serve",
]
