#!/usr/bin/env bash
# Prints what a release still lacks, and ends with 1 if that is anything: bash tests/release.sh
# It only reads files. That everything works is what tests/all.sh and tests/campaigns.sh say, and that the version is new is
# what the registry says.
# bash tests/release.sh FOLDER looks at another checkout.
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

# The registry resolves relative links of a README only if the repository is on one of these.
hosts='github\.com|gitlab\.com|bitbucket\.org'

missing=0
lacks() {
    printf 'missing: %s\n' "$*"
    missing=1
}

# value FILE TABLE KEY: prints the text of a key in a table of a manifest.
value() {
    awk -v table="[$2]" -v key="$3" '
        /^\[/ { here = $0 }
        here == table && $1 == key && $2 == "=" && match($0, /".*"/) { print substr($0, RSTART + 1, RLENGTH - 2) }
    ' "$1"
}

# field MANIFEST KEY: prints what a package says of itself, or has from the workspace.
field() {
    if grep -q "^$2\.workspace = true" "$1"; then
        value Cargo.toml workspace.package "$2"
    else
        value "$1" package "$2"
    fi
}

# links FILE: prints the targets of inline links, images and link definitions, without code.
links() {
    sed '/^```/,/^```/d; s/`[^`]*`//g' "$1" |
        grep -oE '\]\([^) ]+\)|^\[[^]]+\]: [^ ]+' | sed -E 's/^\]\((.*)\)$/\1/; s/^\[[^]]+\]: //'
}

version=$(value Cargo.toml workspace.package version)
if ! [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || [ "$version" = 0.0.0 ]; then
    lacks "a version of three numbers in [workspace.package] of Cargo.toml, not '$version'"
fi
needed=$(sed -nE 's/^tower-ratelimit = \{ version = "([^"]*)".*/\1/p' cli/Cargo.toml)
if [ "$needed" != "$version" ]; then
    lacks "the version in cli/Cargo.toml: the program needs the library $needed, and this is $version"
fi

dated="^## \[?${version//./\\.}\]? - [0-9]{4}-[0-9]{2}-[0-9]{2}$"
if ! grep -qE "$dated" CHANGELOG.md; then
    lacks "a heading '## $version - YYYY-MM-DD' in CHANGELOG.md"
fi
if awk '/^## / { here = /Unreleased/; next } here && NF { found = 1 } END { exit !found }' CHANGELOG.md; then
    lacks "a place in the new version for what CHANGELOG.md lists under [Unreleased]"
fi

contact=$(sed -n 's/^\*\*Contact:\*\* *//p' SECURITY.md)
if ! [[ $contact == *@* || $contact == *https://* ]]; then
    lacks "an address after **Contact:** in SECURITY.md, for reports of vulnerabilities"
fi

for manifest in Cargo.toml cli/Cargo.toml; do
    name=$(value "$manifest" package name)
    repository=$(field "$manifest" repository)
    if ! [[ $repository =~ ^https:// ]]; then
        lacks "repository of $name: set it in [workspace.package] of Cargo.toml, and repository.workspace = true in $manifest"
    fi
    if [ -z "$(field "$manifest" documentation)" ] && [ -z "$(field "$manifest" homepage)" ]; then
        lacks "documentation or homepage of $name, in $manifest"
    fi
    readme=$(dirname "$manifest")/$(field "$manifest" readme)
    for target in $(links "$readme"); do
        case $target in
        *://* | mailto:* | '#'*) continue ;;
        esac
        if [ ! -e "$(dirname "$readme")/${target%%#*}" ]; then
            lacks "$target, to which $readme links"
        elif ! [[ $repository =~ ^https://($hosts)/ ]]; then
            lacks "a target of the link $target in $readme: the registry's page has none without a repository on ${hosts//\\/}"
        fi
    done
done

if [ "$missing" -eq 0 ]; then
    printf 'Nothing is missing for the release of %s.\n' "$version"
fi
exit "$missing"
