"""Everything that knows Megatron."""
