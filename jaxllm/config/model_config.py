"""The `model` section of a config: the network's shape, and how it is computed."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jaxllm.config.errors import refuse
from jaxllm.config.model_spec import LORA_TARGETS, parameters
from jaxllm.config.types import Count, PositiveFloat, PositiveInt, Section, Switch, divisors, one_or_more

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MOST_LAYERS, MOST_PARAMETERS = 16_384, 10**15
"""A thousand times what anybody has trained. Bytes, FLOPs and positions in arrays stay within 64 bits."""


WINDOWS = {"sliding_window": None, "full_attention_every": None, "full_attention_first": 0}
"""Keys of the `model` section, with the values of a network without windows."""
VARIANTS: dict[str, Any] = {
    **{"qkv_bias": False, "qk_norm": None, "block_norms": "before", "norm_plus_one": False, "activation": "silu"},
    **{"scale_embeddings": False, "num_experts": None, "experts_per_token": None, "normalize_expert_weights": False},
    **{**WINDOWS, "local_rope_theta": None, "query_pre_attn_scalar": None, "no_rope_every": None, "vision": None},
}
"""Keys in which networks differ from Llama, with Llama's values: files of earlier versions lack these keys."""
SHAPE_KEYS = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("rope_theta", "rope_scaling", "tie_embeddings", "norm_eps"),
    *VARIANTS,
)
"""Keys of the `model` section that define the network, as opposed to how it runs."""


class RopeScaling(Section):
    """Slower rotary frequencies, for contexts longer than those that the network was trained for."""

    rope_type: Literal["llama3", "linear", "yarn"] = "llama3"
    """linear: all frequencies are divided by `factor` (Chen et al., 2023). llama3: slow ones are, fast ones are not, with a
    blend between. yarn: the same with other bounds and another blend, and larger attention scores (Peng et al., 2023)."""
    factor: PositiveFloat
    """How many times longer the context becomes."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: pairs that turn less often than this within the original context are divided."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: pairs that turn more often than this are not."""
    beta_slow: PositiveFloat = 1.0
    """yarn: as low_freq_factor."""
    beta_fast: PositiveFloat = 32.0
    """yarn: as high_freq_factor."""
    attention_factor: PositiveFloat | None = None
    """yarn: queries and keys are multiplied by it; default: 1 + ln(factor) / 10, at least 1."""
    original_max_position: PositiveInt = 8192
    """llama3 and yarn: context length before scaling. yarn needs it."""

    @model_validator(mode="after")
    def _check(self):
        of_type = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast"), "linear": ()}
        more = {"llama3": ("original_max_position",), "yarn": ("original_max_position", "attention_factor"), "linear": ()}
        has_effect = {"rope_type", "factor", *of_type[self.rope_type], *more[self.rope_type]}
        for name, field in type(self).model_fields.items():
            if name not in has_effect and getattr(self, name) != field.default:
                given = f"model.rope_scaling.{name}={getattr(self, name)}"
                raise refuse(f"{given} has no effect with rope_type={self.rope_type}: leave it out.")
        if self.rope_type == "yarn" and "original_max_position" not in self.model_fields_set:
            raise refuse("model.rope_scaling.original_max_position is missing: yarn needs the context length before scaling.")
        if self.rope_type == "yarn" and self.original_max_position <= 2 * math.pi * self.beta_slow:
            raise refuse(
                f"model.rope_scaling.original_max_position={self.original_max_position} is too short for yarn: no pair turns "
                f"beta_slow={self.beta_slow} times in it."
            )
        if bounds := of_type[self.rope_type]:
            slow, fast = (getattr(self, name) for name in bounds)
            if fast <= slow:
                given = f"model.rope_scaling.{bounds[1]}={fast}"
                raise refuse(f"{given} must be larger than {bounds[0]}={slow}: frequencies above it are not scaled.")
        return self


def rotating(no_rope_every: int | None, layers: int) -> list[bool]:
    """Whether positions rotate the queries and keys of each layer."""
    return [not no_rope_every or number % no_rope_every != 0 for number in range(1, layers + 1)]


def whole_rope_scaling(given: Mapping[str, Any]) -> dict[str, Any]:
    """A `rope_scaling` section of a file, perhaps an older one, with defaults for keys that it lacks. Nothing is checked."""
    fields = RopeScaling.model_fields
    return {**{key: field.default for key, field in fields.items() if not field.is_required()}, **given}


