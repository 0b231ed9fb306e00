#!/usr/bin/env bash
# The same tests as in tests/all.sh, with many more cases: for nights, or before a release.
#
# bash tests/campaigns.sh              goes on where the run before ended, to the end
# bash tests/campaigns.sh 60           the same, and begins nothing after 60 minutes
# bash tests/campaigns.sh list         says what passed, at which commits, and what is left
# bash tests/campaigns.sh again NAME   forgets the slices of a campaign, of NAME or of `all`
#
# A long campaign has slices, which take an hour at most. A slice that passed is not run again, also if the code changed
# since: `list` tells its commit. A slice that ran no test fails, because its names may be those of no test any more. What
# slices print is in target/campaigns.
set -euo pipefail
cd "$(dirname "$0")/.."
features=axum,tonic,tokio,fleet,fred-rustls-ring,serde,rules,conformance,time-zones
done=target/campaigns
names=() slices=() commands=()

# campaign NAME SLICES COMMAND: in the command, $slice is the number of the slice, from 0 on.
campaign() {
    names+=("$1") slices+=("$2") commands+=("$3")
}

# Tests of this package, optimised: the library's take five minutes to build, and the simulation plays eight times as
# many seeds a second. Assertions stay.
tests="CARGO_PROFILE_TEST_OPT_LEVEL=2 cargo test --locked --features $features"

# The newest versions of the dependencies, which users get.
campaign newest 1 "bash tests/newest/run"
# Properties with 25 times as many cases, a flood of 50 million keys, and a file of rules that changes 250 times under load.
campaign properties 1 "RATELIMIT_CAMPAIGN=25 $tests --test client --test memory --test middleware --test redis"
# The laws of each algorithm beside an oracle, with 250,000 schedules of each.
campaign algorithms 1 "RATELIMIT_CAMPAIGN=25 $tests --lib algorithm::"
# Every edge of calendars in 22 zones for 199 years, beside Python's zoneinfo.
campaign edges 1 "RATELIMIT_CAMPAIGN=1 $tests --lib edges_are_those -- --nocapture"
# A million histories of threads that use the same keys at once: an order of their calls explains all answers.
campaign linearizable 1 "RATELIMIT_CAMPAIGN=100 $tests --test memory linearizable"
# The same for three limiters on one Redis, and in one PostgreSQL.
campaign linearizable-redis 1 "RATELIMIT_CAMPAIGN=25 $tests --test redis linearizable"
campaign linearizable-postgres 1 "RATELIMIT_CAMPAIGN=25 $tests,postgres --test postgres linearizable"
# A million requests in flight that end in every way, over TCP, counted in memory, and as many counted in Redis. No place may
# leak.
campaign in-flight-memory 1 "RATELIMIT_CAMPAIGN=1 IN_FLIGHT_REQUESTS=1000000 $tests --test middleware in_flight_campaign -- --nocapture"
campaign in-flight-redis 1 "RATELIMIT_CAMPAIGN=1 IN_FLIGHT_REQUESTS=1000000 $tests --test redis in_flight_campaign -- --nocapture"
# Mixed traffic for eight hours in nine slices, while Redis is killed each minute. Prints a line each minute, and the figures at the
# end. Each slice goes on with the data in the Redis of the one before, and the slope of the memory is that of all slices. The
# setting tells glibc to keep no freed blocks for each thread: these become more for hours, and look like memory that is lost.
campaign soak 9 "RATELIMIT_CAMPAIGN=1 SOAK_KEEPS=$done/soak.kept GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1 SOAK_SECONDS=3200 $tests --test redis soak -- --nocapture"
# A thousand clients that obey and a thousand that do not, for five minutes. Prints the table in the guide, and draws the picture.
campaign crowd 1 "RATELIMIT_CAMPAIGN=1 CROWD=1 $tests --test client crowds_with_and -- --nocapture"
# 100,000 random schedules of threads, for each test that is too large for loom. Only this crate is built with the condition.
campaign shuttle 1 "RATELIMIT_CAMPAIGN=100 \$(CARGO_PROFILE_TEST_OPT_LEVEL=2 cargo rustc --locked --package tower-ratelimit \\
    --features $features --lib --profile test --message-format json -- --cfg ratelimit_shuttle |
    sed -n 's/.*\"executable\":\"\\([^\"]*\\)\".*/\\1/p') shuttle"
