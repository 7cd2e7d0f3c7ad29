"""`python -m megatron_vshape` is `megatron-vshape`."""

import sys

from megatron_vshape.cli.main import main

sys.exit(main())
