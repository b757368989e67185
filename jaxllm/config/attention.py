"""What a kind of GPU can compute, and what computes attention there, as far as the config tells."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from jaxllm.config.checks import causal_block_length, effective_windows
from jaxllm.config.config import Config
from jaxllm.config.errors import ConfigError
from jaxllm.config.model_config import ModelConfig
from jaxllm.config.model_spec import cached, has_experts
from jaxllm.config.types import EXPERT_UNIT

# ------------------------------------------------------------------------------------------------------------- capability

Capability = tuple[int, int] | None
"""CUDA compute capability; None: not a GPU, or unknown."""
AMPERE, HOPPER = (8, 0), (9, 0)
FIRST_WITH = {"bfloat16": AMPERE, "fp8": (8, 9)}
"""The first compute capability whose tensor cores multiply a dtype (CUDA programming guide, compute capabilities). Before
Ampere XLA converts bfloat16 to float32 for each matmul: not faster than float32, and with copies that no estimate counts, so it
is refused there."""
GENERATION = {"bfloat16": "Ampere", "fp8": "Ada, Hopper"}


def why_not_cudnn(model: ModelConfig, capability: Capability, name: str) -> str | None:
    """The reason cuDNN attention cannot run this model on a GPU of this name, or None. Unknown capabilities are Ampere or
    later."""
    if capability is not None and capability < AMPERE:
        return f"it needs Ampere (compute capability 8.0) or newer and {name} has {_text(capability)}"
    if model.compute_dtype != "bfloat16":
        return f"it computes in bfloat16 and model.compute_dtype is {model.compute_dtype}"
    # Of cuDNN's backward pass (cuDNN documentation, Attention, support matrix of 9.18).
    widest = 256 if capability is not None and capability[0] == 9 else 128
    if model.head_dim % 8 or model.head_dim > widest:
        return f"it takes head sizes that are multiples of 8 up to {widest} here and model.head_dim is {model.head_dim}"
    return None


def require_runs(model: ModelConfig, capability: Capability, name: str) -> None:
    """Raises ConfigError if a GPU of this name cannot multiply the dtypes of a model, or run the attention that it names."""
    for key, fix in (("compute_dtype", "float32"), ("matmul_dtype", "compute_dtype")):
        dtype = getattr(model, key)
        needed = FIRST_WITH.get(dtype)
        if needed is not None and capability is not None and capability < needed:
            raise ConfigError(
                f"model.{key}={dtype} needs an NVIDIA GPU of {GENERATION[dtype]} or later (compute capability "
                f"{_text(needed)}), and {name} has {_text(capability)}: set model.{key}={fix}."
            )
    if model.attention.startswith("cudnn") and (reason := why_not_cudnn(model, capability, name)):
        raise no_cudnn(model, reason)


def require_trains(config: Config, capability: Capability, name: str, tensor: int | None = None) -> None:
    """Raises ConfigError as require_runs, or if a GPU of this name has no kernels for the step of a model with experts.
    tensor: ranks; default: the config's."""
    require_runs(config.model, capability, name)
    if reason := why_no_experts(config.model, tensor or config.parallel.tensor, capability, name):
        raise ConfigError(f"model.num_experts={config.model.num_experts} cannot be trained there: {reason}.")


def why_no_experts(model: ModelConfig, tensor: int, capability: Capability, name: str) -> str | None:
    """Why a GPU cannot train a model's experts (model/grouped_matmul.py), and what to change; None if it can, or for a CPU."""
    if not has_experts(model) or capability is None:
        return None
    D, F = model.hidden_size, model.intermediate_size
    if capability != HOPPER:
        return f"their kernels are for NVIDIA Hopper GPUs, of compute capability 9.0, and {name} has {_text(capability)}"
    if model.compute_dtype != "bfloat16":
        return f"their kernels do not multiply {model.compute_dtype}; set model.compute_dtype=bfloat16"
    if D % EXPERT_UNIT:
        return f"their kernels need a multiple of {EXPERT_UNIT}; change model.hidden_size={D}"
    if F // tensor % EXPERT_UNIT:
        return (
            f"their kernels need a multiple of {EXPERT_UNIT} on each tensor rank; change model.intermediate_size={F} or "
            f"parallel.tensor={tensor}"
        )
    return None


def no_cudnn(model: ModelConfig, reason: str) -> ConfigError:
    """The error for a config that names cuDNN attention where it cannot run."""
    return ConfigError(f"model.attention={model.attention} cannot run here, because {reason}: set model.attention=auto or xla.")


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


