"""Counts the requests of logs by a regular expression for each form, sharing no code with the program.

    forms.py LIMIT FORM=FILE...

Prints JSON: for each form the requests, their clients, those answered with 429, and those over LIMIT for each client.
"""

import collections
import json
import re
import sys

IP = r"(?P<client>[0-9a-f.:]+)"
STATUS = r"(?P<status>\d{3})"
CLF = IP + r' - \S+ \[01/Mar/2024[^\]]*\] "\S+ \S+ HTTP/[\d.]+" ' + STATUS + r" "
HAPROXY = IP + r":\d+ \[01/Mar/2024[^\]]*\] \S+ \S+ [-\d/+]+ " + STATUS + r" "
ISTIO = STATUS + r' - via_upstream .* 10\.0\.0\.1:80 ' + IP + r":\d+ - default$"

FORMS = {
    "combined": "^" + CLF,
    "common": "^" + CLF,
    "vhost with port": r"^\S+:443 " + CLF,
    "vhost": r"^shop\.example " + CLF,
    "syslog": r"^Mar  1 \S+ web1 nginx: " + CLF,
    "syslog on the wire": r"^<190>Mar  1 \S+ nginx: " + CLF,
    "syslog by RFC 5424": r"^<190>1 \S+ web1 nginx - - - " + CLF,
    "journald": r"^Mar 01 \S+ web1 nginx\[\d+\]: " + CLF,
    "journald json": r'"MESSAGE":"' + CLF.replace('"', r'\\"'),
    "compose": r"^web-1 +\| " + CLF,
    "compose coloured": r"^\x1b\[36mweb-1 +\|\x1b\[0m " + CLF,
    "cri": r"^\S+ stdout F " + CLF,
    "docker": r'^\{"log":"' + CLF.replace('"', r'\\"'),
    "kubectl ingress": r"^\[pod/ingress-0/controller\] " + CLF,
    "filebeat": r'"message":"' + CLF.replace('"', r'\\"'),
    "more fields": "^" + CLF,
    "heroku": r'heroku router - at=.* fwd="' + IP + r'" .* status=' + STATUS + " ",
    "caddy": r'"logger":"http\.log\.access".*"client_ip":"' + IP + r'".*"status":' + STATUS,
    "traefik": r'"ClientHost":"' + IP + r'".*"DownstreamStatus":' + STATUS,
    "nginx json": r'"remote_addr":"' + IP + r'".*"status":"?' + STATUS,
    "haproxy": r"haproxy\[\d+\]: " + HAPROXY,
    "haproxy https": "^" + HAPROXY,
    "envoy": r'^\[2024\S+ "[^"]+" ' + STATUS + r' .* "' + IP + '" "curl"',
    "istio": ISTIO,
    "alb": r"^https \S+ \S+ " + IP + r":\d+ \S+ \S+ \S+ \S+ " + STATUS + " ",
    "cloudfront": r"^2024-03-01\t\S+\tLAX1\t\d+\t" + IP + r"\t\S+\t\S+\t\S+\t" + STATUS + "$",
    "iis": r"^2024-03-01 \S+ 10\.0\.0\.2 \S+ \S+ \S+ 443 - " + IP + r" \S+ \S+ " + STATUS + " ",
    "squid": r"^17092\S+ +\d+ " + IP + r" TCP_\w+/" + STATUS + " ",
    "cloudflare": r'"ClientIP":"' + IP + r'".*"EdgeResponseStatus":' + STATUS,
    "gcp": r'"remoteIp":"' + IP + r'".*"status":' + STATUS,
    "kong": r'"client_ip":"' + IP + r'".*"status":' + STATUS,
}


def count(form, file, limit):
    pattern = re.compile(FORMS[form])
    clients = collections.Counter()
    limited = 0
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            found = pattern.search(line)
            if found:
                clients[found["client"]] += 1
                limited += found["status"] == "429"
    return {
        "requests": sum(clients.values()),
        "clients": len(clients),
        "answered_429": limited,
        "refused": sum(max(0, requests - limit) for requests in clients.values()),
    }


def main():
    limit = int(sys.argv[1])
    forms = (argument.split("=", 1) for argument in sys.argv[2:])
    print(json.dumps({form: count(form, file, limit) for form, file in forms}))


main()
