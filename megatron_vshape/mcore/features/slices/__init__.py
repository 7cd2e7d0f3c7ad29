"""Sequence slices: a microbatch runs in several slices of its sequence."""