class LoraConfig(Section):
    """Low-rank adapters (LoRA; Hu et al., 2021): a matmul x W becomes x W + alpha / rank (x A) B. Only A and B are trained."""

    rank: PositiveInt
    alpha: PositiveFloat = 16.0
    targets: Annotated[tuple[LoraTarget, ...], BeforeValidator(one_or_more), Field(min_length=1)] = LORA_TARGETS
    """The matrices that get adapters, by their names in PEFT."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @field_validator("targets")
    @classmethod
    def _in_order(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in LORA_TARGETS if name in targets)


Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]


class VisionConfig(Section):
    """A vision tower before the network (LLaVA; Liu et al., 2023): patches of an image go through a ViT, and a projector of two
    matrices makes features of hidden_size of them, which take the places of image tokens."""

    kind: Literal["clip", "siglip"] = "clip"
    """clip: a class token is before the patches, and a norm before the layers. siglip: patches have a bias."""
    image_token_id: PositiveInt
    """The token whose places the features take, in order."""
    image_size: PositiveInt
    """Pixels on each side of an image."""
    patch_size: PositiveInt
    """Pixels on each side of a patch."""
    num_layers: PositiveInt
    used_layers: PositiveInt = Field(default_factory=lambda given: given.get("num_layers", 1))
    """Layers that are run: the features are the output of the last of them. Default: all."""
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    activation: Activation = "quick_gelu"
    norm_eps: PositiveFloat = 1e-5
    drop_first: Switch = True
    """The feature of the first position, with clip that of the class token, is left out."""
    projector_activation: Activation = "gelu"
    projector_bias: Switch = True
    channels: ClassVar[int] = 3

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Shape of an image: channels, height, width."""
        return self.channels, self.image_size, self.image_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def positions(self) -> int:
        """Positions in the tower: patches and the class token."""
        return self.patches + (self.kind == "clip")

    @property
    def tokens_per_image(self) -> int:
        return self.positions - self.drop_first

    @model_validator(mode="after")
    def _check(self):
        if (width := self.hidden_size) % self.num_heads:
            raise refuse(
                f"model.vision.hidden_size={width} is not a multiple of num_heads={self.num_heads}: change one of them."
            )
        if self.used_layers > self.num_layers:
            raise refuse(f"model.vision.used_layers={self.used_layers} is more than num_layers={self.num_layers}: use fewer.")
        if self.tokens_per_image < 1:
            raise refuse(
                f"model.vision.image_size={self.image_size} with patch_size={self.patch_size} and drop_first="
                f"{str(self.drop_first).lower()} leaves no feature of an image: make the image larger, or its patches smaller."
            )
        return self


