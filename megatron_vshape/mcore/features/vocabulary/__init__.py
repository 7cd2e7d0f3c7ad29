"""Vocabulary parallelism: all pipeline ranks share the embedding and the output layer."""
