"""The playground: an interactive web UI for schedules, and its small server."""
