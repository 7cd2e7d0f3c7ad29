"""The command line `megatron-vshape`; the one place that prints."""
