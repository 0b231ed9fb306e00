#!/usr/bin/env bash
# The library and the program build with the declared Rust version: bash tests/msrv.sh
# With rustup it uses that toolchain. On Debian 12 it fetches the compiler that this version of Debian had first, and
# installs nothing. The lint `incompatible_msrv` and tests/project/msrv.rs stand for it in tests/all.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
features=$(sed -n 's/^features=//p' tests/all.sh)
check=(check --locked --workspace --lib --bins --features "$features")
export CARGO_TARGET_DIR=$PWD/target/msrv

if cargo "+$version" --version >/dev/null 2>&1; then
    exec cargo "+$version" "${check[@]}"
fi
if ! grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release; then
    printf 'Rust %s is missing. Install it with: rustup toolchain install %s\n' "$version" "$version" >&2
    exit 1
fi

to=$PWD/target/msrv/rust
if [ ! -x "$to/usr/bin/rustc" ]; then
    release=$(apt-cache madison rustc-web | sed -n "s/^[^|]*| *\($version\.[^ ]*\) .*/\1/p" | head -n 1)
    mkdir -p "$to/packages"
    (cd "$to/packages" && apt-get download "rustc-web=$release" "libstd-rust-web-dev=$release" \
        "libstd-rust-web-$version=$release" libllvm19)
    for package in "$to"/packages/*.deb; do
        dpkg -x "$package" "$to"
    done
fi
export RUSTC=$to/usr/bin/rustc LD_LIBRARY_PATH=$to/usr/lib/x86_64-linux-gnu
"$RUSTC" --version
exec cargo "${check[@]}"
