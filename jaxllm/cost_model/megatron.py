"""Megatron-LM on the same mesh: memory by its published rule, and its step. A second column for users of Megatron-LM.

The rule (Fujii, Watanabe and Yokota 2024, "Accelerating Large Language Model Training with 4D Parallelism and Memory
Consumption Estimator", arXiv:2411.06465): if the formula below gives at most SAFE_SHARE of the GPU's memory for stage 0, the
run does not run out of memory. By the paper's abstract this held in 454 runs of Llamas on A100s and H100s. A table of the
first author, weeks older, has such runs without a result: PUBLISHED_RUNS. The formula follows the first author's public code, a
fork of Megatron-LM, tools/memory_estimate, December 2024.

The bytes are Megatron's, not jaxllm's: bfloat16 weights, float32 gradients accumulated in place, AdamW with float32 master
weights, 1F1B, sequence parallelism, flash attention, and no recomputation. parallel.remat, the compute dtype and documents are
ignored.

D width, F feed-forward width, N query heads, K key-value heads, H head size, L layers, V vocabulary, S sequence length, b
sequences of a microbatch, M microbatches; p, d, c and t ranks of pipe, data, context and tensor.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxllm.config import Config, ModelConfig
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.flops import layer_parameter_count, train_flops_per_token
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.memory import MemoryEstimate, StageMemory
from jaxllm.cost_model.network import all_gather_s, all_reduce_s, reduce_scatter_s
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import FITTED, Fitted, Transfers, largest_deviation

SAFE_SHARE = 0.8
"""Share of a GPU's memory; the rest is for everything outside the formula: CUDA's context, NCCL, scratch and fragmentation."""
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes per parameter: bfloat16; float32; master weight and two moments in float32."""


class RuleRecord(NamedTuple):
    """How many runs the rule calls safe and unsafe, and how many of these have a result."""

    safe: int
    safe_and_ran: int
    unsafe: int
    unsafe_and_ran: int


PUBLISHED_RUNS: Mapping[str, RuleRecord] = MappingProxyType(
    {"a100-40gb": RuleRecord(63, 56, 36, 0), "h100-94gb": RuleRecord(98, 98, 91, 10)}
)
"""The rule on the runs of Llama 3.1 8B in the first author's table of October 2024, by benchmarks/published_rule.py. It is not
known why a run there has no result."""


def megatron_memory(config: Config) -> MemoryEstimate:
    """Bytes of one device of a resolved config's stage 0, the fullest stage without rematerialisation.

    With x = S b / (c t), a layer's matrices m = D H (2 N + 2 K) + 3 D F and its norms' 2 D
    (and biases and norms of heads, where a network has them),

        parameters   ((m + 2 D) L / p + V D) / t, and V D / t + D more where p = 1 (head, last norm)
        weights      2 x parameters
        gradients    4 x parameters
        optimizer    12 x parameters, / (d c) from ZeRO 1 on (Megatron's distributed optimizer; it does not support 2 and 3)
        activations  x (L (8 D + 4 N H + 4 K H + 8 F) + 8 D p), times 1 + (p - 1) / (p virtual_stages) if interleaved, times
                     min(1, M / p) if not
        logits       x (4 D + 4 V), in float32, where p = 1

    For H = D / N that is D (12 + 4 K / N + 8 F / D) bytes a token and layer. As in the author's code, norms are divided by t,
    L / p is not rounded, and the 8 D p for embeddings is too large; the logits of a last stage are left out. Tied embeddings
    have no second matrix.
    """
    model, parallel = config.model, config.parallel
    p, c, t = parallel.pipe, parallel.context, parallel.tensor
    D, L = model.hidden_size, model.num_layers
    parameters = L * layer_parameter_count(model) / (p * t) + model.vocab_size * D / t
    if p == 1:
        parameters += D + (0 if model.tie_embeddings else model.vocab_size * D / t)
    x = config.train.sequence_length * config.microbatch_sequences / (c * t)
    activations = x * (L * activation_bytes(model) + 8 * D * p)
    if parallel.virtual_stages > 1:
        activations *= 1 + (p - 1) / (p * parallel.virtual_stages)
    else:
        activations *= min(1, config.num_microbatches / p)
    logits = x * 4 * (D + model.vocab_size) if p == 1 else 0
    stage = stage_memory(config, 0, parameters, activations, logits)
    return MemoryEstimate(config.devices, (stage,), host_bytes=0)


