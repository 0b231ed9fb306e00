"""Holds the description of a server, and its answers, against the rules of OpenAPI: openapi.py LISTEN ADMIN TOKEN.

Each status of each operation that a client can cause is caused, and the answer is validated as the description says.
"""

import base64
import json
import sys
import urllib.error
import urllib.request

from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

LISTEN, ADMIN, TOKEN = sys.argv[1:]


def send(address, path, method, body, headers):
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    request = urllib.request.Request(f"http://{address}{path}", data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read().decode()


STATUS, _, TEXT = send(ADMIN, "/openapi.json", "GET", None, {})
assert STATUS == 200
API = json.loads(TEXT)
validate(API)


def resolved(part):
    while "$ref" in part:
        target = API
        for name in part["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        part = target
    return part


def valid(schema, value):
    """Raises an error if the value is not as the schema says."""
    OAS31Validator({**schema, "components": API["components"]}).validate(value)


SEEN = set()


def ask(path, status, body, method="POST", kind="application/json", authorization=f"Bearer {TOKEN}"):
    """Sends a body, and holds the answer against the description. Returns the answer."""
    operation = API["paths"][path][method.lower()] if method.lower() in API["paths"][path] else API["paths"][path]["post"]
    is_for_operators = "security" in operation
    headers = {"Content-Type": kind} if kind else {}
    if is_for_operators and authorization:
        headers["Authorization"] = authorization
    got, content, text = send(ADMIN if is_for_operators else LISTEN, path, method, body, headers)
    assert got == status, (path, body, got, text)
    if status < 400 and body is not None:
        valid(operation["requestBody"]["content"]["application/json"]["schema"], body)
    described = resolved(operation["responses"][str(status)])
    schema = described["content"][content]["schema"]
    value = json.loads(text) if content == "application/json" else text
    valid(schema, value)
    SEEN.add((path, method, status))
    return value


LOGIN = {"method": "POST", "path": "/login", "client": "203.0.113.9", "headers": {"x-a": "1", "x-b": ["2", "3"]}}
for path in API["paths"]:
    if "post" in API["paths"][path]:
        ask(path, 400, {"paht": "/"})
        ask(path, 400, b"{")
        ask(path, 413, b" " * 70_000)
        ask(path, 415, {}, kind="text/plain")
        if path != "/v1/settings":
            ask(path, 405, None, method="GET", kind=None)
        if "security" in API["paths"][path]["post"]:
            ask(path, 401, LOGIN, authorization=None)
            ask(path, 401, LOGIN, authorization="Bearer wrong")

held = ask("/v1/check", 200, {**LOGIN, "hold_seconds": 60})
ask("/v1/report", 200, {"id": held["id"], "refund": True})
ask("/v1/report", 404, {"id": held["id"], "refund": True})
held = ask("/v1/check", 200, {**LOGIN, "hold_seconds": 60})
ask("/v1/report", 200, {"id": held["id"], "cost": 2})
while ask("/v1/check", 200, LOGIN)["allowed"]:
    pass
assert ask("/v1/check", 200, {"client": "203.0.113.8"})["allowed"]

ask("/v1/explain", 200, LOGIN)
basic = base64.b64encode(f"alice:{TOKEN}".encode()).decode()
ask("/v1/explain", 200, LOGIN, authorization=f"Basic {basic}")
ask("/v1/reset", 200, LOGIN)
assert ask("/v1/check", 200, LOGIN)["allowed"]

shadow = {"kind": "mode", "name": "login", "value": "shadow", "why": "too strict", "lasting": "1h"}
revision = ask("/v1/settings", 200, shadow)["revision"]
ask("/v1/settings", 409, {**shadow, "seen": revision - 1})
block = {"kind": "network", "name": "rules", "subject": "192.0.2.0/24", "value": "deny", "why": ""}
ask("/v1/settings", 200, block)
assert ask("/v1/check", 200, {"client": "192.0.2.1"})["status"] == 403
ask("/v1/rollback", 400, {"name": "rules", "why": "none was pushed"})
settings = ask("/v1/settings", 200, None, method="GET", kind=None)
assert len(settings["entries"]) == 2 and len(settings["actions"]) == 2

# What needs a store that fails, a server without operators or settings, or ten seconds, is not caused here.
OTHERS = {408, 503, 507, 403, 404}
for path, operations in API["paths"].items():
    for method, operation in operations.items():
        described = {int(status) for status in operation["responses"]} - OTHERS
        seen = {status for (p, m, status) in SEEN if p == path and (m == method.upper() or status == 405)}
        missing = described - seen - ({200, 409} if path == "/v1/rollback" else set()) - ({409} if path == "/v1/report" else set())
        missing -= {405} if path == "/v1/settings" else set()
        missing -= {401} if (path, method) == ("/v1/settings", "get") else set()
        assert not missing, (path, method, missing)
print(f"{len(SEEN)} answers are as described")
