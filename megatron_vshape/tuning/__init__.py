"""Sweeps: find the best way to train a model on a cluster by prediction, then by measurement."""
