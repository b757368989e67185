"""How long one train step takes: a roofline of its parts, in plain Python and a fraction of a millisecond. Nothing is measured.

    step = estimate_step_time(config, GPUS["h100-80gb"], gpus_per_host=8)
    step.step_s, step.tokens_per_s_per_gpu, step.terms_s
    print("\\n".join(step_time_lines(step)))

Each part is FLOPs over the speed that its shape allows, bytes over a bandwidth, or kernels times what each takes to start; a
transfer that lies behind compute costs what is left of it when the compute is done. terms_s has what the step waits for, and
sums to it; hidden_s what does not show.

A stage's work comes in ticks, one chunk of layers forward and one backward (plan/schedule.py). M microbatches over V virtual
stages are M V ticks and P - 1 more in which a stage waits or works for nothing: the bubble, (P - 1) / V times a microbatch's
layers. Two conventions:

  jaxllm    what parallel/ sends: all stages in lockstep, embedding and head split over pipe, gradients reduced once a step
            (ZeRO 0, 1) or behind the layer loop (2, 3)
  megatron  what Megatron-LM would do with the same mesh: 1F1B, the head on the last stage, for which all others wait, gradients
            and weights exchanged behind the last backward and the first forward (from ZeRO 1 on all alike), FLOPs as it counts

Constants. Four are fitted, FITTED, and serve all kinds of GPU and both conventions: to 88 published TFLOP/s of Megatron-LM
(Llama 3.1 8B, S 8192, A100s and H100s; benchmarks/published), by `python benchmarks/step_time.py --fit`, which also fits to
some rows and predicts the others. The rest are data sheets' (plan/hardware.py), follow from shapes, or are rules of thumb that
say so where they stand; which parts there are was decided with the published rows at hand. jaxllm itself has not been timed on
GPUs: its predictions are what these constants make of what it computes and sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from jaxllm.config import ATTENTION_RESULTS, Config
from jaxllm.config_errors import ConfigError
from jaxllm.plan.activations import bytes_per_token_and_layer, context_method, is_blockwise, policy_of, takes_cudnn
from jaxllm.plan.flops import train_flops_per_token
from jaxllm.plan.hardware import Gpu
from jaxllm.plan.megatron import megatron_flops_per_token
from jaxllm.plan.network import Group, all_gather_s, all_reduce_s, group_of, links_of, permute_s, reduce_scatter_s

Convention = Literal["jaxllm", "megatron"]
CONVENTIONS = get_args(Convention)
COMMUNICATION = ("tensor", "tensor_skew", "context", "pipe", "data", "replica", "offload", "offload_state")
"""Terms that wait for other GPUs or for the host."""


@dataclass(frozen=True)
class Fitted:
    """The four constants that were fitted."""

    matmul_share: float
    """Of the dense peak, what a large matmul reaches whose tiles fill the GPU: before Hopper."""
    hopper_matmul_share: float
    """From Hopper on, whose power does not allow the data sheet's clock."""
    sync_s: float
    """What ranks of tensor wait for each other at each of their collectives, whatever its bytes."""
    loader_tokens_per_s: float
    """Megatron's convention alone: what a data rank's input delivers. The published runs on 16 GPUs a data rank take 185 to 215
    ms a sequence of 8192, whatever their layout and microbatch, where others take 260 and more."""


FITTED = Fitted(matmul_share=0.773, hopper_matmul_share=0.557, sync_s=63e-6, loader_tokens_per_s=41_450)

