"""The kernel account: every kernel of a compiled step by part, with its bytes, FLOPs and seconds by roofline.

    account = kernel_account(module, config, gpu, gpus_per_host, overlap)
    account.step_s, account.mfu_causal
    for row in account.parts: row.part, row.seconds, row.least_seconds

Bytes follow from the shapes in the program. An operand counts once, as if nothing of it were in the cache. Of an array that a
fusion only slices, the slice counts; of one that it updates in place, the update.

A kernel takes the longer of its FLOPs and its bytes at the rates of cost_model/kernel_rates.py, and the time to launch it. All
kernels run one after the other; collectives take the time for which they are exposed (overlap.py), and copies to and from the
host only what exceeds everything else. Nothing is timed.

The account is of the mean step. In DiLoCo's rounds an outer step is once in several steps, and the part `outer_step` has a
step's share of it: the exchange as the step-time model predicts it, and the kernels if it is beside a step
(train.diloco_overlap). Those into which XLA fused operations of the inner step count in each step, and so do a few small sums
over the ranks of a replica.

The part of a kernel follows from what it does and from the named scopes of the traced program. A kernel into which XLA fused
operations of several parts belongs to the part of its result.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxllm.compile import buffers, hlo
from jaxllm.compile.hlo import BUFFER, ON_HOST, OP_NAME, RUNNING, Instruction, Module, byte_size, operands, shape_of
from jaxllm.compile.overlap import Overlap
from jaxllm.config import Config
from jaxllm.config.rounds import steps_apart
from jaxllm.config.types import FP8_ROUNDING
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import Gpu
from jaxllm.cost_model.kernel_rates import KernelRates, kernel_rates, least_seconds
from jaxllm.cost_model.replicas import exchange_of
from jaxllm.cost_model.step_parts import OUTER_STEP
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.mesh.axes import REPLICA

NO_KERNELS = (*hlo.PASSING, "add-dependency", "after-all", "partition-id", "replica-id", "domain")
"""Operations that launch nothing. The done of an asynchronous one launches nothing either."""
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_WORKSPACES = ("s8", "u8")
"""Dtypes of a library's workspace, which is not read again."""


@dataclass(frozen=True)
class Kernel:
    """One instruction that a GPU launches. Bytes and FLOPs are of one run."""

    name: str
    kind: str
    """matmul, attention forward, attention backward, collective, host copy, copy, or fusion (anything else)."""
    runs: int
    """Runs in one step."""
    read_bytes: int
    written_bytes: int
    flops: int
    is_fp8: bool
    op_names: tuple[str, ...]
    """Paths of the traced operations: a matmul's own, the instruction's, then those that are fused into it."""
    body: tuple[str, ...]
    """HLO's names of the fused operations on arrays, or of the operation itself. Those on scalars compute indices."""

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


def kernels(module: Module) -> Iterator[Kernel]:
    """Every kernel, copy, library call and collective of one run of the module, in the order of the program."""
    everything = (i for among in module.computations.values() for i in among)
    loops = [i.text for i in everything if i.op == "while" and hlo.TRIPS.search(i.text)]
    # Where a loop's trip count is known, the host counts, and nothing is launched for the condition.
    counted = {match[1] for text in loops if (match := _CONDITION.search(text))}
    types = {name: {i.name: i.result for i in among} for name, among in module.computations.items()}
    for at in module.walk():
        instruction = at.instruction
        if at.computation in counted or instruction.op in (*NO_KERNELS, *RUNNING):
            continue
        if instruction.op.endswith(("-done", "-update")) or target_of(instruction) == "AllocateBuffer":
            continue
        yield _kernel(module, instruction, types[at.computation], at.executed)


