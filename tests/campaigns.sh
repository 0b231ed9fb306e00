#!/usr/bin/env bash
# The same tests as in tests/all.sh, with many more cases: for a night, or before a release. Each command also runs alone.
set -euo pipefail
cd "$(dirname "$0")/.."
features=axum,tonic,tokio,fred-rustls-ring,serde,rules,conformance,time-zones
# Optimised, the tests of the library take five minutes to build, and the simulation plays eight times as many seeds a second.
# Assertions stay.
export CARGO_PROFILE_TEST_OPT_LEVEL=2
# Every case of each test, as in tests/all.sh.
export RATELIMIT_CAMPAIGN=1
set -x

# The newest versions of the dependencies, which users get.
bash tests/newest/run
# Properties with 25 times as many cases, a flood of 50 million keys, and a file of rules that changes 250 times under load.
RATELIMIT_CAMPAIGN=25 cargo test --locked --features "$features" --test client --test memory --test middleware --test redis
# The laws of each algorithm beside an oracle, with 250,000 schedules of each.
RATELIMIT_CAMPAIGN=25 cargo test --locked --features "$features" --lib algorithm::
# A million histories of threads that use the same keys at once: an order of their calls explains all answers.
RATELIMIT_CAMPAIGN=100 cargo test --locked --features "$features" --test memory linearizable
# A million requests in flight that end in every way, over TCP, counted in memory, and as many counted in Redis. No place may
# leak.
IN_FLIGHT_REQUESTS=1000000 cargo test --locked --features "$features" --test middleware in_flight_campaign -- --nocapture
IN_FLIGHT_REQUESTS=1000000 cargo test --locked --features "$features" --test redis in_flight_campaign -- --nocapture
# A thousand WebSockets of a hundred users over TCP: each user gets at least 0.99 of its rate, none more, and sockets that
# end in every way leave nothing behind.
(ulimit -n 4096 && MESSAGES_SOCKETS=1000 MESSAGES_SECONDS=10 cargo test --locked --features "$features" --test middleware messages_campaign -- --nocapture)
# Eight hours of mixed traffic, while Redis is killed each minute. Prints a line each minute, and the figures at the end. The
# setting tells glibc to keep no freed blocks for each thread: these become more for hours, and look like memory that is lost.
GLIBC_TUNABLES=glibc.malloc.tcache_count=0 SOAK_SECONDS=28800 cargo test --locked --features "$features" --test redis soak -- --nocapture
# A thousand clients that obey and a thousand that do not, for five minutes. Prints the table in the guide, and draws the picture.
CROWD=1 cargo test --locked --features "$features" --test client crowds_with_and -- --nocapture
# 100,000 random schedules of threads, for each test that is too large for loom. Only this crate is built with the condition.
shuttle=$(cargo rustc --locked --package tower-ratelimit --features "$features" --lib --profile test \
    --message-format json -- --cfg ratelimit_shuttle | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
RATELIMIT_CAMPAIGN=100 "$shuttle" shuttle
# Each algorithm beside its script in Redis, for two million steps.
RATELIMIT_PARITY_STEPS=2000000 cargo test --locked --features "$features" --lib wire::tests::parity
# Faults of Redis by the other client, the crate redis. Without the feature fred, the limiter has it only.
cargo test --locked --package tower-ratelimit --features "${features/fred-rustls-ring/redis-rs-rustls-ring}" --lib -- redis::connection \
    --test-threads 2
cargo test --locked --package tower-ratelimit --features "${features/fred-rustls-ring/redis-rs-rustls-ring}" --test vectors
# What the compiler, errors and warnings say after each mistake of a newcomer names the fix.
tests/mistakes/run
# Requests in flight on Redis: half a million schedules of lost and late calls, four processes for a minute of which one is
# killed, 2,000 failovers, and a proxy that loses answers. Prints the table in the guide.
RATELIMIT_CAMPAIGN=25 PLACES_TABLE=1 cargo test --locked --features "$features" --lib places -- --nocapture
RATELIMIT_CAMPAIGN=25 cargo test --locked --features "$features" --lib holdings
# Four processes in line for places of one key, for a minute: each gets at least 0.8 of an equal share.
PLACES_IN_LINE_SECONDS=60 cargo test --locked --features "$features" --lib processes_that_wait_in_line -- --nocapture
# The same with eight callers that wait for at most 50 ms. Prints how many are refused.
PLACES_IN_LINE_SECONDS=10 PLACES_IN_LINE_WAIT_MS=50 PLACES_IN_LINE_CALLERS=2 cargo test --locked --features "$features" --lib \
    processes_that_wait_in_line -- --nocapture
# 2,000 failovers, a stream of three times the time after which places lapse, and 10,000 places of as many keys and of one
# key. Then three failovers while 2,000 places are held.
PLACES_FAILOVERS=2000 PLACES_TABLE=1 cargo test --locked --features "$features" --test redis places:: -- --nocapture
PLACES_FAILOVERS=3 PLACES_HELD=2000 cargo test --locked --features "$features" --test redis replica_that_takes_over -- --nocapture
# Simulated processes, a server and a network with faults: a million seeds each on Redis, with a fallback, and over a store.
SIMULATION_SEEDS=1000000 cargo test --locked --features "$features,store" --lib simulation -- --nocapture
# Each algorithm over a store that compares and swaps, beside memory, for 100,000 steps.
RATELIMIT_CAMPAIGN=25 cargo test --locked --features "$features,store" --lib store::tests::parity
# Each algorithm in PostgreSQL, beside memory, for 100,000 steps; and eight processes on one key, 160,000 checks.
POSTGRES_PARITY_STEPS=100000 cargo test --locked --features "$features,postgres" --lib postgres::tests -- --test-threads 2
RATELIMIT_CAMPAIGN=25 cargo test --locked --features "$features,postgres" --test postgres processes
# The same with the usual deadline. Prints how many checks lose until then.
RATELIMIT_CAMPAIGN=1 POSTGRES_DEADLINE_MS=50 cargo test --locked --features "$features,postgres" --test postgres processes -- --nocapture
# A hot row in PostgreSQL beside a transaction that stays open for five minutes. Prints times and sizes.
POSTGRES_TRANSACTION_SECONDS=300 cargo test --locked --features "$features" --test postgres transaction -- --nocapture
# A million mutated files of rules.
RATELIMIT_CAMPAIGN=10 cargo test --locked --features "$features" --lib rules::tests::mutations
# Inputs that a fuzzer makes, ten minutes each: rules, Envoy's files and descriptors, quotas, headers, logs, snapshots, stored
# values, and replies of Redis.
bash tests/fuzz/run 600
# ThreadSanitizer and Miri: half an hour, and a nightly compiler.
bash tests/sanitize/run
# Processes that are stopped and continued, for ten minutes.
STOPPED_CLOCK_SECONDS=600 cargo test --locked --features "$features" --test memory stopped_clock
# Floods that go on until every key is forgotten. Prints the table in the documentation of `limiter::memory`.
FLOOD_TABLE=1 cargo test --locked --features "$features" --test memory floods -- --nocapture
# The library without warnings, with each feature and each two of them: a quarter of an hour, and OpenSSL's headers for
# fred-native-tls. Licences, duplicates and sources of all dependencies: seconds.
cargo install --locked cargo-hack cargo-deny
cargo hack clippy --locked --package tower-ratelimit --lib --feature-powerset --depth 2 --exclude-features _redis -- -D warnings
cargo deny --locked check licenses bans sources

# Commands that build the library for each case do so without optimising, and try a sample.
unset CARGO_PROFILE_TEST_OPT_LEVEL RATELIMIT_CAMPAIGN
# The simulation finds fifteen planted defects: an hour.
bash tests/campaigns/defects.sh
# Every hundredth mutant of the code that decides: three hours, as estimated. A test has to fail for each. The run ends with 2
# if one was missed, and with 3 if one hung: compare these with the list in tests/campaigns/MUTANTS.md.
cargo install --locked cargo-mutants
cargo mutants --config tests/campaigns/mutants.toml --shard 0/100 --sharding round-robin || (($? == 2 || $? == 3))
# The declared Rust version, by its own compiler: a minute.
bash tests/msrv.sh
# The programs for other frameworks, pingora among them, which needs cmake.
cargo clippy --locked --manifest-path examples/frameworks/Cargo.toml --target-dir target/frameworks --all-targets --all-features -- -D warnings
cargo test --locked --manifest-path examples/frameworks/Cargo.toml --target-dir target/frameworks --all-features
# The comparison with peers still works: each case once, which needs wrk.
cargo clippy --locked --manifest-path benches/peers/Cargo.toml -- -D warnings
cargo run --locked --profile smoke --manifest-path benches/peers/Cargo.toml -- --smoke
