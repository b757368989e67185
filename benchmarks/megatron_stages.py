"""Memory of every pipeline stage by the published rule for Megatron-LM: for memory_accuracy.py, whose draw it keeps fixed."""

from __future__ import annotations

from jaxllm.config import Config
from jaxllm.cost_model.flops import layer_matmul_parameters, layer_parameter_count
from jaxllm.cost_model.megatron import activation_bytes, stage_memory
from jaxllm.cost_model.memory import MemoryEstimate


def megatron_memory_by_stage(config: Config) -> MemoryEstimate:
    """The published rule (jaxllm/cost_model/megatron.py) for every stage, with rules of the same kind for the parts that the
    published formula leaves out.

    Stage i holds min(p - i, M) microbatches of its layers (gpipe: M; interleaved over v virtual stages: min((v - 1) p +
    2 (p - i - 1) + 1, M v) chunks of L / (p v) layers). The first stage also holds the embedding and token ids in int32, the
    last the head and its logits. Norms are replicated over tensor ranks, and
    here biases too. remat=full keeps 2 S b D / (c t) of each layer, and
    all of one layer.

    Args:
      config: resolved.
    """
    model, parallel = config.model, config.parallel
    p, c, t, chunks = parallel.pipe, parallel.context, parallel.tensor, parallel.virtual_stages
    D, M, layers = model.hidden_size, config.num_microbatches, model.num_layers / p
    tokens = config.train.sequence_length * config.microbatch_sequences / c
    layer, vocabulary = tokens / t * activation_bytes(model), model.vocab_size * D / t
    vectors = layer_parameter_count(model) - layer_matmul_parameters(model)
    matrices, stages = model.num_layers * layer_matmul_parameters(model), []
    for i in range(p):
        first, last = i == 0, i == p - 1
        parameters = matrices / (p * t) + vectors * layers + first * vocabulary + last * D
        parameters += last * (0 if p == 1 and model.tie_embeddings else vocabulary)
        if chunks > 1:
            held = min((chunks - 1) * p + 2 * (p - i - 1) + 1, M * chunks) / chunks * layers
        else:
            held = (M if parallel.schedule == "gpipe" and p > 1 else min(p - i, M)) * layers
        activations = held * 2 * D * tokens / t + layer if parallel.remat == "full" else held * layer
        activations += first * 4 * tokens * min(p, M)
        logits = last * tokens / t * 4 * (D + model.vocab_size)
        stages.append(stage_memory(config, i, parameters, activations, logits))
    return MemoryEstimate(config.devices, tuple(stages), host_bytes=0)
