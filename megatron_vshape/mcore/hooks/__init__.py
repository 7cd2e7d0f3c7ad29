"""Where this package takes the place of Megatron's own, and how that is undone."""
