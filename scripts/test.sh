#!/usr/bin/env bash
# Checks the package as CI does: lint, types, layers, tests. Makes the environment it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

usage() {
    cat <<'TEXT'
usage: bash scripts/test.sh [--slow] [--browser] [--bridge] [--clients] [--nightly]
                            [--megatron 0.17|0.18|0.19|CHECKOUT] [PYTEST ARGS]

  --slow            the tests that take minutes as well
  --browser         the playground in Chromium as well, which is installed if it is missing
  --bridge          only training with Megatron-Bridge, installed without its dependencies
  --clients         only training with verl, Megatron-Bridge, torchtitan and NeMo Automodel, and the
                    examples for verl, slime and ms-swift; libraries are installed without their
                    dependencies
  --nightly         --clients, and training with ms-swift, slime, NeMo-RL and ROLL; the last three
                    from the checkouts SLIME, NEMO_RL and ROLL, or cloned
  --megatron V      only the tests, in an environment of its own with that megatron-core
  --megatron CHECKOUT
                    only the tests, with the Megatron of a Megatron-LM checkout, such as main
TEXT
}

# Prints constraints.txt without the pins that another Megatron cannot share: its own,
# and transformers', whose version Megatron limits, with what transformers limits in turn.
constraints_for() {
    grep -Eiv '^(megatron-core|transformers|tokenizers|huggingface[-_]hub|hf-xet)==' constraints.txt
    printf 'megatron-core==%s.*\n' "$1"
}

# Makes sure that there is a Chromium for the tests to drive.
find_chromium() {
    if command -v chromium || command -v chromium-browser || command -v google-chrome; then
        return
    fi >/dev/null
    say "installing Chromium"
    local -a as_root=()
    ((EUID == 0)) || as_root=(sudo)
    "${as_root[@]}" apt-get install -y --no-install-recommends chromium >&2 ||
        die "Chromium is missing and apt-get could not install it"
}

# use_checkout CHECKOUT: has tests import its megatron instead of the installed wheel's.
use_checkout() {
    # Through a folder with nothing else in it: the checkout has a package `tests`, too.
    mkdir -p .cache/checkout
    ln -sfn "$1/megatron" .cache/checkout/megatron
    export PYTHONPATH=$PWD/.cache/checkout${PYTHONPATH:+:$PYTHONPATH} MEGATRON_LM_PATH=$1
}

