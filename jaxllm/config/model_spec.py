"""The network's parameters, each declared once. No JAX.

    for spec in parameters(config.model):
        spec.path, spec.dims, spec.shape, spec.hugging_face

The modules in model/ make their arrays from this table. Sharding, counts of parameters and FLOPs, memory, the matmuls of the
step-time model, weight decay, the names in parallel.remat, and Hugging Face's names and layouts are read from it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LAYERS, EXPERTS, ROUTES, TOWER_LAYERS = "layers.", "experts", "routes", "tower_layers"
"""Paths of the layer stack begin with the first. Such a parameter is declared for one layer. The others are dims."""
OF_IMAGES = "vision.", "projector."
"""Where paths of a vision tower begin, and of what follows it."""

Shape: TypeAlias = Any
"""A ModelConfig. It cannot be imported here, because types.py reads names from the table."""


@dataclass(frozen=True)
class ParameterSpec:
    path: str
    dims: tuple[str, ...]
    """Name of each dim. Sharding follows from the names (mesh/sharding.py)."""
    shape: tuple[int, ...]
    initial: Literal["normal", "residual", "ones", "zeros", "lora"]
    """Initial values: normal with model.initializer_std, divided by sqrt(2 L) for matrices that write to the residual stream,
    of which 2 L add up (GPT-2); or all the same; or those of PEFT's lora_A."""
    hugging_face: str
    """Name of Hugging Face's tensor; in the layer stack with {} for the number of the layer, then for that of the expert."""
    inputs: int
    """How many leading dims, after `counted`, a matmul in a block sums over: Hugging Face stores the matrix transposed, with
    these as columns. 0: not a block's matrix; both have the same order of dims."""
    output: str
    """Name of the tensor that this matmul makes; '' if there is none."""
    used: float = 1.0
    """Share of its numbers that a token is multiplied by: of experts, those that the token is sent to."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def in_layer(self) -> bool:
        return self.path.startswith(LAYERS)

    @property
    def of_experts(self) -> bool:
        """Whether each expert has its own: the first dim counts them."""
        return self.dims[0] == EXPERTS

    @property
    def counted(self) -> int:
        """Leading dims that count experts, or the layers of a vision tower."""
        return int(self.dims[0] in (EXPERTS, TOWER_LAYERS))

    @property
    def target(self) -> str:
        """PEFT's name of a layer's matrix, such as q_proj."""
        return self.hugging_face.split(".")[-2]

    @property
    def is_lora(self) -> bool:
        return LORA_RANK in self.dims

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies hidden states or is looked up: weight decay is for these, and ZeRO may pad them."""
        return self.inputs > 0 or "vocab" in self.dims

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Row:
    path: str
    letters: str
    """Dims, a letter each. A bar ends those that a matmul sums over."""
    hugging_face: str
    output: str = ""
    initial: Literal["normal", "residual", "norm", "ones", "zeros"] = "normal"
    """norm: what leaves the size of normalised tensors."""
    when: Callable[[Shape], bool] = lambda model: True


_DIMS = {
    **{"V": ("vocab", "vocab_size"), "D": ("embed", "hidden_size"), "F": ("mlp", "intermediate_size")},
    **{"N": ("heads", "num_heads"), "K": ("kv_heads", "num_kv_heads"), "H": ("head_dim", "head_dim")},
    **{"E": (EXPERTS, "num_experts"), "R": (ROUTES, "num_experts"), "P": ("projector", "hidden_size")},
    **{"l": (TOWER_LAYERS, "num_layers"), "d": ("tower_embed", "hidden_size"), "f": ("tower_mlp", "intermediate_size")},
    **{"n": ("tower_heads", "num_heads"), "h": ("tower_head_dim", "head_dim"), "t": ("tower_positions", "positions")},
    **{"c": ("channels", "channels"), "x": ("patch_rows", "patch_size"), "y": ("patch_columns", "patch_size")},
}
"""Letter -> dim, and the key of the model section, for small letters of model.vision, with its size."""
_VIT, _VIT_LAYER, _PROJECTOR = "vision_tower.", "vision_tower.encoder.layers.{}.", "multi_modal_projector."
_LAYER, _ATTENTION, _MLP = "model.layers.{}.", "model.layers.{}.self_attn.", "model.layers.{}.mlp."


def _has(key: str, *values: str | None) -> Callable[[Shape], bool]:
    return lambda model: getattr(model, key) in values


def has_experts(model: Shape) -> bool:
    """Whether a router sends each token to some of many feed-forwards."""
    return model.num_experts is not None


def norms_after(model: Shape) -> bool:
    """Whether the outputs of attention and MLP are normalised before they are added."""
    return model.block_norms != "before"


