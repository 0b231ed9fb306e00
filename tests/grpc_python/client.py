"""Calls the tonic example's service as a gRPC client in Python would: client.py ADDRESS QUOTA PERIOD_MS.

The service lets QUOTA calls pass at once, and QUOTA in PERIOD_MS.
"""

import json
import sys
import time

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

METHOD = "/greeter.Greeter/Greet"


def method(channel):
    """The method, with messages of one text field written by hand."""
    return channel.unary_unary(
        METHOD,
        request_serializer=lambda name: b"\x0a" + bytes([len(name)]) + name,
        response_deserializer=lambda reply: reply[2:].decode(),
    )


def until_refused(greet, quota, period_ms):
    """Calls until it is refused; returns how many calls passed, and the refusal."""
    started, passed = time.monotonic(), 0
    while True:
        try:
            assert greet(b"Ann") == "hello, Ann"
        except grpc.RpcError as refused:
            return passed, refused
        passed += 1
        # What came back meanwhile passes as well.
        most = quota + quota * (time.monotonic() - started) * 1000 / period_ms
        check(passed <= most, f"{passed} calls passed, of which {most} may")


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def main():
    address, quota, period_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    channel = grpc.insecure_channel(address)
    grpc.channel_ready_future(channel).result(timeout=120)
    greet = method(channel)

    passed, refused = until_refused(greet, quota, period_ms)
    check(passed >= quota, f"{passed} calls passed, not {quota}")
    check(refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, f"refused with {refused.code()}")

    metadata = dict(refused.trailing_metadata())
    check("grpc-retry-pushback-ms" in metadata, f"no pushback in {sorted(metadata)}")
    pushback_ms = int(metadata["grpc-retry-pushback-ms"])
    check(0 < pushback_ms <= period_ms, f"a pushback of {pushback_ms} ms")

    status = rpc_status.from_call(refused)
    check(status is not None, "no grpc-status-details-bin")
    check(status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], f"the details say {status.code}")
    details = {}
    for any_message in status.details:
        for kind in (error_details_pb2.RetryInfo, error_details_pb2.QuotaFailure):
            if any_message.Is(kind.DESCRIPTOR):
                details[kind] = kind()
                any_message.Unpack(details[kind])
    check(error_details_pb2.RetryInfo in details, f"no RetryInfo in {status}")
    retry_ms = details[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds()
    check(abs(retry_ms - pushback_ms) <= 1, f"RetryInfo says {retry_ms} ms, the pushback {pushback_ms} ms")
    violations = details[error_details_pb2.QuotaFailure].violations
    check(len(violations) == 1, f"no one violation in {status}")

    # Whoever waits as long as it was told passes.
    time.sleep(pushback_ms / 1000)
    check(greet(b"Ann") == "hello, Ann", "another greeting")

    # gRPC's own retries obey the pushback: with their own backoff of a millisecond the second attempt would fail too.
    retries = {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 2,
                    "initialBackoff": "0.001s",
                    "maxBackoff": "0.001s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                },
            }
        ]
    }
    options = [("grpc.service_config", json.dumps(retries)), ("grpc.enable_retries", 1)]
    retrying = grpc.insecure_channel(address, options)
    grpc.channel_ready_future(retrying).result(timeout=120)
    until_refused(greet, quota, period_ms)
    started = time.monotonic()
    check(method(retrying)(b"Ann") == "hello, Ann", "another greeting")
    waited_ms = round((time.monotonic() - started) * 1000)

    print(f"{passed} passed, then RESOURCE_EXHAUSTED with a pushback of {pushback_ms} ms; a retry passed after {waited_ms} ms")


main()
