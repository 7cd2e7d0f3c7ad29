"""Everything that knows Megatron."""

import os

from megatron_vshape.environment import missing

# Here, because torch reads some of it as it is imported, which every module of this layer does.
os.environ.update(missing(os.environ))
