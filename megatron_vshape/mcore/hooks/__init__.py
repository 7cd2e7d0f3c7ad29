"""Replacements of Megatron's attributes: installation, state and removal."""