def _norm(path: str, letters: str, hugging_face: str, when: Callable[[Shape], bool]) -> _Row:
    return _Row(f"{LAYERS}{path}.scale", letters, hugging_face + ".weight", initial="norm", when=when)


def _biased(path: str, letters: str, hugging_face: str, when: Callable[[Shape], bool]) -> tuple[_Row, _Row]:
    """A matrix of a vision tower or a norm's scale, and its bias."""
    inputs, bar, outputs = letters.rpartition("|")
    counted = "l" if bar and inputs.startswith("l") else ""
    weight = _Row(path, letters, hugging_face + ".weight", initial="normal" if bar else "ones", when=when)
    return weight, _Row(f"{path}_bias", counted + outputs, hugging_face + ".bias", initial="zeros", when=when)


def _tower_has(key: str, *values: Any) -> Callable[[Shape], bool]:
    return lambda model: model.vision is not None and getattr(model.vision, key) in values


_any_tower, _clip, _siglip = (_tower_has("kind", *kinds) for kinds in (("clip", "siglip"), ("clip",), ("siglip",)))
_projector_bias = _tower_has("projector_bias", True)


# Random numbers are drawn in this order.
_TABLE = (
    _Row("embedding", "VD", "model.embed_tokens.weight"),
    _norm("attention_norm", "D", _LAYER + "input_layernorm", _has("block_norms", "before", "both")),
    _Row("layers.attention.query", "D|NH", _ATTENTION + "q_proj.weight", "query"),
    _Row("layers.attention.key", "D|KH", _ATTENTION + "k_proj.weight", "key"),
    _Row("layers.attention.value", "D|KH", _ATTENTION + "v_proj.weight", "value"),
    *(
        _Row(f"layers.attention.{key}_bias", dims, f"{_ATTENTION}{key[0]}_proj.bias", "", "zeros", lambda model: model.qkv_bias)
        for key, dims in (("query", "NH"), ("key", "KH"), ("value", "KH"))
    ),
    *(
        _norm(f"attention.{name}_norm", dims, f"{_ATTENTION}{name[0]}_norm", _has("qk_norm", kind))
        for kind, *both in (("head", "H", "H"), ("width", "NH", "KH"))
        for name, dims in zip(("query", "key"), both, strict=True)
    ),
    _Row("layers.attention.out", "NH|D", _ATTENTION + "o_proj.weight", "attention_out", "residual"),
    _norm("attention_post_norm", "D", _LAYER + "post_attention_layernorm", norms_after),
    _norm("mlp_norm", "D", _LAYER + "post_attention_layernorm", _has("block_norms", "before")),
    _norm("mlp_norm", "D", _LAYER + "pre_feedforward_layernorm", _has("block_norms", "both")),
    _Row("layers.mlp.gate", "D|F", _MLP + "gate_proj.weight", "mlp_gate", when=_has("num_experts", None)),
    _Row("layers.mlp.up", "D|F", _MLP + "up_proj.weight", "mlp_up", when=_has("num_experts", None)),
    _Row("layers.mlp.down", "F|D", _MLP + "down_proj.weight", "mlp_down", "residual", _has("num_experts", None)),
    _Row("layers.mlp.router", "D|R", _MLP + "gate.weight", "", when=has_experts),
    _Row("layers.mlp.gate", "ED|F", _MLP + "experts.{}.gate_proj.weight", "mlp_gate", when=has_experts),
    _Row("layers.mlp.up", "ED|F", _MLP + "experts.{}.up_proj.weight", "mlp_up", when=has_experts),
    _Row("layers.mlp.down", "EF|D", _MLP + "experts.{}.down_proj.weight", "mlp_down", "residual", has_experts),
    _norm("mlp_post_norm", "D", _LAYER + "post_feedforward_layernorm", norms_after),
    _Row("final_norm.scale", "D", "model.norm.weight", initial="norm"),
    _Row("head", "VD", "lm_head.weight", when=lambda model: not model.tie_embeddings),
    _Row("vision.class_token", "d", _VIT + "embeddings.class_embedding", when=_clip),
    _Row("vision.patch", "cxy|d", _VIT + "embeddings.patch_embedding.weight", when=_any_tower),
    _Row("vision.patch_bias", "d", _VIT + "embeddings.patch_embedding.bias", "", "zeros", _siglip),
    _Row("vision.position", "td", _VIT + "embeddings.position_embedding.weight", when=_any_tower),
    *_biased("vision.norm_before", "d", _VIT + "pre_layrnorm", _clip),
    *_biased("vision.blocks.attention_norm", "ld", _VIT_LAYER + "layer_norm1", _any_tower),
    *_biased("vision.blocks.query", "ld|nh", _VIT_LAYER + "self_attn.q_proj", _any_tower),
    *_biased("vision.blocks.key", "ld|nh", _VIT_LAYER + "self_attn.k_proj", _any_tower),
    *_biased("vision.blocks.value", "ld|nh", _VIT_LAYER + "self_attn.v_proj", _any_tower),
    *_biased("vision.blocks.out", "lnh|d", _VIT_LAYER + "self_attn.out_proj", _any_tower),
    *_biased("vision.blocks.mlp_norm", "ld", _VIT_LAYER + "layer_norm2", _any_tower),
    *_biased("vision.blocks.up", "ld|f", _VIT_LAYER + "mlp.fc1", _any_tower),
    *_biased("vision.blocks.down", "lf|d", _VIT_LAYER + "mlp.fc2", _any_tower),
    *_biased("vision.norm_after", "d", _VIT + "post_layernorm", _any_tower),
    _Row("projector.first", "d|P", _PROJECTOR + "linear_1.weight", when=_any_tower),
    _Row("projector.first_bias", "P", _PROJECTOR + "linear_1.bias", "", "zeros", _projector_bias),
    _Row("projector.second", "P|D", _PROJECTOR + "linear_2.weight", when=_any_tower),
    _Row("projector.second_bias", "D", _PROJECTOR + "linear_2.bias", "", "zeros", _projector_bias),
)
LORA_TARGETS: tuple[Any, ...] = tuple(dict.fromkeys(row.hugging_face.split(".")[-2] for row in _TABLE if row.output))
"""PEFT's names of a layer's matrices."""
MATMUL_OUTPUTS = tuple(dict.fromkeys(row.output for row in _TABLE if row.output))
"""Names of the results of a block's matmuls, in order of computation."""
LORA_RANK = "lora_rank"
LORA_A, LORA_B = "_lora_a", "_lora_b"
"""Ends of the names of LoRA's matrices, after the name of the matrix whose product they add to."""
PEFT_PREFIX = "base_model.model."
"""What PEFT writes before Hugging Face's name of a tensor."""


