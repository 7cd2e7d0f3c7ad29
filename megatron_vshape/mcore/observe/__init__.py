"""What is measured, logged and counted of a run."""
