"""Parameters and model FLOPs of a shape, in closed form.

A multiply and an add are two FLOPs. Only matmuls count, not norms, rotary angles, softmax or the optimizer; what
rematerialisation computes twice is counted once (MFU, not HFU; Chowdhery et al. 2022, "PaLM", appendix B).

D width, F feed-forward width, N query heads, K key-value heads, H head size, L layers, V vocabulary, S sequence length.
"""

from jaxllm.config import ATTENTION_RESULTS, Config, ModelConfig
from jaxllm.plan.activations import policy_of


def layer_matmul_parameters(model: ModelConfig) -> int:
    """D H (2 N + 2 K) for queries, keys, values and output, 3 D F for the gated feed-forward."""
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    return attention + 3 * model.hidden_size * model.intermediate_size


def parameter_count(model: ModelConfig) -> int:
    """All parameters, without the padding a mesh may add; a tied embedding and head count once.

    L (D H (2 N + 2 K) + 3 D F + 2 D) + D + V D (2 V D untied): two norms a layer and one at the end.
    """
    layer = layer_matmul_parameters(model) + 2 * model.hidden_size
    vocabulary_matrices = 1 if model.tie_embeddings else 2
    return model.num_layers * layer + model.hidden_size + vocabulary_matrices * model.vocab_size * model.hidden_size


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply every token: L (D H (2 N + 2 K) + 3 D F) + V D.

    The V D is the head, tied or not; looking up an embedding is no matmul.
    """
    return model.num_layers * layer_matmul_parameters(model) + model.vocab_size * model.hidden_size


def attention_flops_per_token(model: ModelConfig, sequence_length: int, causal: bool) -> int:
    """FLOPs per token of scores and weighted values, all layers, forward only: 4 S N H L; causal 2 S N H L.

    Causal takes half the square, as published figures do; with its diagonal it is (S + 1) / (2 S) of it.
    Packed documents are not taken into account: a token is billed for the whole sequence.
    """
    full_square = 4 * sequence_length * model.num_heads * model.head_dim * model.num_layers
    return full_square // 2 if causal else full_square


def train_flops_per_token(model: ModelConfig, sequence_length: int, causal: bool = True) -> int:
    """Model FLOPs of forward and backward per token: 6 x matmul_parameters + 3 x attention_flops_per_token.

    The backward does twice the forward's work: one matmul for each of a matmul's two inputs.
    """
    return 6 * matmul_parameters(model) + 3 * attention_flops_per_token(model, sequence_length, causal)


def mfu(
    tokens_per_s_per_device: float, model: ModelConfig, sequence_length: int, peak_flops: float, causal: bool = True
) -> float:
    """Model FLOPs utilisation, as a fraction of `peak_flops` (FLOP/s: the dense peak of the compute dtype)."""
    return tokens_per_s_per_device * train_flops_per_token(model, sequence_length, causal) / peak_flops


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
