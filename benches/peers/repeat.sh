#!/usr/bin/env bash
# Runs the router, and some cases of a check, five times with each release profile, and the server five times with the
# first one, one run after the other. Adds the medians, with the lowest and the highest, to the tables:
# bash benches/peers/repeat.sh
set -euo pipefail
cd "$(dirname "$0")"

for run in 1 2 3 4 5; do
    for profile in release thin; do
        # Two programs of the same source, divided in another way, differ by more than their layers. The last has Cargo's
        # own 16 units, because the tables of the router are made from it.
        cargo rustc --locked --profile "$profile" -- -C codegen-units=$((11 + run))
        echo "Run $run of 5, $profile."
        "target/$profile/peers" --record router
        "target/$profile/peers" --record check --seconds 1.5 \
            --only "allowed, 10k addresses" --only "allowed, 1M addresses" --only "allowed, 10k texts" \
            --only "denied, 10k addresses" --only "allowed, two threads, 10k addresses"
    done
    target/release/peers --record server
done
target/release/peers --report
