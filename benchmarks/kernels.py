"""Steps of three models by kernel account, compiled for GPUs without one: step time by roofline, MFU and memory.

    python benchmarks/kernels.py h100-80gb h200-141gb 4096 8192 32768      GPUs and sequence lengths; default: h100-80gb 8192

It needs the extra aot, and on two cores half a minute for a row.

Four microbatches of at least 32,768 (1B), 16,384 (3B) or 8,192 (8B) tokens, documents masked as by default, `selective` where
its estimate fits and `full` where not. One GPU has ten layers of 8B. Prints a Markdown table. The seconds are kernel times at
the rates of cost_model/kernel_rates.py; no step is timed.
"""

import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxllm.compile.report import compile_report
from jaxllm.config import Config, load_config
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.memory import estimate_memory

MICROBATCH_TOKENS = {"llama-3.2-1b": 32768, "llama-3.2-3b": 16384, "llama-3.1-8b": 8192}
MESHES = {"1": {"data": 1}, "8, ZeRO 1": {"data": 8, "zero": 1}, "8, ZeRO 3": {"data": 8, "zero": 3}}
MOVING = ("sums", "stacks", "slices", "zero_fills", "copies")
"""Parts of the account that compute nothing."""
Case = tuple[str, str, int, str]
"""GPU, model, sequence length, mesh."""


def configured(case: Case, remat: str) -> Config:
    _, model, length, mesh = case
    sequences = max(1, MICROBATCH_TOKENS[model] // length)
    data = MESHES[mesh]["data"]
    train = {"steps": 1000, "sequence_length": length, "microbatch_sequences": sequences}
    base = {
        "model": {"name": model, **({"num_layers": 10} if model == "llama-3.1-8b" and data == 1 else {})},
        "train": {**train, "global_batch_sequences": 4 * sequences * data},
        "parallel": {**MESHES[mesh], "remat": remat},
    }
    return load_config(base).resolve(data)


def row(case: Case) -> str:
    gpu = find_gpu(case[0])
    configs = [configured(case, remat) for remat in ("selective", "full")]
    fitting = [config for config in configs if estimate_memory(config, gpu).peak_bytes <= gpu.capacity_bytes]
    layers = configs[0].model.num_layers
    name = f"{layers} layers of 8B" if layers == 10 else case[1].rpartition("-")[2].upper()
    cells = [case[0], name, f"{case[2]:,}", case[3]]
    if fitting:
        report = compile_report(fitting[0], gpu, fitting[0].devices)
        kernels = report.kernels
        assert kernels is not None, "compiled for a GPU"
        moved = sum(part.seconds for part in kernels.parts if part.part in MOVING)
        figures = (f"{1e3 * kernels.step_s:,.0f}", f"{kernels.mfu_full_square:.1%}", f"{moved / kernels.step_s:.1%}")
        cells += [str(fitting[0].parallel.remat), *figures, f"{report.total_bytes / 2**30:.1f}"]
    else:
        cells += ["does not fit", *[""] * 4]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    lengths = [int(argument) for argument in arguments if argument.isdigit()]
    gpus = [argument for argument in arguments if not argument.isdigit()]
    cases = itertools.product(gpus or ["h100-80gb"], MICROBATCH_TOKENS, lengths or [8192], MESHES)
    print("| GPU | model | S | GPUs | remat | step, ms | MFU, full square | copies and sums | GiB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(row, cases):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
