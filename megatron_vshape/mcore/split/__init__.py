"""Linear layers whose weight gradients run in W instead of B."""
