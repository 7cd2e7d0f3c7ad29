"""A step begun before the last one is known to stand, and checks that may come late."""
