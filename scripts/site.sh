#!/usr/bin/env bash
# Builds the documentation into site/, and fails if a link is broken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

make_environment .venv-site docs constraints.txt
# mkdocs-material prints a warning about the future of mkdocs otherwise.
NO_MKDOCS_2_WARNING=1 PYTHONPATH=$PWD .venv-site/bin/python -m mkdocs build --quiet --strict
say "the site begins at site/index.html"
