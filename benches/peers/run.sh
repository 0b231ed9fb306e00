#!/usr/bin/env bash
# Runs the comparison with peers with both release profiles, and writes charts and tables: bash benches/peers/run.sh
# Families of cases may be named: bash benches/peers/run.sh router check
set -euo pipefail
cd "$(dirname "$0")"

# Build all first, so that no compiler runs beside a case.
for profile in release thin; do
    cargo build --locked --profile "$profile"
done
if [ $# -gt 0 ]; then
    target/release/peers "$@"
    target/thin/peers "$@"
else
    target/release/peers
    # The other families compare this crate with itself, or memory, or Redis.
    target/thin/peers router server check keys layer
fi
target/release/peers --report
