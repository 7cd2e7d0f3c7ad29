"""Run programs over torch.distributed; independent of Megatron."""
