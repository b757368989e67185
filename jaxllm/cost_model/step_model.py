"""Roofline of one step of jaxllm: its compute, memory traffic and transfers, in seconds. step_time.py explains the model."""

from collections import Counter
from functools import cached_property
from math import fsum as sum  # As in step_parts.py.
from math import prod

from jaxllm.config import Config
from jaxllm.config.attention import HOPPER
from jaxllm.config.layer_stack import adds_in_matmuls, has_own_layers, host_sum_itemsize, rings_tensor, sends_once
from jaxllm.config.types import ITEMSIZE, MASTER_ON_HOST
from jaxllm.cost_model.activations import ActivationBytes, bytes_per_token_and_layer, context_method
from jaxllm.cost_model.flops import moments_per_parameter, train_flops_per_token, trained_matrices
from jaxllm.cost_model.hardware import Gpu, host_copy_bytes_per_s
from jaxllm.cost_model.layer_compute import LayerCompute
from jaxllm.cost_model.network import all_gather_s, all_reduce_s, all_to_all_s, permute_s, reduce_scatter_s
from jaxllm.cost_model.replicas import add_exchange
from jaxllm.cost_model.step_parts import (
    BETWEEN_GPUS,
    COMMUNICATION,
    MEASURED,
    PUBLISHED,
    STEP_KERNELS,
    Fitted,
    StepTime,
    Transfers,
    add_times,
    largest_deviation,
)
from jaxllm.cost_model.step_sizes import StepSizes


