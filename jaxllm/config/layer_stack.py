"""How a step runs its layers: as one compiled layer in a loop or each with arrays of its own, and when it sends them."""

import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from jaxllm.config.attention import HOPPER, Capability, packed_documents
from jaxllm.config.config import Config
from jaxllm.config.model_spec import has_experts
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.types import ITEMSIZE

MOST_UNROLLED, MOST_IN_STAGE = 40, 16
"""Layers that `model.scan_layers: null` unrolls on GPUs, and of a stage. XLA compiles 16 layers in 6 s, 32 in 17 s and 80 in 39
s, and a loop in 4 to 7 s (benchmarks/RESULTS.md, "Unrolled layers"). A pipeline has each layer up to five times."""

RING_CHUNK_BYTES = 8 * 2**20
"""Smallest chunk of a sequence that `parallel.tensor_ring: null` sends in a ring. Each takes a few more kernels and copies. By
the kernel account of H100s a step of 1B, 8B and 70B is 2 to 8% faster with chunks of 8 MiB and more, as fast with 4 MiB, and
slower with less (benchmarks/RESULTS.md, "Tensor ranks in a ring")."""


@cache
def has_older_xla(jax: str = "") -> bool:
    """Whether this JAX, or that here, is older than 0.12, whose XLA transposes fewer stacks and keeps fewer products."""
    with suppress(PackageNotFoundError):
        return [*map(int, re.findall(r"\d+", jax or version("jax"))[:2])] < [0, 12]
    return False


def has_own_layers(config: Config, capability: Capability = HOPPER) -> bool:
    """Whether each layer of a resolved config has its own arrays in the step, so that its matmuls add to float32 sums, or with
    ZeRO 2 and 3 make gradients in the dtype in which ranks add them.

    Layers on the host, or whose activations are, go through a loop in any case. So do frozen weights, of which a stack needs no
    copy; experts and FP8 with ZeRO 2 and 3; and in a pipeline ZeRO 2 and 3, virtual stages, of which each tick takes another,
    experts, and remat none, which would keep an input of several matmuls once for each: 106 GiB instead of 96 for 16 layers of
    8B in four stages. `null` unrolls on GPUs up to MOST_UNROLLED layers, or MOST_IN_STAGE of a stage, but

    - not where SwiGLU's products are recomputed to save memory: outside a loop XLA needs more for them, 5 to 19% of four steps
      with `full` that would be 1 to 6% faster;
    - not with documents that are not packed, in a single microbatch or a pipeline: outside a loop over microbatches or layers
      XLA makes the zeros for all layers' blocks of documents at once, and 1B with 8 sequences of 8,192 takes 85.2 GiB on an
      H200 instead of 76.7;
    - not with ZeRO 2 and 3 in steps of a single microbatch: gradients are reduced behind too little, and 8B on eight H100s
      takes 2% more time by the kernel account; nor before JAX 0.12, whose XLA exposes three times as much as in a loop;
    - not with experts, whose gradients are made apart from their sums;
    - not beside tensor or context ranks, where XLA's scheduler holds gradients of several layers back: 8B on eight H100s takes
      46.7 GiB instead of 36.3 at tensor 2 with `full`, and 8% less time by the kernel account.
    """
    model, parallel = config.model, config.parallel
    ranks, policy = int(parallel.data) * parallel.context, policy_of(parallel.remat, model)
    if parallel.virtual_stages > 1 or policy.offload:
        return False
    is_sharded = parallel.zero >= 2 and ranks > 1
    if is_sharded and (parallel.pipe > 1 or model.multiplies_fp8 or has_experts(model)):
        return False
    if parallel.offload_state == "all" or config.frozen:
        return False
    if parallel.pipe > 1 and (policy.everything or has_experts(model)):
        return False
    if model.scan_layers is not None:
        return not model.scan_layers
    recomputes_products = {"mlp_gate", "mlp_up"} & set(policy.recompute)
    most = MOST_UNROLLED if parallel.pipe == 1 else MOST_IN_STAGE
    if capability is None or config.chunk_layers > most or recomputes_products or has_experts(model):
        return False
    if is_sharded and (has_older_xla() or config.at_largest_batch.num_microbatches == 1):
        return False
    if (config.num_microbatches == 1 or parallel.pipe > 1) and _documents_in_blocks(config, capability):
        return False
    return parallel.tensor == parallel.context == 1


