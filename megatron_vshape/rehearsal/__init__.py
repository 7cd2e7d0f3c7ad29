"""Dry runs of Megatron's training steps in fake tensors, to estimate memory and time per rank."""
