#!/usr/bin/env bash
# Draws every schedule of the catalogue and writes a page that shows them.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
usage: bash scripts/gallery.sh [FOLDER] [--devices D] [--microbatches M]
       bash scripts/gallery.sh --readme

  FOLDER      where the figures and the page, README.md, go (docs/gallery)
  --readme    the figures of the project's README instead (docs/figures)
TEXT
}

case ${1-} in -h | --help) usage && exit ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
if ! (cd "$root" && "$python" -c 'import matplotlib, megatron_vshape') 2>/dev/null; then
    (cd "$root" && make_environment .venv draw constraints.txt)
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/scripts/gallery.py" "$@"
