#!/usr/bin/env bash
# Checks the library with the lowest version of each direct dependency that Cargo.toml allows: bash tests/minimal.sh [FEATURES]
# A version that is declared too low fails only for users whose lock file has it.
set -euo pipefail
cd "$(dirname "$0")/.."
features=${1:-axum,client,tonic,tokio,fleet,tracing,metrics,fred,redis-rs,postgres,retry,serde,status,rules,conformance,time-zones}
folder=$PWD/target/minimal/package
rm -rf "$folder"
mkdir -p "$folder"
ln -s "$PWD/src" "$folder/src"
cp README.md "$folder"
# Without what only the repository needs: those dependencies would raise the versions.
awk '/^\[/ { is_needed = !/dev-dependencies|^\[\[|^\[profile/ } is_needed && !/^(default-)?members/' Cargo.toml >"$folder/Cargo.toml"
cd "$folder"
# Cargo has this way of choosing versions for a long time, and calls it unstable still.
RUSTC_BOOTSTRAP=1 cargo generate-lockfile --quiet -Z direct-minimal-versions
# What is not lowered is shared with the other checks of tests/all.sh.
CARGO_TARGET_DIR=$PWD/../../checks cargo check --locked --lib --features "$features"
