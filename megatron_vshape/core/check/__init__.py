"""What is true of a schedule: its times, what it holds, that it can run, and how good it is."""
