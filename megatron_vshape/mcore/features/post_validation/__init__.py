"""Optimizer post-validation: start the next step before the last one is validated."""
