#!/usr/bin/env python3
"""Measure an image encoder in layers of its language model: X of `--pipeline-encoder-layers X`.

    python benchmarks/encoder_ratio.py [--hidden 4096] [--pixels 1008] [--tokens 4096] [--images 1]

It runs the encoder of Qwen3-VL-8B, and one and three language layers, from Hugging Face's
transformers, in bf16 on a GPU (fp32 on a CPU). A microbatch has `--images` square images of
`--pixels` and `--tokens` tokens. X is the ratio of the forwards; the ratio of forwards and
backwards shows whether X describes the backward, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

PATCH, MERGED, WARM_UP, RUNS = 16, 2, 3, 7


def config_of(hidden: int, layers: int) -> Qwen3VLConfig:
    """Return the config of Qwen3-VL-8B with another width and number of language layers."""
    text = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "head_dim": 128,
        "vocab_size": 1024,
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision)


def measure(run: Callable[[], Tensor], backward: bool) -> float:
    """Return the median seconds of a forward, and of its backward if requested."""
    seconds = []
    for index in range(WARM_UP + RUNS):
        synchronize()
        start = time.perf_counter()
        output = run()
        if backward:
            output.sum().backward()
        synchronize()
        if index >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=4096, help="width of a language layer")
    parser.add_argument("--pixels", type=int, default=1008, help="height and width of an image")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a microbatch")
    parser.add_argument("--images", type=int, default=1, help="images of a microbatch")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    settings = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {"dtype": torch.float32}
    torch.manual_seed(1)
    side = options.pixels // PATCH // MERGED * MERGED
    grid = torch.tensor([[1, side, side]] * options.images, device=settings.get("device"))
    model = Qwen3VLForConditionalGeneration(config_of(options.hidden, 3)).to(**settings).model
    pixels = torch.randn(options.images * side**2, 3 * 2 * PATCH**2, **settings)
    embeddings = torch.randn(1, options.tokens, options.hidden, **settings).requires_grad_()
    layers = model.language_model.layers

    def encode() -> Tensor:
        return model.visual(pixels, grid_thw=grid).pooler_output

    def run_layers(number: int) -> Tensor:
        model.language_model.layers = layers[:number]
        return model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    for name, backward in (("forward", False), ("forward and backward", True)):
        encoder_s = measure(encode, backward)
        one_s, three_s = (measure(partial(run_layers, number), backward) for number in (1, 3))
        layer_s = (three_s - one_s) / 2
        ratio = f"{encoder_s / layer_s:.2f} layers"
        print(f"{name}: encoder {1e3 * encoder_s:.2f} ms, layer {1e3 * layer_s:.2f} ms: {ratio}")


if __name__ == "__main__":
    main()
