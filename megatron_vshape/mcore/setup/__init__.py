"""From flags to the pipeline of a run: option checks, choice of the schedule and planning."""
