"""What a server says of its health."""

from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc


def health_of(channel, name=""):
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)