def cached(function: F) -> F:
    """functools.lru_cache. Type checkers do not know that a frozen model of pydantic is hashable."""
    return cast(Any, lru_cache(maxsize=1024)(function))


@cached
def parameters(model: Shape) -> tuple[ParameterSpec, ...]:
    """All parameters of a network."""
    sizes: dict[str, Any] = {x: getattr(model.vision if x.islower() else model, key, None) for x, (_, key) in _DIMS.items()}
    specs = [
        ParameterSpec(
            row.path,
            tuple(_DIMS[letter][0] for letter in row.letters if letter != "|"),
            tuple(sizes[letter] for letter in row.letters if letter != "|"),
            ("zeros" if model.norm_plus_one else "ones") if row.initial == "norm" else row.initial,
            row.hugging_face,
            max(0, row.letters.find("|") - row.letters.startswith(("E", "l"))),
            row.output,
            model.experts_per_token / model.num_experts if row.letters.startswith("E") else 1.0,
        )
        for row in _TABLE
        if row.when(model)
    ]
    if model.lora is not None:
        for spec in [spec for spec in specs if spec.output and spec.target in model.lora.targets]:
            specs += _lora(spec, model.lora.rank)
    return tuple(specs)


def _lora(spec: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    """LoRA's A and B of a matrix: x W + alpha / rank (x A) B (Hu et al., 2021)."""
    n, theirs = spec.inputs, PEFT_PREFIX + spec.hugging_face.removesuffix("weight")
    dims, shape = (*spec.dims[:n], LORA_RANK, *spec.dims[n:]), (*spec.shape[:n], rank, *spec.shape[n:])
    return (
        ParameterSpec(spec.path + LORA_A, dims[: n + 1], shape[: n + 1], "lora", theirs + "lora_A.weight", n, ""),
        ParameterSpec(spec.path + LORA_B, dims[n:], shape[n:], "zeros", theirs + "lora_B.weight", 1, ""),
    )


@cached
def layer_parameters(model: Shape) -> tuple[ParameterSpec, ...]:
    """Those of one layer."""
    return tuple(spec for spec in parameters(model) if spec.in_layer)


@cached
def layer_matmuls(model: Shape) -> tuple[ParameterSpec, ...]:
    """The matrices of one layer."""
    return tuple(spec for spec in layer_parameters(model) if spec.output)


def parameter_count(model: Shape, frozen: frozenset[str] = frozenset()) -> int:
    """All parameters but those of the paths `frozen`, without the padding a mesh may add; a tied embedding and head count
    once."""
    sizes = {spec.path: spec.size * (model.num_layers if spec.in_layer else 1) for spec in parameters(model)}
    return sum(size for path, size in sizes.items() if path not in frozen)
