"""Asks a server for its health by Google's client, as balancers do: health.py ADDRESS.

Prints each status that it learns of while it watches, and the code with which the watching ends.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LONG = 60
STUB = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))


def name(answer):
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def asked(service):
    return health_pb2.HealthCheckRequest(service=service)


def check(service):
    return name(STUB.Check(asked(service), timeout=LONG))


for service in ("", "envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"):
    assert check(service) == "SERVING", service
try:
    raise AssertionError(check("nothing"))
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.NOT_FOUND, error

unknown = STUB.Watch(asked("nothing"), timeout=LONG)
assert name(next(unknown)) == "SERVICE_UNKNOWN"
unknown.cancel()

try:
    for answer in STUB.Watch(asked(""), timeout=10 * LONG):
        assert check("") == name(answer)
        print(name(answer), flush=True)
except grpc.RpcError as error:
    print(error.code().name, flush=True)
