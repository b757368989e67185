"""Roofline of one layer's compute, for one microbatch on one GPU: matmuls, attention, and memory-bound kernels."""

import math
from collections.abc import Iterable
from math import fsum as sum  # As in step_parts.py.

from jaxllm.config import ATTENTION_RESULTS, Config
from jaxllm.config.attention import HOPPER, chunks_in_reach, first_seen, require_trains, takes_cudnn, window_shares
from jaxllm.config.model_spec import EXPERTS, layer_matmuls
from jaxllm.config.remat_policy import policy_of
from jaxllm.config.types import ITEMSIZE
from jaxllm.cost_model.activations import XLA_ROWS, is_blockwise
from jaxllm.cost_model.flops import causal_pairs
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.images import ImageSizes
from jaxllm.cost_model.network import Group, group_of, links_of
from jaxllm.cost_model.step_parts import ATTENTION_ROWS, BANDWIDTH_SHARE, KERNEL_S, LARGE_HEAD, MEMORY_SHARE, Fitted, tile_share

BLOCK_NORM_MOVES = {"before": (9, 12), "after": (7, 14), "both": (10, 20)}
"""Reads and writes of a token's width by norms and residual sums, forward and backward, by model.block_norms. Counted for
kernels that end where a row is summed; none of it is measured."""


GROUPED_SHARE = 0.7
"""Rate of the experts' grouped matmuls, as a share of other matmuls': 62 to 75% on an H200, 70% in the mean of six products
(benchmarks/RESULTS.md, "Experts on one H200")."""


