#!/usr/bin/env bash
# Builds the documentation into site/, and fails where a link leads nowhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

# With the search, since pages show plans.
make_environment .venv-site docs,search constraints.txt
# mkdocs-material's word on the future of mkdocs is none of this site's.
NO_MKDOCS_2_WARNING=1 PYTHONPATH=$PWD .venv-site/bin/python -m mkdocs build --quiet --strict
say "the site begins at site/index.html"
