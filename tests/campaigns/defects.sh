#!/usr/bin/env bash
# Tests find defects that were planted: each patch in tests/campaigns/defects is applied to a copy of the last commit, and then
# a test has to fail. A line "Found by: " of the patch says which tests are run, with the options of cargo test. Without it
# the simulation has to fail within a number of seeds. Prints a table. With numbers as arguments, only these are tried.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD copy=$PWD/target/defects seeds=${SIMULATION_SEEDS:-1000}
features=${FEATURES:-axum,tonic,tokio,fleet,metrics,fred-rustls-ring,redis-rs-rustls-ring,postgres,retry,serde,status,rules,conformance,time-zones}
# In a folder of its own: Cargo would take what it built here for a build of the project.
export CARGO_TARGET_DIR=$root/target/with-defects CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
git worktree remove --force "$copy" 2>/dev/null || true
git worktree add --quiet --detach "$copy" HEAD
trap 'git worktree remove --force "$copy"' EXIT
missed=0
echo "| defect | found by | at seed |"
echo "|---|---|---|"
for patch in "$root"/tests/campaigns/defects/*.patch; do
    name=$(basename "$patch" .patch)
    if [ $# -gt 0 ] && [[ " $* " != *" ${name%%-*} "* ]]; then continue; fi
    git -C "$copy" reset --quiet --hard
    if ! git -C "$copy" apply "$patch"; then
        echo "| $name | does not fit the code | |"
        missed=1
        continue
    fi
    log=$root/target/defect-$name.log
    by=$(sed -n 's/^Found by: //p' "$patch")
    # Without a line of its own it is the simulation's.
    read -ra tests <<<"${by:---package tower-ratelimit --lib simulation}"
    features_of=(--features "$features")
    [[ $by == *tower-ratelimit-cli* ]] && features_of=()
    build=(nice -n 10 cargo test --quiet --locked "${features_of[@]}" "${tests[@]}")
    (cd "$copy" && "${build[@]}" --no-run) >"$log" 2>&1 || { echo "| $name | does not compile, see $log | |"; missed=1; continue; }
    (cd "$copy" && SIMULATION_SEEDS=$seeds RATELIMIT_CAMPAIGN=1 "${build[@]}" -- --test-threads 1 --nocapture) >"$log" 2>&1 || true
    if [ -n "$by" ]; then
        line=$(sed -n '/^failures:$/,$s/^    \([a-z_0-9:]*\)$/\1/p' "$log" | head -n 1)
        seed=
    else
        line=$(grep --max-count 1 '^SIMULATION_SEED=' "$log" || true)
        seed=${line#SIMULATION_SEED=}
        seed=${seed%% *}
        line=${line#*\# }
    fi
    if [ -z "$line" ]; then
        echo "| $name | **nothing** | |"
        missed=1
    else
        echo "| $name | $line | $seed |"
    fi
done
exit $missed