def _kernel(module: Module, instruction: Instruction, types: Mapping[str, str], runs: int) -> Kernel:
    fused = [i for name in instruction.called for i in module.computations.get(name, [])]
    is_fusion = fused and instruction.op.startswith("fusion")
    read, written = _moved_by_fusion(fused) if is_fusion else _moved(instruction, types)
    kind = _kind(instruction, fused, types)
    is_product = kind == "matmul" or kind.startswith("attention")
    flops = module.flops_of(instruction, types) if is_product else 0
    product = next((i for i in (*fused, instruction) if _is_matmul(i)), None)
    first = operands(product)[0] if product else ""
    is_fp8 = next((i.result for i in fused if i.name == first), types.get(first, "")).startswith("f8")
    # Of a matmul into which XLA fused the slice of its operand or of its result, the fusion has the slice's name.
    traced = (*([product] if product else []), instruction, *fused)
    names = tuple(match[1] for i in traced if (match := OP_NAME.search(i.text)))
    body = tuple(i.op for i in fused if not re.fullmatch(r"\w+\[\]", i.result)) or (instruction.op.removesuffix("-start"),)
    return Kernel(instruction.name, kind, runs, read, written, flops, is_fp8, names, body)


def target_of(instruction: Instruction) -> str:
    """The library function of a custom call; '' for anything else."""
    match = hlo.TARGET.search(instruction.text) if instruction.op == "custom-call" else None
    return match[1] if match else ""


def _is_matmul(instruction: Instruction) -> bool:
    return instruction.op == "dot" or hlo.MATMULS.search(target_of(instruction)) is not None


def _kind(instruction: Instruction, fused: Sequence[Instruction], types: Mapping[str, str]) -> str:
    op = instruction.op.removesuffix("-start")
    if op in hlo.COLLECTIVES:
        return "collective"
    if any(_is_matmul(i) for i in (instruction, *fused)):
        return "matmul"
    if "fmha" in (target := target_of(instruction)):
        return "attention backward" if "Backward" in target else "attention forward"
    if ON_HOST in instruction.result or any(ON_HOST in types.get(name, "") for name in operands(instruction)):
        return "host copy"
    return "copy" if op in ("copy", "transpose") else "fusion"


def bytes_of(result: str, left_out: tuple[str, ...] = ()) -> int:
    """Bytes of all arrays in a type as HLO writes it. Behind the first, a product, arrays of some dtypes may be left out."""
    arrays = enumerate(BUFFER.findall(result))
    return sum(byte_size(dtype, shape_of(dims)) for n, (dtype, dims) in arrays if n == 0 or dtype not in left_out)


def _moved(instruction: Instruction, types: Mapping[str, str]) -> tuple[int, int]:
    """(bytes read, bytes written) by an instruction that is not a fusion."""
    read = [bytes_of(types.get(name, "")) for name in operands(instruction)]
    op = instruction.op.removesuffix("-start")
    if op in ("copy", "dynamic-update-slice"):
        moved = read[1 if op == "dynamic-update-slice" else 0]
        return moved, moved
    if op in ("dynamic-slice", "slice", "gather"):
        return bytes_of(instruction.result), bytes_of(instruction.result)
    return sum(read), bytes_of(instruction.result, _WORKSPACES if target_of(instruction) else ())


def _moved_by_fusion(fused: Sequence[Instruction]) -> tuple[int, int]:
    by_name = {i.name: i for i in fused}
    used = _used_shares(fused)

    def behind_bitcasts(i: Instruction) -> Instruction:
        while i.op == "bitcast":
            i = by_name[operands(i)[0]]
        return i

    def written(output: Instruction) -> int:
        output = behind_bitcasts(output)
        if output.op == "dynamic-update-slice":
            updated, update = (by_name[name] for name in operands(output)[:2])
            updated = behind_bitcasts(updated)
            if updated.op in ("parameter", "dynamic-update-slice"):
                return bytes_of(update.result) + (0 if updated.op == "parameter" else written(updated))
        if output.op == "scatter":
            # Each row is read, added to and written.
            return 2 * bytes_of(by_name[operands(output)[-1]].result)
        return bytes_of(output.result, _WORKSPACES)

    root = next(i for i in fused if i.text.lstrip().startswith("ROOT "))
    outputs = [by_name[name] for name in operands(root)] if root.op == "tuple" else [root]
    outputs = [output for output in outputs if not (output.op == "get-tuple-element" and output.result.startswith(_WORKSPACES))]
    read = sum(bytes_of(i.result) * min(1.0, used[i.name]) for i in fused if i.op == "parameter")
    return round(read), sum(map(written, outputs))