BANDWIDTH_SHARE = 0.8
"""Of a data sheet's link or network bandwidth, what collectives reach: 230 to 240 of 300 GB/s on eight A100s and 360 to 370 of
450 on H100s are what NCCL's own tests usually print."""
MEMORY_SHARE = 0.8
"""Of the memory's bandwidth, what kernels that only move bytes reach; a rule of thumb."""
KERNEL_S = 5e-6
"""To start a kernel, fill the GPU and empty it again; a rule of thumb."""
KERNELS = {"jaxllm": 60, "megatron": 120}
"""Of one layer, forward and backward, by counting: 21 matmuls, attention, and what lies between, fused by XLA or not."""
HOP_KERNELS = {"jaxllm": 12, "megatron": 24}
"""Of one more step of a ring: attention, merging, sums."""
STEP_KERNELS = 400
"""Of one update."""
ATTENTION_SHARES = (0.60, 0.50)
"""Of the dense peak, what fused causal attention reaches forward and backward with heads of 128 and long sequences: Dao 2023,
"FlashAttention-2", for A100s, and Shah et al. 2024, "FlashAttention-3", for cuDNN on H100s; rounded."""
ATTENTION_ROWS = 128
"""Queries of one thread block."""
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 64, 0.5))
"""Rows and columns of a matmul's output tiles, and how fast each kind is beside the largest: a small one reads its inputs more
often. Rules of thumb."""
SHORTEST_SUM, SPLIT_SHARE = 1024, 0.95
"""A long sum may be split over multiprocessors, in parts of no less, that are added in the end (split-K); a rule of thumb."""


@dataclass(frozen=True)
class StepTime:
    terms_s: dict[str, float]
    """What the step waits for, by name, in seconds; axes of size 1 have no term. They sum to step_s."""
    hidden_s: dict[str, float]
    """Transfers behind compute, by the same names."""
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs: causal, or in Megatron's convention as that counts them."""

    @property
    def step_s(self) -> float:
        return sum(self.terms_s.values())

    @property
    def exposed_communication_share(self) -> float:
        """Of the step, what waits for other GPUs and the host; what lies in the bubble is not counted."""
        return sum(self.terms_s.get(name, 0.0) for name in COMMUNICATION) / self.step_s