# -------------------------------------------------------------------------------------------------------------- attention

FORWARD_SLOTS, BACKWARD_SLOTS = 64, 4
"""Documents that one call of cuDNN takes for each piece of a sequence that is as long as its longest one. For each of them it
has a log-sum-exp of that length, and backward a float32 gradient of the queries: dQ_accum in cudnn-frontend's
scaled_dot_product_flash_attention.h, where XLA gives no smaller size. That is 0.5 GiB for 8,192 tokens of an 8B model with 4 of
them, and 8 GiB with 64."""
SHORTER_DOCUMENTS = "shorter_documents"
"""Name scope of all its calls but the first, which have no work where each sequence is one document."""
TOKENS_PER_DOCUMENT = 128
"""Least mean length of the documents of a sequence for which attention is compiled if nothing else is known. Chosen, not
measured: web pages have several times as many. A run counts the documents of its data."""


@cached
def window_shares(model: ModelConfig, sequence_length: int) -> Mapping[int | None, float]:
    """Effective window, None for all positions -> share of the layers."""
    windows = effective_windows(model.windows, sequence_length)
    return MappingProxyType({window: count / len(windows) for window, count in Counter(windows).items()})


def branch_shares(model: ModelConfig, sequence_length: int) -> tuple[float, ...]:
    """Share of the layers that take each branch of a conditional around attention; () if layers do not differ in it."""
    shares = window_shares(model, sequence_length).values()
    return tuple(shares) if len(shares) > 1 else ()


def chunks_in_reach(window: int, length: int, context: int) -> int:
    """How many of 2 x `context` chunks of `length` a chunk of queries sees before its own, at most."""
    return min(2 * context - 1, -(-(window - 1) // length))


def first_seen(window: int, length: int, distance: int) -> int:
    """The first key of a chunk of `length` that is seen from `distance` chunks behind."""
    return max(0, distance * length - window + 1)


def takes_cudnn(model: ModelConfig, capability: Capability = HOPPER) -> bool:
    """Whether attention uses cuDNN on a GPU of this capability. model/attention.py also asks whether it is installed."""
    return model.attention != "xla" and why_not_cudnn(model, capability, "") is None


def packed_documents(config: Config, capability: Capability = HOPPER) -> int | None:
    """Documents of a sequence for which attention is compiled, where cuDNN packs them (model/cudnn_attention.py). None: no
    documents are masked, or by halves, or by plain XLA.

    By halves it is on GPUs before Hopper; where lengths do not divide, so that many documents would share a call; where cuDNN's
    32 bits do not tell where a document starts; and in deterministic runs, whose backward pass may have a square of scores for
    each document (by cudnn-frontend's source; not tried).
    """
    model, parallel = config.model, config.parallel
    if not config.data.mask_documents or not takes_cudnn(model, capability) or model.attention == "cudnn_halves":
        return None
    if capability is None or capability < HOPPER or config.run.deterministic:
        return None
    tokens = config.microbatch_sequences * config.train.sequence_length // parallel.context
    if tokens * model.num_heads // parallel.tensor * model.head_dim >= 2**31:
        return None
    most = most_documents(config)
    length = causal_block_length(config.train.sequence_length, parallel.context)
    fits = all(most_in_a_piece(most, length, slots) <= slots for slots in (FORWARD_SLOTS, BACKWARD_SLOTS))
    return most if fits else None


def documents_by_length(most: int, length: int, slots: int) -> list[tuple[int, int]]:
    """(longest document, documents for each piece of that length) of the calls that take any `most` documents of `length`
    tokens. Each call but the last has those of more than longest / slots tokens: fewer than slots for each piece."""
    calls, longest = [], length
    while most > slots * (length // longest) and longest % slots == 0:
        calls.append((longest, slots))
        longest //= slots
    # With one document a piece JAX would not pass on where it starts.
    return [*calls, (longest, max(2, -(-most // (length // longest))))]


def most_in_a_piece(most: int, length: int, slots: int) -> int:
    return max(count for _, count in documents_by_length(most, length, slots))


def most_documents(config: Config) -> int:
    """data.max_documents; by default one for TOKENS_PER_DOCUMENT tokens, rounded up to a power of four, which is how the number
    of cuDNN's calls grows."""
    return config.data.max_documents or power_of_four(config.train.sequence_length // TOKENS_PER_DOCUMENT)


def power_of_four(least: int) -> int:
    """The first power of four, from 4 on, that is not below."""
    return 4 ** max(1, ((least - 1).bit_length() + 1) // 2)
