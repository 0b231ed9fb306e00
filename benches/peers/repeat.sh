#!/usr/bin/env bash
# Runs the router, and some cases of a check, five times with each release profile, one run after the other, and adds the
# medians, with the lowest and the highest, to the tables: bash benches/peers/repeat.sh
set -euo pipefail
cd "$(dirname "$0")"

# Build all first, so that no compiler runs beside a case.
for profile in release thin; do
    cargo build --locked --profile "$profile"
done
for run in 1 2 3 4 5; do
    for profile in release thin; do
        echo "Run $run of 5, $profile."
        "target/$profile/peers" --record router
        "target/$profile/peers" --record check --seconds 1.5 \
            --only "allowed, 10k addresses" --only "allowed, 1M addresses" --only "allowed, 10k texts" \
            --only "denied, 10k addresses" --only "allowed, two threads, 10k addresses"
    done
done
target/release/peers --report
