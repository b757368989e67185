"""The config that tests of the memory estimate start from, and the tensors that it counts."""

import math

from jaxllm.config import load_config
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.layer_backward import facts, tensor_counts

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


def working_set(step, moment="feed_forward"):
    """Size -> number of its tensors that are live while a layer runs backward."""
    known = frozenset(name for name, holds in facts(step).items() if holds)
    return dict(tensor_counts(known)[moment]["working_set"])


def layers_of_weights(step):
    return working_set(step)["weights"]
