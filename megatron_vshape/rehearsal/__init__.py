"""Whole training steps of Megatron without memory and arithmetic: what each rank would allocate."""