def _used_shares(fused: Sequence[Instruction]) -> dict[str, float]:
    """The share of each value's elements that a fusion reads or computes: those that its result needs."""
    sizes = {i.name: bytes_of(i.result) for i in fused}
    used: dict[str, float] = defaultdict(float)
    for user in reversed(fused):
        own = 1.0 if user.text.lstrip().startswith("ROOT ") else min(1.0, used[user.name])
        for place, name in enumerate(operands(user)):
            share = own
            if place == 0 and user.op in ("dynamic-slice", "slice", "gather"):
                share *= sizes[user.name] / sizes[name]
            elif place == 0 and user.op in ("dynamic-update-slice", "scatter"):
                share = 0.0
            used[name] += share
    return used


PARTS = {
    "matmuls": "the layers' matmuls, forward and backward",
    "matmuls_again": "matmuls that the backward pass repeats",
    "head_matmuls": "logits and their two gradients",
    "attention_forward": "attention's kernel",
    "attention_backward": "its gradients",
    "attention_again": "attention's kernel, repeated in the backward pass",
    "attention_blocks": "cutting, masking and merging blocks of attention",
    "norms": "norms and residual sums",
    "swiglu": "SiLU and products",
    "rotary": "rotary embeddings; joining and splitting queries, keys and values",
    "loss": "softmax of the logits",
    "embedding": "look-up and its gradient",
    "fp8_rounding": "arrays scaled and rounded to FP8, with what XLA fused into that",
    "sums": "gradients cast to float32, and added to sums",
    "stacks": "tensors copied into a stack of layers or chunks",
    "slices": "tensors copied out of one",
    "zero_fills": "buffers filled with a constant",
    "copies": "whole buffers copied, or stored in another order",
    "optimizer": "AdamW, the gradients' norm, the weights in the compute dtype",
    "transfers": "collectives, as far as nothing hides them",
    "outer_step": "a step's share of DiLoCo's outer steps",
    "host_transfers": "copies to and from the host, beyond everything else",
    "other": "the rest",
}
"""Part -> what it contains."""
OF_LAYERS = ("matmuls", "matmuls_again", *(p for p in PARTS if p.startswith("attention")), "norms", "swiglu", "rotary")
OF_LAYERS += ("fp8_rounding", "sums", "stacks", "slices", "zero_fills", "copies")
"""Parts that are all or mostly the layers', each microbatch."""
_SCOPES = (
    ("sums", r"gradient_sums|reduce_gradients|zero_scatter"),
    ("fp8_rounding", FP8_ROUNDING),
    ("embedding", r"embedding|embedding_backward"),
    ("loss", r"head|head_backward|loss"),
    ("attention_blocks", r"attend"),
    ("rotary", r"rotary"),
    ("swiglu", r"mlp"),
    ("norms", r"norm|residual"),
    ("rotary", r"attention"),
)
"""Named scopes of the model, inner ones first."""
_MOVERS = {"copy", "convert", "reshape", "transpose"}
"""Operations on layout and dtype, beside the slice or the update that a copy consists of."""
_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "broadcast", "iota", "bitcast"}
_SMALL_BYTES = 2**12
"""A fill reads at most some scalars."""


@dataclass(frozen=True)
class KernelPart:
    """All kernels of one part, in one step on one device; `runs`, `bytes` and `flops` in a step that has the part."""

    part: str
    runs: int
    bytes: int
    """Read and written; of collectives, sent."""
    flops: int
    seconds: float
    """In the mean step."""
    least_seconds: float
    """The least that the part could take at the same rates; 0 for work that a step can do without."""
    layer_seconds: float | None
    """`seconds` per layer and microbatch; None for a part that is not the layers'."""


