"""What the matmuls of a whole step execute, in closed form: what traced programs and compile reports are held against."""

from jaxllm.config import ATTENTION_RESULTS, Config
from jaxllm.plan.activations import policy_of
from jaxllm.plan.flops import layer_matmul_parameters


def step_matmul_flops(config: Config, attention: str = "xla") -> int:
    """What the matmuls of one train step execute on all devices together, counted from nothing but the config: model FLOPs, and
    what is computed twice, or for nothing.

    A layer's token takes 2 D H (2 N + 2 K) + 6 D F forward and twice that backward, a token of the head three times 2 V D: its
    gradients are made in the forward pass, where the logits are. Over that

    - the backward computes again what the remat policy keeps nowhere, but never the block's last matmul: nothing in a block
      reads its output. Attention runs once more unless its results are kept, which it must be in blocks to have;
    - attention multiplies whole squares and masks half of them, forward 4 S N H per token and layer, backward 8 S N H, or
      10 where it is in blocks, whose backward makes the scores again;
    - a pipeline's stages all work in all ticks: M V + P - 1 chunks forward and as many backward instead of M V, with
      identity layers where L is not a multiple of P V. The head alone is never worked on for nothing.

    Args:
      config: resolved.
      attention: as Parallelized.attention says: xla, xla ring or xla all_gather.

    Raises:
      ValueError: attention by a kernel whose matmuls are its own business.
    """
    kernel, _, method = attention.partition(" ")
    if kernel != "xla":
        raise ValueError(f"What {attention} multiplies is not known in closed form: count with attention=xla.")
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
    """How much of S x S attention multiplies, forward and backward: all on one rank. A rank of c has two of 2 c chunks, so that
    (2 c)^2 products of two chunks are the square. A ring's rank does 4 at home and 2 for each of c - 1 visitors, backward 3 at
    home. Having gathered, it does 2 at home and 2 c - 1 more.
    """
    if not method:
        return 1, 1
    forward, backward = {"ring": (2 * c + 2, 2 * c + 1), "all_gather": (2 * c + 1, 2 * c + 1)}[method]
    return c * forward / (2 * c) ** 2, c * backward / (2 * c) ** 2


def _recomputed(config: Config, attention_forward: float, in_blocks: bool) -> float:
    """FLOPs per token and layer that the backward repeats under the config's remat policy."""
    model, policy = config.model, policy_of(config.parallel.remat)
    if policy.everything:
        return 0
    D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
    query, key, mlp = 2 * D * model.num_heads * H, 2 * D * model.num_kv_heads * H, 2 * D * F
    matmuls = {"query": query, "key": key, "value": key, "attention_out": query, "mlp_gate": mlp, "mlp_up": mlp}
    again = sum(flops for name, flops in matmuls.items() if name in policy.recompute)
    attention_again = not in_blocks or set(ATTENTION_RESULTS) & set(policy.recompute)
    return again + (attention_forward if attention_again else 0)
