"""Roofline of one step of Megatron-LM on the same mesh: the parts in which it differs from jaxllm."""

from __future__ import annotations

import math

from jaxllm.config import Config
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.megatron import megatron_flops_per_token
from jaxllm.cost_model.network import all_gather_s, all_reduce_s, reduce_scatter_s
from jaxllm.cost_model.step_model import StepModel
from jaxllm.cost_model.step_parts import FITTED, Fitted, Transfers, largest_deviation

MASK_POWER = 3
"""Exponent of the power mean of two times that vary: of 2 to 8 the one that fits the published runs best."""


class MegatronStep(StepModel):
    """1F1B, the head on the last stage, kernels that XLA would fuse, and exchanges over data behind compute."""

    constants = FITTED
    layer_kernels = 120
    hop_kernels = 24
    hidden_collectives = (2, 2)
    """Two gathers overlap with the gradient of an input, and two scatters with that of a weight."""
    backward_mlp_moves = 5

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, fitted: Fitted):
        super().__init__(config, gpu, gpus_per_host, fitted)
        # No activations are offloaded, and no weights.
        self.policy, self.layers_on_host = policy_of("none", config.model), False
        self.fuses_attention, self.context_method = True, "ring"
        self.key_gradient_itemsize = self.itemsize
        self.sends_by_layer, self.rings_tensor = False, False
        # 1F1B waits for each message.
        self.hides_messages = False

    def block_matmuls(self) -> dict[str, tuple[int, int]]:
        """Matrices with the same input are one."""
        found = super().block_matmuls()
        for names in (("query", "key", "value"), ("mlp_gate", "mlp_up")):
            columns, lengths = zip(*(found.pop(name) for name in names), strict=True)
            found["_".join(names)] = sum(columns), lengths[0]
        return found

    def flops_per_token(self) -> float:
        return megatron_flops_per_token(self.model, self.S)

    def recomputed(self) -> tuple[set[str], bool, bool]:
        """Only full recomputation counts: flash attention replaces Megatron's selective recomputation."""
        full = self.parallel.remat == "full"
        return (set(self.matmuls) - {"mlp_down"} if full else set()), full, full

    def gradient_sums_s(self) -> float:
        """Zero, because Megatron accumulates inside the matmul."""
        return 0.0

    def stacks_s(self) -> float:
        """Zero: each layer has its own tensors."""
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

    def add_state_offload(self, transfers: Transfers) -> None:
        """Adds nothing: no state is offloaded."""

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
