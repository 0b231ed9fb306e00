"""Computes the figures of a replay anew: recompute.py LOG LIMIT BURST PERIOD_S ALGORITHM

It reads a log in the combined format, and shares nothing with the program but the definitions:
lines more than 60 s older than the latest one before are left out, the requests of a second are
spread evenly over it in the order of the log, and a client is an address, IPv6 by its /64.
"""

import datetime
import ipaddress
import json
import re
import sys
from collections import Counter, defaultdict
from fractions import Fraction

LINE = re.compile(rb'(\S+) \S+ .*? \[([^\]]+)\] "((?:[^"\\]|\\.)*)" (\S+) (\d+|-) "((?:[^"\\]|\\.)*)" "((?:[^"\\]|\\.)*)"')


def client(text):
    address = ipaddress.ip_address(text.decode())
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def read(path):
    seconds, latest, unreadable, late, statuses = defaultdict(list), 0, 0, 0, Counter()
    with open(path, "rb") as log:
        for line in log:
            if line.strip() == b"" or line.startswith(b"#"):
                continue
            match = LINE.fullmatch(line.rstrip(b"\r\n"))
            if not match:
                unreadable += 1
                continue
            date = datetime.datetime.strptime(match[2].decode(), "%d/%b/%Y:%H:%M:%S %z")
            second = int(date.timestamp())
            latest = max(latest, second)
            if second < latest - 60:
                late += 1
                continue
            seconds[second].append((client(match[1]), int(match[4])))
            statuses[int(match[4])] += 1
    requests = []
    for second in sorted(seconds):
        at_once = seconds[second]
        for index, (who, status) in enumerate(at_once):
            requests.append((second * 1_000_000 + index * 1_000_000 // len(at_once), second * 1_000_000, who, status))
    return requests, unreadable, late


def token_bucket(limit, burst, period_us):
    """A bucket as the instant at which it is full again."""
    states, interval = {}, Fraction(period_us, limit)

    def passes(who, at):
        full = max(states.get(who, Fraction(0)), Fraction(at)) + interval
        if full - at > burst * interval:
            return False
        states[who] = full
        return True

    return passes


def fixed_window(limit, burst, period_us):
    counts = Counter()

    def passes(who, at):
        if counts[who, at // period_us] >= limit:
            return False
        counts[who, at // period_us] += 1
        return True

    return passes


def sliding_log(limit, burst, period_us):
    logs = defaultdict(list)

    def passes(who, at):
        logs[who] = [then for then in logs[who] if then > at - period_us]
        if len(logs[who]) >= limit:
            return False
        logs[who].append(at)
        return True

    return passes


def replayed(requests, passes, as_burst=False):
    refused, run, longest = Counter(), Counter(), 0
    for spread, second, who, _ in requests:
        if passes(who, second if as_burst else spread):
            run[who] = 0
        else:
            refused[who] += 1
            run[who] += 1
            longest = max(longest, run[who])
    return refused, longest


def main():
    path, limit, burst, period, algorithm = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    requests, unreadable, late = read(path)
    make = {"token": token_bucket, "fixed": fixed_window, "sliding_log": sliding_log}[algorithm]
    period_us = period * 1_000_000
    refused, longest = replayed(requests, make(limit, burst, period_us))
    refused_as_burst, _ = replayed(requests, make(limit, burst, period_us), as_burst=True)
    peaks = {}
    for name, length in [("1 s", 1), ("1 min", 60), ("1 h", 3600), ("1 day", 86400)]:
        windows = Counter((who, spread // (length * 1_000_000)) for spread, _, who, _ in requests)
        most = Counter()
        for (who, _), count in windows.items():
            most[who] = max(most[who], count)
        ordered = sorted(most.values())
        ranks = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99.9": 999, "max": 1000}
        peaks[name] = {rank: ordered[max(-(-len(ordered) * of // 1000), 1) - 1] for rank, of in ranks.items()}
    curve = {}
    for other in [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100]:
        scaled = -(-burst * other // limit)
        counts, _ = replayed(requests, make(other, scaled, period_us))
        curve[str(other)] = {"refused": sum(counts.values()), "touched": len(counts)}
    print(
        json.dumps(
            {
                "requests": len(requests),
                "unreadable": unreadable,
                "late": late,
                "clients": len({who for _, _, who, _ in requests}),
                "refused": sum(refused.values()),
                "touched": len(refused),
                "refused_as_burst": sum(refused_as_burst.values()),
                "touched_as_burst": len(refused_as_burst),
                "longest_run": longest,
                "requests_of_touched": sum(1 for _, _, who, _ in requests if who in refused),
                "worst": [count for _, count in refused.most_common(10)],
                "peaks": peaks,
                "curve": curve,
            }
        )
    )


main()
