"""Megatron's linear layers with the weight gradient put off from B to W."""
