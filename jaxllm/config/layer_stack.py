"""Whether the layers of a step are one compiled layer in a loop, or each a part of the program with arrays of its own."""

from __future__ import annotations

from jaxllm.config.config import Config
from jaxllm.config.remat_policy import policy_of

MOST_UNROLLED = 40
"""Layers that `model.scan_layers: null` unrolls on GPUs. XLA compiles 10 layers of Llama 3 8B in 4 s, 32 in 13 s and 80 of 70B
in 50 s (two cores, no autotuning; a scan takes 4 s)."""


def has_own_layers(config: Config, on_gpu: bool = True) -> bool:
    """Whether each layer of a resolved config has its own arrays in the step, so that its matmuls add to float32 sums.

    Layers that are sharded (ZeRO 2 and 3), offloaded or in a pipeline go through a loop in any case. `null` unrolls on GPUs up
    to MOST_UNROLLED layers, and not beside tensor or context ranks, where XLA's scheduler holds gradients of several layers
    back: 8B on eight H100s takes 46.7 GiB instead of 36.3 at tensor 2 with `full`, and 8% less time by the kernel account.
    """
    model, parallel = config.model, config.parallel
    ranks = int(parallel.data) * parallel.context
    if parallel.pipe > 1 or (parallel.zero >= 2 and ranks > 1) or policy_of(parallel.remat).offload:
        return False
    if model.scan_layers is not None:
        return not model.scan_layers
    return on_gpu and model.num_layers <= MOST_UNROLLED and parallel.tensor == parallel.context == 1
