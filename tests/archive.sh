#!/usr/bin/env bash
# Makes the archives of both packages as cargo would publish them, and builds them alone in an empty folder: the library,
# its examples and its documentation examples. Installs the program. Checks what the archives hold, and their size.
# bash tests/archive.sh [FEATURES]
set -euo pipefail
cd "$(dirname "$0")/.."
features=${1:-axum,tonic,tokio,fleet,metrics,fred-rustls-ring,redis-rs-rustls-ring,postgres,retry,serde,status,rules,conformance,time-zones}

# Kilobytes of the compressed archives. Something that does not belong there is found by it: raise it for code and its words only.
limit_library=1300
limit_program=200

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
export CARGO_TARGET_DIR=$PWD/target
packages=$CARGO_TARGET_DIR/package
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run() {
    printf '$ %s\n' "$*"
    "$@"
}
fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

# Cargo before 1.90 cannot package a program together with the library that it needs.
packed=(--package tower-ratelimit --package tower-ratelimit-cli)
if [ "$(cargo --version | cut -d. -f2)" -lt 90 ]; then
    packed=(--package tower-ratelimit)
    printf 'This cargo cannot package the program before the library is published.\n'
fi
# What cargo says about tests and benches that are left out is meant.
run cargo package --locked --allow-dirty --no-verify "${packed[@]}" 2>&1 | sed '/ignoring/d'

# unpack NAME LIMIT FILE…: unpacks an archive. Checks that it has these files, no tests, and at most so many kilobytes.
unpack() {
    local name=$1 limit=$2 archive=$packages/$1-$version.crate size
    shift 2
    # With the times of now: all files of an archive are of 2006, so cargo would take a changed file for an old one.
    tar -xzmf "$archive" -C "$folder"
    mv "$folder/$name-$version" "$folder/$name"
    for file in Cargo.toml Cargo.lock README.md LICENSE-APACHE LICENSE-MIT "$@"; do
        [ -f "$folder/$name/$file" ] || fail "the archive of $name lacks $file"
    done
    if find "$folder/$name" -name '*tests' -o -name '*tests.rs' -o -name '*_test.*' -o -name benches | grep .; then
        fail "the archive of $name has tests"
    fi
    size=$(($(wc -c <"$archive") / 1000))
    printf '%s: %s files, %s kB\n' "$name" "$(find "$folder/$name" -type f | wc -l)" "$size"
    [ "$size" -le "$limit" ] || fail "the archive of $name has $size kB, and at most $limit are meant"
}

unpack tower-ratelimit "$limit_library" CHANGELOG.md SECURITY.md src/lib.rs examples/client_ip.rs examples/rules.yaml
members='"tower-ratelimit"'
if [ "${#packed[@]}" -gt 2 ]; then
    unpack tower-ratelimit-cli "$limit_program" src/main.rs
    members+=', "tower-ratelimit-cli"'
fi

# With the lock, the profiles and the target folder of the repository its builds of the dependencies are used. The
# library is not on the registry before it is published, so the program gets this one.
{
    printf '[workspace]\nresolver = "3"\nmembers = [%s]\n' "$members"
    printf '[patch.crates-io]\ntower-ratelimit = { path = "tower-ratelimit" }\n'
    sed -n '/^\[profile/,$p' Cargo.toml
} >"$folder/Cargo.toml"
cp Cargo.lock "$folder"
# Where tests/all.sh keeps what it only checks.
checks=$CARGO_TARGET_DIR/checks
cd "$folder"

# Each example is checked with just the features that it needs. The features that choose much code are checked alone as
# well, each with the example that needs no feature: beside an example the dependencies also have the features that only
# tests ask for, so cargo checks them once, and not once for each set. So tests/campaigns.sh looks whether the library
# names all it needs, with each feature and with each two.
cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
packages = json.load(sys.stdin)["packages"]
targets = next(package["targets"] for package in packages if package["name"] == "tower-ratelimit")
sets = {features: ["--example=hyper"] for features in ("postgres", "fred", "redis-rs", "rules", "stats", "status", "store")}
for target in targets:
    if target["kind"] == ["example"]:
        sets.setdefault(",".join(target.get("required-features", [])), []).append("--example=" + target["name"])
for features in sorted(sets):
    print(features or "default", *sets[features])
' >sets
# Cargo says each time that the profiles of the archive are not those of the workspace.
alone() {
    run "$@" 2>&1 | sed '/^warning: profiles for the non root package/,+2d'
}
while read -r set examples; do
    # shellcheck disable=SC2086 # each is a word
    alone env CARGO_TARGET_DIR="$checks" cargo check --package tower-ratelimit --lib $examples --features "$set" | tee told
    ! grep -q '^warning' told || fail "with the features $set there are warnings"
done <sets
alone cargo test --package tower-ratelimit --doc --features "$features"

# The program as users install it, but in the profile of the tests, whose builds of the dependencies are used.
if [ "${#packed[@]}" -gt 2 ]; then
    alone cargo install --locked --offline --profile test --path tower-ratelimit-cli --root installed
    program=installed/bin/tower-ratelimit
    run "$program" --version
    [ "$("$program" --version)" = "tower-ratelimit $version" ] || fail "the program has another version"
    run "$program" check --key user tower-ratelimit/examples/rules.yaml
fi
