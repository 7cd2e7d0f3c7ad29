"""Schedules from building blocks in four steps (arXiv 2405.15362)."""
