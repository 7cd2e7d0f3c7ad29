"""Figures and traces of simulated and measured timelines."""