class LayerCompute:
    """Sizes of a config on one GPU, and the compute time of one layer and microbatch.

    D, F, N, K, H, L as in flops.py; P stages, V virtual stages, M microbatches; d, c, t ranks of data, context and tensor.
    """

    backward_mlp_moves = 6
    """Reads and writes of the feed-forward width in SwiGLU's backward, which also writes its product for mlp_down's gradient
    (one kernel, in a profile of an H100)."""

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, fitted: Fitted):
        model, parallel = config.model, config.parallel
        require_trains(config, gpu.chip.compute_capability, gpu.name)
        self.config, self.model, self.parallel, self.gpu = config, model, parallel, gpu
        self.fitted = fitted
        self.policy = policy_of(parallel.remat, model)
        self.fuses_attention = takes_cudnn(model, gpu.chip.compute_capability)
        self.is_blockwise = is_blockwise(config, gpu.chip.compute_capability)
        self.windows = window_shares(model, config.train.sequence_length)
        self.P, self.d, self.c, self.t = parallel.pipe, int(parallel.data), parallel.context, parallel.tensor
        self.V, self.M, self.S = parallel.virtual_stages, config.num_microbatches, config.train.sequence_length
        replica_devices = self.P * self.d * self.c * self.t
        self.devices = parallel.replica * replica_devices
        self.itemsize = ITEMSIZE[model.compute_dtype]
        self.peak_flops = gpu.peak_flops(model.compute_dtype)
        self.is_hopper = gpu.chip.compute_capability >= HOPPER
        self.matmul_flops = self.peak_flops * fitted.share_of_matmuls(self.is_hopper, is_fp8=False)
        self.is_fp8 = model.multiplies_fp8
        self.fp8_flops = (gpu.float8_flops or 0.0) * fitted.share_of_matmuls(self.is_hopper, is_fp8=True)
        memory_share = fitted.hopper_memory_share if self.is_hopper else MEMORY_SHARE
        self.memory_bytes_per_s = gpu.memory_bandwidth_bytes_per_s * memory_share
        self.kernel_s = fitted.hopper_kernel_s if self.is_hopper else KERNEL_S
        self.attention_shares = fitted.attention_shares
        if self.is_hopper:
            is_large = model.head_dim >= LARGE_HEAD
            self.attention_shares = fitted.hopper_attention_shares if is_large else fitted.hopper_small_head_shares
        self.links = links_of(gpu, BANDWIDTH_SHARE)

        self.gpus_per_host = min(gpus_per_host, self.devices)

        def axis(size: int, stride: int) -> Group:
            return group_of(size, stride, self.gpus_per_host)

        self.tensor_group, self.context_group = axis(self.t, 1), axis(self.c, self.t)
        self.data_group = axis(self.d * self.c, self.t)
        self.pipe_group, self.replica_group = axis(self.P, self.d * self.c * self.t), axis(parallel.replica, replica_devices)

        self.images = ImageSizes(config)
        self.rows = config.microbatch_sequences * self.S // self.c
        """Tokens of a microbatch that a rank multiplies; tensor ranks gather the sequence first."""
        N, K, H = model.num_heads, model.num_kv_heads, model.head_dim
        # Key-value heads that do not divide are replicated over tensor ranks.
        self.query_width, self.key_width = N * H // self.t, K * H // (self.t if K % self.t == 0 else 1)
        self.experts, self.per_token, e = model.num_experts or 1, model.mlps_per_token, parallel.expert
        # The ranks that share experts, and those that have the same ones.
        self.expert_group, self.alike_group = axis(e, self.c * self.t), axis(self.d // e, e * self.c * self.t)
        self.mlp_width = self.per_token * model.intermediate_size // self.t
        self.of_experts = {spec.output for spec in layer_matmuls(model) if spec.of_experts}
        self.matmuls = self.block_matmuls()
        """Name -> columns of the output, length of the sum; of one expert."""
        self.layer_parameters, self.used_parameters = (
            self.count(self.matmuls, times) for times in (self.experts, self.per_token)
        )
        """Parameters of a layer's matmuls: all, and those that a token is multiplied by."""
        frozen = config.frozen
        self.frozen = {spec.output for spec in layer_matmuls(model) if spec.path in frozen}
        targets, rank = (model.lora.targets, model.lora.rank) if model.lora else ((), 0)
        adapted = [self.matmuls[spec.output] for spec in layer_matmuls(model) if spec.target in targets]
        self.adapters = [pair for columns, length in adapted for pair in ((rank, length), (columns, rank))]
        """LoRA's matmuls, as in `matmuls`."""
        trained = [name for name in self.matmuls if name not in self.frozen]
        of_adapters = sum(columns * length for columns, length in self.adapters)
        self.trained_parameters, self.used_trained_parameters = (
            of_adapters + self.count(trained, times) for times in (self.experts, self.per_token)
        )
        self.chunk_layers: float = config.chunk_layers

    def count(self, names: Iterable[str], times: int) -> int:
        """Parameters of these matmuls, with those of an expert so many times."""
        return int(sum(math.prod(self.matmuls[name]) * (times if name in self.of_experts else 1) for name in names))

    @property
    def stage_layers(self) -> float:
        return self.V * self.chunk_layers

    def vocabulary_parameters(self) -> float:
        """Parameters of embedding, head and vision tower, on one rank."""
        matrices = 1 if self.model.tie_embeddings else 2
        return self.matrix_parameters() * matrices / self.P + self.images.parameters

    @property
    def trains_head(self) -> bool:
        return ("embedding" if self.model.tie_embeddings else "head") not in self.config.frozen

    def trained_vocabulary(self) -> float:
        """As vocabulary_parameters, of those that are trained."""
        matrices = {"embedding"} if self.model.tie_embeddings else {"embedding", "head"}
        of_text = self.vocabulary_parameters() - self.images.parameters
        return of_text * len(matrices - self.config.frozen) / len(matrices) + self.images.trained_parameters

    def matrix_parameters(self) -> float:
        """Parameters of the embedding, or of the head, on one tensor rank."""
        return self.model.vocab_size * self.model.hidden_size / self.t

    def shared_parameters(self) -> float:
        """Parameters that a rank updates."""
        parameters = self.stage_layers * self.trained_parameters + self.trained_vocabulary()
        return parameters / (self.data_group.size if self.parallel.zero else 1)

    def block_matmuls(self) -> dict[str, tuple[int, int]]:
        split = {"heads": self.t, "mlp": self.t, "kv_heads": self.t if self.model.num_kv_heads % self.t == 0 else 1}
        found = {}
        for spec in layer_matmuls(self.model):
            sizes = [size // split.get(dim, 1) for dim, size in zip(spec.dims, spec.shape, strict=True) if dim != EXPERTS]
            found[spec.output] = math.prod(sizes[spec.inputs :]), math.prod(sizes[: spec.inputs])
        return found

    def matmul_s(self, rows: int, columns: int, length: int, is_fp8: bool = False) -> float:
        """Time of a rows x columns matmul in which each element sums `length` products. FP8's inputs have one byte."""
        share = self.tile_share(rows, columns, length)
        traffic = (1 if is_fp8 else self.itemsize) * (rows * length + length * columns) + self.itemsize * rows * columns
        flops_per_s = (self.fp8_flops if is_fp8 else self.matmul_flops) * share
        return max(2 * rows * columns * length / flops_per_s, self.moved_s(traffic))

    def tile_share(self, rows: int, columns: int, length: int) -> float:
        return tile_share(rows, columns, length, self.gpu.chip.multiprocessors)

    def block_matmul_s(self, rows: int, columns: int, length: int) -> float:
        """The same for a matmul of a block: in FP8, if the config asks for it."""
        return self.matmul_s(rows, columns, length, self.is_fp8)

    def rounding_s(self, weights: float = 2) -> float:
        """FP8 rounding, forward and backward: an array is read for its maximum, then read again and written in one byte: each
        input in both passes, each weight `weights` times a microbatch, and once each output's gradient. Queries, keys and
        values share an input, and so do gate and up. Savings by fusion and recomputation are not counted."""
        D, N, K, F = self.model.hidden_size, self.query_width, self.key_width, self.mlp_width
        inputs, gradients = 2 * D + N + F, N + 2 * K + D + 2 * F + D
        numbers = self.rows * (2 * inputs + gradients) + weights * self.layer_parameters
        slower = self.fitted.hopper_memory_share / self.fitted.hopper_rounding_share if self.is_hopper else 1.0
        return slower * self.moved_s(numbers * (2 * self.itemsize + 1))

    def moved_s(self, size_bytes: float) -> float:
        return size_bytes / self.memory_bytes_per_s

    def layer_matmuls_s(self) -> tuple[float, float]:
        """(forward, backward). The backward has two matmuls per forward matmul: for the input's and, unless it is frozen, for
        the weight's gradient."""
        shapes = [*((name, *shape) for name, shape in self.matmuls.items()), *(("", *shape) for shape in self.adapters)]
        forward_s = sum(self.rows_matmul_s(name, columns, length) for name, columns, length in shapes)
        inputs_s = sum(self.rows_matmul_s(name, length, columns) for name, columns, length in shapes)
        weights_s = (
            self.grouped_matmul_s(columns, length)
            if name in self.of_experts
            else self.block_matmul_s(length, columns, self.rows)
            for name, columns, length in shapes
            if name not in self.frozen
        )
        return forward_s, inputs_s + sum(weights_s)

    def rows_matmul_s(self, name: str, columns: int, length: int) -> float:
        """Time of a matmul of a microbatch's rows with the matrix of this name, or with its transpose; '': of an adapter."""
        is_grouped = name in self.of_experts
        return self.grouped_matmul_s(columns, length) if is_grouped else self.block_matmul_s(self.rows, columns, length)

    def grouped_matmul_s(self, columns: int, length: int) -> float:
        """Time of all experts' matmuls with one input or gradient. The matrices are read, or their gradients written, however
        few rows they multiply."""
        flops_s = self.matmul_s(self.per_token * self.rows, columns, length) / GROUPED_SHARE
        return max(flops_s, self.moved_s(self.itemsize * self.experts * columns * length))

    def attention_s(self) -> tuple[float, float]:
        """(forward, backward), in the mean over the layers."""
        forward_s, backward_s = zip(*(self.attention_in_s(window) for window in self.windows), strict=True)
        return self.mean(forward_s), self.mean(backward_s)

    def mean(self, by_window: Iterable[float]) -> float:
        """The mean over the layers of a value for each of self.windows."""
        return sum(share * value for share, value in zip(self.windows.values(), by_window, strict=True))

    def attention_in_s(self, window: int | None) -> tuple[float, float]:
        """(forward, backward) in a layer. Fused attention has two matmuls over the causal half forward and five backward, which
        recomputes the scores. In a ring the work is equal on every rank (zigzag.py). In windows ranks with the start of the
        sequence wait for the others.

        Plain XLA attention multiplies the full square, or what a tile's rows may see of a window, and keeps scores in memory,
        in float32: softmax reads or writes them four times forward, about twice that backward.
        """
        heads = self.model.num_heads // self.t
        flops_per_key = 2 * self.rows * heads * self.model.head_dim
        if self.fuses_attention:
            blocks = self.config.microbatch_sequences * heads * -(-(self.S // self.c) // ATTENTION_ROWS)
            # Thread blocks, of the places for them on the multiprocessors in whole waves.
            places = self.gpu.chip.multiprocessors
            share = blocks / (-(-blocks // places) * places)
            half_s = flops_per_key * self.keys_per_query(window) / (self.peak_flops * share)
            return 2 * half_s / self.attention_shares[0], 5 * half_s / self.attention_shares[1]
        keys = self.S if window is None else min(self.S, window + XLA_ROWS)
        scores_s = self.moved_s(4 * 4 * self.rows * keys * heads)
        square_s = flops_per_key * keys / self.matmul_flops
        return 2 * square_s + scores_s, (5 if self.is_blockwise else 4) * square_s + 2 * scores_s

    def keys_per_query(self, window: int | None) -> float:
        """Keys that a rank multiplies with each of its queries, in the mean."""
        if window is None or self.c == 1:
            return causal_pairs(self.S, window) / self.S
        length = self.S // (2 * self.c)
        pairs = causal_pairs(length, window)
        for number, (share, _) in enumerate(self.hops(window)):
            # A block that the window cuts: query i sees keys j > i - reach.
            reach = max(-length, min(length, window - (number + 1) * length))
            pairs += share * (length**2 - (length - reach) ** 2 / 2 if reach > 0 else (length + reach) ** 2 / 2)
        return pairs / length

    def hops(self, window: int | None) -> list[tuple[float, float]]:
        """(share of a rank's queries, share of its keys) of each block with keys that other ranks sent: all in a ring; in
        windows as in window_attention.py."""
        if window is None or self.c == 1:
            return [(1.0, 1.0)] * (self.c - 1)
        length, found = self.S // (2 * self.c), []
        for distance in range(1, chunks_in_reach(window, length, self.c) + 1):
            queries = 1.0 if distance < self.c else 0.5
            found.append((queries, queries * (1 - first_seen(window, length, distance) / length)))
        return found

    def moves_s(self) -> tuple[float, float]:
        """(forward, backward) time of memory-bound kernels.

        Norms and residual sums read or write a token's width BLOCK_NORM_MOVES times, of which a rank has 1/t. Forward: rotary
        embeddings read and write queries and keys; SwiGLU accesses the feed-forward width three times. Backward: two and
        backward_mlp_moves times. A norm of heads fuses with the rotation: it reads its input once more forward; backward it
        does so too, and reads and writes a gradient. Each further block of a ring or window merges an output in float32 (10
        bytes per element) and adds a gradient of queries (8).
        """
        split = self.model.hidden_size / self.t
        moves = BLOCK_NORM_MOVES[self.model.block_norms]
        heads = self.query_width + self.key_width
        normed = heads if self.model.qk_norm else 0
        forward = moves[0] * split + 2 * heads + normed + 3 * self.mlp_width
        backward = moves[1] * split + 2 * heads + 3 * normed + self.backward_mlp_moves * self.mlp_width
        if self.of_experts:
            # Rows are gathered for the experts and from them; backward also once more, for the weights' gradients.
            rows = 2 * self.per_token * self.model.hidden_size * self.parallel.slots_per_row
            times = 1 if self.parallel.expert == 1 else 2
            forward, backward = forward + 2 * times * rows, backward + 3 * times * rows
        merged = self.mean(sum(queries for queries, _ in self.hops(w)) for w in self.windows) * self.query_width
        return (
            self.moved_s(self.rows * (self.itemsize * forward + 10 * merged)),
            self.moved_s(self.rows * (self.itemsize * backward + 8 * merged)),
        )

    def norms_s(self) -> float:
        """Time of the forward pass's norms alone: what of the memory-bound kernels is computed again in the backward pass. XLA
        makes SwiGLU's product in the kernel of its gradients (by a profile of `selective` on an H100; not measured for `full`).
        """
        split = self.model.hidden_size / self.t
        return self.moved_s(self.rows * self.itemsize * BLOCK_NORM_MOVES[self.model.block_norms][0] * split)

    def gradient_sums_s(self) -> float:
        """Time to write and read gradients and add them to float32 sums; from ZeRO 2 on a rank has its share of the sums."""
        shares = self.data_group.size if self.parallel.zero >= 2 else 1
        return self.moved_s(self.trained_parameters * (2 * self.itemsize + 8 / shares))

    def recomputed(self) -> tuple[set[str], bool, bool]:
        """(matmuls that the backward repeats, whether it repeats attention, whether it repeats the operations between
        matmuls)."""
        if self.policy.everything:
            return set(), False, False
        again = set(self.policy.recompute)
        attention = not self.is_blockwise or bool(again & set(ATTENTION_RESULTS))
        return again & set(self.matmuls), attention, True