@dataclass(frozen=True)
class KernelAccount:
    parts: tuple[KernelPart, ...]
    """The longest first."""
    step_s: float
    phases_s: Mapping[str, float]
    """Seconds of the forward pass, the backward pass with what it repeats, the update, and what waits for transfers."""
    mfu_full_square: float
    """Model FLOPs with the full square of attention, as a share of the dense peak of bfloat16."""
    mfu_causal: float
    rates: KernelRates


def kernel_account(
    module: Module, config: Config, gpu: Gpu, gpus_per_host: int, overlap: Sequence[Overlap] = ()
) -> KernelAccount:
    """The account of the train step of a resolved config.

    Args:
      overlap: by_kind() of the same module; exchanges between DiLoCo's replicas with `every_steps`.
    """
    rates = kernel_rates(gpu, config.model)
    in_rounds, each_step = config.train.diloco_steps is not None, [row for row in overlap if row.every_steps is None]
    exchange = {c.name for c in module.collectives() if in_rounds and REPLICA in c.axes}
    groups: dict[str, list[Kernel]] = {}
    for kernel in kernels(module):
        groups.setdefault(OUTER_STEP if kernel.name in exchange else part_of(kernel), []).append(kernel)
    outer = groups.pop(OUTER_STEP, [])
    seconds = {part: sum(k.runs * kernel_seconds(k, rates) for k in among) for part, among in groups.items()}
    sent = {"transfers": round(sum(row.sent_bytes for row in each_step))}
    if "transfers" in groups:
        seconds["transfers"] = sum(row.exposed_s for row in each_step)
    if "host_transfers" in groups:
        crossing = sum(k.runs * k.moved_bytes / 2 for k in groups["host_transfers"]) / gpu.host_bandwidth_bytes_per_s
        seconds["host_transfers"] = 0.0
        seconds["host_transfers"] = max(0.0, crossing - sum(seconds.values()))
    least = least_seconds(config, gpu, gpus_per_host, rates)
    turns = config.chunk_layers * config.parallel.virtual_stages * config.num_microbatches
    parts = [
        KernelPart(
            part,
            runs=sum(k.runs for k in among),
            bytes=sent.get(part, sum(k.runs * k.moved_bytes for k in among)),
            flops=sum(k.runs * k.flops for k in among),
            seconds=seconds[part],
            least_seconds=least.get(part, 0.0),
            layer_seconds=seconds[part] / turns if part in OF_LAYERS else None,
        )
        for part, among in groups.items()
    ]
    if in_rounds:
        parts.append(_outer_part(config, gpu, gpus_per_host, outer, rates))
    step_s = sum(row.seconds for row in parts)
    model, S, possible_flops = config.model, config.train.sequence_length, step_s * config.devices * gpu.dense_flops["bfloat16"]
    per_token = (train_flops_per_token(model, S, causal, config.frozen) for causal in (False, True))
    mfu_full_square, mfu_causal = (config.step_tokens * flops / possible_flops for flops in per_token)
    phases_s: dict[str, float] = dict.fromkeys(buffers.PHASES, 0.0)
    for part, among in groups.items():
        for kernel in among if part not in ("transfers", "host_transfers") else ():
            phases_s[phase_of(kernel, part)] += kernel.runs * kernel_seconds(kernel, rates)
    phases_s["transfers"] = max(0.0, step_s - sum(phases_s.values()))
    ordered = tuple(sorted(parts, key=lambda row: -row.seconds))
    return KernelAccount(ordered, step_s, phases_s, mfu_full_square, mfu_causal, rates)