class ModelConfig(Section):
    """The network's shape. Give `name` (a file in configs/models) or every size."""

    name: str | None = None
    """A published shape (llama-3.1-8b, smollm2-135m, ...), which the keys below override. Or a model folder, or ORG/NAME or
    ORG/NAME@REVISION of the Hugging Face Hub: it also gives, unless set otherwise, the weights (train.init_from) and the
    tokenizer for texts (data.tokenizer)."""
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)]
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt = None  # type: ignore[assignment]  # filled in from num_heads
    """Key-value heads; default: one per query head."""
    head_dim: PositiveInt = None  # type: ignore[assignment]  # filled in from hidden_size / num_heads
    """Width of one head; default: hidden_size / num_heads."""
    vocab_size: PositiveInt
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: Switch = False
    """Biases on queries, keys and values (Qwen 2)."""
    qk_norm: Literal["head", "width"] | None = None
    """RMSNorm of queries and keys before the rotation. head: of each head, with one scale for all heads (Qwen 3). width: of all
    query heads together, and of all key heads together (OLMo 2)."""
    block_norms: Literal["before", "after", "both"] = "before"
    """RMSNorms of the inputs of attention and MLP (before), of their outputs (after; OLMo 2), or of both (Gemma 3)."""
    sliding_window: PositiveInt | None = None
    """A position attends to this many positions, its own included; nothing is computed or sent for the others (Mistral 7B
    v0.1). null: to all before it."""
    full_attention_every: PositiveInt | None = None
    """With sliding_window: the last of every so many layers attends to all positions (Gemma 3: 6)."""
    full_attention_first: Count = 0
    """With sliding_window: so many layers at the start attend to all positions (max_window_layers of Qwen)."""
    local_rope_theta: PositiveFloat | None = None
    """rope_theta of the layers with a window, without rope_scaling (Gemma 3, OLMo 3); default: as all others."""
    no_rope_every: PositiveInt | None = None
    """The last of every so many layers has no rotary positions (SmolLM3: 4)."""
    query_pre_attn_scalar: PositiveInt | None = None
    """Attention scores are divided by its square root; default: head_dim."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the feed-forward's gate. gelu_tanh: GELU by its approximation with tanh (Gemma)."""
    scale_embeddings: Switch = False
    """Embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    norm_plus_one: Switch = False
    """RMSNorms multiply by 1 + scale, and scales begin at 0 (Gemma)."""
    num_experts: PositiveInt | None = None
    """Feed-forwards of each layer, each of intermediate_size, of which a router chooses for every token (docs/experts.md).
    null: one, for all tokens."""
    experts_per_token: PositiveInt | None = None
    """With num_experts: the experts to which a token is sent, those of the largest probabilities."""
    normalize_expert_weights: Switch = False
    """With num_experts: the weights of a token's experts add up to 1 (Mixtral, Qwen 3). false: they are its probabilities among
    all experts (OLMoE)."""
    balance_loss_weight: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)] = 0.01
    """With num_experts: weight, for each layer, of a loss that is 1 where each sequence uses all experts equally, and
    num_experts / experts_per_token where always the same ones (Fedus et al., 2022)."""
    router_z_loss_weight: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)] = 0.0
    """With num_experts: weight, for each layer, of the squared log-sum-exp of the router's logits (Zoph et al., 2022)."""
    vision: VisionConfig | None = None
    """A vision tower, whose features take the places of image tokens (docs/images.md)."""
    tie_embeddings: Switch = False
    """Embedding and head share one matrix."""
    norm_eps: PositiveFloat = 1e-5
    initializer_std: PositiveFloat = 0.02
    """Standard deviation of all initial matrices; those that write to the residual stream have std / sqrt(2 L)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of matmuls; bfloat16 on GPUs from Ampere on. What is always float32: docs/precision.md."""
    matmul_dtype: Literal["compute_dtype", "fp8"] = "compute_dtype"
    """Dtype of the blocks' matmuls with weights, in training. fp8 (GPUs from Ada on): E4M3 forward, E5M2 gradients
    (docs/precision.md)."""
    attention: Literal["xla", "cudnn", "cudnn_halves", "auto"] = "auto"
    """auto: cudnn on NVIDIA GPUs that support it, else xla; a run prints which. cudnn packs masked documents from Hopper on;
    before, and with cudnn_halves, it halves blocks again and again, which takes longer."""
    scan_layers: Switch | None = None
    """true: one compiled layer, in a loop. false: unrolled, which is faster and takes longer to compile. null: unrolled on GPUs
    up to 40 layers, or 16 of a stage, on meshes without virtual stages, context and tensor, without experts and frozen weights,
    unless SwiGLU's products are recomputed or offloaded, documents are masked by halves in a single microbatch or a pipeline,
    remat is none in a pipeline, or ZeRO 2 or 3 has a pipeline, FP8 or a single microbatch."""
    lora: LoraConfig | None = None
    """Train low-rank adapters beside the matrices of the blocks, and nothing else (docs/lora.md)."""

    @property
    def multiplies_fp8(self) -> bool:
        return self.matmul_dtype != "compute_dtype"

    @property
    def mlps_per_token(self) -> int:
        """Feed-forwards of a layer that each token goes through."""
        return self.experts_per_token or 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it attends to all positions before."""
        every, first = self.full_attention_every, self.full_attention_first
        is_full = (number < first or (every and (number + 1) % every == 0) for number in range(self.num_layers))
        return tuple(None if full else self.sliding_window for full in is_full)

    @property
    def _window_and_rotation(self) -> tuple[tuple[int | None, bool], ...]:
        """(window, whether positions rotate queries and keys) of each layer: its kind."""
        return tuple(zip(self.windows, rotating(self.no_rope_every, self.num_layers), strict=True))

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The window of each kind of layers."""
        return tuple(window for window, _ in dict.fromkeys(self._window_and_rotation))

    @property
    def rotates(self) -> tuple[bool, ...]:
        """Whether positions rotate the queries and keys of each kind of layers."""
        return tuple(rotates for _, rotates in dict.fromkeys(self._window_and_rotation))

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Number of each layer's kind."""
        of_layers = self._window_and_rotation
        return tuple(map(list(dict.fromkeys(of_layers)).index, of_layers))

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any):
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        heads, width = values.get("num_heads"), values.get("hidden_size")
        if values.get("num_kv_heads") is None and isinstance(heads, int):
            values["num_kv_heads"] = heads
        if values.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
            if width % heads:
                raise refuse(
                    f"model.hidden_size={width} is not a multiple of model.num_heads={heads}: "
                    f"change one of them or set model.head_dim."
                )
            values["head_dim"] = width // heads
        return values

    def _check_experts(self) -> None:
        if self.num_experts is None:
            of_experts = {"experts_per_token": None, "normalize_expert_weights": False, "router_z_loss_weight": 0.0}
            of_experts |= {"balance_loss_weight": 0.01}
            if given := next((key for key, default in of_experts.items() if getattr(self, key) != default), None):
                raise refuse(f"model.{given}={getattr(self, given)} has no effect without model.num_experts: leave it out.")
            return
        if self.experts_per_token is None or self.experts_per_token > self.num_experts:
            raise refuse(
                f"model.experts_per_token={self.experts_per_token} of model.num_experts={self.num_experts}: set it to the "
                f"number of experts of each token, 1 to {self.num_experts}."
            )
        if self.lora is not None and (on := sorted({"gate_proj", "up_proj", "down_proj"} & set(self.lora.targets))):
            raise refuse(
                f"model.lora.targets has {', '.join(on)}, and adapters of experts are not supported: set "
                f"model.lora.targets=[q_proj, k_proj, v_proj, o_proj]."
            )
        if self.multiplies_fp8:
            raise refuse("model.matmul_dtype=fp8 is not supported with model.num_experts: set it to compute_dtype.")

    @model_validator(mode="after")
    def _check(self):
        self._check_experts()
        if self.num_heads % self.num_kv_heads:
            raise refuse(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}: "
                f"use one of {list(divisors(self.num_heads))} key-value heads."
            )
        if self.vision is not None and (token := self.vision.image_token_id) >= self.vocab_size:
            raise refuse(
                f"model.vision.image_token_id={token} is not below model.vocab_size={self.vocab_size}: change one of them."
            )
        count = sum(spec.size * (self.num_layers if spec.in_layer else 1) for spec in parameters(self))
        if count > MOST_PARAMETERS:
            raise refuse(
                f"The model has {count:.1e} parameters, and at most {MOST_PARAMETERS:.0e} are supported: make "
                f"model.hidden_size, intermediate_size, num_heads, head_dim, vocab_size or num_layers smaller."
            )
        of_windows = {"full_attention_every": "null", "full_attention_first": 0, "local_rope_theta": "null"}
        if self.sliding_window is None and (given := [key for key in of_windows if getattr(self, key)]):
            fix = " and ".join(f"model.{key}={of_windows[key]}" for key in given)
            raise refuse(f"model.{given[0]}={getattr(self, given[0])} has no effect without model.sliding_window: set {fix}.")
        if self.sliding_window is not None and not any(self.windows):
            raise refuse(
                f"model.sliding_window={self.sliding_window} is on none of {self.num_layers} layers with full_attention_every="
                f"{self.full_attention_every} and full_attention_first={self.full_attention_first}: change these, or set "
                f"model.sliding_window=null."
            )
        if self.no_rope_every is not None and self.no_rope_every > self.num_layers:
            raise refuse(f"model.no_rope_every={self.no_rope_every} is on none of {self.num_layers} layers: set it to null.")
        if (H := self.head_dim) % 2:
            raise refuse(f"model.head_dim={H} is odd, and rotary embeddings rotate pairs: make it {H + 1}.")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and (base := self.rope_theta) <= 1:
            raise refuse(f"model.rope_theta={base} must be above 1 with rope_type=yarn: later pairs turn more slowly.")
        return self
