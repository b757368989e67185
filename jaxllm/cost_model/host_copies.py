"""Copies between a GPU and its host's memory in one step, in seconds: activations, and state (docs/remat.md).

The GPUs of a host copy at the same time and share its memory's bandwidth (hardware.host_copy_bytes_per_s). The forward pass
sends activations to the host only, and the backward pass reads them back only; with offload_state=all both directions are busy
at once.

A doubt: XLA moves rows with kernels that take multiprocessors from the compute that hides them (docs/remat.md). By how much
that slows the compute is not measured, and nothing is counted for it.
"""

from __future__ import annotations

from functools import cached_property
from math import fsum as sum  # As in step_parts.py.

from jaxllm.config import Config
from jaxllm.config.layer_stack import host_sum_itemsize
from jaxllm.config.types import MASTER_ON_HOST
from jaxllm.cost_model.activations import ActivationBytes, bytes_per_token_and_layer
from jaxllm.cost_model.flops import moments_per_parameter
from jaxllm.cost_model.hardware import Gpu, host_copy_bytes_per_s
from jaxllm.cost_model.layer_compute import LayerCompute
from jaxllm.cost_model.step_parts import Fitted, Transfers


class HostCopies(LayerCompute):
    """Adds the copies to and from the host to a layer's compute."""

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, fitted: Fitted):
        super().__init__(config, gpu, gpus_per_host, fitted)
        self.layers_on_host = self.parallel.offload_state == "all"
        self.one_way = host_copy_bytes_per_s(gpu, self.gpus_per_host, both_ways=False)
        self.both_ways = host_copy_bytes_per_s(gpu, self.gpus_per_host, both_ways=True)
        """Bytes per second in one direction."""
        self.free_s = (0.0, 0.0)
        """Time of one tick that hides activations on the host's link, forward and backward: of compute, or of a longer transfer
        over another link, less that of state on the same link. tick() sets it."""

    @cached_property
    def bytes_per_token(self) -> ActivationBytes:
        """What the policy keeps and offloads of a layer; the policy names tensors (not `none`)."""
        return bytes_per_token_and_layer(self.policy, self.model, context=self.c, tensor=self.t, blockwise=self.is_blockwise)

    def offloaded_bytes(self) -> float:
        """Bytes offloaded to the host per layer, microbatch and rank."""
        return self.rows * self.c * sum(self.bytes_per_token.offloaded.values()) if self.policy.offload else 0.0

    @property
    def activations_out_bytes_per_s(self) -> float:
        """The bandwidth of activations on their way to the host, with `all` beside weights on their way in."""
        return self.both_ways if self.layers_on_host else self.one_way

    def add_host(
        self,
        behind_forward: dict[str, float],
        behind_backward: dict[str, float],
        backward: Transfers,
        compute_s: tuple[float, float],
    ) -> None:
        """Adds a tick's copies to the transfers behind its forward and backward compute, compute_s."""
        layers, size_bytes = self.config.chunk_layers, self.offloaded_bytes()
        at_once_s = 0.0
        if self.layers_on_host:
            weights, sums_in, sums_out = self.layer_on_host()
            behind_forward["offload_state"] = layers * weights / (self.both_ways if size_bytes else self.one_way)
            # Sums arrive, and activations, over the same link; then sums leave while weights arrive.
            at_once_s = layers * (sums_in / self.one_way + max(sums_out, weights) / self.both_ways)
            # Nothing hides the first layer's weights, and the sums of the last that is run backward.
            backward.add("offload_state", (weights + sums_in + sums_out) / self.one_way)
        out_s, in_s = max(compute_s[0], *behind_forward.values(), 0.0), max(compute_s[1], *behind_backward.values(), 0.0)
        self.free_s = out_s, in_s - at_once_s
        if size_bytes:
            behind_forward["offload"] = layers * size_bytes / self.activations_out_bytes_per_s
            behind_backward["offload"] = layers * size_bytes / self.one_way
        if self.layers_on_host:
            behind_backward["offload_state"] = at_once_s + behind_backward.get("offload", 0.0)

    def layer_on_host(self) -> tuple[float, float, float]:
        """(weights in, sums in, sums out): bytes of one layer on the host's link. The sums of a single microbatch are not read;
        on one rank they are in the compute dtype."""
        parameters = self.layer_parameters / self.data_group.size
        out = parameters * host_sum_itemsize(self.config)
        return parameters * self.itemsize, out if self.M > 1 else 0.0, out

    def add_state_offload(self, transfers: Transfers) -> None:
        """Adds state_offload_s, once a step."""
        if self.parallel.offload_state != "none":
            transfers.add("offload_state", self.state_offload_s(self.parallel.offload_state))

    def state_offload_s(self, state: str) -> float:
        """Time of an update with `state` as parallel.offload_state. Moments cross the host's link once each way, one direction
        after the other. Master weights do too, and once more to be cast at the step's start. With `all` the cast layers return,
        and their gradients come in for the norm and for the update."""
        if state == "none":
            return 0.0
        crossing = self.shared_parameters() * (
            2 * 4 * moments_per_parameter(self.config) + (3 * 4 if state in MASTER_ON_HOST else 0)
        )
        if state == "all":
            layers = self.stage_layers * self.layer_parameters / self.data_group.size
            crossing += layers * (self.itemsize + 2 * host_sum_itemsize(self.config))
        return crossing / self.one_way

    def vocabulary_parameters(self) -> float:
        """Parameters of embedding and head, on one rank."""
        matrices = 1 if self.model.tie_embeddings else 2
        return self.matrix_parameters() * matrices / self.P

    @property
    def trains_head(self) -> bool:
        return ("embedding" if self.model.tie_embeddings else "head") not in self.config.frozen

    def trained_vocabulary(self) -> float:
        """As vocabulary_parameters, of those that are trained."""
        matrices = {"embedding"} if self.model.tie_embeddings else {"embedding", "head"}
        return self.vocabulary_parameters() * len(matrices - self.config.frozen) / len(matrices)

    def matrix_parameters(self) -> float:
        """Parameters of the embedding, or of the head, on one tensor rank."""
        return self.model.vocab_size * self.model.hidden_size / self.t

    def shared_parameters(self) -> float:
        """Parameters that a rank updates."""
        parameters = self.stage_layers * self.trained_parameters + self.trained_vocabulary()
        return parameters / (self.data_group.size if self.parallel.zero else 1)
