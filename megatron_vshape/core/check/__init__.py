"""Analysis of schedules: simulation, verification, deadlocks, memory and lower bounds."""