# Each algorithm beside its script in Redis, for two million steps.
campaign parity-redis 1 "RATELIMIT_CAMPAIGN=1 RATELIMIT_PARITY_STEPS=2000000 $tests --lib wire::tests::parity"
# Faults of Redis by the other client, the crate redis. Without the feature fred, the limiter has it only.
other="${tests/fred-rustls-ring/redis-rs-rustls-ring} --package tower-ratelimit"
campaign faults-redis-rs 1 "RATELIMIT_CAMPAIGN=1 $other --lib -- redis::connection --test-threads 2"
campaign vectors-redis-rs 1 "RATELIMIT_CAMPAIGN=1 $other --test vectors"
# What the compiler, errors and warnings say after each mistake of a newcomer names the fix.
campaign mistakes 1 "tests/mistakes/run"
# Requests in flight on Redis: half a million schedules of lost and late calls, four processes for a minute of which one is
# killed, 2,000 failovers, and a proxy that loses answers. Prints the table in the guide.
campaign places 1 "RATELIMIT_CAMPAIGN=25 PLACES_TABLE=1 $tests --lib places -- --nocapture"
campaign holdings 1 "RATELIMIT_CAMPAIGN=25 $tests --lib holdings"
# Four processes in line for places of one key, for a minute: each gets at least 0.8 of an equal share.
campaign places-in-line 1 "RATELIMIT_CAMPAIGN=1 PLACES_IN_LINE_SECONDS=60 $tests --lib processes_that_wait_in_line -- --nocapture"
# The same with eight callers that wait for at most 50 ms. Prints how many are refused.
campaign places-in-haste 1 "RATELIMIT_CAMPAIGN=1 PLACES_IN_LINE_SECONDS=10 PLACES_IN_LINE_WAIT_MS=50 PLACES_IN_LINE_CALLERS=2 $tests --lib \\
    processes_that_wait_in_line -- --nocapture"
# 2,000 failovers, a stream of three times the time after which places lapse, and 10,000 places of as many keys and of one
# key. Then three failovers while 2,000 places are held.
campaign places-failovers 1 "RATELIMIT_CAMPAIGN=1 PLACES_FAILOVERS=2000 PLACES_TABLE=1 $tests --test redis places:: -- --nocapture"
campaign places-held 1 "RATELIMIT_CAMPAIGN=1 PLACES_FAILOVERS=3 PLACES_HELD=2000 $tests --test redis replica_that_takes_over -- --nocapture"
# Simulated processes, a server and a network with faults: a million seeds each on Redis, with a fallback, and over a store.
campaign simulation 20 "RATELIMIT_CAMPAIGN=1 SIMULATION_FROM=\$((slice * 50000)) SIMULATION_SEEDS=50000 $tests,store --lib simulation -- --nocapture"
# Each algorithm over a store that compares and swaps, beside memory, for 100,000 steps.
campaign parity-store 1 "RATELIMIT_CAMPAIGN=25 $tests,store --lib store::tests::parity"
# Each algorithm in PostgreSQL, beside memory, for 100,000 steps; and eight processes on one key, 160,000 checks.
campaign parity-postgres 1 "RATELIMIT_CAMPAIGN=1 POSTGRES_PARITY_STEPS=100000 $tests,postgres --lib postgres::tests -- --test-threads 2"
campaign processes-postgres 1 "RATELIMIT_CAMPAIGN=25 $tests,postgres --test postgres processes"
# The same with the usual deadline. Prints how many checks lose until then.
campaign haste-postgres 1 "RATELIMIT_CAMPAIGN=1 POSTGRES_DEADLINE_MS=50 $tests,postgres --test postgres processes -- --nocapture"
# A hot row in PostgreSQL beside a transaction that stays open for five minutes. Prints times and sizes.
campaign transaction-postgres 1 "RATELIMIT_CAMPAIGN=1 POSTGRES_TRANSACTION_SECONDS=300 $tests,postgres --test postgres transaction -- --nocapture"
# A million mutated files of rules.
campaign mutations 1 "RATELIMIT_CAMPAIGN=10 $tests --lib rules::tests::mutations"
# Inputs that a fuzzer makes, ten minutes in each slice, two hours for each: rules, Envoy's files and descriptors, quotas,
# calendars, headers, logs, snapshots, stored values, operators' settings, replies of Redis, and requests to the server. The
# inputs found so far stay for the next slice.
for target in rules envoy quota calendars headers clients logs snapshot stored fleet replies serve; do
    campaign "fuzz-$target" 12 "bash tests/fuzz/run 600 $target"
