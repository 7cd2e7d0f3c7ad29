# shellcheck shell=bash
# What train.sh and test.sh share: a Python environment, made once and then left alone.

# Packages come uncompiled (see make_environment): every process would compile torch for itself.
unset PYTHONDONTWRITEBYTECODE

say() {
    printf '%s\n' "$*" >&2
}

die() {
    say "$(basename "$0"): $*"
    exit 1
}

# Succeeds if the command "$1" is a Python 3.12 that can make environments.
# A pyenv shim exists for versions that are not active too, so only running it tells.
is_python_3_12() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' \
        >/dev/null 2>&1
}

# Prints the path of a Python 3.12.
find_python() {
    local candidate
    local -a candidates=(python3.12)
    if command -v pyenv >/dev/null; then
        for candidate in "$(pyenv root)"/versions/3.12*/bin/python; do
            candidates+=("$candidate")
        done
    fi
    for candidate in "${candidates[@]}"; do
        if is_python_3_12 "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null && uv python install 3.12 >&2; then
        uv python find --no-project 3.12
        return
    fi
    die "Python 3.12 is needed and was found neither as python3.12 (with its venv module)," \
        "nor among pyenv's versions, nor through uv: install one of the three"
}

# make_environment DIR EXTRAS CONSTRAINTS: makes DIR a virtual environment with this package.
# Does nothing if it did so before for the same pyproject.toml and the same constraints.
make_environment() {
    local dir=$1 extras=$2 constraints=$3 python
    local stamp=$dir/.installed-with-${extras//,/-}
    if cat pyproject.toml "$constraints" | cmp -s - "$stamp"; then
        return
    fi
    if ! "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        say "making $dir with $python"
        "$python" -m venv --clear "$dir"
    fi
    say "installing this package with $extras into $dir (the first time several GB and minutes: torch)"
    # Python compiles what is imported then; pip would compile all of torch, for a minute.
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$constraints" --editable ".[$extras]"
    cat pyproject.toml "$constraints" >"$stamp"
}
