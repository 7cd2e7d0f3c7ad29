#!/usr/bin/env bash
# Checks the package as CI does: lint, types, layers, tests. Makes the environment it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/test.sh [--slow] [--megatron 0.17|0.18|0.19] [PYTEST ARGS]

  --slow            the tests that take minutes as well
  --megatron V      only the tests, in an environment of its own with that megatron-core
TEXT
}

# Prints constraints.txt without the pins that another Megatron cannot share: its own,
# and transformers', whose version Megatron limits, with what transformers limits in turn.
constraints_for() {
    grep -Eiv '^(megatron-core|transformers|tokenizers|huggingface[-_]hub|hf-xet)==' constraints.txt
    printf 'megatron-core==%s.*\n' "$1"
}

# check NAME COMMAND...: runs it, and remembers the name if it fails.
failed=()
check() {
    say "== $1"
    "${@:2}" || failed+=("$1")
}

markers='not slow and not gpu' megatron='' pytest_args=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --slow) markers='not gpu' && shift ;;
        --megatron)
            [[ ${2-} =~ ^0\.[0-9]+$ ]] || die "--megatron needs a version such as 0.18"
            megatron=$2 && shift 2
            ;;
        *) pytest_args+=("$1") && shift ;;
    esac
done

venv=.venv constraints=constraints.txt
if [[ -n $megatron ]]; then
    venv=.venv-$megatron constraints=.cache/constraints-$megatron.txt
    mkdir -p .cache
    constraints_for "$megatron" >"$constraints"
fi
make_environment "$venv" megatron,exact,search,draw,dev "$constraints"
PATH=$PWD/$venv/bin:$PATH

if [[ -z $megatron ]]; then
    check ruff ruff check .
    check shellcheck shellcheck --external-sources scripts/*.sh .ci/run
    check mypy mypy
    check import-linter lint-imports
fi
check pytest python -m pytest -m "$markers" "${pytest_args[@]}"
((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
