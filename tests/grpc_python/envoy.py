"""Asks a server of Envoy's rate limit service as Envoy would: envoy.py ADDRESS FAILING_ADDRESS FILE.

FILE has the limits of the domain `another`. The store of the server at FAILING_ADDRESS is away. Windows are a year long,
so none ends in between. The messages are defined here anew, so the two definitions check each other.
"""

import sys
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, wrappers_pb2

METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
TYPES = descriptor_pb2.FieldDescriptorProto
OK, OVER_LIMIT = 1, 2
SECOND, YEAR = 1, 6

# Seconds: the length of a year, the longest wait in a header, and what a busy machine may need between two lines here.
YEAR_SECONDS, LONGEST_WAIT, SLACK = 365 * 86_400, 86_400, 60

# Each message with its fields: name, number, type, and whether there are many. From Envoy's API v3.
MESSAGES = {
    "Entry": [("key", 1, "string", False), ("value", 2, "string", False)],
    "RateLimitOverride": [("requests_per_unit", 1, "uint32", False), ("unit", 2, "int32", False)],
    "RateLimitDescriptor": [
        ("entries", 1, "Entry", True),
        ("limit", 2, "RateLimitOverride", False),
        ("hits_addend", 3, "google.protobuf.UInt64Value", False),
        ("is_negative_hits", 4, "bool", False),
    ],
    "RateLimitRequest": [
        ("domain", 1, "string", False),
        ("descriptors", 2, "RateLimitDescriptor", True),
        ("hits_addend", 3, "uint32", False),
    ],
    "RateLimit": [("requests_per_unit", 1, "uint32", False), ("unit", 2, "int32", False), ("name", 3, "string", False)],
    "DescriptorStatus": [
        ("code", 1, "int32", False),
        ("current_limit", 2, "RateLimit", False),
        ("limit_remaining", 3, "uint32", False),
        ("duration_until_reset", 4, "google.protobuf.Duration", False),
    ],
    "HeaderValue": [("key", 1, "string", False), ("value", 2, "string", False)],
    "RateLimitResponse": [
        ("overall_code", 1, "int32", False),
        ("statuses", 2, "DescriptorStatus", True),
        ("response_headers_to_add", 3, "HeaderValue", True),
    ],
}


def classes():
    """The classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="rls.proto", package="rls", syntax="proto3")
    file.dependency.extend([wrappers_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name])
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, many in fields:
            label = TYPES.LABEL_REPEATED if many else TYPES.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if kind in ("string", "uint32", "int32", "bool"):
                added.type = getattr(TYPES, f"TYPE_{kind.upper()}")
            else:
                added.type = TYPES.TYPE_MESSAGE
                added.type_name = f".{kind}" if "." in kind else f".rls.{kind}"
    pool = descriptor_pool.Default()
    pool.Add(file)
    get = lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"rls.{name}"))
    return get("RateLimitRequest"), get("RateLimitResponse")


Request, Response = classes()


def method(address):
    channel = grpc.insecure_channel(address)
    grpc.channel_ready_future(channel).result(timeout=120)
    return channel.unary_unary(
        METHOD, request_serializer=Request.SerializeToString, response_deserializer=Response.FromString
    )


def request(domain, *descriptors, hits=0):
    """A request with descriptors, each a list of keys and values, or a dictionary with `entries` and more."""
    made = Request(domain=domain, hits_addend=hits)
    for one in descriptors:
        more = dict(one) if isinstance(one, dict) else {"entries": one}
        added = made.descriptors.add(is_negative_hits=more.get("negative", False))
        for key, value in more["entries"]:
            added.entries.add(key=key, value=value)
        if "hits" in more:
            added.hits_addend.value = more["hits"]
            added.hits_addend.SetInParent()
        if "limit" in more:
            added.limit.requests_per_unit, added.limit.unit = more["limit"]
    return made


def equal(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: {found!r}, not {expected!r}")


def near_end_of_year(seconds, what, longest=YEAR_SECONDS):
    """Windows are aligned to the epoch, as in Envoy's own service."""
    expected = min(YEAR_SECONDS - int(time.time()) % YEAR_SECONDS, longest)
    if abs(seconds - expected) > SLACK:
        raise AssertionError(f"{what}: {seconds} s, not about {expected} s")


def status(one):
    """Code, limit, unit and remaining; the limit and the unit are None without a limit."""
    limit = one.current_limit if one.HasField("current_limit") else None
    return (one.code, limit and limit.requests_per_unit, limit and limit.unit, one.limit_remaining)


def refused(call, *arguments):
    try:
        call(*arguments)
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the call succeeded")


def statuses(ask):
    response = ask(request("foo", [("hello", "world")]))
    equal((response.overall_code, [status(one) for one in response.statuses]), (OK, [(OK, None, None, 0)]), "a domain of nobody")
    equal(len(response.response_headers_to_add), 0, "its headers")

    response = ask(request("basic", [("key1", "foo")]))
    equal((response.overall_code, status(response.statuses[0])), (OK, (OK, 50, SECOND, 49)), "basic")
    equal(response.statuses[0].current_limit.name, "named", "the name of the limit")
    equal(status(ask(request("basic", [("nothing", "foo")])).statuses[0]), (OK, None, None, 0), "no match")
    equal(status(ask(request("basic", [("open", "foo")])).statuses[0]), (OK, None, None, 2**32 - 1), "unlimited")

    for call in range(25):
        response = ask(request("another", [("key2", "a")]))
        code = OK if call < 20 else OVER_LIMIT
        expected = (code, (code, 20, YEAR, max(19 - call, 0)))
        equal((response.overall_code, status(response.statuses[0])), expected, f"key2, call {call}")
        near_end_of_year(response.statuses[0].duration_until_reset.seconds, "the time until the window ends")

    # All or nothing: what key3 refuses is not charged to key2.
    for call in range(15):
        response = ask(request("another", [("key2", "b")], [("key3", "b")]))
        code, used = (OK, call + 1) if call < 10 else (OVER_LIMIT, 10)
        equal(response.overall_code, code, f"key2 and key3, call {call}")
        expected = [(OK, 20, YEAR, 20 - used), (code, 10, YEAR, 10 - used)]
        equal([status(one) for one in response.statuses], expected, f"key2 and key3, call {call}")

    # Values that share a threshold.
    for call, value in enumerate(["f/1", "f/2", "f/3"]):
        code = OK if call < 2 else OVER_LIMIT
        equal(status(ask(request("another", [("file", value)])).statuses[0])[0], code, f"a shared threshold, {value}")


