#!/usr/bin/env bash
# The simulation finds defects that were planted: each patch in tests/campaigns/defects is applied to a copy of the last commit, and the
# simulation has to fail within a number of seeds. Prints a table of the seeds. With names as arguments, only these are tried.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD copy=$PWD/target/defects seeds=${SIMULATION_SEEDS:-1000}
features=${FEATURES:-axum,tonic,tokio,metrics,fred-rustls-ring,redis-rs-rustls-ring,postgres,retry,serde,status,rules,conformance}
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
    (cd "$copy" && nice -n 10 cargo test --quiet --locked --package tower-ratelimit --features "$features" --lib --no-run) >"$log" 2>&1 ||
        { echo "| $name | does not compile, see $log | |"; missed=1; continue; }
    (cd "$copy" && SIMULATION_SEEDS=$seeds nice -n 10 cargo test --quiet --locked --package tower-ratelimit --features "$features" --lib \
        simulation -- --test-threads 1 --nocapture) >"$log" 2>&1 || true
    line=$(grep --max-count 1 '^SIMULATION_SEED=' "$log" || true)
    if [ -z "$line" ]; then
        echo "| $name | **nothing** | |"
        missed=1
    else
        seed=${line#SIMULATION_SEED=}
        echo "| $name | ${line#*\# } | ${seed%% *} |"
    fi
done
exit $missed
