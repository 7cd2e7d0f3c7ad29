"""The paper in plain Python; imports neither torch nor Megatron."""