def record_text() -> str:
    """What the rule got right and wrong in PUBLISHED_RUNS, in one line."""
    counts = RuleRecord(*map(sum, zip(*PUBLISHED_RUNS.values(), strict=True)))
    by_kind = ", ".join(f"{kind} {found.safe_and_ran} of {found.safe}" for kind, found in PUBLISHED_RUNS.items())
    return (
        f"Of its author's runs of Llama 3.1 8B, {counts.safe_and_ran} of {counts.safe} called safe ran ({by_kind}), and "
        f"{counts.unsafe_and_ran} of {counts.unsafe} others"
    )


def nominal_bytes(gpu: Gpu) -> int:
    """The memory of which the rule takes a share: that of the GPU, rounded to GiB.

    The author's code compares GiB with the number in the GPU's name (40, 80, 94). Rounding gives the same numbers, although the
    driver reports up to 0.4 GiB less. The name of a B200 is decimal: it has 179 GiB, not 192.
    """
    return round(gpu.memory_bytes / 2**30) * 2**30


def megatron_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Model FLOPs of forward and backward per token, as Megatron-LM logs them: the full square of attention, with the head.

    12 L D^2 ((1 + K / N + S / D) N H / D + 3 F / (2 D) + V / (2 L D)) (num_floating_point_operations in
    megatron/training/training.py; later versions take half the square). Its V is the padded vocabulary; here it is not padded.
    Windows are not counted.
    """
    full = model.model_copy(update={"sliding_window": None})
    return float(train_flops_per_token(full, sequence_length, causal=False))


def activation_bytes(model: ModelConfig) -> int:
    """Activation bytes of one token in one layer, bfloat16: inputs and outputs of both norms, query, key, value, attention's
    output, and four of the feed-forward's width (a fused SwiGLU would keep three).
    """
    return 8 * model.hidden_size + 4 * model.head_dim * (model.num_heads + model.num_kv_heads) + 8 * model.intermediate_size


def stage_memory(config: Config, stage: int, parameters: float, activations: float, logits: float) -> StageMemory:
    """Terms of a stage from its number of parameters and its bytes of activations and logits."""
    parallel = config.parallel
    shards = int(parallel.data) * parallel.context if parallel.zero else 1
    terms = {
        "weights": WEIGHT_BYTES * parameters,
        "gradients": GRADIENT_BYTES * parameters,
        "optimizer": OPTIMIZER_BYTES * parameters / shards,
        "activations": activations,
        "logits": logits,
    }
    return StageMemory(stage, {name: round(size) for name, size in terms.items()})


# ------------------------------------------------------------------------------------------------------- seconds of a step
# The parts in which the step of Megatron-LM on the same mesh differs from jaxllm's.

MASK_POWER = 3
"""Exponent of the power mean of two times that vary: of 2 to 8 the one that fits the published runs best."""


class MegatronStep(StepModel):
    """1F1B, the head on the last stage, kernels that XLA would fuse, and exchanges over data behind compute."""

    layer_kernels = 120
    hop_kernels = 24
    hidden_collectives = (2, 2)
    """Two gathers overlap with the gradient of an input, and two scatters with that of a weight."""
    backward_mlp_moves = 5

    @classmethod
    def constants(cls, config: Config, gpu: Gpu) -> Fitted:
        return FITTED

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, fitted: Fitted | None = None):
        super().__init__(config, gpu, gpus_per_host, fitted)
        # No activations are offloaded, and no state.
        self.policy, self.offload_state = policy_of("none", config.model), "none"
        # Each layer has its own tensors: none is copied into a stack or a ring.
        self.copies_residuals = False
        self.fuses_attention, self.context_method = True, "ring"
        self.key_gradient_itemsize = self.itemsize
        self.sends_by_layer, self.rings_tensor = False, False
        # 1F1B waits for each message.
        self.hides_messages = False
        # Matrices with the same input are one. Adapters were added to each.
        for names in (("query", "key", "value"), ("mlp_gate", "mlp_up")):
            columns, lengths = zip(*(self.matmuls.pop(name) for name in names), strict=True)
            self.matmuls["_".join(names)] = sum(columns), lengths[0]
            if self.frozen.issuperset(names):
                self.frozen.add("_".join(names))

    def flops_per_token(self) -> float:
        return megatron_flops_per_token(self.model, self.S)

    def recomputed(self) -> tuple[set[str], bool, bool]:
        """Only full recomputation counts: flash attention replaces Megatron's selective recomputation."""
        full = self.parallel.remat == "full"
        return (set(self.matmuls) - {"mlp_down"} if full else set()), full, full

    def gradient_sums_s(self) -> float:
        """Zero, because Megatron accumulates inside the matmul."""
        return 0.0

    def head(self) -> dict[str, float]:
        """Also reads and writes the float32 sum of the head's gradient."""
        columns = -(-self.model.vocab_size // self.t)
        return {"head": super().head()["head"] + self.M * self.moved_s(columns * self.model.hidden_size * 8)}

    def head_parts(self) -> tuple[int, float, int]:
        return self.t, 10, 1

    def norms_s(self) -> float:
        """Full recomputation repeats all memory-bound kernels."""
        return self.moves_s()[0]

    def add_pipe_reductions(self, transfers: Transfers) -> None:
        """Adds nothing: the first stage has the embedding and the last the head."""

    def vocabulary_parameters(self) -> float:
        """In a pipeline, one matrix: the first stage has the embedding and the last the head."""
        return super().vocabulary_parameters() if self.P == 1 else self.matrix_parameters()

    def add_step_data(self, transfers: Transfers, forward_s: float, backward_s: float) -> None:
        """Transfers over data x context, behind the last microbatch's backward and the first's forward; equal from ZeRO 1
        on."""
        group, links = self.data_group, self.links
        if group.size == 1:
            return
        parameters = self.stage_layers * self.layer_parameters + self.vocabulary_parameters()
        if self.parallel.zero == 0:
            transfers.add("data", all_reduce_s(4 * parameters, group, links), backward_s)
        else:
            transfers.add("data", reduce_scatter_s(4 * parameters, group, links), backward_s)
            transfers.add("data", all_gather_s(self.itemsize * parameters, group, links), forward_s)

    def add_input(self, terms: dict[str, float]) -> None:
        """Adds the time that a step waits for attention masks, which loaders make while the GPUs work. The slowest data rank
        decides: its masks take mask_jitter x largest_deviation(ranks) / sqrt(M) longer than the mean for each loader that
        shares its host, and larger microbatches even that out. Of two times that vary the longer is in the mean longer than
        both: a power mean.
        """
        fitted = self.fitted
        each_s = self.S**2 / (fitted.hopper_mask_bytes_per_s if self.is_hopper else fitted.mask_bytes_per_s)
        b, step_s = self.config.microbatch_sequences, math.fsum(terms.values())
        # The first and the last stage load, each on one of its tensor ranks.
        loaders = self.gpus_per_host / self.t * min(1, 2 / self.P)
        slowest = 1 + fitted.mask_jitter * loaders * largest_deviation(self.d * self.parallel.replica) / math.sqrt(self.M) / b
        masks_s = each_s * b * self.M * slowest
        terms["input"] = (masks_s**MASK_POWER + step_s**MASK_POWER) ** (1 / MASK_POWER) - step_s