def _outer_part(config: Config, gpu: Gpu, gpus_per_host: int, among: Sequence[Kernel], rates: KernelRates) -> KernelPart:
    """A step's share of the outer steps, of one of which the kernels `among` are beside the compiled step."""
    own, exchange = [k for k in among if k.kind != "collective"], exchange_of(config)
    return KernelPart(
        OUTER_STEP,
        runs=sum(k.runs for k in among),
        bytes=sum(k.runs * k.moved_bytes for k in own) + (0 if exchange is None else exchange.sent_bytes // exchange.gpus),
        flops=0,
        seconds=estimate_step_time(config, gpu, gpus_per_host).between_replicas_s
        + sum(k.runs * kernel_seconds(k, rates) for k in own) / steps_apart(config.train),
        least_seconds=0.0,
        layer_seconds=None,
    )


def kernel_seconds(kernel: Kernel, rates: KernelRates) -> float:
    """Seconds of one run, alone on the GPU."""
    per_s = {
        "matmul": rates.fp8_flops_per_s if kernel.is_fp8 else rates.matmul_flops_per_s,
        "attention forward": rates.attention_forward_flops_per_s,
        "attention backward": rates.attention_backward_flops_per_s,
    }.get(kernel.kind)
    moved_s = kernel.moved_bytes / rates.memory_bytes_per_s
    return max(moved_s, kernel.flops / per_s if per_s else 0.0) + rates.launch_s


def phase_of(kernel: Kernel, part: str) -> str:
    """The phase of a step to which a kernel of a part belongs."""
    if part == "optimizer":
        return "update"
    path = next(iter(kernel.op_names), "")
    return (
        "backward" if "transpose(" in path or part.endswith("_again") or part in ("attention_backward", "sums") else "forward"
    )


def part_of(kernel: Kernel) -> str:
    """The part of the step to which a kernel belongs. Plain XLA attention: its matmuls count as attention's kernel, its softmax
    as attention_blocks."""
    path = next(iter(kernel.op_names), "")
    again = "rematted_computation" in path or ".remat" in kernel.name
    backward = "transpose(" in path
    if kernel.kind == "collective":
        return "transfers"
    if kernel.kind == "host copy":
        return "host_transfers"
    if kernel.kind.startswith("attention"):
        # In the backward pass only a repeated kernel is a forward one.
        return "attention_again" if kernel.kind.endswith("forward") and (again or backward) else kernel.kind.replace(" ", "_")
    if kernel.kind == "matmul":
        if _within(path, r"attend"):
            return "attention_again" if again else "attention_backward" if backward else "attention_forward"
        return "head_matmuls" if _within(path, r"head|head_backward") else "matmuls_again" if again else "matmuls"
    if kernel.op_names and all(_within(one, r"outer_step|fragment") for one in kernel.op_names):
        return OUTER_STEP
    if _within(path, r"optimizer|compute_copy|outer_step|fragment"):
        return "optimizer"
    traced = (one for one in kernel.op_names if one.startswith("jit("))
    by_scope = (part for one in traced for part, scopes in _SCOPES if _within(one, scopes))
    return _by_structure(kernel) or next(by_scope, "other")


def _by_structure(kernel: Kernel) -> str | None:
    """stacks, slices, zero_fills, copies or sums, by the operations on arrays alone; None for a kernel that computes."""
    body = set(kernel.body) - _NOTHING
    if not body and kernel.read_bytes <= _SMALL_BYTES:
        return "zero_fills"
    if body >= (added := {"dynamic-update-slice", "dynamic-slice", "add"}) and body <= _MOVERS | added | {"select"}:
        return "sums"
    if "dynamic-update-slice" in body and body <= _MOVERS | {"dynamic-update-slice", "dynamic-slice"}:
        return "stacks"
    if body and body <= _MOVERS | {"dynamic-slice"} and "dynamic-slice" in body:
        return "slices"
    return "copies" if kernel.kind == "copy" or (body and body <= {"copy", "transpose", "slice", "concatenate"}) else None


def _within(path: str, scopes: str) -> bool:
    """Whether a scope is an element of the path, plain or as in transpose(jvp(norm))."""
    return re.search(rf"(?:^|[/(])(?:{scopes})(?=[/)]|$)", path) is not None
