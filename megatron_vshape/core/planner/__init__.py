"""What is best: the adaptive scheduler, for measured costs within a memory limit."""