def estimate_step_time(
    config: Config, gpu: Gpu, gpus_per_host: int, convention: str = "jaxllm", fitted: Fitted = FITTED
) -> StepTime:
    """Predicts the train step of a resolved config.

    Args:
      gpus_per_host: devices are dealt to hosts in the mesh's order, replica and pipe slowest and tensor fastest. Between
        islands of parallel.replica the network is taken to be that between hosts; a slower one is not known here.
      convention: jaxllm or megatron, see the module. In Megatron's parallel.remat means what it is there if it is `full`, and
        is not read otherwise.
      fitted: other constants, to fit them.

    Raises:
      ConfigError: no such convention.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention={convention} is not one of the choices: use {', '.join(CONVENTIONS)}.")
    return _Step(config, gpu, gpus_per_host, convention, fitted).time()


def step_time_lines(step: StepTime) -> Iterator[str]:
    """A table for a terminal: of each term the seconds that show, their share of the step, and the seconds that do not."""
    yield f"{'term':<16}{'exposed s':>12}{'share':>8}{'hidden s':>12}"
    for name in dict.fromkeys((*step.terms_s, *step.hidden_s)):
        exposed_s = step.terms_s.get(name, 0.0)
        yield _line(name.replace("_", " "), exposed_s, exposed_s / step.step_s, step.hidden_s.get(name, 0.0))
    yield _line("step", step.step_s, 1.0, sum(step.hidden_s.values()))


def _line(name: str, exposed_s: float, share: float, hidden_s: float) -> str:
    return f"{name:<16}{exposed_s:>12.4f}{share:>8.1%}" + (f"{hidden_s:>12.4f}" if hidden_s else f"{'-':>12}")


@lru_cache(maxsize=65536)
def tile_share(rows: int, columns: int, length: int, multiprocessors: int) -> float:
    """What a matmul's shape leaves of a GPU's speed.

    The output's tiles are dealt to the multiprocessors in waves. The last may be nearly empty, and tiles at the edges reach
    beyond the output. The best of TILES, with the sum over `length` whole or in 2, 4 or 8 parts.
    """
    splits = [ways for ways in (1, 2, 4, 8) if ways == 1 or length >= ways * SHORTEST_SUM]
    best = 0.0
    for tile_rows, tile_columns, speed in TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        for ways in splits:
            places = -(-tiles * ways // multiprocessors) * multiprocessors
            filled = rows * columns * ways / (places * tile_rows * tile_columns)
            best = max(best, filled * speed * (SPLIT_SHARE if ways > 1 else 1.0))
    return best


class _Transfers:
    """Adds up what shows of transfers and what lies behind compute."""

    def __init__(self):
        self.exposed_s: dict[str, float] = {}
        self.hidden_s: dict[str, float] = {}

    def add(self, name: str, transfer_s: float, behind_s: float = 0.0, times: float = 1) -> None:
        """`times` transfers of so many seconds, each behind so much compute."""
        hidden_s = min(transfer_s, behind_s)
        self.exposed_s[name] = self.exposed_s.get(name, 0.0) + times * (transfer_s - hidden_s)
        if times * hidden_s > 0:
            self.hidden_s[name] = self.hidden_s.get(name, 0.0) + times * hidden_s

    def add_together(self, transfers_s: dict[str, float], behind_s: float) -> None:
        """Transfers over different links, all behind the same compute: the longest alone may show."""
        longest = max(transfers_s, key=transfers_s.__getitem__, default="")
        for name, transfer_s in transfers_s.items():
            self.add(name, transfer_s, behind_s if name == longest else math.inf)

    @property
    def total_s(self) -> float:
        """Of what shows."""
        return sum(self.exposed_s.values())


def _add_times(sums: dict[str, float], found: dict[str, float], times: float = 1) -> None:
    for name, time_s in found.items():
        sums[name] = sums.get(name, 0.0) + times * time_s


class _Step:
    """A config's sizes as one GPU has them, and the parts of its step.

    D, F, N, K, H, L as in flops.py; P stages, V virtual stages, M microbatches; d, c, t ranks of data, context and tensor.
    """

    def __init__(self, config: Config, gpu: Gpu, gpus_per_host: int, convention: str, fitted: Fitted):
        model, parallel = config.model, config.parallel
        self.config, self.model, self.parallel, self.gpu = config, model, parallel, gpu
        self.convention, self.fitted, self.is_megatron = convention, fitted, convention == "megatron"
        self.policy = policy_of(parallel.remat)
        self.P, self.d, self.c, self.t = parallel.pipe, int(parallel.data), parallel.context, parallel.tensor
        self.V, self.M, self.S = parallel.virtual_stages, config.num_microbatches, config.train.sequence_length
        island = self.P * self.d * self.c * self.t
        self.devices = parallel.replica * island
        self.itemsize = {"bfloat16": 2, "float32": 4}[model.compute_dtype]
        self.peak_flops = gpu.peak_flops(model.compute_dtype)
        is_hopper = gpu.chip.compute_capability >= (9, 0)
        self.matmul_flops = self.peak_flops * (fitted.hopper_matmul_share if is_hopper else fitted.matmul_share)
        self.is_fp8, float8_flops = model.matmul_dtype == "fp8", gpu.float8_flops
        if self.is_fp8 and float8_flops is None:
            raise ConfigError(
                f"model.matmul_dtype=fp8 needs a GPU of Ada, Hopper or later, and {gpu.name} is none: set "
                f"model.matmul_dtype=compute_dtype, or choose another --gpu."
            )
        self.block_flops = self.matmul_flops * (float8_flops / self.peak_flops if self.is_fp8 and float8_flops else 1.0)
        self.memory_bytes_per_s = gpu.memory_bandwidth_bytes_per_s * MEMORY_SHARE
        self.links = links_of(gpu, BANDWIDTH_SHARE)

        def axis(size: int, stride: int) -> Group:
            return group_of(size, stride, min(gpus_per_host, self.devices))

        self.tensor_group, self.context_group = axis(self.t, 1), axis(self.c, self.t)
        self.data_group = axis(self.d * self.c, self.t)
        self.pipe_group, self.replica_group = axis(self.P, self.d * self.c * self.t), axis(parallel.replica, island)

        self.rows = config.microbatch_sequences * self.S // self.c
        """Tokens of a microbatch that a rank multiplies: tensor ranks gather the sequence first."""
        D, N, K, H = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
        # Key-value heads that do not split are whole on every tensor rank.
        self.query_width, self.key_width = N * H // self.t, K * H // (self.t if K % self.t == 0 else 1)
        self.mlp_width = model.intermediate_size // self.t
        inputs = {"query": self.query_width, "key": self.key_width, "value": self.key_width}
        inputs |= {"mlp_gate": self.mlp_width, "mlp_up": self.mlp_width}
        if self.is_megatron:
            inputs = {"query_key_value": self.query_width + 2 * self.key_width, "mlp_gate_up": 2 * self.mlp_width}
        self.matmuls = {name: (width, D) for name, width in inputs.items()}
        """Name -> columns of the output, length of the sum."""
        self.matmuls |= {"attention_out": (D, self.query_width), "mlp_down": (D, self.mlp_width)}
        self.layer_parameters = sum(columns * length for columns, length in self.matmuls.values())
        self.stage_layers = self.V * config.chunk_layers

    # ------------------------------------------------------------------------------------------------------- the whole step

    def time(self) -> StepTime:
        ticks = self.M * self.V
        compute, *both_ways, forward_s, backward_s = self.tick()
        terms = {name: ticks * time_s for name, time_s in compute.items()}
        hidden: dict[str, float] = {}
        for transfers in both_ways:
            _add_times(terms, transfers.exposed_s, ticks)
            _add_times(hidden, transfers.hidden_s, ticks + self.P - 1)
        if self.P > 1:
            terms["bubble"] = (self.P - 1) * sum(terms.values()) / ticks
        once = _Transfers()
        if self.P > 1 and not self.is_megatron:
            self.add_pipe_reductions(once)
        self.add_step_data(once, self.V * forward_s, self.V * backward_s)
        self.add_islands(once)
        self.add_state_offload(once)
        for found in (self.head(), self.update(), once.exposed_s):
            _add_times(terms, found)
        _add_times(hidden, once.hidden_s)
        if self.is_megatron:
            self.add_input(terms)
        tokens_per_s = self.config.step_tokens / sum(terms.values()) / self.devices
        count = megatron_flops_per_token if self.is_megatron else train_flops_per_token
        return StepTime(terms, hidden, tokens_per_s, tokens_per_s * count(self.model, self.S) / 1e12)

    def tick(self) -> tuple[dict[str, float], _Transfers, _Transfers, float, float]:
        """One chunk of layers: (compute by term, transfers forward, transfers backward, seconds forward, seconds backward)."""
        layers = self.config.chunk_layers
        matmuls_s, attention_s, moves_s = self.layer_matmuls_s(), self.attention_s(), self.moves_s()
        again, attention_again = self.recomputed()
        repeated_s = sum(self.block_matmul_s(self.rows, *self.matmuls[name]) for name in again)
        repeated_s += attention_s[0] if attention_again else 0.0
        # What lies between matmuls is made again under every policy but none.
        repeats_moves = bool(again) if self.is_megatron else not self.policy.everything
        repeated_s += moves_s[0] if repeats_moves else 0.0
        kernels = KERNELS[self.convention] + (self.c - 1) * HOP_KERNELS[self.convention]
        layer = {
            "matmuls": sum(matmuls_s),
            "attention": sum(attention_s),
            "memory_bound": sum(moves_s),
            "fp8_rounding": self.rounding_s() if self.is_fp8 else 0.0,
            "gradient_sums": self.gradient_sums_s(),
            "recomputation": repeated_s,
            "launches": kernels * KERNEL_S,
        }
        forward, backward = _Transfers(), _Transfers()
        if self.t > 1:
            self.add_tensor(forward, backward, layers, matmuls_s, "attention_out" in again)
        if self.c > 1:
            self.add_context(forward, backward, layers, attention_s, attention_again)
        forward_s, backward_s = (layers * sum(parts) for parts in zip(matmuls_s, attention_s, moves_s, strict=True))
        forward_s += forward.total_s
        backward_s += backward.total_s + layers * repeated_s

        behind_forward, behind_backward = {}, {}
        if self.P > 1:
            message_s = permute_s(self.hidden_bytes, self.pipe_group, self.links)
            if self.is_megatron:
                # 1F1B waits for each.
                backward.add("pipe", message_s, times=2)
            else:
                # Sent at a tick's top, behind the head, half of them show (compiled steps).
                bare = self.paired_share / 2
                backward.add("pipe", message_s, times=2 * bare)
                behind_forward["pipe"] = behind_backward["pipe"] = (1 - bare) * message_s
        if self.sends_by_layer:
            gather_s, scatter_s = self.layerwise_data_s()
            if gather_s:
                behind_forward["data"] = (layers - 1) * gather_s
            behind_backward["data"] = (layers - 1) * (gather_s + scatter_s)
            # A chunk's first gather and its last scatter have nothing to lie behind.
            backward.add("data", gather_s + scatter_s)
        if self.policy.offload and not self.is_megatron:
            link_s = layers * self.offloaded_bytes() / self.gpu.host_bandwidth_bytes_per_s
            behind_forward["offload"] = behind_backward["offload"] = link_s
        forward.add_together(behind_forward, forward_s)
        backward.add_together(behind_backward, backward_s)
        return {name: layers * time_s for name, time_s in layer.items() if time_s}, forward, backward, forward_s, backward_s

    # ---------------------------------------------------------------------------------- compute of one layer and microbatch

    def matmul_s(self, rows: int, columns: int, length: int) -> float:
        """rows x columns, each a sum of `length` products."""
        share = tile_share(rows, columns, length, self.gpu.chip.multiprocessors)
        traffic = self.itemsize * (rows * length + length * columns + rows * columns)
        return max(2 * rows * columns * length / (self.matmul_flops * share), self.moved_s(traffic))

    def block_matmul_s(self, rows: int, columns: int, length: int) -> float:
        """The same of a block's: in FP8, where that is asked for, at its peak's multiple of the speed, with inputs of a byte.
        That FP8 reaches the same share of its peak as bfloat16 is a guess."""
        if not self.is_fp8:
            return self.matmul_s(rows, columns, length)
        share = tile_share(rows, columns, length, self.gpu.chip.multiprocessors)
        traffic = rows * length + length * columns + self.itemsize * rows * columns
        return max(2 * rows * columns * length / (self.block_flops * share), self.moved_s(traffic))

    def rounding_s(self) -> float:
        """Of FP8, forward and backward: an array is read for its largest number, read again and written in a byte, each input
        and weight both ways, each output's gradient once. Queries, keys and values share an input, so do gate and up; what a
        fusion saves is not counted, nor what is computed again."""
        D, N, K, F = self.model.hidden_size, self.query_width, self.key_width, self.mlp_width
        inputs, gradients = 2 * D + N + F, N + 2 * K + D + 2 * F + D
        numbers = self.rows * (2 * inputs + gradients) + 2 * self.layer_parameters
        return self.moved_s(numbers * (2 * self.itemsize + 1))

    def moved_s(self, size_bytes: float) -> float:
        return size_bytes / self.memory_bytes_per_s

    def layer_matmuls_s(self) -> tuple[float, float]:
        """(forward, backward): backward one for the gradient of each matmul's input and one for that of its weight."""
        forward_s = backward_s = 0.0
        for columns, length in self.matmuls.values():
            forward_s += self.block_matmul_s(self.rows, columns, length)
            backward_s += self.block_matmul_s(self.rows, length, columns) + self.block_matmul_s(length, columns, self.rows)
        return forward_s, backward_s

    def attention_s(self) -> tuple[float, float]:
        """(forward, backward). Fused, two matmuls over the causal half forward and five backward, which makes the scores again;
        in a ring as much on every rank (zigzag.py).

        XLA's own multiplies all, and has scores in memory, in float32: softmax reads or writes them four times forward, about
        twice that backward.
        """
        heads, multiprocessors = self.model.num_heads // self.t, self.gpu.chip.multiprocessors
        square = 2 * self.rows * self.S * heads * self.model.head_dim
        if self.is_megatron or takes_cudnn(self.model):
            blocks = self.config.microbatch_sequences * heads * -(-(self.S // self.c) // ATTENTION_ROWS)
            filled = blocks / (-(-blocks // multiprocessors) * multiprocessors)
            half_s = square / 2 / (self.peak_flops * filled)
            return 2 * half_s / ATTENTION_SHARES[0], 5 * half_s / ATTENTION_SHARES[1]
        scores_s = self.moved_s(4 * 4 * self.rows * self.S * heads)
        square_s = square / self.matmul_flops
        return 2 * square_s + scores_s, (5 if self.c > 1 else 4) * square_s + 2 * scores_s

    def moves_s(self) -> tuple[float, float]:
        """(forward, backward) of kernels that only move bytes.

        Forward, norms and residual sums read or write a token's width nine times, of which a rank has 1/t; rotary angles
        queries and keys twice; SwiGLU the feed-forward width three times. Backward twelve, two and five, or eight where its
        product is made again for the gradient of mlp_down, as outside Megatron. Each further step of a ring merges an output in
        float32 (10 bytes an element) and adds a gradient of queries (8).
        """
        split = self.model.hidden_size / self.t
        rotary = 2 * (self.query_width + self.key_width)
        forward = 9 * split + rotary + 3 * self.mlp_width
        backward = 12 * split + rotary + (5 if self.is_megatron else 8) * self.mlp_width
        merged = (self.c - 1) * self.query_width
        return (
            self.moved_s(self.rows * (self.itemsize * forward + 10 * merged)),
            self.moved_s(self.rows * (self.itemsize * backward + 8 * merged)),
        )

    def gradient_sums_s(self) -> float:
        """Gradients written and read, and added to float32 sums, of which a rank has its share from ZeRO 2 on. Megatron adds
        inside the matmul."""
        shares = self.data_group.size if self.parallel.zero >= 2 else 1
        return 0.0 if self.is_megatron else self.moved_s(self.layer_parameters * (2 * self.itemsize + 8 / shares))

    def recomputed(self) -> tuple[set[str], bool]:
        """(matmuls that the backward repeats, whether it repeats attention). Flash attention is what Megatron's selective
        recomputation was for, so of its policies full is left."""
        if self.is_megatron:
            full = self.parallel.remat == "full"
            return (set(self.matmuls) - {"mlp_down"} if full else set()), full
        if self.policy.everything:
            return set(), False
        again = set(self.policy.recompute)
        return again & set(self.matmuls), not is_blockwise(self.config) or bool(again & set(ATTENTION_RESULTS))

    # -------------------------------------------------------------------------------- transfers of one layer and microbatch

    def add_tensor(
        self, forward: _Transfers, backward: _Transfers, layers: int, matmuls_s: tuple[float, float], scatters_again: bool
    ) -> None:
        """Sequence parallelism: hidden states are gathered into both halves of a block and scattered out of them, backward the
        same, and the two inputs gathered once more (6 and 4 of a layer); out of attention once more if that is repeated.

        Of XLA's, three gathers and one scatter lie behind a matmul (70B at tensor 4, compiled for 1,024 H100s; taken for the
        backward's); of Megatron's two, behind the gradient of an input, and two, behind that of a weight. In ticks that turn
        layers of both passes the others lie behind the other pass's matmuls (benchmarks/overlap.py).
        """
        size_bytes = self.rows * self.model.hidden_size * self.itemsize
        gather_s = all_gather_s(size_bytes, self.tensor_group, self.links)
        scatter_s = reduce_scatter_s(size_bytes, self.tensor_group, self.links)
        behind_s = matmuls_s[1] / (2 * len(self.matmuls))
        gathers, scatters = 4, 2 + scatters_again
        hidden_gathers, hidden_scatters = (2, 2) if self.is_megatron else (3, 1)
        backward.add("tensor", gather_s, behind_s, layers * hidden_gathers)
        backward.add("tensor", scatter_s, behind_s, layers * hidden_scatters)
        # What has nothing of its own pass to lie behind.
        alone = (
            (forward, matmuls_s[1] - (hidden_gathers + hidden_scatters) * behind_s, 2, 2),
            (backward, matmuls_s[0], gathers - hidden_gathers, scatters - hidden_scatters),
        )
        paired = self.paired_share
        for way, other_s, gathered, scattered in alone:
            for transfer_s, times in ((gather_s, gathered), (scatter_s, scattered)):
                way.add("tensor", transfer_s, times=(1 - paired) * layers * times)
                way.add("tensor", transfer_s, other_s / (gathered + scattered), paired * layers * times)
        # Hidden or not, as it was fitted.
        forward.add("tensor_skew", self.fitted.sync_s, times=4 * layers)
        backward.add("tensor_skew", self.fitted.sync_s, times=layers * (gathers + scatters))

    @property
    def paired_share(self) -> float:
        """Of the ticks that go forward, those that go backward too, layer by layer: all but the first P V. None with ZeRO 2 and
        3, whose own transfers fill the room (nothing was gained in a compiled step)."""
        if self.P == 1 or not self.parallel.overlap_passes or self.is_megatron or self.sends_by_layer:
            return 0.0
        return max(0.0, 1 - self.P * self.V / (self.M * self.V + self.P - 1))

    def add_context(
        self, forward: _Transfers, backward: _Transfers, layers: int, attention_s: tuple[float, float], again: bool
    ) -> None:
        """Ring: keys and values travel behind attention's c blocks, backward with their gradients (float32; Megatron's in the
        compute dtype). Gathered: before attention, backward too, and their gradients scattered after it."""
        keys, hops = 2 * self.rows * self.key_width, layers * (self.c - 1)
        sent, returned = keys * self.itemsize, keys * (self.itemsize if self.is_megatron else 4)
        if self.is_megatron or context_method(self.config) == "ring":
            hop_s = permute_s(sent, self.context_group, self.links)
            hop_back_s = permute_s(sent + returned, self.context_group, self.links)
            forward.add("context", hop_s, attention_s[0] / self.c, hops)
            backward.add("context", hop_s, attention_s[0] / self.c, hops * again)
            backward.add("context", hop_back_s, attention_s[1] / self.c, hops)
        else:
            gather_s = all_gather_s(sent * self.c, self.context_group, self.links)
            scatter_s = reduce_scatter_s(returned * self.c, self.context_group, self.links)
            forward.add("context", gather_s, times=layers)
            backward.add("context", (1 + again) * gather_s + scatter_s, times=layers)

    @property
    def sends_by_layer(self) -> bool:
        """Whether gradients, and with ZeRO 3 weights, travel over data x context a layer at a time."""
        return self.parallel.zero >= 2 and self.data_group.size > 1 and not self.is_megatron

    def layerwise_data_s(self) -> tuple[float, float]:
        """(gather, scatter) of a layer: ZeRO 2 scatters its gradients behind the backward of the layer before it, 3 also
        gathers its weights behind the layer that is computed before it, both ways (layer_loop.py)."""
        scatter_s = reduce_scatter_s(4 * self.layer_parameters, self.data_group, self.links)
        if self.parallel.zero == 2:
            return 0.0, scatter_s
        return all_gather_s(self.itemsize * self.layer_parameters, self.data_group, self.links), scatter_s

    @property
    def hidden_bytes(self) -> float:
        """Of a microbatch's hidden states between layers, on one rank."""
        return self.rows * self.model.hidden_size * self.itemsize / self.t

    def offloaded_bytes(self) -> float:
        """To the host, of one layer and microbatch, on one rank."""
        blockwise = is_blockwise(self.config)
        held = bytes_per_token_and_layer(self.policy, self.model, context=self.c, tensor=self.t, blockwise=blockwise)
        return self.rows * self.c * sum(held.offloaded.values())

    # ------------------------------------------------------------------------------------- once a microbatch, once a step

    def head(self) -> dict[str, float]:
        """All microbatches' logits and loss, and their gradients. jaxllm takes them in chunks, over pipe and tensor, and reads
        or writes float32 logits about six times; Megatron on the last stage, over tensor, and ten times."""
        ways, passes = (self.t, 10) if self.is_megatron else (self.P * self.t, 6)
        D, columns = self.model.hidden_size, -(-self.model.vocab_size // ways)
        chunks = 1 if self.is_megatron else -(-self.rows // self.config.train.loss_chunk_tokens)
        rows = -(-self.rows // chunks)
        matmuls_s = self.matmul_s(rows, columns, D) + self.matmul_s(rows, D, columns) + self.matmul_s(columns, D, rows)
        # And the float32 sum of the head's gradient, read and written.
        loss_s = self.moved_s(rows * columns * 4 * passes + columns * D * 8)
        return {"head": self.M * chunks * (matmuls_s + loss_s)}

    def add_pipe_reductions(self, transfers: _Transfers) -> None:
        """Hidden states summed over the stages four times a microbatch: looked up, to the head, and both back. XLA has half of
        them behind matmuls (70B compiled for 1,024 H100s)."""
        reduce_s = all_reduce_s(self.hidden_bytes, self.pipe_group, self.links)
        transfers.add("pipe", reduce_s, reduce_s, 2 * self.M)
        transfers.add("pipe", reduce_s, times=2 * self.M)

    def add_step_data(self, transfers: _Transfers, forward_s: float, backward_s: float) -> None:
        """Over data x context: gradients summed in float32, weights gathered in the compute dtype; but not what goes by layers.

        In a pipeline, embedding and head are needed in every tick, and are not shared out before the update; without one, ZeRO
        2 scatters their gradients in every microbatch, and 3 gathers them too. Megatron's exchanges lie behind the last
        microbatch's backward and the first's forward, of so many seconds.
        """
        group, zero, links = self.data_group, self.parallel.zero, self.links
        if group.size == 1:
            return
        layers, rest = self.stage_layers * self.layer_parameters, self.vocabulary_parameters()
        if zero == 0:
            transfers.add("data", all_reduce_s(4 * (layers + rest), group, links), backward_s if self.is_megatron else 0.0)
        elif self.is_megatron:
            transfers.add("data", reduce_scatter_s(4 * (layers + rest), group, links), backward_s)
            transfers.add("data", all_gather_s(self.itemsize * (layers + rest), group, links), forward_s)
        else:
            each = self.M if self.P == 1 else 1
            scatter_s = reduce_scatter_s(4 * (rest if zero >= 2 else layers + rest), group, links)
            gather_s = all_gather_s(self.itemsize * (rest if zero == 3 else layers + rest), group, links)
            transfers.add("data", scatter_s, times=each if zero >= 2 else 1)
            transfers.add("data", gather_s, times=each if zero == 3 else 1)

    def vocabulary_parameters(self) -> float:
        """Of embedding and head, on one rank; of Megatron's stages the first has the one and the last the other."""
        matrices = 1 if self.model.tie_embeddings else 2
        whole = self.model.vocab_size * self.model.hidden_size / self.t
        return whole * matrices / self.P if not self.is_megatron or self.P == 1 else whole

    def shared_parameters(self) -> float:
        """Those that a rank updates."""
        parameters = self.stage_layers * self.layer_parameters + self.vocabulary_parameters()
        return parameters / (self.data_group.size if self.parallel.zero else 1)

    def update(self) -> dict[str, float]:
        """AdamW in float32: weight, two moments and gradient read, the first three written; the gradient's norm; the copy in
        the compute dtype."""
        moved_bytes = self.shared_parameters() * (4 * 4 + 3 * 4 + 4 + 4 + self.itemsize)
        return {"optimizer": self.moved_s(moved_bytes), "launches": STEP_KERNELS * KERNEL_S}

    def add_islands(self, transfers: _Transfers) -> None:
        """Across islands, float32, each rank its share: gradients once a step, or with DiLoCo weights once a round."""
        if self.replica_group.size > 1:
            reduce_s = all_reduce_s(4 * self.shared_parameters(), self.replica_group, self.links)
            transfers.add("replica", reduce_s, times=1 / (self.config.train.diloco_steps or 1))

    def add_state_offload(self, transfers: _Transfers) -> None:
        """Moments cross the host's link once each way; master weights too, and once more to be cast at the step's beginning."""
        state = self.parallel.offload_state
        if state != "none" and not self.is_megatron:
            crossing = 2 * 8 + (3 * 4 if state == "optimizer_and_master" else 0)
            transfers.add("offload_state", self.shared_parameters() * crossing / self.gpu.host_bandwidth_bytes_per_s)

    def add_input(self, terms: dict[str, float]) -> None:
        """What a data rank waits for its input, beyond the step's own time."""
        tokens = self.config.step_tokens / (self.parallel.replica * self.d)
        wait_s = tokens / self.fitted.loader_tokens_per_s - sum(terms.values())
        if wait_s > 0:
            terms["input"] = wait_s
