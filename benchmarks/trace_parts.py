"""Sorts the kernels of a profile of a GPU into the parts of the kernel account (jaxllm/compile/kernels.py).

    python benchmarks/trace_parts.py NAME... [--gpu h100-80gb] [--model llama-3.2-1b] [--steps 2]

reads NAME.hlo.gz (the program as the GPU compiled it) and NAME.xplane.gz (the profile of some steps), which gpu_cases.train
writes if its options have `keep`, and prints a Markdown table with the roofline of the account beside each part.

XLA launches kernels in CUDA graphs, so a profile does not name the instructions of the program. But a stream runs kernels in
the order of the program. The kernels that ran are therefore aligned with those of the program, its loops written out, by token:
attention forward, attention backward, a library's matmul, or the base name of a fusion. A kernel whose token is not at its
place belongs to no part: it counts as `unmatched`.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.compile.hlo import RUNNING, Module, trip_count
from jaxllm.compile.kernels import Kernel, kernel_seconds, kernels, part_of
from jaxllm.cost_model.kernel_rates import KernelRates

FORWARD, BACKWARD, MATMUL, MEMSET, HELPER = "attention forward", "attention backward", "matmul", "memset", "attention's helper"
UNMATCHED = "unmatched"
_LIBRARY = (
    (HELPER, re.compile(r"dot_do_o|convert_dq|reduce_head")),
    (BACKWARD, re.compile(r"cudnn.*bprop|fmha.*(bwd|bprop)")),
    (FORWARD, re.compile(r"cudnn.*fprop|fmha.*(fwd|fprop)")),
    (MATMUL, re.compile(r"nvjet|cutlass|xmma|cublas|^(?!gemm_fusion|input_|loop_).*gemm")),
    (MEMSET, re.compile(r"memset", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy", re.IGNORECASE)),
)
"""Token -> names of kernels that XLA does not generate itself."""
_OF_XLA = ("fusion", "gemm_fusion")
"""Beginnings of names of matmuls that XLA generates itself."""
_WITHOUT_INSTRUCTION = {HELPER: "attention_backward", MEMSET: "other"}
"""Token of kernels that a library launches beside that of the instruction -> their part."""
_NUMBERING = re.compile(r"(_(\d+|remat\d*|clone))+$")
_AGREEING = 4
"""Kernels that must agree in a row where the alignment continues after a difference."""
_FARTHEST = 64
"""Kernels that may be missing or unknown in a row."""


def kernels_of(profile: Any) -> Iterator[tuple[str, str, float, float]]:
    """(kernel, HLO instruction or '', start, end in ns) of all work on the GPU's streams; on a CPU, of XLA's operations."""
    planes, gpus = list(profile.planes), gpu_planes(profile)
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                op = str(dict(event.stats).get("hlo_op", ""))
                if gpus or op:
                    yield event.name, op, event.start_ns, event.start_ns + event.duration_ns


def gpu_planes(profile: Any) -> list[Any]:
    return [plane for plane in profile.planes if plane.name.startswith("/device:GPU")]


def trace_parts(hlo: str, profile: Any, steps: int, rates: KernelRates | None = None) -> dict[str, Any]:
    """{"matched": share of the kernels' time that has a part, "parts": part -> its figures a step}, the longest part first.

    Args:
      hlo: the compiled program, as text.
      profile: of `steps` steps of it.
      rates: adds `roofline_s`, the seconds by the kernel account.
    """
    ran = sorted((start, end, name) for name, _, start, end in kernels_of(profile))
    return sorted_into_parts(written_out(Module(hlo, {})), [(name, end - start) for start, end, name in ran], steps, rates)


def sorted_into_parts(
    program: Sequence[Kernel], ran: Sequence[tuple[str, float]], steps: int, rates: KernelRates | None = None
) -> dict[str, Any]:
    """As `trace_parts`, from the kernels of a step and (name, ns) of the kernels that ran, both in their order."""
    tokens = [token_of(name) for name, _ in ran]
    own = [at for at, token in enumerate(tokens) if token not in _WITHOUT_INSTRUCTION]
    wanted = list(program) * steps
    pairs = aligned([token_in_program(kernel) for kernel in wanted], [tokens[at] for at in own])
    kernel_at = {own[there]: wanted[here] for here, there in pairs}
    sums: dict[str, dict[str, float]] = {}
    for at, (_, ns) in enumerate(ran):
        kernel = kernel_at.get(at)
        part = part_of(kernel) if kernel else _WITHOUT_INSTRUCTION.get(tokens[at], UNMATCHED)
        row = sums.setdefault(part, dict.fromkeys(("s", "runs", "flops", "bytes", "roofline_s"), 0))
        row["s"] += 1e-9 * ns / steps
        row["runs"] += 1 / steps
        if kernel:
            row["flops"] += kernel.flops / steps
            row["bytes"] += kernel.moved_bytes / steps
            row["roofline_s"] += kernel_seconds(kernel, rates) / steps if rates else 0
    whole_s = sum(row["s"] for row in sums.values())
    matched = 1 - sums.get(UNMATCHED, {"s": 0})["s"] / whole_s if whole_s else 0.0
    found = {}
    for part, row in sorted(sums.items(), key=lambda item: -item[1]["s"]):
        found[part] = {"s": row["s"], "runs": row["runs"], "bytes_per_s": row["bytes"] / max(row["s"], 1e-12)}
        if row["flops"]:
            found[part]["flops_per_s"] = row["flops"] / row["s"]
        if rates:
            found[part]["roofline_s"] = row["roofline_s"]
    return {"matched": matched, "parts": found}


def written_out(module: Module) -> list[Kernel]:
    """The kernels of one run of the program in their order, those of a loop once for each iteration."""
    named = {kernel.name: kernel for kernel in kernels(module)}

    def of(computation: str) -> list[Kernel]:
        found: list[Kernel] = []
        for instruction in module.computations[computation]:
            if instruction.op in RUNNING:
                found += [kernel for name in instruction.called for kernel in of(name)] * trip_count(instruction)
            elif instruction.name in named:
                found.append(named[instruction.name])
        return found

    return of(module.entry)


def token_of(name: str) -> str:
    """Token of a kernel that ran."""
    return next((token for token, pattern in _LIBRARY if pattern.search(name)), None) or _base(name)


def token_in_program(kernel: Kernel) -> str:
    """Token that the kernel has when it runs."""
    if kernel.kind in (FORWARD, BACKWARD) or (kernel.kind == MATMUL and not kernel.name.startswith(_OF_XLA)):
        return kernel.kind
    return _base(kernel.name)


def _base(name: str) -> str:
    return _NUMBERING.sub("", re.sub(r"[.-]", "_", name).removeprefix("wrapped_"))


def aligned(wanted: Sequence[str], ran: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of positions with equal tokens, both in order. After a difference it leaves out the fewest tokens of both sides
    after which several agree."""
    here = there = 0
    while here < len(wanted) and there < len(ran):
        if wanted[here] == ran[there]:
            yield here, there
            here, there = here + 1, there + 1
            continue
        left_out = ((gap - more, more) for gap in range(1, _FARTHEST) for more in range(gap + 1))
        skipped, unknown = next((gap for gap in left_out if _agree(wanted, here + gap[0], ran, there + gap[1])), (1, 1))
        here, there = here + skipped, there + unknown


def _agree(wanted: Sequence[str], here: int, ran: Sequence[str], there: int) -> bool:
    return wanted[here : here + _AGREEING] == ran[there : there + _AGREEING]


def table(found: dict[str, Any]) -> str:
    """Markdown, with milliseconds a step."""
    lines = ["| part | ms | by roofline | kernels | TFLOP/s | TB/s |", "|---|---|---|---|---|---|"]
    for part, row in found["parts"].items():
        flops = f"{row['flops_per_s'] / 1e12:.0f}" if "flops_per_s" in row else ""
        roofline = f"{1e3 * row['roofline_s']:.2f}" if "roofline_s" in row else ""
        rate = f"{row['bytes_per_s'] / 1e12:.2f}" if row["bytes_per_s"] else ""
        lines.append(f"| {part} | {1e3 * row['s']:.2f} | {roofline} | {row['runs']:.0f} | {flops} | {rate} |")
    whole_s = sum(row["s"] for row in found["parts"].values())
    return "\n".join([*lines, "", f"{1e3 * whole_s:.1f} ms of kernels a step, of which {found['matched']:.1%} have a part."])


def main() -> None:
    import jax

    from jaxllm.config import load_config
    from jaxllm.cost_model.gpu_choice import find_gpu
    from jaxllm.cost_model.kernel_rates import kernel_rates

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="start of the names of the two files")
    parser.add_argument("--gpu", default="h100-80gb", help="kind of GPU for the roofline; default: h100-80gb")
    parser.add_argument("--model", default="llama-3.2-1b", help="preset for the roofline: its dtype and head size count")
    parser.add_argument("--steps", type=int, default=2, help="steps in the profile; default: 2")
    options = parser.parse_args()
    train = {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 1}
    model = load_config({"model": {"name": options.model}, "train": train}).model
    rates = kernel_rates(find_gpu(options.gpu), model)
    for name in options.names:
        hlo = gzip.decompress(Path(f"{name}.hlo.gz").read_bytes()).decode()
        profile = gzip.decompress(Path(f"{name}.xplane.gz").read_bytes())
        profile = jax.profiler.ProfileData.from_serialized_xspace(profile)
        print(f"{Path(name).name}\n\n{table(trace_parts(hlo, profile, options.steps, rates))}\n")


if __name__ == "__main__":
    main()
