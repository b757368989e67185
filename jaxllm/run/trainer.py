"""The Trainer: mesh, model, state and data of one run, and the step that advances them.

    trainer = Trainer(load_config("configs/quickstart.yaml"))
    for metrics in trainer.steps(20):
        print(metrics["loss"])

Metrics come one step behind the device: step n+1 runs when the numbers of step n are read, so reading never makes the device
wait. After Ctrl-C, or a notebook's stop button, the state is that of a complete step, and `trainer.steps` continues from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxllm.checkpoint.arrays import give_up
from jaxllm.checkpoint.files import Meta
from jaxllm.checkpoint.manager import Checkpoints
from jaxllm.cluster import distributed, progress
from jaxllm.config import Config, ConfigError
from jaxllm.config.attention import require_trains
from jaxllm.config.hf_config import VARIANTS
from jaxllm.cost_model.hardware import compute_capability, require_device_runs
from jaxllm.data.loader import ahead
from jaxllm.data.sources import load_data
from jaxllm.mesh.placement import mesh_on_hosts
from jaxllm.model.llama import Llama
from jaxllm.parallel.device_batches import put_global_batch
from jaxllm.parallel.parameters import merge_model
from jaxllm.parallel.types import Loss
from jaxllm.run import batch_growth, evaluation, fewer_hosts, rounds
from jaxllm.run.console import Console
from jaxllm.run.given import GivenBatches, adopted, require_same_optimizer
from jaxllm.run.memory_check import Fit, check_memory, require_right_attention, with_room_for_documents
from jaxllm.run.metrics import Record
from jaxllm.run.programs import Programs, SavedPrograms
from jaxllm.run.signals import defer_sigint
from jaxllm.run.step_metrics import Pending, StepMetrics, data_keys
from jaxllm.train import diloco
from jaxllm.train.build import Batches, Given, State
from jaxllm.train.step import on_device
from jaxllm.weights.stored_models import with_commits
from jaxllm.weights.weights import MUST_AGREE, WeightsSource, initial_adapter, initial_weights, read_initial


class Start(NamedTuple):
    """What a start of a run found."""

    weights: WeightsSource | None
    """Those that train.init_from names; None without it, and where the run resumes."""
    absent_hosts: int
    """Number of hosts that the run trains without."""
    memory_fit: Fit | None
    """The estimate and the devices' memory; None if that is not known, as on CPU."""


