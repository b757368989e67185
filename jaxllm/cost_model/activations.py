"""How attention is computed, and the bytes that a block stores for its backward pass under a remat policy
(config/remat_policy.py)."""

import math
from dataclasses import dataclass

from jaxllm.config import ATTENTION_RESULTS, BLOCK_INPUT, Config
from jaxllm.config.attention import HOPPER, Capability, takes_cudnn, window_shares
from jaxllm.config.model_spec import has_experts, layer_matmuls
from jaxllm.config.remat_policy import Policy
from jaxllm.config.types import EXPERT_CHOICE, ITEMSIZE, LAST_OUTPUT

Bytes = dict[str, float]
"""Name of a tensor -> bytes."""


def is_blockwise(config: Config, capability: Capability = HOPPER) -> bool:
    """Whether attention on a GPU has ATTENTION_RESULTS to keep: cuDNN's, any over context ranks, and any with a window. Plain
    XLA on one context rank has none."""
    has_window = any(window_shares(config.model, config.train.sequence_length))
    return config.parallel.context > 1 or has_window or takes_cudnn(config.model, capability)


XLA_ROWS, MOST_SCORES = 512, 2**26
"""Queries of a tile of plain XLA attention, and its float32 scores (256 MiB), at most."""


def tile_rows(rows: int, scores_of_row: int, most_rows: int = XLA_ROWS) -> int:
    """Queries of a tile of plain XLA attention (blockwise_attention.xla_kernel): both limits hold as far as `rows` can be
    halved."""
    while rows % 2 == 0 and (rows > most_rows or rows * scores_of_row > MOST_SCORES):
        rows //= 2
    return rows


RING_MIN_ROWS = 4096


def context_method(config: Config) -> str:
    """ring or all_gather. `auto` follows a rule of thumb that is not measured: a ring step multiplies each key of the S/c keys
    that travel with S/c x N/K rows of queries, which makes 2 x that many FLOPs per byte sent. An H100's 600 TFLOP/s over 200
    GB/s of a ring over NVLink need about 1,500 rows. Below 4096 rows a hop may stay exposed, and the keys of such a short
    sequence are small enough to gather.
    """
    if config.parallel.context_method != "auto":
        return config.parallel.context_method
    rows = config.train.sequence_length // config.parallel.context * config.model.num_heads // config.model.num_kv_heads
    return "ring" if rows >= RING_MIN_ROWS else "all_gather"


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one device and in its host's memory."""

    kept: Bytes
    offloaded: Bytes


def bytes_per_token_and_layer(policy: Policy, config: Config, *, blockwise: bool) -> ActivationBytes:
    """Bytes of the named tensors of one block, per token of a sequence. The device has its share of every sequence.

    With D, F, N, K, H as in layers.py, b bytes of the compute dtype, c context and t tensor ranks: block_input, attention_out
    and mlp_down D b / (c t), as the sequence is sharded over tensor between blocks; query and attention_output N H b / (c t);
    key and value K H b / (c t), or K H b / c where t does not divide K (every rank then has all heads, see weight_rules);
    mlp_gate and mlp_up F b / (c t), for each expert of a token; attention_lse, float32, 4 N / (c t). Beside the names every
    policy keeps the choice of experts, 12 bytes for each expert of a token on every tensor rank. Where tokens travel, the slots
    of buffers are in the place of a token's experts, and 8 bytes for each of these come with them.

    Args:
      blockwise: whether attention has results to keep (is_blockwise).

    Raises:
      ValueError: the policy keeps everything, which has no closed form.
    """
    if policy.everything:
        raise ValueError("remat=none keeps what autodiff needs, which does not follow from tensor names: use another policy.")
    model, context, tensor = config.model, config.parallel.context, config.parallel.tensor
    itemsize = ITEMSIZE[model.compute_dtype]
    sizes: dict[str, float] = {BLOCK_INPUT: model.hidden_size * itemsize, "attention_lse": 4 * model.num_heads}
    for spec in layer_matmuls(model):
        replicas = tensor if "kv_heads" in spec.dims and model.num_kv_heads % tensor else 1
        sizes[spec.output] = math.prod(spec.shape[spec.inputs + spec.of_experts :]) * itemsize * replicas
        if spec.of_experts and spec.output != LAST_OUTPUT:
            sizes[spec.output] *= model.mlps_per_token * config.parallel.slots_per_row
    sizes["attention_output"] = sizes["query"]

    def of(names: tuple[str, ...]) -> Bytes:
        there = [name for name in names if blockwise or name not in ATTENTION_RESULTS]
        return {name: sizes[name] / (context * tensor) for name in there}

    of_row = 12 * config.parallel.slots_per_row + 8 * (config.parallel.expert > 1)
    choice = {EXPERT_CHOICE: of_row * model.mlps_per_token / context} if has_experts(model) else {}
    return ActivationBytes({**of(policy.keep), **choice}, of(policy.offload))
