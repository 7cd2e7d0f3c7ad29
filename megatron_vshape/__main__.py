"""Run `megatron-vshape` as `python -m megatron_vshape`."""

import sys

from megatron_vshape.cli.main import main

sys.exit(main())