def sends_once(config: Config, microbatches: int, capability: Capability = HOPPER) -> bool:
    """Whether a step of a resolved config with so many microbatches gathers each layer's weights and reduces its gradients
    once, behind the compute of other layers (parallel/zero.py): with ZeRO 0 and 1, but not

    - in a pipeline;
    - with frozen weights, which have no gradients to reduce and are not sharded at these levels;
    - with FP8 and several microbatches: XLA kept stacks of transposed weights beside those that are gathered, and 8B with
      `full` on 64 H100s took 62.4 GiB instead of 52.5 (JAX 0.10.2; not tried again since FP8 arrays have fixed layouts);
    - with documents that are not packed, in layers with arrays of their own and several microbatches: the first and the last
      microbatch are outside a loop, where XLA makes all layers' zeros at once (has_own_layers), 43% more for 1B on two A100s;
    - in a step that measures the noise scale, of which this function does not know.
    """
    parallel = config.parallel
    if parallel.zero > 1 or parallel.pipe > 1 or int(parallel.data) * parallel.context == 1 or config.frozen:
        return False
    if microbatches == 1:
        return True
    unrolls_blocks = _documents_in_blocks(config, capability) and has_own_layers(config, capability)
    return not config.model.multiplies_fp8 and not unrolls_blocks


def _documents_in_blocks(config: Config, capability: Capability) -> bool:
    """Whether documents are masked and not packed."""
    return config.data.mask_documents and packed_documents(config, capability) is None


def rings_tensor(config: Config, capability: Capability = HOPPER) -> bool:
    """Whether tensor ranks of a resolved config send chunks of a sequence behind the matmuls of other chunks
    (parallel/tensor_ring.py). `parallel.tensor_ring: null` does so for chunks of at least RING_CHUNK_BYTES, but not

    - with remat none, whose residuals in a ring the estimate counts less exactly: up to 16% too high in 33 steps;
    - before Hopper, where XLA starts transfers too late to hide them;
    - with FP8, whose scales are those of whole arrays;
    - with LoRA, whose products are added to whole sequences, and with experts, whose rows are sorted over whole sequences;
    - where layers with arrays of their own add gradients in their matmuls.
    """
    model, parallel = config.model, config.parallel
    if parallel.tensor == 1 or parallel.tensor_ring is not None:
        return parallel.tensor > 1 and bool(parallel.tensor_ring)
    if parallel.remat == "none" or (capability is not None and capability < HOPPER):
        return False
    if model.multiplies_fp8 or model.scan_layers is False or has_experts(model):
        return False
    # The ring does not know matrices without gradients.
    if config.frozen:
        return False
    positions = config.train.sequence_length // (parallel.context * parallel.tensor)
    return ITEMSIZE[model.compute_dtype] * config.microbatch_sequences * positions * model.hidden_size >= RING_CHUNK_BYTES


def host_sum_itemsize(config: Config) -> int:
    """Bytes of an element of the layers' gradient sums on the host (parallel.offload_state=all): those of a single microbatch
    are not reduced on a single rank, and stay in the compute dtype."""
    ranks = int(config.parallel.data) * config.parallel.context
    return 4 if config.num_microbatches > 1 or ranks > 1 else ITEMSIZE[config.model.compute_dtype]


def adds_in_matmuls(config: Config) -> bool:
    """Whether the matmuls of layers with arrays of their own add their gradients, so that products are not rounded before. In
    float32 nothing is rounded, and in FP8 tensor ranks add partial products: there each gradient is made first. So is that of
    the microbatch whose backward pass reduces (regions.py), where it is rounded once."""
    return config.parallel.tensor == 1 if config.model.multiplies_fp8 else config.model.compute_dtype == "bfloat16"
