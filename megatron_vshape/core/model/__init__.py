"""What there is: passes, stages and their devices, schedules and timelines, costs, files."""
