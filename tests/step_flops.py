"""Closed form of the matmul FLOPs of a complete step, for comparison with traced programs and compile reports."""

from jaxllm.config import ATTENTION_RESULTS, Config
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.flops import layer_matmul_parameters


def step_matmul_flops(config: Config, attention: str = "xla") -> int:
    """Matmul FLOPs of one train step on all devices together, from the config alone: model FLOPs, plus recomputation and
    wasted work.

    A token costs 2 D H (2 N + 2 K) + 6 D F per layer forward and twice that backward. In the head it costs three times 2 V D:
    its gradients are computed in the forward pass, where the logits are. In addition

    - the backward recomputes what the remat policy does not keep, except the block's last matmul, whose output nothing in the
      block reads. Attention runs again unless its results are kept, which blockwise attention requires;
    - attention multiplies complete squares and masks half of them: forward 4 S N H per token and layer, backward 8 S N H, or
      10 S N H for blockwise attention, whose backward recomputes the scores;
    - the stages of a pipeline work in all ticks: M V + P - 1 chunks forward and as many backward instead of M V, including
      identity layers if L is not a multiple of P V. Only the head does no wasted work.

    Args:
      config: resolved.
      attention: the value of Parallelized.attention: xla, xla ring or xla all_gather.

    Raises:
      ValueError: the attention kernel does its own matmuls.
    """
    kernel, _, method = attention.partition(" ")
    if kernel != "xla":
        raise ValueError(f"The FLOPs of {attention} have no closed form: count with attention=xla.")
    model, parallel = config.model, config.parallel
    P, V, S, M = parallel.pipe, parallel.virtual_stages, config.train.sequence_length, config.num_microbatches
    tokens = config.train.global_batch_sequences // M * S
    layers_run = tokens * config.chunk_layers * P * (M * V + P - 1)

    scores = 2 * S * model.num_heads * model.head_dim
    share_forward, share_backward = _share_of_square(method, parallel.context)
    attention_forward = 2 * scores * share_forward
    attention_backward = (5 if method else 4) * scores * share_backward
    weights = 2 * layer_matmul_parameters(model)
    again = _recomputed(config, attention_forward, in_blocks=bool(method))
    layer = 3 * weights + attention_forward + attention_backward + again
    head_rows = -(-model.vocab_size // (P * parallel.tensor)) * P * parallel.tensor
    return round(layers_run * layer) + M * tokens * 3 * 2 * head_rows * model.hidden_size


def _share_of_square(method: str, c: int) -> tuple[float, float]:
    """Share of S x S that attention multiplies, forward and backward: all of it on one rank. Each of c ranks has two of 2 c
    chunks, so (2 c)^2 chunk products are the square. A rank of a ring computes 4 of its own and 2 for each of c - 1 visiting
    blocks, and 3 of its own in the backward. With all_gather it computes 2 of its own and 2 c - 1 more.
    """
    if not method:
        return 1, 1
    forward, backward = {"ring": (2 * c + 2, 2 * c + 1), "all_gather": (2 * c + 1, 2 * c + 1)}[method]
    return c * forward / (2 * c) ** 2, c * backward / (2 * c) ** 2


def _recomputed(config: Config, attention_forward: float, in_blocks: bool) -> float:
    """FLOPs per token and layer that the backward repeats under the config's remat policy."""
    model, policy = config.model, policy_of(config.parallel.remat, config.model)
    if policy.everything:
        return 0
    D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
    query, key, mlp = 2 * D * model.num_heads * H, 2 * D * model.num_kv_heads * H, 2 * D * F
    matmuls = {"query": query, "key": key, "value": key, "attention_out": query, "mlp_gate": mlp, "mlp_up": mlp}
    again = sum(flops for name, flops in matmuls.items() if name in policy.recompute)
    attention_again = not in_blocks or set(ATTENTION_RESULTS) & set(policy.recompute)
    return again + (attention_forward if attention_again else 0)
