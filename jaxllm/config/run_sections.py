"""The sections of a config that say where a run writes, what it logs, and how its processes start and stop."""

from typing import Annotated

from pydantic import Field

from jaxllm.config.types import Count, PositiveInt, Section, Switch

Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
"""Up to 30 years, which is also what a lock of Python's can wait."""
MOST_CPU_DEVICES = 4096
"""Each has its own threads: JAX takes a minute and a gigabyte to make 20,000."""


class CheckpointConfig(Section):
    """The last step is always saved, and so is the current step when a signal ends the run."""

    every_steps: PositiveInt | None = None
    """Steps between checkpoints."""
    every_minutes: Seconds | None = 30.0
    """Minutes between checkpoints, in addition; null: never."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints at multiples of this step are saved and never deleted."""
    export_every_steps: PositiveInt | None = None
    """Checkpoints at multiples of this step are saved, and exported to run.dir/exports/<step> in Hugging Face format beside
    training, on the CPU of the first host (docs/serving.md)."""
    asynchronous: Switch = True
    """Write while training continues: the run waits only for the copy from the devices."""
    store: Annotated[str, Field(min_length=1)] | None = None
    """s3://BUCKET/PREFIX or gs://BUCKET/PREFIX: complete checkpoints are copied there while training continues, and a start
    takes the newest from there if run.dir has none as new. Hosts then need not share run.dir (docs/checkpoints.md)."""
    store_every_steps: PositiveInt | None = None
    """Checkpoints at multiples of this step are saved, and these alone go to the store, with those of keep_every_steps and the
    one with which the run ends or is stopped. null: all go to the store."""

    retired = {
        key: (unchanged, f"checkpoint.{key} was removed with checkpoints in memory: leave it out, and lower every_steps.")
        for key, unchanged in {"memory_every_steps": None, "memory_dir": "/dev/shm"}.items()
    }

    def keeps_forever(self, step: int) -> bool:
        return self.keep_every_steps is not None and step % self.keep_every_steps == 0

    def goes_to_store(self, step: int) -> bool:
        """Whether a checkpoint is copied to the store wherever the run ends."""
        return self.store_every_steps is None or step % self.store_every_steps == 0 or self.keeps_forever(step)


class LogConfig(Section):
    every_steps: PositiveInt = 10
    """Steps between lines on the terminal (or in the log file); metrics.jsonl has every step."""
    baselines: Switch = False
    """Print byte bigram and trigram losses on the same held-out text at the end."""
    sample_tokens: Count = 0
    """Length of the text sampled at the end."""
    sample_prompt: Annotated[str, Field(min_length=1)] = "The "
    """Start of the sampled text."""
    tensorboard: Switch = False
    """Write run.dir/tensorboard. What trackers get, and when: docs/logging.md."""
    wandb_project: Name | None = None
    """Log to this project of Weights & Biases. Key, server and mode come from its own variables (WANDB_API_KEY)."""
    wandb_entity: Name | None = None
    """User or team that owns the project. null: the default of the key."""
    wandb_group: Name | None = None
    """Runs with the same group are shown together."""
    wandb_tags: tuple[Name, ...] = ()
    mlflow_experiment: Name | None = None
    """Log to this experiment of MLflow, at MLFLOW_TRACKING_URI."""
    trackio_project: Name | None = None
    """Log to this project of Trackio: a local one, or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""
    prometheus_file: Annotated[str, Field(pattern=r"\.prom$")] | None = None
    """File for the newest metrics as gauges, in the folder of the node exporter's textfile collector. It ends in .prom."""
    sinks: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = ()
    """Own sinks, each module:Class. Class(config) has write(record) and close() (docs/logging.md)."""
    layer_norms_every: PositiveInt | None = None
    """Steps between records of each layer's gradient norm and of the root mean square of its output in one microbatch, which
    costs one forward pass of that microbatch. With model.num_experts also of how evenly each layer spreads its rows over them.
    null: never; with experts every 100, unless parallel.offload_state=all or train.freeze rules it out."""
    noise_scale_every: PositiveInt | None = None
    """Steps between measurements of the gradient noise scale, which predicts the benefit of a larger batch. It compares parts
    of a step (data ranks, microbatches), so there must be at least two. Above 1, these steps have their own program, compiled
    when the first is due. null: never."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """[first, last]: write a profiler trace of these steps into run.dir/profile."""


class LaunchConfig(Section):
    least_hosts: Annotated[int, Field(ge=1, strict=True)] | None = None
    """If hosts are lost and not back within launch.wait_s, train on with the others while so many are left, and with all again
    when they return (docs/launch.md). null: wait for all."""
    wait_s: Seconds = 120
    """Seconds to wait for missing hosts before the others train without them."""


class RunConfig(Section):
    dir: str = "runs/default"
    """Folder for checkpoints, metrics.jsonl and the config, from which a second start resumes. All hosts share it, or have
    checkpoint.store."""
    cpu_devices: Annotated[int, Field(ge=1, le=MOST_CPU_DEVICES, strict=True)] | None = None
    """Run on this many CPU devices of this machine, to try any mesh at home. With several processes, each has this many."""
    deterministic: Switch = False
    """Bit-equal reruns on GPUs, at a cost in speed (docs/precision.md)."""
    compilation_cache: Annotated[str, Field(min_length=1)] = "auto"
    """Folder of compiled programs, for faster restarts. auto: JAX_COMPILATION_CACHE_DIR, or ~/.cache/jaxllm/programs (with
    $XDG_CACHE_HOME, there); off: none. Hosts with disks of their own each keep theirs."""
    allow_overcommit: Switch = False
    """Start even if the estimate says that a step does not fit into the GPU's memory."""
    peer_timeout_s: Seconds = 60
    """Seconds without a heartbeat after which a process counts as lost and all processes exit."""
    stuck_factor: Annotated[float, Field(gt=1)] = 20
    """A step that takes this many times the median of the last 50, and at least run.stuck_min_s, is stuck: the process prints
    its stack traces and exits, so that it can be restarted."""
    stuck_min_s: Seconds = 300
    """Seconds that any step may take, mainly for the first step after a start."""
    phase_timeout_s: Seconds = 3600
    """Seconds that other work may take before the process counts as stuck: start, compilation, a batch of data or of an
    evaluation, a save."""

    retired = {"xla_options": ([], "run.xla_options was removed, as steps set what helps: leave it out, or set XLA_FLAGS.")}
