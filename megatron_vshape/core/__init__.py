"""Schedules in plain Python (arXiv 2405.15362); imports neither torch nor Megatron."""
