"""A Trainer: mesh, model, state and data of one run, and the step that moves them on.

    trainer = Trainer(load_config("configs/quickstart.yaml"))
    for metrics in trainer.steps(20):
        print(metrics["loss"])

Metrics come one step behind the device: step n+1 is under way before the numbers of step n are read, so reading never makes
the device wait.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm import distributed, progress, xla_flags
from jaxllm.config import Config, ConfigError
from jaxllm.data.loader import ahead
from jaxllm.data.sources import load_data
from jaxllm.mesh import make_mesh, replicated
from jaxllm.model.cudnn_attention import largest_error
from jaxllm.model.llama import Llama
from jaxllm.parallel.batches import place
from jaxllm.parallel.parallelize import merge_model
from jaxllm.train.build import build_training
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.fits import require_fit
from jaxllm.train.metrics import Record
from jaxllm.train.state import on_device
from jaxllm.train.weights import Source, initial_weights, read_weights

log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """What was measured on held-out text."""

    loss: float
    """Nats per token."""
    tokens: int
    """How many were scored."""
    by_source: dict[str, float]
    """The loss of each source of a mixture."""


ATTENTION_TOLERANCE = 0.03


def require_right_attention(config: Config, attention: str, mesh: jax.sharding.Mesh) -> None:
    """cuDNN in blocks goes through a private binding of JAX: on a GPU it is held against plain XLA before anything is trained.

    Raises:
      ConfigError: they differ.
    """
    in_blocks = config.data.mask_documents or config.parallel.context > 1
    if not attention.startswith("cudnn") or not in_blocks or mesh.devices.flat[0].platform == "cpu":
        return
    model = config.model
    with jax.default_device(jax.local_devices()[0]):
        error = largest_error(model.num_heads // model.num_kv_heads, 1, model.head_dim)
    if not error < ATTENTION_TOLERANCE:
        raise ConfigError(
            f"cuDNN's attention is off by {100 * error:.1f}% on this machine, so its version and JAX {jax.__version__} do not "
            f"fit together: set model.attention=xla, or install other versions."
        )


class Trainer:
    """One run on the devices at hand (or on run.cpu_devices). Writes nothing; `fit` in loop.py does.

    Args:
      resumes: `restore` comes next, so train.init_from is not read.

    Raises:
      ConfigError: the config does not fit the devices, their memory or the data.

    Attributes:
      config: with parallel.data filled in.
      data: the sources, and what of them is held out.
      stream: the training samples.
      mesh: jax.sharding.Mesh with axes pipe, data, context, tensor.
      state: TrainState; replaced by each step (the old one's memory is reused).
      step: steps done, as a Python int.
      memory_fit: the estimate beside the devices' memory; None where that is not known, as on CPU.
      weights: where train.init_from found them; None without it.
      compile_s: seconds it took to compile the train step; None until then.
      stopped_by: the name of the signal that stopped `fit`; None if none did.
    """

    def __init__(self, config: Config, *, resumes: bool = False):
        # A wrong path is found before a device is touched.
        self.weights = None if resumes else initial_weights(config)
        with progress.phase("meet"):
            distributed.start(config.run)
        distributed.require_same_config(config)
        self.config = config = config.resolve(jax.device_count())
        self.memory_fit = require_fit(config, jax.local_devices()[0])
        self.data = load_data(config)
        distributed.require_same(self.data.fingerprint, "read different text; give all hosts the same files and Python")
        self.stream = self.data.stream()
        self.mesh = make_mesh(config.parallel)
        training = build_training(config, self.mesh)
        self.parallelized, self.shardings = training.functions, training.shardings
        require_right_attention(config, self.parallelized.attention, self.mesh)
        with jax.set_mesh(self.mesh):
            self.state = training.create_state(config.train.seed)
        if self.weights is not None:
            self._start_from(self.weights)
        self.step = 0
        self.compile_s: float | None = None
        self.stopped_by: str | None = None
        self.traces = 0

        def counted(state, batch):
            self.traces += 1
            return training.step(state, batch)

        # Numbers lie on every device, so that every process can read them.
        everywhere = replicated(self.mesh)
        self.jitted_step = jax.jit(counted, donate_argnums=0, out_shardings=(self.shardings, everywhere))
        self._compiled_step: Any = None
        self._loss_sum = jax.jit(self.parallelized.loss_sum, out_shardings=everywhere)
        self._batches: Any = None
        self._first_batch: Any = None
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._last_finish_s: float | None = None

    # ------------------------------------------------------------------------------------------------------------ training

    def steps(self, count: int) -> Iterator[Record]:
        """Trains `count` steps; yields one dict of Python floats per step: step, tokens, loss, grad_norm, learning_rate,
        tokens_per_s_per_device. Stopping early is safe: the state is that of the last step started.
        """
        for _ in range(count):
            record = self.advance()
            if record is not None:
                yield record
        record = self.finish()
        if record is not None:
            yield record

    def prepare(self) -> None:
        """Reads a batch and compiles the step with it, if that was not done yet; trains nothing."""
        if self._compiled_step is None:
            batch = self._next_batch()
            with jax.set_mesh(self.mesh), progress.phase("compile"):
                self.compile_step(batch)
            self._first_batch = batch

    def _next_batch(self) -> Any:
        if self._first_batch is not None:
            batch, self._first_batch = self._first_batch, None
            return batch
        if self._batches is None:
            self._batches = ahead(self.train_batch, start=self.step)
        with progress.phase("data"):
            return next(self._batches)

    def advance(self) -> Record | None:
        """Starts one step; returns the metrics of the one before (None if there are none to read)."""
        self.prepare()
        batch = self._next_batch()
        with jax.set_mesh(self.mesh), progress.phase("step"):
            progress.at_step(self.step + 1)
            self._last_finish_s = self._last_finish_s or time.perf_counter()
            self.state, metrics = self._compiled_step(self.state, batch)
            self.step += 1
            previous, self._pending = self._pending, (self.step, metrics)
            return self._read(previous)

    def finish(self) -> Record | None:
        """Waits for the step under way; returns its metrics. The clock of tokens_per_s_per_device stops until the next."""
        pending, self._pending = self._pending, None
        with progress.phase("step"):
            record, self._last_finish_s = self._read(pending), None
        return record

    def compile_step(self, batch: Any) -> None:
        started = time.perf_counter()
        options = xla_flags.compile_options(self.config, self.mesh.devices.flat[0].platform)
        lowered = self.jitted_step.lower(self.state, batch)
        if jax.process_count() > 1:
            what = "lowered different train steps; give all hosts the same packages, flags and environment variables"
            distributed.require_same(fingerprint(lowered.as_text(), options), what)
        self._compiled_step = lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - started

    @property
    def compiled(self) -> jax.stages.Compiled | None:
        """The train step; None until `prepare` or the first step."""
        return self._compiled_step

    def _read(self, pending) -> Record | None:
        if pending is None:
            return None
        step, arrays = pending
        with progress.waiting():
            values = {name: float(value) for name, value in jax.device_get(arrays).items()}  # waits for that step
        now = time.perf_counter()
        rate = self.config.step_tokens / (now - self._last_finish_s) / self.mesh.size
        self._last_finish_s = now
        record = {"step": step, "tokens": step * self.config.step_tokens, **values, "tokens_per_s_per_device": rate}
        if len(self.stream.sources) > 1:
            epochs = self.stream.epochs(step * self.config.train.global_batch_sequences)
            record |= {f"epochs/{name}": count for name, count in epochs.items()}
        return record

    def restore(self, checkpoints: Checkpoints) -> None:
        """Takes up the newest saved state; data goes on from its step."""
        # Zero layers are added and taken away as pipelines want them: their number alone does not tell another model.
        saved, wanted = checkpoints.meta()["config"]["model"]["num_layers"], self.config.model.num_layers
        if saved != wanted:
            raise ConfigError(
                f"{checkpoints.folder} has a model of {saved} layers, not {wanted}: set model.num_layers={saved}."
            )
        self.close()
        self._pending = self._last_finish_s = None
        self.state = checkpoints.restore(_give_up(self.state), self.parallelized.table)
        self.step = int(self.state.step)

    def _start_from(self, weights: Source) -> None:
        params = read_weights(weights, _give_up(self.state.params), self.parallelized.table)
        self.state = dataclasses.replace(self.state, params=params)

    # ---------------------------------------------------------------------------------------------------------------- data

    def train_batch(self, step: int) -> dict[str, jax.Array]:
        """Samples [step G, (step+1) G), laid out [microbatch, sequence, position] on the mesh; each host reads its share.
        Positions are in zigzag order (parallel/zigzag.py) where parallel.context is above 1.
        """
        config = self.config
        G, M = config.train.global_batch_sequences, config.num_microbatches
        samples = (step * G + np.arange(G)).reshape(M, G // M)
        return place(self.mesh, self.stream.samples, samples, config.train.sequence_length)

    # ---------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, max_batches: int | None = None, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Held-out loss of the present state: all held-out text, unless max_batches (of each source) is given. None if `stop`
        says so after a batch; it must answer all processes alike.

        Raises:
          ConfigError: nothing is held out.
        """
        # A pipeline takes as many microbatches as it has stages, or it would stand still most of the time.
        M, R = self.config.parallel.pipe, self.config.microbatch_sequences * int(self.config.parallel.data)
        length = self.config.train.sequence_length
        sums: dict[str, tuple[float, int]] = {}
        with jax.set_mesh(self.mesh):
            for source in self.data.held_out():
                total, count = 0.0, 0
                for first in itertools.islice(range(0, source.packing.num_samples, M * R), max_batches):
                    # Each batch is progress: an evaluation may take hours.
                    with progress.phase("evaluate"):
                        batch = place(self.mesh, source.in_order, (first + np.arange(M * R)).reshape(M, R), length)
                        part, tokens = self._loss_sum(self.state.params, batch)
                        # Summed in float64 here: a float32 running sum over a million tokens would lose the last digits.
                        total, count = total + float(part), count + int(tokens)
                    if stop():
                        return None
                sums[source.name] = (total, count)
        tokens = sum(count for _, count in sums.values())
        if not tokens:
            raise ConfigError("Nothing is held out to evaluate on: set data.held_out_fraction above 0, or give more files.")
        by_source = {name: total / count for name, (total, count) in sums.items() if count}
        return Evaluation(sum(total for total, _ in sums.values()) / tokens, tokens, by_source)

    @property
    def model(self) -> Llama:
        """The network with the present parameters, in the compute dtype's place on the mesh."""
        return merge_model(self.config, on_device(self.state.params))

    def close(self) -> None:
        """Stops the thread that reads ahead."""
        self._first_batch = None
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def fingerprint(stablehlo: str, options: dict[str, Any]) -> str:
    """Of a program before XLA compiles it, the same in all processes that lower the same one for the same devices."""
    # Where a custom partitioner is (cuDNN's attention has one), JAX writes the address of a Python object.
    text = re.sub(r'backend_config = "\d+"', "", stablehlo)
    return hashlib.sha256(f"{sorted(options.items())}{text}".encode()).hexdigest()


def _give_up(arrays: Any) -> Any:
    """Where arrays lay, as ShapeDtypeStructs. Their memory is free: two states would not fit where one does."""
    layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
    jax.tree.map(lambda x: x.delete(), arrays)
    return layout