def hits(ask):
    left = lambda made: status(ask(made).statuses[0])[3]
    key = [("key2", "hits")]
    equal(left(request("another", key, hits=5)), 15, "the request's hits")
    equal(left(request("another", {"entries": key, "hits": 3}, hits=5)), 12, "the descriptor's own hits")
    equal(left(request("another", {"entries": key, "hits": 0}, hits=5)), 12, "a look")
    equal(left(request("another", {"entries": key, "hits": 4, "negative": True})), 16, "a refund")
    equal(left(request("another", {"entries": key, "hits": 2**64 - 1, "negative": True})), 20, "no more than was used")

    # Tokens: the request looks, the response charges, the next request is over.
    token = [("key2", "tokens")]
    equal(ask(request("another", {"entries": token, "hits": 0})).overall_code, OK, "a look at a fresh counter")
    equal(ask(request("another", {"entries": token, "hits": 50})).overall_code, OVER_LIMIT, "more than there is")
    equal(ask(request("another", {"entries": token, "hits": 0})).overall_code, OVER_LIMIT, "a look at nothing")

    brought = lambda limit: {"entries": [("key2", "brought")], "limit": limit}
    equal(status(ask(request("another", brought((10, YEAR)))).statuses[0]), (OK, 10, YEAR, 9), "a limit of the caller")
    equal(status(ask(request("another", brought((42, YEAR)))).statuses[0]), (OK, 42, YEAR, 40), "another one")
    equal(status(ask(request("foo", brought((0, YEAR)))).statuses[0]), (OK, None, None, 0), "in a domain of nobody")


def headers(ask):
    ask(request("another", [("key2", "headers")], hits=19))
    names = lambda response: {header.key: header.value for header in response.response_headers_to_add}
    passed = names(ask(request("another", [("key2", "headers")])))
    equal(sorted(passed), ["ratelimit", "ratelimit-policy"], "the headers of a response")
    over = names(ask(request("another", [("key2", "headers")])))
    equal(sorted(over), ["ratelimit", "ratelimit-policy", "retry-after"], "those of a refusal")
    near_end_of_year(int(over["retry-after"]), "Retry-After", LONGEST_WAIT)


def errors(ask, failing):
    invalid, unavailable = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE
    empty = refused(ask, request("", [("a", "b")]))
    equal(empty, (invalid, "rate limit domain must not be empty"), "no domain")
    equal(refused(ask, request("basic")), (invalid, "rate limit descriptor list must not be empty"), "no descriptors")
    equal(refused(ask, request("basic", {"entries": [("a", "b")], "limit": (1, 9)}))[0], invalid, "an unknown unit")
    equal(refused(failing, request("another", [("key2", "a")]))[0], unavailable, "a store that is away")
    equal(failing(request("another", [("nothing", "a")])).overall_code, OK, "what needs no store")
    equal(refused(ask, request("another", *[[("key2", str(at))] for at in range(10_000)]))[0] in (
        invalid, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED), True, "10,000 descriptors")
    equal(refused(ask, request("another", *[[("a", "")]] * 101))[0], invalid, "101 descriptors")


def hostile(ask):
    """Values that a server could confuse have counters of their own."""
    left = lambda *entries: status(ask(request("hostile", list(entries))).statuses[0])[3]
    values = ["a", "a|b", "a\0", "\0", "", "é", "e\u0301", "a,b", "a=b", "a_b", " a", "%61", "👍" * 1000, "a" * 20_000]
    equal([left(("x", value)) for value in values], [8] * len(values), "values")
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("a\0", "bc"), ("a", "\0bc"), ("a|b", "c"), ("a", "b|c")]
    equal([left(("y", one), ("z", two)) for one, two in pairs], [8] * len(pairs), "pairs of values")
    # Two entries whose keys and values look alike when they are joined.
    equal([left(("k_v", "w")), left(("k", "v_w")), left(("k", "v"), ("w", "x"))], [5, 6, 7], "keys that collide")
    deep = ask(request("hostile", [("deep", "x")] * 200))
    equal(status(deep.statuses[0]), (OK, None, None, 0), "a descriptor that is too deep")


def reload(ask, file):
    with open(file, encoding="utf-8") as opened:
        before = opened.read()
    limit = lambda: ask(request("another", [("key2", "reload")])).statuses[0].current_limit.requests_per_unit
    equal(limit(), 20, "the limit before")
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(before.replace("requests_per_unit: 20", "requests_per_unit: 30"))
    until = time.monotonic() + 60
    while limit() != 30:
        if time.monotonic() > until:
            raise AssertionError("the file was not read again")
        time.sleep(0.05)


def main():
    address, failing, file = sys.argv[1:]
    ask = method(address)
    statuses(ask)
    hits(ask)
    headers(ask)
    errors(ask, method(failing))
    hostile(ask)
    reload(ask, file)
    print("every answer is as expected")


main()
