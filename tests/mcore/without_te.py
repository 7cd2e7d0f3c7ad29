"""What Megatron's main needs of the tests where Transformer Engine is missing."""

import importlib


def let_predict() -> None:
    """Have multi-token prediction be built: what asks for a class of Transformer Engine's fails."""
    module = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    name = "is_inference_column_parallel_linear"  # not in releases up to 0.19
    if hasattr(module, name):
        setattr(module, name, lambda linear: False)
