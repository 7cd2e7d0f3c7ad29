"""Placement of stages on ranks, and the layers of each stage."""
