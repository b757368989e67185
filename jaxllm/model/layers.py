"""The parts of a Llama block: RMSNorm, rotary embedding, attention and SwiGLU projections.

Letters: B sequences, S positions, D model width, F feed-forward width, N query heads, K key-value heads, H head size.
Weights are cast to the activations' dtype where they are used. Norms and angles are computed in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.config.model_spec import LORA_RANK, ParameterSpec, has_experts, parameters
from jaxllm.model.adapters import lora_scale, matrix_of, multiply, without_adapter
from jaxllm.model.attention import Attend, xla_attention
from jaxllm.model.experts import Deliver, GroupedMatmul, deliver_here, expert_mlp, grouped_matmul, route


def look_up(table_VD: Float[Array, "V D"], ids_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of the embedding. The table is cast to float32, so that gradients of a frequent token are added in float32."""
    return table_VD.astype(jnp.float32)[ids_BS].astype(table_VD.dtype)


def scaled_embeddings(model: ModelConfig, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Embeddings as the first layer takes them: times sqrt(D), rounded to their dtype, if the network scales them. The map is
    its own transpose."""
    return h_BSD * jnp.asarray(math.sqrt(model.hidden_size), h_BSD.dtype) if model.scale_embeddings else h_BSD


Matmul = Callable[[str, jax.Array, jax.Array], jax.Array]
"""(einsum spec, activations, weights) -> activations: a block's matmuls against weights."""

SHARDED_SEQUENCE, FULL_SEQUENCE = ("batch", "sequence_shard", "embed"), ("batch", "sequence", "embed")
"""Dims of hidden states between the two halves of a block, and inside each half."""
LORA_ACTIVATIONS = ("batch", "sequence", LORA_RANK)
"""Dims of x A."""


@dataclass(frozen=True)
class Ops:
    """The functions that a forward pass is built with. They are chosen before it is traced."""

    attend: Attend = xla_attention
    matmul: Matmul = jnp.einsum
    look_up: Callable[[jax.Array, jax.Array], jax.Array] = look_up
    constrain: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, dims: x
    grouped_matmul: GroupedMatmul = grouped_matmul
    deliver: Deliver = deliver_here
    run_experts: Callable[..., jax.Array] = lambda function, *arrays: function(*arrays)
    """Runs a function of (x_BSD, routes, gate_EDF, up_EDF, down_EFD) on each tensor rank's part of the experts, and adds."""
    add_over_sequence: Callable[[jax.Array], jax.Array] = lambda x: x
    """Adds over the ranks that share a sequence."""
    ring: Any = None
    """Both matmuls of a half of a block with the transfers between tensor ranks in them (parallel/tensor_ring.py). If not
    `in_order`, the positions inside the half may be in any order, the same in all of its arrays. None: XLA gathers and scatters
    the sequence as `constrain` asks, around `matmul`."""

    def gather_matmul(
        self, specs: tuple[str, ...], x_BSD: jax.Array, weights: tuple[jax.Array, ...], *, in_order: bool
    ) -> tuple[jax.Array, ...]:
        """The matmuls at the start of a half of a block: x, whose sequence is sharded, times each of the weights."""
        if self.ring:
            return self.ring.gather_matmul(specs, x_BSD, weights, in_order)
        x_BSD = self.constrain(x_BSD, FULL_SEQUENCE)
        return tuple(self.multiply(spec, x_BSD, w) for spec, w in zip(specs, weights, strict=True))

    def matmul_scatter(self, spec: str, y: jax.Array, weight: jax.Array, *, in_order: bool) -> jax.Array:
        """The matmul at the end of a half of a block. The result's sequence is sharded."""
        if self.ring:
            return self.ring.matmul_scatter(spec, y, weight, in_order)
        return self.constrain(self.multiply(spec, y, weight), SHARDED_SEQUENCE)

    def multiply(self, spec: str, x: jax.Array, weight: Any) -> jax.Array:
        """x times a weight: an array, or one of those in adapters.py."""
        return multiply(self.matmul, lambda x: self.constrain(x, LORA_ACTIVATIONS), spec, x, weight)


def parameter(rngs: nnx.Rngs, model: ModelConfig, spec: ParameterSpec, zero_rows: int = 0) -> nnx.Param:
    """A float32 parameter with its initial values.

    zero_rows are added at the end of the first dim. They do not change the other values.
    """
    if spec.initial == "lora":
        # PEFT's kaiming_uniform_(a=sqrt(5)).
        bound = 1 / math.sqrt(math.prod(spec.shape[: spec.inputs]))
        value = jax.random.uniform(rngs.params(), spec.shape, jnp.float32, -bound, bound)
    elif spec.initial in ("ones", "zeros"):
        value = jnp.full(spec.shape, float(spec.initial == "ones"), jnp.float32)
    else:
        std = model.initializer_std / (math.sqrt(2 * model.num_layers) if spec.initial == "residual" else 1)
        value = std * jax.random.normal(rngs.params(), spec.shape, jnp.float32)
    if zero_rows:
        value = jnp.pad(value, [(0, zero_rows)] + [(0, 0)] * (value.ndim - 1))
    return nnx.Param(value, out_sharding=spec.dims)


def add_parameters(module: nnx.Module, model: ModelConfig, path: str, rngs: nnx.Rngs) -> None:
    """Gives `module` the parameters that are declared directly under `path` (config/model_spec.py), by their names."""
    for spec in parameters(model):
        if spec.path.rpartition(".")[0] == path:
            setattr(module, spec.name, parameter(rngs, model, spec))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the dims of the scale, which are the last ones, in float32 (Zhang and Sennrich, 2019). With
    model.norm_plus_one the factor is 1 + scale."""

    scale: nnx.Param

    def __init__(self, model: ModelConfig, path: str, *, rngs: nnx.Rngs):
        self.eps, self.plus_one = model.norm_eps, model.norm_plus_one
        add_parameters(self, model, path, rngs)

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32, scale = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        scale = 1 + scale if self.plus_one else scale
        normed = tuple(range(x.ndim - scale.ndim, x.ndim))
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=normed, keepdims=True) + self.eps)
        return (x32 * inverse_rms * jnp.expand_dims(scale, range(x.ndim - scale.ndim))).astype(x.dtype)


def rotary_frequencies(model: ModelConfig) -> np.ndarray:
    """Angle per position of each pair, float32 [H/2] (Su et al., 2021), with the scaling that is configured (RopeScaling).

    Every operation rounds as in transformers, because published weights were trained with its angles: at position p the last
    bit of a frequency counts p times. The power itself may differ in the last bit: some of torch's are not the nearest numbers.
    """
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float32) / np.float32(model.head_dim)
    # NumPy's float32 power is further from exact than torch's.
    wavelengths_of_2_pi = (model.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    frequencies = 1 / wavelengths_of_2_pi
    if (scaling := model.rope_scaling) is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.rope_type == "llama3":
        # torch divides a number by an array by multiplying with the reciprocal.
        wavelengths = (1 / frequencies) * np.float32(2 * math.pi)
        turns = scaling.original_max_position * (1 / wavelengths)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return (1 - keep) * frequencies / scaling.factor + keep * frequencies
    slow, fast = (_pair_that_turns(model, turns) for turns in (scaling.beta_slow, scaling.beta_fast))
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), model.head_dim - 1)
    pairs = np.arange(model.head_dim // 2, dtype=np.float32)
    keep = 1 - np.clip((pairs - np.float32(first)) / np.float32(last - first or 0.001), 0.0, 1.0)
    divided = 1 / (np.float32(scaling.factor) * wavelengths_of_2_pi)
    return divided * (1 - keep) + frequencies * keep


def _pair_that_turns(model: ModelConfig, turns: float) -> float:
    """The number of the pair that makes so many turns within the original context."""
    assert model.rope_scaling is not None, "scaling is configured"
    wavelength = model.rope_scaling.original_max_position / (turns * 2 * math.pi)
    return model.head_dim * math.log(wavelength) / (2 * math.log(model.rope_theta))


def attention_factor(model: ModelConfig) -> float:
    """By what YaRN multiplies queries and keys; 1 without it."""
    scaling = model.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


Rotary = tuple[Float[Array, "*kinds B S H/2"], Float[Array, "*kinds B S H/2"]]
"""(cosines, sines)"""


@jax.named_scope("rotary")
def rotary_table(model: ModelConfig, positions_BS: Int[Array, "B S"]) -> Rotary:
    """Cosine and sine of every angle times attention_factor, float32: bfloat16 would round position 257 to 256. Where layers
    have different angles, with a leading dim of their kinds."""
    of_kinds = [(_of_window(model, window), rotates) for window, rotates in zip(model.kinds, model.rotates, strict=True)]
    if model.local_rope_theta is None and len(set(model.rotates)) == 1:
        of_kinds = of_kinds[:1]
    tables = [_rotary_table(of_kind, positions_BS, rotates) for of_kind, rotates in of_kinds]
    # The barrier keeps XLA from fusing cos and sin into every layer's rotation and computing them once per head.
    return jax.lax.optimization_barrier(tables[0] if len(tables) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *tables))


def _of_window(model: ModelConfig, window: int | None) -> ModelConfig:
    """The model with the angles of the layers that have this window."""
    if window is None or model.local_rope_theta is None:
        return model
    return model.model_copy(update={"rope_theta": model.local_rope_theta, "rope_scaling": None})


def _rotary_table(model: ModelConfig, positions_BS: Int[Array, "B S"], rotates: bool) -> Rotary:
    if not rotates:
        ones = jnp.ones((*positions_BS.shape, model.head_dim // 2), jnp.float32)
        return ones, jnp.zeros_like(ones)
    angles = positions_BS.astype(jnp.float32)[..., None] * rotary_frequencies(model)[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if (factor := attention_factor(model)) != 1:
        cos, sin = cos * factor, sin * factor
    return cos, sin


@jax.named_scope("rotary")
def rotate(x_BSNH: Float[Array, "B S N H"], rotary: Rotary, factor: float = 1.0) -> Float[Array, "B S N H"]:
    """x with each pair (i, i + H/2) rotated by its angle, times `factor`. Hugging Face's weights have this order of pairs."""
    cos, sin = (table[:, :, None, None, :] for table in rotary)
    pairs = x_BSNH.astype(jnp.float32).reshape(*x_BSNH.shape[:-1], 2, -1)
    # (a, b) -> (a cos - b sin, b cos + a sin). The swap is a reversal, which fuses with the products; with a concatenation XLA
    # on CPU takes four times as long.
    turned = pairs * cos + jnp.flip(pairs, axis=-2) * jnp.concatenate([-sin, sin], axis=-2)
    turned = turned if factor == 1 else turned * factor
    return turned.reshape(x_BSNH.shape).astype(x_BSNH.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    query: nnx.Param
    key: nnx.Param
    value: nnx.Param
    out: nnx.Param
    query_bias: nnx.Param | None = None
    key_bias: nnx.Param | None = None
    value_bias: nnx.Param | None = None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None

    def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
        # Kernels of attention divide scores by sqrt(head_dim).
        self.query_factor = math.sqrt(model.head_dim / (model.query_pre_attn_scalar or model.head_dim))
        self.lora_scale = lora_scale(model)
        add_parameters(self, model, "layers.attention", rngs)
        if model.qk_norm is not None:
            self.query_norm = RMSNorm(model, "layers.attention.query_norm", rngs=rngs)
            self.key_norm = RMSNorm(model, "layers.attention.key_norm", rngs=rngs)

    @jax.named_scope("attention")
    def __call__(self, x_BSD, rotary: Rotary, segments_BS: Int[Array, "B S"] | None, ops: Ops) -> Float[Array, "B S D"]:
        dtype = x_BSD.dtype
        weights = tuple(matrix_of(self, name, dtype, self.lora_scale) for name in ("query", "key", "value"))
        specs = "BSD,DNH->BSNH", "BSD,DKH->BSKH", "BSD,DKH->BSKH"
        outputs = ops.gather_matmul(specs, x_BSD, weights, in_order=True)
        biases = (self.query_bias, self.key_bias, self.value_bias)
        q_BSNH, k_BSKH, v_BSKH = (x if bias is None else _add(x, bias) for x, bias in zip(outputs, biases, strict=True))
        q_BSNH = _positioned("query", q_BSNH, self.query_norm, rotary, self.query_factor)
        k_BSKH = _positioned("key", k_BSKH, self.key_norm, rotary)
        v_BSKH = checkpoint_name(v_BSKH, "value")
        with jax.named_scope("attend"):
            o_BSNH = ops.attend(q_BSNH, k_BSKH, v_BSKH, segments_BS)
        return ops.matmul_scatter("BSNH,NHD->BSD", o_BSNH, matrix_of(self, "out", dtype, self.lora_scale), in_order=True)


def _add(x_BSNH: Float[Array, "B S N H"], bias: nnx.Param) -> Float[Array, "B S N H"]:
    """The bias is broadcast in float32, so that its gradient is summed over tokens in float32."""
    broadcast = jnp.broadcast_to(bias[...].astype(jnp.float32)[None, None], x_BSNH.shape)
    return x_BSNH + broadcast.astype(x_BSNH.dtype)


def _positioned(
    name: str, x_BSNH: Float[Array, "B S N H"], norm: RMSNorm | None, rotary: Rotary, factor: float = 1.0
) -> Float[Array, "B S N H"]:
    """Queries or keys, normalised, rotated and multiplied by `factor`. A norm's backward pass reads its input, so that has the
    name under which remat keeps it; a rotation's reads nothing."""
    if norm is None:
        return checkpoint_name(rotate(x_BSNH, rotary, factor), name)
    return rotate(norm(checkpoint_name(x_BSNH, name)), rotary, factor)


# GELU is computed again in the backward pass: without remat, autodiff would keep two more tensors of this width in each layer
# (Gemma 3 1B with 32,768 tokens on two A100s: 92 GiB, not 81).
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.checkpoint(partial(jax.nn.gelu, approximate=True))}


Losses = dict[str, jax.Array]
"""Float32 scalars by name."""


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU with SiLU (Shazeer, 2020)."""

    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[model.activation]
        self.lora_scale = lora_scale(model)
        add_parameters(self, model, "layers.mlp", rngs)

    @jax.named_scope("mlp")
    def __call__(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Float[Array, "B S D"], Losses]:
        dtype, wide = x_BSD.dtype, ("batch", "sequence", "mlp")
        # Without these constraints XLA shards the backward pass by sequence too, and gathers the weights over tensor for it.
        weights = tuple(matrix_of(self, name, dtype, self.lora_scale) for name in ("gate", "up"))
        outputs = ops.gather_matmul(("BSD,DF->BSF",) * 2, x_BSD, weights, in_order=False)
        gate_BSF, up_BSF = (
            checkpoint_name(ops.constrain(x_BSF, wide), name)
            for x_BSF, name in zip(outputs, ("mlp_gate", "mlp_up"), strict=True)
        )
        product_BSF = ops.constrain(self.activation(gate_BSF) * up_BSF, wide)
        down_FD = matrix_of(self, "down", dtype, self.lora_scale)
        return ops.matmul_scatter("BSF,FD->BSD", product_BSF, down_FD, in_order=False), {}


class Experts(nnx.Module):
    """Many gated feed-forwards, of which a router sends each token to a few (experts.py)."""

    router: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param

    def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
        self.model = model
        add_parameters(self, model, "layers.mlp", rngs)

    @jax.named_scope("mlp")
    def __call__(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Float[Array, "B S D"], Losses]:
        router_DE = without_adapter(self, "router", jnp.float32)
        routes, losses = route(self.model, x_BSD, router_DE, ops.add_over_sequence)
        weights = (without_adapter(self, name, x_BSD.dtype) for name in ("gate", "up", "down"))
        mlp = partial(expert_mlp, ACTIVATIONS[self.model.activation], ops.grouped_matmul, ops.deliver)
        return ops.run_experts(mlp, x_BSD, routes, *weights), losses


class Block(nnx.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)). model.block_norms says whether the norms are there, or after each half:
    h + norm(attention(h)), or both.

    Between the two halves, and between blocks, the sequence dim is sharded over the tensor axis. It is gathered before each
    half, and the half's partial sums are reduce-scattered, in Ops.gather_matmul and matmul_scatter.

    Returns (h, losses): losses of the block's own by name, float32 sums over tokens, which the objective adds like those of the
    targets. They are those of a router.
    """

    attention_norm: RMSNorm | None = None
    attention_post_norm: RMSNorm | None = None
    mlp_norm: RMSNorm | None = None
    mlp_post_norm: RMSNorm | None = None

    def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(model, rngs=rngs)
        self.mlp = Experts(model, rngs=rngs) if has_experts(model) else GatedMLP(model, rngs=rngs)
        if model.block_norms != "after":
            self.attention_norm = RMSNorm(model, "layers.attention_norm", rngs=rngs)
            self.mlp_norm = RMSNorm(model, "layers.mlp_norm", rngs=rngs)
        if model.block_norms != "before":
            self.attention_post_norm = RMSNorm(model, "layers.attention_post_norm", rngs=rngs)
            self.mlp_post_norm = RMSNorm(model, "layers.mlp_post_norm", rngs=rngs)

    def __call__(
        self, h_BSD, rotary: Rotary, segments_BS: Int[Array, "B S"] | None, ops: Ops
    ) -> tuple[Float[Array, "B S D"], Losses]:
        x_BSD = ops.constrain(_normed(h_BSD, self.attention_norm), SHARDED_SEQUENCE)
        update_BSD = checkpoint_name(self.attention(x_BSD, rotary, segments_BS, ops), "attention_out")
        update_BSD = _normed(update_BSD, self.attention_post_norm)
        with jax.named_scope("residual"):
            h_BSD = h_BSD + update_BSD
        x_BSD = ops.constrain(_normed(h_BSD, self.mlp_norm), SHARDED_SEQUENCE)
        update_BSD, losses = self.mlp(x_BSD, ops)
        update_BSD = _normed(checkpoint_name(update_BSD, "mlp_down"), self.mlp_post_norm)
        with jax.named_scope("residual"):
            return h_BSD + update_BSD, losses


def _normed(x_BSD: Float[Array, "B S D"], norm: RMSNorm | None) -> Float[Array, "B S D"]:
    return x_BSD if norm is None else norm(x_BSD)
