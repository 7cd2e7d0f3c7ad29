"""Variable-length microbatches: their lengths, and their order in a step."""

from megatron_vshape.mcore.setup.features import Feature

FEATURE = Feature()
