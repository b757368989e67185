"""Memory of a pipelined step, compiled for eight H100s without a GPU: schedules, microbatches and remat policies.

python benchmarks/pipeline.py [full selective offload]        (needs the extra aot; a minute and a half per policy)

Llama 3.1 8B, S 8192, one sequence per microbatch, pipe 4 x tensor 2, bfloat16, cuDNN attention. Prints a Markdown table.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jaxllm.compile.aot import compile_step, gpu_devices
from jaxllm.config import Config, load_config
from jaxllm.config.remat_policy import policy_of
from jaxllm.cost_model.activations import bytes_per_token_and_layer
from jaxllm.pipeline_schedule import make_schedule

GIB = 2**30
P, TENSOR = 4, 2
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Name -> virtual stages."""


def configured(schedule: str, microbatches: int, remat: str) -> Config:
    train = {"steps": 10, "sequence_length": 8192, "global_batch_sequences": microbatches, "microbatch_sequences": 1}
    parallel = {"pipe": P, "tensor": TENSOR, "data": 1, "schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
    model = {"name": "llama-3.1-8b", "attention": "cudnn"}
    base = {"model": model, "train": train, "parallel": {**parallel, "remat": remat}, "data": {"mask_documents": False}}
    return load_config(base)


def residuals_gib(config: Config) -> float:
    """Slots x layers per chunk x tokens x bytes of the tensors that the policy keeps or offloads."""
    V, S = config.parallel.virtual_stages, config.train.sequence_length
    slots = make_schedule(config.parallel.schedule, P, config.num_microbatches, V).slots
    held = bytes_per_token_and_layer(policy_of(config.parallel.remat, config.model), config, blockwise=True)
    sizes = [*held.kept.values(), *held.offloaded.values()]
    return slots * (config.model.num_layers // (P * V)) * S * sum(sizes) / GIB


def main(policies: list[str]) -> None:
    print(f"JAX {jax.__version__}; GiB a GPU\n")
    print("| remat | schedule | microbatches | temporaries | in the host | residuals, closed form | compiled in s |")
    print("|---|---|---|---|---|---|---|")
    for remat in policies:
        for schedule in SCHEDULES:
            for microbatches in (8, 32, 128):
                config, started = configured(schedule, microbatches, remat), time.perf_counter()
                memory = compile_step(config, gpu_devices(hosts=1, gpus_per_host=8)).memory_analysis()
                figures = [memory.temp_size_in_bytes / GIB, memory.host_temp_size_in_bytes / GIB, residuals_gib(config)]
                row = [remat, schedule, str(microbatches), *(f"{figure:.2f}" for figure in figures)]
                print(f"| {' | '.join(row)} | {time.perf_counter() - started:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["full", "selective", "offload"])
