"""Adaptive scheduler: searches for the fastest schedule for given costs within a memory limit."""
