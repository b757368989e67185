"""Parameters and model FLOPs of a shape, in closed form.

A multiply and an add are two FLOPs. Only matmuls count; norms, rotary angles, softmax and the optimizer do not. Work repeated
by rematerialisation counts once (MFU, not HFU; Chowdhery et al. 2022, "PaLM", appendix B).

D width, F feed-forward width, N query heads, K key-value heads, H head size, L layers, V vocabulary, S sequence length.
"""

from jaxllm.config import Config, ModelConfig
from jaxllm.config.attention import window_shares
from jaxllm.config.model_spec import ParameterSpec, has_experts, layer_parameters, parameter_count, parameters
from jaxllm.config.types import ITEMSIZE


def layer_matmul_parameters(model: ModelConfig) -> int:
    """Parameters of one layer's matrices that a token is multiplied by: D H (2 N + 2 K) for queries, keys, values and output,
    3 D F for the gated feed-forward. With experts 3 D F for each one that the token is sent to, and D E for the router."""
    return round(sum(spec.used * spec.size for spec in layer_parameters(model) if spec.inputs and not spec.is_lora))


def layer_parameter_count(model: ModelConfig) -> int:
    """The same with norms and biases: D H (2 N + 2 K) + 3 D F + 2 D for a Llama."""
    return sum(spec.size for spec in layer_parameters(model))


def parameter_words(model: ModelConfig) -> str:
    """'124.4M parameters', and of a mixture also how many a token is multiplied by or looks up."""
    used = sum(spec.used * spec.size * (model.num_layers if spec.in_layer else 1) for spec in parameters(model))
    for_token = f", {used / 1e6:,.1f}M of them for a token" if has_experts(model) else ""
    return f"{parameter_count(model) / 1e6:,.1f}M parameters{for_token}"


def trained_matrices(config: Config) -> list[ParameterSpec]:
    """One layer's matrices that are not frozen, adapters among them."""
    frozen = config.frozen
    return [spec for spec in layer_parameters(config.model) if spec.inputs and spec.path not in frozen]


def moments_per_parameter(config: Config) -> float:
    """Float32 numbers of the optimizer's state for each trained parameter, in the mean."""
    in_matrices, elsewhere = config.optimizer.numbers
    sizes = [spec.size for spec in trained_matrices(config)]
    share = config.model.num_layers * sum(sizes) / max(parameter_count(config.model, config.frozen), 1)
    return elsewhere + (in_matrices - elsewhere) * share


def state_bytes(config: Config) -> int:
    """Bytes of the trained weights and of the optimizer's state, all float32, and of the frozen weights."""
    trained = parameter_count(config.model, config.frozen)
    frozen = parameter_count(config.model) - trained
    return round(4 * trained * (1 + moments_per_parameter(config)) + ITEMSIZE[config.model.compute_dtype] * frozen)


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply every token: L (D H (2 N + 2 K) + 3 D F) + V D.

    The V D is the head, tied or not; an embedding lookup is not a matmul.
    """
    return model.num_layers * layer_matmul_parameters(model) + model.vocab_size * model.hidden_size


def attention_flops_per_token(model: ModelConfig, sequence_length: int, causal: bool) -> int:
    """FLOPs per token of scores and weighted values, all layers, forward only: causal 2 S N H L, else twice that.

    Causal attention counts half the square, as published figures do; the exact share with the diagonal is (S + 1) / (2 S). Of a
    sliding window of W positions it counts 4 (W - W^2 / (2 S)) N H L. Packed documents are ignored: every token counts for the
    complete sequence.
    """
    shares = window_shares(model, sequence_length)
    pairs = sum(share * causal_pairs(sequence_length, window) for window, share in shares.items())
    flops = round(4 * pairs / sequence_length * model.num_heads * model.head_dim * model.num_layers)
    return flops if causal else 2 * flops


def causal_pairs(length: float, window: float | None) -> float:
    """Pairs of a query and a key that it sees, of a causal block of `length` positions; the diagonal counts half."""
    if window is None or window >= length:
        return length**2 / 2
    return length * window - window**2 / 2


def train_flops_per_token(
    model: ModelConfig, sequence_length: int, causal: bool = True, frozen: frozenset[str] = frozenset()
) -> int:
    """Model FLOPs of forward and backward per token: 6 x matmul_parameters + 3 x attention_flops_per_token.

    The backward pass does twice the forward's work: one matmul for each of a matmul's two inputs. Those of the paths `frozen`
    have no gradient, and take a third less; LoRA's matrices are added.
    """
    head = "embedding" if model.tie_embeddings else "head"
    sizes = {spec.path: model.num_layers * round(spec.used * spec.size) for spec in layer_parameters(model) if spec.inputs}
    sizes[head] = model.vocab_size * model.hidden_size
    adapters = model.num_layers * sum(spec.size for spec in layer_parameters(model) if spec.is_lora)
    fewer = 2 * sum(size for path, size in sizes.items() if path in frozen)
    attention = 3 * attention_flops_per_token(model, sequence_length, causal)
    return 6 * (matmul_parameters(model) + adapters) - fewer + attention


def mfu(
    rate: float, model: ModelConfig, sequence_length: int, peak_flops: float, frozen: frozenset[str] = frozenset()
) -> float:
    """Model FLOPs utilisation with causal attention, as a fraction of `peak_flops` (FLOP/s: the dense peak of the compute
    dtype). `rate` is in tokens/s for each device."""
    return rate * train_flops_per_token(model, sequence_length, frozen=frozen) / peak_flops