done
# ThreadSanitizer and Miri: half an hour, and a nightly compiler.
campaign sanitize 1 "bash tests/sanitize/run"
# Processes that are stopped and continued, for ten minutes.
campaign stopped-clock 1 "RATELIMIT_CAMPAIGN=1 STOPPED_CLOCK_SECONDS=600 $tests --test memory stopped_clock"
# Floods that go on until every key is forgotten. Prints the table in the documentation of limiter::memory.
campaign floods 1 "RATELIMIT_CAMPAIGN=1 FLOOD_TABLE=1 $tests --test memory floods -- --nocapture"
# The library without warnings, with each feature and each two of them: a quarter of an hour, and OpenSSL's headers for
# fred-native-tls. Licences, duplicates and sources of all dependencies: seconds.
campaign features 1 "cargo install --locked cargo-hack &&
    cargo hack clippy --locked --package tower-ratelimit --lib --feature-powerset --depth 2 --exclude-features _redis -- -D warnings"
campaign licences 1 "cargo install --locked cargo-deny && cargo deny --locked check licenses bans sources"
# The simulation finds each planted defect: some minutes for one.
for patch in tests/campaigns/defects/*.patch; do
    number=$(basename "$patch" .patch)
    campaign "defect-${number%%-*}" 1 "bash tests/campaigns/defects.sh ${number%%-*}"
done
# Every hundredth mutant of the code that decides: three hours, as estimated. A test has to fail for each. A slice ends with 2
# if one was missed, and with 3 if one hung: compare these with the list in tests/campaigns/MUTANTS.md.
campaign mutants 10 "cargo install --locked cargo-mutants &&
    cargo mutants --config tests/campaigns/mutants.toml --shard \$slice/1000 --sharding round-robin || ((\$? == 2 || \$? == 3))"
# What Docker does for the image of the program, in an empty folder: it builds a release.
campaign image 1 "IMAGE_BUILD=1 cargo test --locked --package tower-ratelimit-cli --test serve build_of_the_image -- --nocapture"
# The declared Rust version, by its own compiler: a minute.
campaign msrv 1 "bash tests/msrv.sh"
# The programs for other frameworks, pingora among them, which needs cmake.
frameworks="--locked --manifest-path examples/frameworks/Cargo.toml --target-dir target/frameworks --all-features"
campaign frameworks 1 "cargo clippy $frameworks --all-targets -- -D warnings && cargo test $frameworks"
# The comparison with peers still works: each case once, which needs wrk.
campaign peers 1 "cargo clippy --locked --manifest-path benches/peers/Cargo.toml -- -D warnings &&
    cargo run --locked --profile smoke --manifest-path benches/peers/Cargo.toml -- --smoke"

# Prints what slices did in sum, by their logs: the seeds and checks of simulations, the inputs of fuzzers, the traffic of soaks.
sum() {
    awk '
        match($0, /[a-z_]+: [0-9]+ seeds, [0-9]+ checks$/) {
            split(substr($0, RSTART), word)
            seeds[word[1]] += word[2]; checks += word[4]
        }
        /^stat::number_of_executed_units:/ { inputs += $2 }
        match($0, /[0-9]+ s of traffic/) { traffic += substr($0, RSTART) }
        END {
            for (kind in seeds) least = least == "" || seeds[kind] < least ? seeds[kind] : least
            if (checks) printf " %.0f seeds of each kind, %.0f checks", least, checks
            if (inputs) printf " %.0f inputs", inputs
            if (traffic) printf " %.1f h of traffic", traffic / 3600
        }' "$@" </dev/null
}

# Prints the slices of each campaign that passed, with their commits, seconds and sums.
list() {
    local at mark passed=0 all=0 has seconds commit took commits logs
    for at in "${!names[@]}"; do
        has=0 seconds=0 commits= logs=()
        for mark in "$done/${names[$at]}".*.passed; do
            [ -f "$mark" ] || continue
            read -r commit took <"$mark"
            has=$((has + 1)) seconds=$((seconds + took)) logs+=("${mark%.passed}.log")
            [[ " $commits " == *" $commit "* ]] || commits+=" $commit"
        done
        printf '%-22s %3s of %3s slices %7s s %s%s\n' "${names[$at]}" "$has" "${slices[$at]}" "$seconds" "$commits" \
            "$(sum "${logs[@]}")"
        passed=$((passed + has)) all=$((all + slices[at]))
    done
    printf '%-22s %3s of %3s slices\n' "all of them" "$passed" "$all"
}

# has_tested LOG COMMAND: whether a command that runs tests ran one. Cargo succeeds if there is none of the name.
has_tested() {
    awk -v tests="$([[ $2 == *'cargo test'* ]] && echo 1)" '
        /^running [0-9]+ tests?$/ { tests = 1; ran += $2 }
        END { if (tests && !ran) { print "no test has the name that the command gives" >>FILENAME; exit 1 } }' "$1"
}

# Runs a slice, and keeps what it printed. Notes its commit and seconds if it passed.
run() {
    local at=$1 slice=$2 began=$SECONDS
    local log=$done/${names[$at]}.$slice.log
    printf -- '--- %s, slice %s of %s\n' "${names[$at]}" "$((slice + 1))" "${slices[$at]}"
    if slice=$slice bash -o pipefail -c "set -e; ${commands[$at]}" >"$log" 2>&1 && has_tested "$log" "${commands[$at]}"; then
        printf '%s %s\n' "$(git describe --always --dirty)" "$((SECONDS - began))" >"$done/${names[$at]}.$slice.passed"
        printf 'passed in %s s: %s\n' "$((SECONDS - began))" "$log"
    else
        printf 'FAILED after %s s: %s\n' "$((SECONDS - began))" "$log"
        tail -n 20 "$log"
        return 1
    fi
}

mkdir -p "$done"
case ${1:-} in
    list)
        list
        exit
        ;;
    again)
        name=${2:?names a campaign, or all}
        if [ "$name" = all ]; then
            rm -rf "$done"/*.passed "$done"/*.kept
        elif [[ " ${names[*]} " == *" $name "* ]]; then
            rm -rf "$done/$name".*.passed "$done/$name.kept"
        else
            printf 'there is no campaign %s: bash tests/campaigns.sh list\n' "$name" >&2
            exit 2
        fi
        exit
        ;;
    "" | [0-9]*) minutes=${1:-} ;;
    *)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
        exit 2
        ;;
esac

failed=()
for at in "${!names[@]}"; do
    for ((slice = 0; slice < slices[at]; slice++)); do
        [ ! -f "$done/${names[$at]}.$slice.passed" ] || continue
        if [ -n "$minutes" ] && ((SECONDS >= minutes * 60)); then
            list
            printf 'the time is over: the same command goes on from here\n'
            exit $((${#failed[@]} > 0))
        fi
        # The others are still worth to know.
        run "$at" "$slice" || failed+=("${names[$at]}.$slice")
    done
done
list
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[*]}" >&2; exit 1; }
