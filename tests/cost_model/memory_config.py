"""The config that tests of the memory estimate start from."""

import math

from jaxllm.config import load_config
from jaxllm.cost_model.hardware import GPUS

MODEL = {
    "num_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 1001,
}

A100 = GPUS["a100-80gb"]


def config(model=MODEL, **sections):
    train = {"steps": 1, "sequence_length": 2048, "global_batch_sequences": 64, "microbatch_sequences": 1}
    recipe = {"model": model, "train": {**train, **sections.pop("train", {})}, **sections}
    found = load_config(recipe)
    return found.resolve(
        math.prod([int(found.parallel.data), *(getattr(found.parallel, a) for a in ("pipe", "context", "tensor"))])
    )
