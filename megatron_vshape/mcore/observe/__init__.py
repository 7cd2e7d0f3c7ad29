"""Measurements, logs and reports of a run."""
