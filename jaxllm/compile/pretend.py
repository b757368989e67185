"""The train step of rank 0 of many GPUs, run on one: `jaxllm compile CONFIG --gpus 8 --run 3`.

JAX starts for a topology that is not there (jax_mock_gpu_topology): the local GPU, and others like it. The program is the run's
own, with its kernels, shapes, buffers and order of launches. XLA skips every collective, so a step takes the time of its
compute alone, and no number is right. On CPU devices, all of which are there, transfers run too.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.cluster import distributed
from jaxllm.compile.aot import options_for
from jaxllm.config import Config, ConfigError, RunConfig
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.display import readable
from jaxllm.machine.xla_flags import gpu_kinds
from jaxllm.mesh.axes import make_mesh
from jaxllm.parallel.device_batches import put_global_batch
from jaxllm.run.memory_check import capacity_of, total_bytes
from jaxllm.train.build import build_training


@dataclass(frozen=True)
class PretendedRun:
    """Seconds of each step, and bytes on the device: by XLA, and the most that was in use (None for a CPU)."""

    device_kind: str
    devices: int
    transfers_run: bool
    compile_s: float
    compiled_bytes: int
    in_use_bytes: int | None
    step_s: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        in_use = "" if self.in_use_bytes is None else f", {readable(self.in_use_bytes)} in use"
        what = "with all transfers" if self.transfers_run else "without its transfers, which do not run, and with wrong numbers"
        return (
            f"Rank 0 of {self.devices} on one {self.device_kind}, {what}: {np.median(self.step_s):.3f} s a step, the median of "
            f"{len(self.step_s)}; {readable(self.compiled_bytes)} by XLA{in_use}; compiled in {self.compile_s:.0f} s"
        )


def start(run: RunConfig, gpus: int) -> bool:
    """Starts JAX with this many GPUs, one of them here; without one, with as many CPU devices. Returns whether one is here.

    Raises:
      ConfigError: several GPUs are here.
    """
    kinds = () if distributed.wants_cpu(run) else gpu_kinds()
    if len(kinds) > 1:
        raise ConfigError(f"--run takes one GPU, and there are {len(kinds)}: set CUDA_VISIBLE_DEVICES=0.")
    if kinds:
        jax.config.update("jax_mock_gpu_topology", f"1x{gpus}x1")
    distributed.start(run.model_copy(update={"cpu_devices": None if kinds else gpus}))
    return bool(kinds)


def run_rank(config: Config, gpus: int | None, steps: int) -> PretendedRun:
    """Starts JAX with `gpus` devices, of which one is here, and times `steps` steps after a first one.

    Args:
      gpus: without a GPU, CPU devices; default: run.cpu_devices, or the config's mesh.

    Raises:
      ConfigError: several GPUs are here, or the config does not fit the devices.
    """
    if config.train.diloco_steps is not None or config.train.loss == "dpo":
        raise ConfigError("--run takes no rounds and no pairs: add train.diloco_steps=null train.loss=cross_entropy.")
    gpus = gpus or config.run.cpu_devices or config.devices
    on_gpu = start(config.run, gpus)
    config, devices, device = config.resolve(len(jax.devices())), jax.devices(), jax.local_devices()[0]
    # Each pretended GPU has a process of its own, and a host has several.
    gpu = gpu_from_device_kind(device.device_kind)
    per_host = gpu.gpus_per_host if gpu else len(devices)
    mesh = make_mesh(config.parallel, devices, {d.process_index: n // per_host for n, d in enumerate(devices)})
    training = build_training(config, mesh)
    with jax.set_mesh(mesh):
        state, batch = training.create_state(config.train.seed), random_batch(config, mesh)
        began = time.perf_counter()
        lowered = training.jit_step(training.step).lower(training.layout(), batch)
        # With it ranks would share the timing of kernels, and wait for each other.
        alone = {"xla_gpu_shard_autotuning": False} if on_gpu else {}
        compiled = lowered.compile(compiler_options=options_for(config, lowered, device, capacity_of(device)) | alone)
        compile_s, step_s = time.perf_counter() - began, []
        for _ in range(1 + steps):
            began = time.perf_counter()
            state, metrics = compiled(state, batch)
            jax.block_until_ready((state, metrics))
            step_s.append(time.perf_counter() - began)
    in_use, size = (device.memory_stats() or {}).get("peak_bytes_in_use"), total_bytes(compiled.memory_analysis())
    return PretendedRun(device.device_kind, len(devices), not on_gpu, compile_s, size, in_use, tuple(step_s[1:]))


def random_batch(config: Config, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """A batch of one text a sequence, put on the mesh as a run puts it. Ids follow Zipf's law, as words do."""
    S, G, M = config.train.sequence_length, config.train.global_batch_sequences, config.num_microbatches
    ids = (np.exp(np.random.default_rng(0).random((G, S + 1)) * np.log(config.model.vocab_size)) - 1).astype(np.int32)
    full = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones((G, S), bool)}
    full["positions"] = np.broadcast_to(np.arange(S, dtype=np.int32), (G, S))
    full |= {"segments": np.ones((G, S), np.int32)} if config.data.mask_documents else {}
    if (vision := config.model.vision) is not None and config.images_per_sequence:
        full["images"] = np.zeros((G, config.images_per_sequence, *vision.pixels), np.float32)
    read = lambda rows: {name: array[rows] for name, array in full.items()}  # noqa: E731
    return put_global_batch(mesh, read, np.arange(G).reshape(M, -1), S)