class Trainer:
    """One run on the local devices (or on run.cpu_devices). It writes no files by itself; `fit` in run/loop.py does.

    Args:
      batches: what to train on in the place of the text of data.*: a function from the number of steps done to the next batch,
        or an iterable of the batches of all steps. A batch is a dict of arrays as the loader's (data/loader.py).
      documents: the text: of each document its token ids, or a row with input_ids, as of Hugging Face's datasets
        (data/iterables.py). With several processes all give the same.
      loss: what to train on in the place of cross-entropy (parallel/types.py); `evaluate` is always cross-entropy.
      optimizer: an optax transformation with a learning rate of its own, in the place of optimizer.name.
      on_step: called with the metrics of each step, when they are read, and the trainer, which has begun the next step. What it
        raises ends the loop.
      resumes: `restore` will be called, so train.init_from is not read.

    Raises:
      ConfigError: the config does not fit the devices, their memory or the data.

    Attributes:
      config: the config with parallel.data filled in; with train.batch_grows_to, `asked` with the batches so far.
      data: the sources and their held-out documents.
      stream: the training samples.
      mesh: jax.sharding.Mesh with axes pipe, data, context, tensor; with several replicas `replica` comes first.
      state: TrainState, or DilocoState during rounds. Each step replaces it and reuses the old one's memory.
      step: number of steps done, as a Python int.
      programs: the compiled steps, and the functions that they are of.
      metrics: the running step's, the state of skipped steps and spikes, and the gradient noise scale so far.
      start: what this start found: weights, absent hosts, memory.
      reference: with train.loss=dpo what the model said that training began with; None before `fit` has read a resumed run's.
      stopped_by: the name of the signal, or the reason of the hook, that stopped `fit`; or None.
    """

    def __init__(
        self,
        config: Config,
        *,
        batches: Batches | None = None,
        documents: Iterable[Any] | None = None,
        loss: Loss | None = None,
        optimizer: optax.GradientTransformation | None = None,
        on_step: Callable[[Record, Trainer], None] | None = None,
        resumes: bool = False,
    ):
        self._given, self._on_step = Given(batches, loss, optimizer, documents), on_step
        config = adopted(config, self._given)
        if distributed.is_one_of_several():
            # Process 0 asks for the commits.
            fewer_hosts.meet(config)
        with progress.phase("initialize"):
            config = with_commits(config)
        # A wrong path is reported before any device is used.
        weights, adapter = (None, None) if resumes else (initial_weights(config), initial_adapter(config))
        fewer_hosts.meet(config)
        version = "" if weights is None else weights.version
        distributed.require_same(version, "read different weights at train.init_from, which someone replaces: start again.")
        with progress.phase("devices"):
            jax.devices()
        absent_hosts = fewer_hosts.absent_hosts(config)
        self.config = config = fewer_hosts.adapted(config).resolve(jax.device_count())
        device = jax.local_devices()[0]
        require_device_runs(config.model, device)
        require_trains(config, compute_capability(device), device.device_kind)
        self.start = Start(weights, absent_hosts, check_memory(config.at_largest_batch, device))
        with progress.phase("dataset"):
            self.data = load_data(config, distributed.cache_folder, documents)
            distributed.require_same(self.data.fingerprint, "read different text; give all hosts the same files and Python")
            self.stream = self.data.stream()
            most_documents = partial(self.data.most_documents, self.stream)
            self.config = config = with_room_for_documents(config, jax.local_devices()[0], most_documents)
        self._own_batches = None if batches is None else GivenBatches(config, batches, jax.local_devices()[0])
        self.mesh = mesh_on_hosts(config.parallel)
        self.batches = BatchQueue(self.train_batch)
        self.asked = config
        # Rounds begin later, at the first step at the earliest.
        self.programs = Programs(config, self.mesh, self._given, SavedPrograms(config, self.mesh))
        require_right_attention(config, self.programs.functions.attention, self.mesh)
        with progress.phase("initialize"):
            with jax.set_mesh(self.mesh):
                self.state: State = self.programs.initial_state()
            if weights is not None or adapter is not None:
                params = read_initial(weights, adapter, self.state.params, self.programs.functions.table)
                self.state = dataclasses.replace(self.state, params=params)
        self.reference = evaluation.reference_of(self) if config.train.loss == "dpo" and not resumes else None
        self.step = 0
        self.stopped_by: str | None = None
        self.metrics = StepMetrics(config)

    def __repr__(self) -> str:
        return f"<Trainer at step {self.step} of {self.config.train.steps}, on {self.mesh.size} devices>"

    def adopt(self, config: Config) -> None:
        """Switches to a config with another train.batch_schedule (run/batch_growth.py)."""
        self.config, self.programs = config, Programs(config, self.mesh, self._given, self.programs.saved)
        self.batches.close()

    # ------------------------------------------------------------------------------------------------------------ training

    def steps(self, count: int, *, show: bool = False) -> Iterator[Record]:
        """Trains `count` steps. Yields one dict of Python floats per step: step, tokens, loss, grad_norm, learning_rate,
        step_s, tokens_per_s_per_device, skipped, skipped_steps, loss_spike, on GPUs tflops_per_gpu and mfu, and the keys that
        the config asks for. Stopping early by `break` or Ctrl-C is safe: the state is that of the last step started. Ctrl-C may
        lose the metrics of one step.

        Args:
          show: show a live line in a notebook or on a terminal, elsewhere a line every log.every_steps.
        """
        last = self.step + count
        with Console(last, main=show and distributed.is_main_process()) as console:
            for number in range(count + 1):
                record = self.advance() if number < count else self.finish()
                if record is not None:
                    due = record["step"] % self.config.log.every_steps == 0 or record["step"] == last
                    console.step(record, due)
                    yield record

    def prepare(self) -> None:
        """Reads a batch and compiles the step for it, if that was not done yet. Does not train. At the start of the first round
        (train.diloco_steps) it gives each replica its copy of the state.
        """
        train = self.config.train
        if train.diloco_steps is not None and self.programs.rounds is None and self.step >= train.diloco_after_steps:
            with defer_sigint():
                self.programs.use(in_rounds=True)
                with jax.set_mesh(self.mesh), progress.phase("compile"):
                    self.state = self.programs.first_round(self.state)
        if self.programs.current is None:
            self._take_program(self.batches.peek(self.step))

    def _take_program(self, batch: Any) -> Record | None:
        """Selects the compiled step for this batch's number of microbatches. Each number is compiled once, before its first
        step, and once more for steps that measure the noise scale, if not all do. If it has to compile, it first waits for the
        running step and returns that step's metrics, so that compilation does not count as its time.
        """
        if self.programs.select(batch, self.step):
            return None
        record = self.finish()
        with jax.set_mesh(self.mesh), progress.phase("compile"):
            self.compile_step(batch)
        return record

    def advance(self) -> Record | None:
        """Starts one step. Returns the metrics of the previous one (None if there are none to read).

        Raises:
          ConfigError: train.max_skips_in_a_row steps in a row were skipped.
        """
        self.metrics.watch.require_progress()
        finished = batch_growth.grow(self)
        self.prepare()
        batch = self.batches.take(self.step)
        if self.config.phase_at(self.step).first_step == self.step:
            # A larger batch takes longer, so the watchdog must not compare it with earlier steps.
            progress.forget_steps()
        finished = self._take_program(batch) or finished
        norms = self._layer_norms_if_due(batch)
        with jax.set_mesh(self.mesh), progress.phase("step"):
            previous = self._start_step(batch, norms)
            record = None if finished else self._read(previous)
        return finished or self._handed_over(record)

    def _start_step(self, batch: Any, norms: dict[str, jax.Array]) -> Pending | Record | None:
        """Returns the previous step, if its metrics are not read yet."""
        progress.at_step(self.step + 1)
        self.metrics.starts()
        # The step donates the old state. An interrupt between the call and the assignment would lose both states.
        with defer_sigint():
            self.state, metrics = self.programs.run(self.state, batch, self.step)
            self.step += 1
            self.state, outer = self.programs.bring_together(self.state, self.step)
            return self.metrics.replace_pending(Pending(self.step, metrics | outer | norms))

    def _layer_norms_if_due(self, batch: Any) -> dict[str, jax.Array]:
        """Layer norms by Config.layer_norms_every, computed before their step, because it donates the state."""
        every = self.config.layer_norms_every
        if every is None or ((self.step + 1) % every and not (self.config.parallel.drops_rows and self.step == 0)):
            return {}
        with jax.set_mesh(self.mesh), progress.phase("evaluate"):
            return self.programs.layer_norms(self.state, batch, self.step)

    def finish(self) -> Record | None:
        """Waits for the running step and returns its metrics. The timer of tokens_per_s_per_device stops until the next."""
        with progress.phase("step"):
            record = self._read(self.metrics.replace_pending(None))
        return self._handed_over(record)

    def _read(self, pending: Pending | Record | None) -> Record | None:
        if not isinstance(pending, Pending):
            return pending
        return self.metrics.read(pending, self.config, self.mesh) | data_keys(self.config, self.stream, pending.step)

    def _handed_over(self, record: Record | None) -> Record | None:
        """`record`, after the callback has it."""
        if record is not None and self._on_step is not None:
            self._on_step(record, self)
        return record

    def compile_step(self, batch: Any) -> None:
        """Compiles the next step, for a batch of this number of microbatches."""
        self.programs.compile(self.state, batch, self.step)

    def restore(self, checkpoints: Checkpoints) -> None:
        """Restores the newest saved state. The data resumes at its step."""
        # Meshes add or remove zeros, so shapes of arrays do not identify the model.
        meta = checkpoints.meta()
        for key in MUST_AGREE:
            wanted = getattr(self.config.model, key)
            saved = meta["config"]["model"].get(key, VARIANTS.get(key, wanted))
            if saved != wanted:
                raise ConfigError(
                    f"{checkpoints.folder} has a model with model.{key}={saved}, not {wanted}: set model.{key}={saved}."
                )
        diloco.require_rounds(meta, self.config)
        require_same_optimizer(checkpoints.folder, meta, self.config)
        self.close()
        layouts = {isinstance(self.state, diloco.DilocoState): give_up(self.state)}

        def like(meta: Meta) -> State:
            """State with the structure of a checkpoint, which may be an older one from before the first round."""
            in_rounds = diloco.in_rounds(meta)
            if (config := batch_growth.resumed(self.asked, meta)) != self.config:
                self.adopt(config)
            if in_rounds != (self.programs.rounds is not None):
                self.programs.use(in_rounds)
            if in_rounds not in layouts:
                with jax.set_mesh(self.mesh):
                    layouts[in_rounds] = self.programs.training.layout()
            return rounds.layout_in(meta, layouts[in_rounds])

        found, meta = checkpoints.restore(like, self.programs.functions.table), checkpoints.meta()
        self.state = rounds.completed(found, layouts[self.programs.rounds is not None], meta)
        self.programs.rounds = self.programs.rounds and self.programs.rounds.resumed(meta)
        self.step = int(self.state.step)
        self.metrics = StepMetrics(self.config, meta)

    # ---------------------------------------------------------------------------------------------------------------- data

    def train_batch(self, step: int) -> dict[str, jax.Array]:
        """The batch of the step that follows `step` steps. Its samples start at the first one that no earlier step has read. It
        is laid out [microbatch, sequence, position] on the mesh; each host reads its part. Positions are in zigzag order
        (parallel/zigzag.py) if parallel.context is above 1.
        """
        config, phase = self.config, self.config.phase_at(step)
        parts, length = phase.parts, config.train.sequence_length
        if self._own_batches is not None:
            rows = np.arange(phase.sequences).reshape(-1, config.microbatch_rows)
            return put_global_batch(self.mesh, self._own_batches.reader(step), rows, length)
        if self.reference is None and config.train.loss == "dpo":
            raise ConfigError("This Trainer has no reference for train.loss=dpo: resume with jaxllm.fit, which reads it.")
        samples = self.stream.samples if self.reference is None else partial(self.reference.samples, self.stream)

        def read(rows: np.ndarray) -> dict[str, np.ndarray]:
            """Rows parts k to parts k + parts - 1 are sample k, cut. A process reads whole samples, in order."""
            found = samples(rows[::parts] // parts)
            return found if parts == 1 else {name: array.reshape(len(rows), -1) for name, array in found.items()}

        rows = parts * config.sequences_before(step) + np.arange(parts * phase.sequences)
        rows = rows.reshape(-1, parts * config.microbatch_rows)
        return put_global_batch(self.mesh, read, rows, length // parts)

    # ---------------------------------------------------------------------------------------------------------- evaluation

    evaluate = evaluation.evaluate

    # ------------------------------------------------------------------------------------------------------------ to a disk

    def save(self, run_dir: str | Path | None = None) -> Path:
        """Saves a checkpoint as `fit` does into `run_dir` (default: run.dir), from which `fit` and `jaxllm train
        RUN_DIR/config.yaml` resume, and returns its folder. All processes call it, on a disk that they share. Older ones go by
        checkpoint.keep.

        Raises:
          ConfigError: the directory is held, has a checkpoint of this step or of another Trainer, or cannot be written.
        """
        # So that the averages in the checkpoint have the last step too. Its metrics come when they are asked for.
        self.metrics.replace_pending(self._read(self.metrics.replace_pending(None)))
        return import_module("jaxllm.run.trainer_files").save(self, run_dir)

    def export(self, destination: str | Path, to: str = "hf", **options: Any) -> Any:
        """Writes the present weights as `jaxllm.export` writes those of a run: hf, a folder for transformers; peft, gguf,
        jaxllm. All processes call it, and process 0 writes. The weights are first written beside the destination, on a disk
        that all share, and removed.

        Args:
          options: dtype, force, ...: as `jaxllm.export` has them, which also says what is returned; None on other processes.

        Raises:
          ConfigError: the destination exists, or cannot be written.
        """
        return import_module("jaxllm.run.trainer_files").export(self, destination, to, options)

    @property
    def model(self) -> Llama:
        """The network with the present parameters, in the compute dtype, on the mesh."""
        return merge_model(self.config, on_device(self.state.params))

    def close(self) -> None:
        """Stops the prefetching thread."""
        self.batches.close()


class BatchQueue:
    """Reads batches in a background thread, two ahead of the current step. read: steps done -> the batch of the next step."""

    def __init__(self, read: Callable[[int], Any]):
        self._read = read
        self._batches: Any = None
        self._next_step: int | None = None
        self._peeked: Any = None

    def peek(self, step: int) -> Any:
        """Returns the batch that `take` returns next."""
        if self._peeked is None:
            if self._batches is None or self._next_step != step:
                # After Ctrl-C a batch may have left the queue for a step that never ran.
                self.close()
                self._batches = ahead(self._read, start=step)
            self._next_step = None
            with progress.phase("data"):
                self._peeked = next(self._batches)
            self._next_step = step + 1
        return self._peeked

    def take(self, step: int) -> Any:
        """Returns the batch of the step that follows `step` steps."""
        batch, self._peeked = self.peek(step), None
        return batch

    def close(self) -> None:
        """Stops the prefetching thread."""
        self._peeked = None
        if self._batches is not None:
            self._batches.close()
            self._batches = None
