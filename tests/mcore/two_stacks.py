"""A plugin of the farm: the model has the class name of Megatron's T5Model."""


def start(rank: int, argument: object) -> None:
    from megatron.core.models.gpt import gpt_model

    gpt_model.GPTModel.__name__ = "T5Model"