class StepModel(LayerCompute):
    """Combines the compute, the transfers and the copies to and from the host of jaxllm's step."""

    layer_kernels = 60
    """Kernels of one layer, forward and backward, counted: 21 matmuls, attention, and operations between, fused by XLA."""
    hop_kernels = 12
    """Kernels of one more step of a ring: attention, merging, sums."""
    chunk_kernels = 8
    """Short kernels of one more chunk, where tensor ranks send chunks in a ring: one in each of eight rings. `chunks_s` counts
    those that copy and add."""
    hidden_collectives = (3, 1)
    """(gathers, scatters) over tensor that overlap with a matmul, per layer (70B at tensor 4, compiled for 1,024 H100s; assumed
    to be those of the backward pass)."""

    @classmethod
    def constants(cls, config: Config, gpu: Gpu) -> Fitted:
        """Those of a resolved config's step: what was measured on one GPU, what others publish of several."""
        return MEASURED if config.devices == 1 and gpu.chip.compute_capability >= HOPPER else PUBLISHED

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, fitted: Fitted | None = None):
        super().__init__(config, gpu, gpus_per_host, fitted or self.constants(config, gpu))
        self.context_method = context_method(config)
        self.sends_by_layer = self.parallel.zero >= 2 and self.data_group.size > 1
        """Whether gradients travel over data x context layer by layer in each microbatch, and with ZeRO 3 also weights."""
        # Constants fit steps of ZeRO 3 with a loop's copies. No time is promised without these before a GPU shows it.
        self.has_own_layers = has_own_layers(config, gpu.chip.compute_capability) and not self.sends_by_layer
        self.adds_in_matmuls = self.has_own_layers and adds_in_matmuls(config)
        self.copies_residuals = not self.has_own_layers or self.P > 1
        self.rings_tensor = rings_tensor(config, gpu.chip.compute_capability)
        self.key_gradient_itemsize = 4
        """Bytes of an element of the keys' gradients between context ranks: float32."""
        self.hides_messages = True
        """Whether a tick's messages between stages overlap with its compute."""
        self.offload_state = self.parallel.offload_state
        self.one_way = host_copy_bytes_per_s(gpu, self.gpus_per_host, both_ways=False)
        self.both_ways = host_copy_bytes_per_s(gpu, self.gpus_per_host, both_ways=True)
        """Bytes per second in one direction."""
        self.free_s = (0.0, 0.0)
        """Time of one tick that hides activations on the host's link, forward and backward: of compute, or of a longer transfer
        over another link, less that of state on the same link. tick() sets it."""

    # ------------------------------------------------------------------------------------------------------- the whole step

    def time(self) -> StepTime:
        ticks = self.M * self.V
        compute, *both_ways, forward_s, backward_s = self.tick()
        terms = {name: ticks * time_s for name, time_s in compute.items()}
        hidden: dict[str, float] = {}
        for transfers in both_ways:
            add_times(terms, transfers.exposed_s, ticks)
            add_times(hidden, transfers.hidden_s, ticks + self.P - 1)
        bubble_transfers_s = (self.P - 1) * sum(terms.get(name, 0.0) for name in BETWEEN_GPUS) / ticks
        once = Transfers()
        if self.P > 1:
            terms["bubble"] = (self.P - 1) * sum(terms.values()) / ticks
            self.add_pipe_reductions(once)
        self.add_step_data(once, self.V * forward_s, self.V * backward_s)
        add_times(terms, {**self.head(), **self.images.times(self.M, self.matmul_s, self.moved_s)})
        add_exchange(once, self.config, self.replica_group, self.links, sum(terms.values()))
        if self.offload_state != "none":
            once.add("offload_state", self.state_offload_s(self.offload_state))
        for times_s in (self.update(), once.exposed_s):
            add_times(terms, times_s)
        add_times(hidden, once.hidden_s)
        if self.fitted.overlap_cost:
            beside_s = sum(time_s for name, time_s in hidden.items() if name in BETWEEN_GPUS)
            terms["overlap"] = self.fitted.overlap_cost * beside_s
        # Replicas of DiLoCo wait for each other once a round only.
        together = self.devices // (self.parallel.replica if self.config.train.diloco_steps else 1)
        if together > 1:
            computes_s = sum(time_s for name, time_s in terms.items() if name not in COMMUNICATION) - bubble_transfers_s
            terms["slowest_gpu"] = self.fitted.spread * largest_deviation(together) * computes_s
        self.add_input(terms)
        tokens_per_s = self.config.step_tokens / sum(terms.values()) / self.devices
        tflops = tokens_per_s * self.flops_per_token() / 1e12
        passes_s = ticks * forward_s + terms["head"] / 3, ticks * backward_s + terms["head"] * 2 / 3
        share = passes_s[0] / sum(passes_s)
        return StepTime(terms, hidden, tokens_per_s, tflops, bubble_transfers_s, share)

    def flops_per_token(self) -> float:
        """Model FLOPs, as counted in tflops_per_gpu."""
        return train_flops_per_token(self.model, self.S, frozen=self.config.frozen)

    def tick(self) -> tuple[dict[str, float], Transfers, Transfers, float, float]:
        """One chunk of layers: (compute by term, transfers forward, transfers backward, seconds forward, seconds backward)."""
        layers = self.chunk_layers
        matmuls_s, attention_s, moves_s = self.layer_matmuls_s(), self.attention_s(), self.moves_s()
        again, attention_again, moves_again = self.recomputed()
        repeated_s = self.repeated_s(again, attention_again) + (self.norms_s() if moves_again else 0.0)
        kernels = self.layer_kernels + self.rings_tensor * (self.t - 1) * self.chunk_kernels
        kernels += self.mean(len(self.hops(window)) for window in self.windows) * self.hop_kernels
        layer = {
            "matmuls": sum(matmuls_s),
            "attention": sum(attention_s),
            "memory_bound": sum(moves_s) + self.chunks_s(),
            "fp8_rounding": self.rounding_s(1 / self.M if self.adds_in_matmuls else 2) if self.is_fp8 else 0.0,
            "gradient_sums": self.gradient_sums_s(),
            "stacks": self.stacks_s() if self.copies_residuals else 0.0,
            "recomputation": repeated_s,
            "launches": kernels * self.kernel_s,
        }
        forward, backward = Transfers(), Transfers()
        self.add_layer_transfers(forward, backward, layers, matmuls_s, self.recomputed())
        forward_s, backward_s = (layers * sum(parts) for parts in zip(matmuls_s, attention_s, moves_s, strict=True))
        forward_s += forward.total_s
        backward_s += backward.total_s + layers * repeated_s

        behind_forward, behind_backward = {}, {}
        if self.P > 1:
            message_s = permute_s(self.hidden_bytes, self.pipe_group, self.links)
            if self.hides_messages:
                behind_forward["pipe"] = behind_backward["pipe"] = message_s
            else:
                backward.add("pipe", message_s, times=2)
        if self.sends_by_layer:
            gather_s, scatter_s = self.layerwise_data_s()
            if gather_s:
                behind_forward["data"] = (layers - 1) * gather_s
            behind_backward["data"] = (layers - 1) * (scatter_s + (gather_s if self.parallel.zero == 3 else 0))
            # A chunk's first gather and its last scatter cannot overlap with anything.
            backward.add("data", gather_s + scatter_s)
        self.add_host(behind_forward, behind_backward, backward, (forward_s, backward_s))
        forward.add_together(behind_forward, forward_s)
        backward.add_together(behind_backward, backward_s)
        # While a pass waits for the host, transfers over other links go on.
        forward_s, backward_s = (
            max(pass_s, *(behind.get(name, 0.0) for name in ("offload", "offload_state")))
            for pass_s, behind in ((forward_s, behind_forward), (backward_s, behind_backward))
        )
        return {name: layers * time_s for name, time_s in layer.items() if time_s}, forward, backward, forward_s, backward_s

    def repeated_s(self, again: set[str], attention_again: bool) -> float:
        """Time to compute a layer's matmuls of these names once more, and its attention."""
        if self.rings_tensor:
            repeated_s = self.t * sum(
                self.chunk_matmul_s(*shape) for name, shape in self.chunk_matmuls.items() if name in again
            )
        else:
            repeated_s = sum(self.rows_matmul_s(name, *shape) for name, shape in self.matmuls.items() if name in again)
        return repeated_s + (self.attention_s()[0] if attention_again else 0.0)

    def add_layer_transfers(
        self,
        forward: Transfers,
        backward: Transfers,
        layers: float,
        matmuls_s: tuple[float, float],
        recomputed: tuple[set[str], bool, bool],
    ) -> None:
        """Transfers over tensor and context of so many layers, with what the backward pass recomputes (recomputed())."""
        again, attention_again, moves_again = recomputed
        if self.rings_tensor:
            self.add_tensor_ring(forward, backward, layers, again)
        elif self.t > 1:
            self.add_tensor(forward, backward, layers, matmuls_s, len(again & {"attention_out", "mlp_down"}))
        if self.t > 1 and self.model.qk_norm == "width":
            # The sums over all heads, of queries and keys at once: a few bytes for each token, for which ranks wait.
            forward.add("tensor_skew", self.fitted.sync_s, times=layers)
            backward.add("tensor_skew", self.fitted.sync_s, times=layers * (1 + moves_again))
        if self.c > 1:
            for window, share in self.windows.items():
                self.add_context(forward, backward, share * layers, window, attention_again)
        if self.parallel.expert > 1:
            # There and back. Where moves are made again, the rows that arrived were not kept.
            slots = self.rows * self.per_token * self.parallel.slots_per_row
            each_s = all_to_all_s(slots * self.model.hidden_size * self.itemsize, self.expert_group, self.links)
            forward.add("expert", each_s, times=2 * layers)
            backward.add("expert", each_s, times=(2 + moves_again) * layers)

    def recomputation_s(self, again: set[str], attention_again: bool) -> float:
        """Time by which one layer's backward pass is longer if it recomputes these matmuls and attention, with the transfers
        over tensor and context that they repeat."""
        with_them, without = Transfers(), Transfers()
        matmuls_s = self.layer_matmuls_s()
        self.add_layer_transfers(Transfers(), with_them, 1, matmuls_s, (again, attention_again, True))
        self.add_layer_transfers(Transfers(), without, 1, matmuls_s, (set(), False, True))
        return self.repeated_s(again, attention_again) + with_them.total_s - without.total_s

    def gradient_sums_s(self) -> float:
        """As in LayerCompute; the matmuls of layers with arrays of their own add to the sums instead of writing gradients, but
        for queries, keys and values in bfloat16 (by profiles of an H100)."""
        if not self.adds_in_matmuls:
            return super().gradient_sums_s()
        apart = 0 if self.is_fp8 else self.model.hidden_size * (self.query_width + 2 * self.key_width)
        return self.moved_s(apart * (4 + 8)) if self.M > 1 else 0.0

    def stacks_s(self) -> float:
        """Time to copy what the backward pass needs into a ring: read and written once, also what waits on the host. In the
        compiled step of 1B (RESULTS, "Kernels of one step") 43.9 ms, and 40.2 by this."""
        if self.policy.everything:
            in_loop = self.config.model_copy(update={"model": self.model.model_copy(update={"scan_layers": True})})
            return self.moved_s(2 * sum(StepSizes(in_loop, self.gpu).kept.values()))
        held = self.bytes_per_token
        return self.moved_s(2 * self.rows * self.c * sum((*held.kept.values(), *held.offloaded.values())))

    # -------------------------------------------------------------------------------- transfers of one layer and microbatch

    def add_tensor(
        self, forward: Transfers, backward: Transfers, layers: float, matmuls_s: tuple[float, float], scatters_again: int
    ) -> None:
        """Sequence parallelism: hidden states are gathered into both halves of a block and scattered out of them. The backward
        pass does the same and gathers the two inputs once more (6 and 4 per layer); it scatters each output that is recomputed
        once more.

        hidden_collectives overlap with a matmul.
        """
        gather_s, scatter_s = self.sequence_s()
        behind_s = matmuls_s[1] / (2 * len(self.matmuls))
        gathers, scatters = 4, 2 + scatters_again
        hidden_gathers, hidden_scatters = self.hidden_collectives
        backward.add("tensor", gather_s, behind_s, layers * hidden_gathers)
        backward.add("tensor", scatter_s, behind_s, layers * hidden_scatters)
        forward.add("tensor", gather_s + scatter_s, times=2 * layers)
        backward.add("tensor", gather_s, times=layers * (gathers - hidden_gathers))
        backward.add("tensor", scatter_s, times=layers * (scatters - hidden_scatters))
        # Counted in full, hidden or not, because the constant was fitted that way.
        forward.add("tensor_skew", self.fitted.sync_s, times=4 * layers)
        backward.add("tensor_skew", self.fitted.sync_s, times=layers * (gathers + scatters))

    def add_tensor_ring(self, forward: Transfers, backward: Transfers, layers: float, again: set[str]) -> None:
        """As add_tensor, where a chunk travels behind the matmuls of another (parallel/tensor_ring.py). The inputs that the
        backward pass gathers for the weights' gradients hide behind half of these."""
        gather_s, scatter_s = self.sequence_s()
        into, out = (("query", "key", "value"), ("mlp_gate", "mlp_up")), (("attention_out",), ("mlp_down",))
        rings = [(names, gather_s, scatter_s) for names in into] + [(names, scatter_s, gather_s) for names in out]
        repeated = 0
        for names, transfer_s, back_s in rings:
            shapes = [self.chunk_matmuls[name] for name in names if name in self.chunk_matmuls]
            behind_s, behind_back_s = (
                (self.t - 1) * sum(self.chunk_matmul_s(*(shape[::way])) for shape in shapes) for way in (1, -1)
            )
            forward.add("tensor", transfer_s, behind_s, layers)
            backward.add("tensor", back_s, behind_back_s, layers)
            if again.intersection(names):
                repeated += 1
                backward.add("tensor", transfer_s, behind_s, layers)
            if names in into:
                weights_s = sum(self.block_matmul_s(length, columns, self.rows) for columns, length in shapes)
                backward.add("tensor", gather_s, weights_s / 2, layers)
        forward.add("tensor_skew", self.fitted.sync_s, times=4 * layers)
        backward.add("tensor_skew", self.fitted.sync_s, times=layers * (6 + repeated))

    def sequence_s(self) -> tuple[float, float]:
        """(gather, scatter) of a microbatch's hidden states over tensor ranks."""
        size_bytes = self.rows * self.model.hidden_size * self.itemsize
        group, links = self.tensor_group, self.links
        return all_gather_s(size_bytes, group, links), reduce_scatter_s(size_bytes, group, links)

    @cached_property
    def chunk_matmuls(self) -> dict[str, tuple[int, int]]:
        """self.matmuls as the chunks of a ring are multiplied: keys and values that are split join the queries."""
        if self.model.num_kv_heads % self.t:
            return self.matmuls
        joined = {"query": (self.query_width + 2 * self.key_width, self.model.hidden_size)}
        return {name: shape for name, shape in self.matmuls.items() if name not in ("query", "key", "value")} | joined

    def chunk_matmul_s(self, columns: int, length: int) -> float:
        """Time of a matmul of one chunk in a ring."""
        return self.block_matmul_s(self.rows // self.t, columns, length)

    def layer_matmuls_s(self) -> tuple[float, float]:
        """As in LayerCompute; in a ring outputs and gradients of inputs are multiplied in chunks."""
        if not self.rings_tensor:
            return super().layer_matmuls_s()
        shapes = self.chunk_matmuls.values()
        forward_s, inputs_s = (self.t * sum(self.chunk_matmul_s(*(shape[::way])) for shape in shapes) for way in (1, -1))
        return forward_s, inputs_s + sum(self.block_matmul_s(length, columns, self.rows) for columns, length in shapes)

    def chunks_s(self) -> float:
        """Time to copy chunks in a ring, and to add them: four sums of t - 1 chunks, three copies of whole sequences, and
        SwiGLU's output and two gradients cut into chunks. In four compiled steps of 1B to 70B 0.7 to 1.1 times this."""
        if not self.rings_tensor:
            return 0.0
        hidden = (4 * 3 * (self.t - 1) / self.t + 3 * 2) * self.model.hidden_size
        return self.moved_s(self.rows * self.itemsize * (hidden + 4 * self.mlp_width))

    def add_context(self, forward: Transfers, backward: Transfers, layers: float, window: int | None, again: bool) -> None:
        """Ring: keys and values travel behind attention's c blocks, in the backward pass with their gradients. All-gather: keys
        and values are gathered before attention, in both passes, and their gradients are scattered after it. In windows, what
        is seen of other chunks is sent as in a ring."""
        keys = 2 * self.rows * self.key_width
        sent, returned = keys * self.itemsize, keys * self.key_gradient_itemsize
        if window is not None or self.context_method == "ring":
            hops = self.hops(window)
            behind_s, behind_back_s = (time_s / (len(hops) + 1) for time_s in self.attention_in_s(window))
            for (_, share), times in Counter(hops).items():
                hop_s = permute_s(share * sent, self.context_group, self.links)
                hop_back_s = permute_s(share * (sent + returned), self.context_group, self.links)
                forward.add("context", hop_s, behind_s, layers * times)
                backward.add("context", hop_s, behind_s, layers * times * again)
                backward.add("context", hop_back_s, behind_back_s, layers * times)
        else:
            gather_s = all_gather_s(sent * self.c, self.context_group, self.links)
            scatter_s = reduce_scatter_s(returned * self.c, self.context_group, self.links)
            forward.add("context", gather_s, times=layers)
            backward.add("context", (1 + again) * gather_s + scatter_s, times=layers)

    def layerwise_data_s(self) -> tuple[float, float]:
        """(gather, scatter) of a layer. ZeRO 2 scatters its gradients behind the backward of the layer before it; ZeRO 3 also
        gathers its weights behind the layer that is computed before it, in both passes (layer_loop.py)."""
        sent = ITEMSIZE[self.parallel.reduce_dtype]
        scatter_s = self.layerwise_s(sent, self.trained_parameters, self.count(self.of_experts - self.frozen, self.experts))
        if self.parallel.zero == 2:
            return 0.0, scatter_s
        return self.layerwise_s(self.itemsize, self.layer_parameters, self.count(self.of_experts, self.experts)), scatter_s

    def layerwise_s(self, itemsize: int, parameters: float, of_experts: int) -> float:
        """Time to gather or scatter so many parameters of a layer, some of them of experts."""
        if (e := self.parallel.expert) == 1:
            return all_gather_s(itemsize * parameters, self.data_group, self.links)
        shared_s = all_gather_s(itemsize * (parameters - of_experts), self.data_group, self.links)
        return shared_s + all_gather_s(itemsize * of_experts / e, self.alike_group, self.links)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a microbatch's hidden states between layers, on one rank."""
        return self.rows * self.model.hidden_size * self.itemsize / self.t

    # ----------------------------------------------------------------------------------------------- copies to the host
    # Activations, and state (docs/remat.md). The GPUs of a host copy at the same time and share its memory's bandwidth
    # (hardware.host_copy_bytes_per_s). The forward pass sends activations to the host only, and the backward pass reads them
    # back only; with offload_state=all both directions are busy at once.
    #
    # A doubt: XLA moves rows with kernels that take multiprocessors from the compute that hides them. By how much that slows
    # the compute is not measured, and nothing is counted for it.

    @cached_property
    def bytes_per_token(self) -> ActivationBytes:
        """What the policy keeps and offloads of a layer; the policy names tensors (not `none`)."""
        return bytes_per_token_and_layer(self.policy, self.config, blockwise=self.is_blockwise)

    def offloaded_bytes(self) -> float:
        """Bytes offloaded to the host per layer, microbatch and rank."""
        return self.rows * self.c * sum(self.bytes_per_token.offloaded.values()) if self.policy.offload else 0.0

    @property
    def activations_out_bytes_per_s(self) -> float:
        """The bandwidth of activations on their way to the host, with `all` beside weights on their way in."""
        return self.both_ways if self.offload_state == "all" else self.one_way

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
        if self.offload_state == "all":
            # Bytes of one layer on the host's link. The sums of a single microbatch are not read.
            parameters = self.layer_parameters / self.data_group.size
            weights, sums_out = parameters * self.itemsize, parameters * host_sum_itemsize(self.config)
            sums_in = sums_out if self.M > 1 else 0.0
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
        if self.offload_state == "all":
            behind_backward["offload_state"] = at_once_s + behind_backward.get("offload", 0.0)

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

    # ------------------------------------------------------------------------------------- once a microbatch, once a step

    def head(self) -> dict[str, float]:
        """Logits, loss and their gradients for all microbatches."""
        ways, passes, chunks = self.head_parts()
        D, columns = self.model.hidden_size, -(-self.model.vocab_size // ways)
        rows = -(-self.rows // chunks)
        matmuls_s = self.matmul_s(rows, columns, D) + self.matmul_s(rows, D, columns)
        if self.trains_head:
            matmuls_s += self.matmul_s(columns, D, rows)
        loss_s = self.moved_s(rows * columns * 4 * passes)
        return {"head": self.M * chunks * (matmuls_s + loss_s)}

    def head_parts(self) -> tuple[int, float, int]:
        """(ranks that share the vocabulary, reads and writes of float32 logits beside the matmuls', chunks of tokens). The sum
        of the head's gradient is added in its matmul (by a profile of an H100)."""
        return self.P * self.t, 3.5, -(-self.rows // self.config.train.loss_chunk_tokens)

    def add_pipe_reductions(self, transfers: Transfers) -> None:
        """Hidden states summed over the stages four times per microbatch: after the embedding, before the head, and backward
        for both. XLA overlaps half of them with matmuls (70B compiled for 1,024 H100s)."""
        reduce_s = all_reduce_s(self.hidden_bytes, self.pipe_group, self.links)
        transfers.add("pipe", reduce_s, reduce_s, 2 * self.M)
        transfers.add("pipe", reduce_s, times=2 * self.M)

    def add_step_data(self, transfers: Transfers, forward_s: float, backward_s: float) -> None:
        """Transfers over data x context: gradients in `reduce_dtype`, in a pipeline float32, and weights in the compute dtype,
        except those that each microbatch sends layer by layer.

        In a pipeline, every tick needs embedding and head, so they are sharded only for the update. Without a pipeline, ZeRO 2
        scatters their gradients in every microbatch, and ZeRO 3 gathers them too. ZeRO 0 and 1 send a layer behind the others:
        weights in the first microbatch's forward pass (forward_s), gradients in the last one's backward pass (backward_s). What
        else is sent overlaps with nothing here.
        """
        group, zero, links = self.data_group, self.parallel.zero, self.links
        self.add_owners(transfers)
        if group.size == 1:
            return
        layer, rest, reduce_s = self.trained_parameters, self.trained_vocabulary(), reduce_scatter_s if zero else all_reduce_s
        bare = self.stage_layers
        if sends_once(self.config, self.M, self.gpu.chip.compute_capability):
            # Of these the first layer's weights, and its gradients.
            behind, bare = self.stage_layers - 1, 1
            transfers.add("data", behind * reduce_s(4 * layer, group, links), backward_s)
            if zero:
                transfers.add("data", behind * all_gather_s(self.itemsize * layer, group, links), forward_s)
        reduced, gathered = (rest + (0 if zero >= level else bare) * layer for level in (2, 3))
        each = self.M if self.P == 1 else 1
        sent = 4 if self.P > 1 else ITEMSIZE[self.parallel.reduce_dtype]
        transfers.add("data", reduce_s(sent * reduced, group, links), times=each if zero >= 2 else 1)
        if zero == 3 and self.P == 1:
            # Frozen weights are sharded too.
            gathered = self.vocabulary_parameters()
        if zero:
            transfers.add("data", all_gather_s(self.itemsize * gathered, group, links), times=each if zero == 3 else 1)

    def add_owners(self, transfers: Transfers) -> None:
        """Muon's matrices, to the ranks that own their layers and back: an all-to-all sends what a gather does."""
        if behind_s := self.muon_s() / 2:
            shared_layers = -(-self.stage_layers // (self.data_group.size * self.t)) * self.t
            owned_bytes = self.itemsize * shared_layers * self.trained_parameters
            # With ZeRO 0 every rank has the momentum, and gathers all updates.
            each_way_bytes = owned_bytes * (1 if self.parallel.zero else self.data_group.size / 2)
            transfers.add("data", all_gather_s(each_way_bytes, self.data_group, self.links), behind_s, times=2)
            transfers.add("tensor", all_gather_s(owned_bytes, self.tensor_group, self.links), behind_s, times=2)

    def muon_s(self) -> float:
        """Muon's matmuls on the whole matrices of a rank's own layers: five iterations of three."""
        if self.config.optimizer.name != "muon":
            return 0.0
        matrices = ((spec.shape[: spec.inputs], spec.shape[spec.inputs :]) for spec in trained_matrices(self.config))
        sides = [sorted(map(prod, rows_and_columns)) for rows_and_columns in matrices]
        products = [shape for n, m in sides for shape in ((n, n, m), (n, n, n), (n, m, n))]
        owned = -(-self.stage_layers // (self.data_group.size * self.t))
        return 5 * owned * sum(self.matmul_s(*shape) for shape in products)

    def update(self) -> dict[str, float]:
        """The update in float32: reads weight, moments and gradient, and writes all but that; the gradient's norm; the copy in
        the compute dtype."""
        n = moments_per_parameter(self.config)
        moved_bytes = self.shared_parameters() * (4 * (2 + n) + 4 * (1 + n) + 4 + 4 + self.itemsize)
        return {"optimizer": self.moved_s(moved_bytes) + self.muon_s(), "launches": STEP_KERNELS * self.kernel_s}

    def add_input(self, terms: dict[str, float]) -> None:
        """Adds nothing, because input is prefetched."""
