"""Temporary memory of the real train step compiled for H100s, without one: ZeRO levels on eight, remat policies on one.

python benchmarks/compiled_memory.py        (needs the extra aot; half a minute)
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxllm.aot import compile_step, gpu_devices
from jaxllm.config import load_config

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 8192}


def temporary_mib(gpus: int, layers: int, train: dict, *overrides: str) -> float:
    config = load_config({"model": {**SHAPE, "num_layers": layers}, "train": {"steps": 10, **train}}, overrides)
    return compile_step(config, gpu_devices(hosts=1, gpus_per_host=gpus)).memory_analysis().temp_size_in_bytes / 2**20


if __name__ == "__main__":
    batch = {"sequence_length": 1024, "global_batch_sequences": 32, "microbatch_sequences": 1}
    for zero in (0, 1, 2, 3):
        print(f"8 H100s, 8 layers, ZeRO {zero}: {temporary_mib(8, 8, batch, f'parallel.zero={zero}'):,.0f} MiB", flush=True)
    batch = {"sequence_length": 2048, "global_batch_sequences": 4}
    for scan in ("true", "false"):
        for remat in ("none", "selective", "full"):
            mib = temporary_mib(1, 6, batch, f"parallel.remat={remat}", f"model.scan_layers={scan}")
            print(f"1 H100, 6 layers, scan_layers {scan}, remat {remat}: {mib:,.0f} MiB", flush=True)
