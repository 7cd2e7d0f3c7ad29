"""Run a Program over torch.distributed; knows torch, knows nothing of Megatron."""