# make_bridge_environment VENV: makes .venv-bridge, which has what VENV has and Megatron-Bridge.
make_bridge_environment() {
    local packages
    [[ -d .venv-bridge ]] || python -m venv --without-pip .venv-bridge
    packages=$(.venv-bridge/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$packages/base.pth"
    [[ -d $packages/megatron/bridge ]] ||
        python -m pip install --quiet --no-deps --target "$packages" 'megatron-bridge==0.6.2'
}

# make_clients VENV: makes .cache/clients/NAME for each NAME.txt in tests/clients, which has what VENV
# has and what that file lists, and checkouts; says in a file `missing` why one is not there.
make_clients() {
    local list name folder packages
    for list in tests/clients/*.txt; do
        name=$(basename "$list" .txt)
        folder=.cache/clients/$name
        if cmp -s "$list" "$folder/installed"; then
            continue
        fi
        say "making $folder"
        rm -rf "$folder"
        python -m venv --without-pip "$folder"
        packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$packages/base.pth"
        if python -m pip install --quiet --no-deps --no-compile --target "$packages" -r "$list"; then
            cp "$list" "$folder/installed"
        else
            printf '%s could not be installed: see what pip says\n' "$name" >"$folder/missing"
        fi
    done
    find_checkout slime SLIME THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
    find_checkout nemo_rl NEMO_RL NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909
    find_checkout roll ROLL alibaba/ROLL 8eb27cc2dc34c4d1310b169d9b86d339004d811a
}

# find_checkout NAME VARIABLE REPOSITORY COMMIT: has .cache/clients/NAME-checkout be the checkout that
# VARIABLE names, or that commit from GitHub, where it is not there.
find_checkout() {
    local folder=.cache/clients/$1-checkout given=${!2-}
    if [[ -n $given ]]; then
        [[ -d $given/$1 ]] || die "$2=$given is no checkout of $1"
        rm -rf "$folder"
        ln -s "$(cd "$given" && pwd)" "$folder"
    elif [[ ! -d $folder/$1 ]]; then
        rm -rf "$folder"
        if ! { git clone --quiet --filter=blob:none --no-checkout "https://github.com/$3.git" "$folder" &&
            git -C "$folder" checkout --quiet "$4"; }; then
            say "$1 could not be cloned, and its tests are skipped: set $2 to a checkout"
            rm -rf "$folder"
        fi
    fi
}

# check NAME COMMAND...: runs it, and remembers the name if it fails.
failed=()
check() {
    say "== $1"
    "${@:2}" || failed+=("$1")
}

processors=$(nproc)
markers='not slow and not gpu and not browser' extras=megatron,search,draw,sweep,playground,dev
megatron='' checkout='' bridge='' pytest_args=() clients=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --slow) markers=${markers/not slow and /} && shift ;;
        --browser) extras+=,browser markers=${markers/ and not browser/} && shift ;;
        --bridge) bridge=yes && shift ;;
        --clients) clients=(tests/clients/test_{verl,bridge_hf,examples,callers,torch_pipelining}.py) && shift ;;
        --nightly) clients=(tests/clients) && shift ;;
        --megatron)
            if [[ -d ${2-}/megatron/core ]]; then
                checkout=$(cd "$2" && pwd)
            elif [[ ${2-} =~ ^0\.[0-9]+$ ]]; then
                megatron=$2
            else
                die "--megatron needs a version such as 0.18, or a checkout of Megatron-LM"
            fi
            shift 2
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
make_environment "$venv" "$extras" "$constraints"
if [[ $extras == *browser* ]]; then
    find_chromium
fi
PATH=$PWD/$venv/bin:$PATH
if [[ -n $checkout ]]; then
    use_checkout "$checkout"
fi
# Estimates and split layers are tested on Transformer Engine's Python, which needs no GPU; the
# tests find it in .cache and see no other cache.
XDG_CACHE_HOME=$PWD/.cache python -m megatron_vshape rehearse --fetch >/dev/null

# Bridge is beside the environment, not in it: its dependencies would bring other versions of ours.
if [[ -n $bridge ]]; then
    make_bridge_environment "$venv"
    exec .venv-bridge/bin/python -m pytest tests/bridge "${pytest_args[@]}"
fi

if ((${#clients[@]})); then
    make_clients "$venv"
    exec python -m pytest "${clients[@]}" -s "${pytest_args[@]}"
fi

if ((${#pytest_args[@]} == 0)); then
    # The planner's inner loops are compiled once, beside the checks, not by every pytest process,
    # and what Megatron imports with them.
    {
        python tests/compile_planner.py
        python -c 'import megatron.training.training' 2>/dev/null
    } &
fi
if [[ -z $megatron$checkout ]]; then
    check ruff ruff check .
    check shellcheck shellcheck --external-sources scripts/*.sh scripts/slurm/*.sbatch \
        patches/*.sh .ci/run
    check mypy mypy
    check import-linter lint-imports
fi
if ((${#pytest_args[@]})); then
    check pytest python -m pytest -m "$markers" "${pytest_args[@]}"
else
    # Most run side by side, one more at a time than there are processors: ranks wait for each
    # other. Those of training come first, for they take longest, and the core's, in many small
    # files, last, so that all end together. What injects faults, times passes, waits for a clock
    # and races threads has the processors to itself.
    alone=(tests/faults tests/gpu tests/runtime/test_{measure,p2p,races}.py)
    ends=(tests/mcore tests/core) between=()
    elsewhere=(tests/bridge tests/clients) # with --bridge and --clients: libraries of their own
    for folder in tests/*/; do
        [[ " ${alone[*]} ${ends[*]} ${elsewhere[*]} " == *" ${folder%/} "* ]] ||
            between+=("${folder%/}")
    done
    wait
    check 'pytest: side by side' python -m pytest -n "$((processors < 3 ? processors + 1 : 4))" \
        --dist loadfile --no-loadscope-reorder -m "$markers" "${alone[@]/#/--ignore=}" \
        tests/mcore "${between[@]}" tests/core
    check 'pytest: alone' python -m pytest -m "$markers" "${alone[@]}"
fi
((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
