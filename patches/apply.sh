#!/usr/bin/env bash
# Patches a Megatron-LM checkout, or takes the patch back; the table in README.md decides which.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() {
    printf 'apply.sh: %s\n' "$*" >&2
    exit 1
}

# Prints the README's table, a line a file: patch, file, sum as released, sum patched.
sums() {
    awk -F '[|` ]+' '/^\| megatron-lm-/ { print $2, $5, $6, $7 }' "$here/README.md"
}

# all_are PATCH COLUMN: succeeds if all files of the patch in the checkout have that column's sums.
all_are() {
    local patch=$1 column=$2 name file released patched
    while read -r name file released patched; do
        [[ $name == "$patch" ]] || continue
        [[ $column == released ]] || released=$patched
        [[ -f $checkout/$file ]] || return 1
        echo "$released  $checkout/$file" | sha256sum --check --status || return 1
    done < <(sums)
}

# Sets patch and state (released or patched) to what the checkout is.
recognise() {
    for patch in $(sums | cut -d ' ' -f 1 | uniq); do
        for state in released patched; do
            if all_are "$patch" "$state"; then
                return
            fi
        done
    done
    local files
    files=$(sums | cut -d ' ' -f 2 | sort -u | paste -sd ,)
    die "$files in $checkout differ from every release that there is a patch for" \
        "($(sums | cut -d ' ' -f 1 | uniq | paste -sd ' ')); leave the tree as it is and start" \
        "it with python -m megatron_vshape.mcore.launch instead"
}

direction=()
if [[ ${1-} == --reverse ]]; then
    direction=(--reverse)
    shift
fi
(($# == 1)) || die "usage: bash patches/apply.sh [--reverse] CHECKOUT_OF_MEGATRON_LM"
[[ -d $1 ]] || die "$1 is not a directory"
checkout=$(cd "$1" && pwd)
wanted=patched
((${#direction[@]} == 0)) || wanted=released
recognise
if [[ $state == "$wanted" ]]; then
    echo "$checkout is as wanted already ($patch, $wanted): nothing to do"
    exit
fi
# A checkout without .git that lies in another repository is not to be taken for a part of it.
GIT_CEILING_DIRECTORIES=$(dirname "$checkout") \
    git -C "$checkout" apply --unidiff-zero "${direction[@]}" "$here/$patch"
all_are "$patch" "$wanted" || die "$patch has been applied, but its files are not as expected"
echo "$checkout is $wanted now ($patch)"
