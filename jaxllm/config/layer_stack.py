"""How a step runs its layers: as one compiled layer in a loop or each with arrays of its own, and when it sends them."""

from __future__ import annotations

from jaxllm.config.attention import HOPPER, Capability, packed_documents
from jaxllm.config.config import Config
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.sections import ModelConfig

MOST_UNROLLED = 40
"""Layers that `model.scan_layers: null` unrolls on GPUs. XLA compiles 16 layers in 6 s, 32 in 17 s and 80 in 39 s, and a
loop in 4 to 7 s (benchmarks/RESULTS.md, "Unrolled layers")."""


def has_own_layers(config: Config, capability: Capability = HOPPER) -> bool:
    """Whether each layer of a resolved config has its own arrays in the step, so that its matmuls add to float32 sums.

    Layers that are sharded (ZeRO 2 and 3), in a pipeline or on the host, or whose activations are, go through a loop in any
    case. `null` unrolls on GPUs up to MOST_UNROLLED layers, but

    - not where SwiGLU's products are recomputed to save memory: outside a loop XLA needs more for them, 5 to 19% of four steps
      with `full` that would be 1 to 6% faster;
    - not with documents that are not packed in a single microbatch: outside a loop over microbatches XLA makes the zeros for
      all layers' blocks of documents at once, and 1B with 8 sequences of 8,192 takes 85.2 GiB on an H200 instead of 76.7;
    - not beside tensor or context ranks, where XLA's scheduler holds gradients of several layers back: 8B on eight H100s takes
      46.7 GiB instead of 36.3 at tensor 2 with `full`, and 8% less time by the kernel account.
    """
    model, parallel = config.model, config.parallel
    ranks, policy = int(parallel.data) * parallel.context, policy_of(parallel.remat)
    if parallel.pipe > 1 or (parallel.zero >= 2 and ranks > 1) or policy.offload:
        return False
    if parallel.offload_state == "all":
        return False
    if model.scan_layers is not None:
        return not model.scan_layers
    recomputes_products = {"mlp_gate", "mlp_up"} & set(policy.recompute)
    if capability is None or model.num_layers > MOST_UNROLLED or recomputes_products:
        return False
    if config.num_microbatches == 1 and config.data.mask_documents and packed_documents(config, capability) is None:
        return False
    return parallel.tensor == parallel.context == 1


def sends_once(config: Config) -> bool:
    """Whether a step of a resolved config gathers each layer's weights and reduces its gradients once, behind the compute of
    other layers (parallel/zero.py): with ZeRO 1 and one microbatch. A step that measures the noise scale does not."""
    parallel = config.parallel
    ranks = int(parallel.data) * parallel.context
    return parallel.zero == 1 and parallel.pipe == 1 and ranks > 1 and config.num_microbatches == 1


def adds_in_matmuls(model: ModelConfig) -> bool:
    """Whether the matmuls of layers with arrays of their own add their gradients, so that products are not rounded before. In
    float32 nothing is rounded, and FP8's matmuls scale their results: there each gradient is made first."""
    return model.compute_dtype == "bfloat16" and not model.multiplies_fp8
