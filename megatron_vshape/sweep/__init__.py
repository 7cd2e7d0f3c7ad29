"""The sweep: which way to train a model on a cluster is best, predicted and then measured."""
