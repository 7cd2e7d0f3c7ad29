"""Integration with Megatron-Core and with Megatron-LM's trainer."""
