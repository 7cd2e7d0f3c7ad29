"""Data model: passes, stages and placements, schedules and timelines, costs, and files."""
