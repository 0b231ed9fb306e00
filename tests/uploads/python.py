"""Uploads by http.client, which writes the whole request before it reads. Prints how many get the refusal."""

import http.client
import ssl
import sys
import urllib.parse

url, size, count = urllib.parse.urlparse(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
body, refused, others = b"x" * size, 0, {}
for _ in range(count):
    if url.scheme == "https":
        context = ssl._create_unverified_context()
        client = http.client.HTTPSConnection(url.hostname, url.port, timeout=20, context=context)
    else:
        client = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
    try:
        client.request("POST", "/", body)
        response = client.getresponse()
        response.read()
        outcome = response.status if response.status != 429 or response.getheader("retry-after") else "no wait"
    except Exception as error:
        outcome = type(error).__name__
    client.close()
    if outcome == 429:
        refused += 1
    else:
        others[outcome] = others.get(outcome, 0) + 1
print(refused, others or "")
