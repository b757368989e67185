"""The sections of a config, key by key, and what each refuses by itself. `Config` (config.py) puts them together."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxllm.config.errors import refuse
from jaxllm.config.types import (
    AUTO,
    BatchSchedule,
    Count,
    Decay,
    Fraction,
    NonNegativeFloat,
    Paths,
    PositiveFloat,
    PositiveInt,
    Remat,
    Seed,
    Switch,
    XlaOptions,
    divisors,
    one_or_more,
)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class RopeScaling(Section):
    """Llama 3's stretching of the low rotary frequencies (Llama 3.1 model card and published inference code)."""

    factor: PositiveFloat
    """How many times longer the context became."""
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_position: PositiveInt = 8192
    """Positions seen before stretching."""

    @model_validator(mode="after")
    def _check(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise refuse(
                f"model.rope_scaling.high_freq_factor={self.high_freq_factor} must be larger than "
                f"low_freq_factor={self.low_freq_factor}: it marks the frequencies that stay as they are."
            )
        return self


class ModelConfig(Section):
    """The network's shape. Give `name` (a file in configs/models) or every size."""

    name: str | None = None
    """A published shape: llama-3.1-8b, smollm2-135m, ... The keys below override it. Or a model's folder, Hugging Face's or
    jaxllm's own: its shape, and unless set otherwise its weights (train.init_from) and, where texts are read, its tokenizer
    (data.tokenizer)."""
    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt = None  # type: ignore[assignment]  # filled in from num_heads
    """Key-value heads; default: one per query head."""
    head_dim: PositiveInt = None  # type: ignore[assignment]  # filled in from hidden_size / num_heads
    """Width of one head; default: hidden_size / num_heads."""
    vocab_size: PositiveInt
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: Switch = False
    """One matrix serves as embedding and head."""
    norm_eps: PositiveFloat = 1e-5
    initializer_std: PositiveFloat = 0.02
    """Standard deviation of all matrices at initialisation; those that write to the residual stream get std / sqrt(2 L)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of matmuls. Master weights, moments, norms, rotary angles, softmax and loss are float32 always."""
    matmul_dtype: Literal["compute_dtype", "fp8"] = "compute_dtype"
    """Of the blocks' matmuls against weights, in training. fp8 (GPUs from Ada on): E4M3 forward, E5M2 gradients, one scale for
    an array, taken from the array itself. Head, attention, embedding and all sums stay as they are."""
    attention: Literal["xla", "cudnn", "auto"] = "auto"
    """auto: cudnn on NVIDIA GPUs where it can run, else xla; the choice is logged."""
    scan_layers: Switch = True
    """One compiled layer, looped. False unrolls: about a third faster on CPU for a few layers, slow to compile for many."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any):
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        heads, width = values.get("num_heads"), values.get("hidden_size")
        if values.get("num_kv_heads") is None and isinstance(heads, int):
            values["num_kv_heads"] = heads
        if values.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
            if width % heads:
                raise refuse(
                    f"model.hidden_size={width} is not a multiple of model.num_heads={heads}: "
                    f"change one of them or set model.head_dim."
                )
            values["head_dim"] = width // heads
        return values

    @model_validator(mode="after")
    def _check(self):
        if self.num_heads % self.num_kv_heads:
            raise refuse(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}: "
                f"use one of {list(divisors(self.num_heads))} key-value heads."
            )
        if self.head_dim % 2:
            raise refuse(
                f"model.head_dim={self.head_dim} is odd, and rotary embeddings turn pairs: make it {self.head_dim + 1}."
            )
        return self


class ParallelConfig(Section):
    """Sizes of the mesh axes (their product is the number of devices) and how the work is cut along them."""

    pipe: PositiveInt = 1
    """Stages of the pipeline, each with its share of the layers and of the vocabulary."""
    data: PositiveInt | Literal["auto"] = AUTO
    """auto: all devices the other axes leave."""
    context: PositiveInt = 1
    tensor: PositiveInt = 1
    replica: PositiveInt = 1
    """Islands: outside all other axes, where the network is slowest. ZeRO shards inside an island; across islands gradients are
    summed once a step, or with train.diloco_steps weights once in so many steps."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicates the state over data; 1 shards master weights and moments; 2 also gradients; 3 also the weights (FSDP)."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Of the pipeline. gpipe: all microbatches forward, then all backward, memory in proportion to them; 1f1b: forward and
    backward in turn, memory flat; interleaved: 1f1b over virtual stages, a bubble 1/virtual_stages as long."""
    virtual_stages: PositiveInt = 1
    """Chunks of layers on each stage, for interleaved. Layers that do not divide over pipe x virtual_stages are filled up with
    identity layers, which are computed, never change, and are reported at the start."""
    remat: Remat = "selective"
    """none keeps all activations; selective the matmul outputs; full one tensor a layer; offload has what selective keeps wait
    in the host's memory. Or a mapping of a block's tensors to keep, offload or recompute, which is the rest's: {query: keep,
    mlp_up: offload}."""
    offload_state: Annotated[
        Literal["none", "optimizer", "optimizer_and_master"], BeforeValidator(lambda value: "none" if value is None else value)
    ] = "none"
    """optimizer: AdamW's moments lie in the host's pinned memory between steps, and pass through the GPU a layer at a time;
    optimizer_and_master: the fp32 master weights too. They cross the host's link twice a step."""
    context_method: Literal["ring", "all_gather", "auto"] = "auto"
    """How queries meet the keys of other context ranks. ring: keys travel behind the blocks' compute; all_gather: every rank
    gathers them first; auto: ring, unless sequences are too short to hide a hop (S / context x query heads per key-value head
    below 4096)."""
    overlap_passes: bool = False
    """In ticks of a pipeline that go forward and backward: a layer of each in turn, not a chunk of each, so that what tensor
    ranks send for one travels behind the other's matmuls. Of use with tensor > 1, zero 0 or 1, schedule 1f1b or interleaved."""

    @model_validator(mode="after")
    def _check(self):
        if (V := self.virtual_stages) > 1 and self.pipe == 1:
            raise refuse(f"parallel.virtual_stages={V} cuts the stages of a pipeline: set parallel.pipe, or virtual_stages=1.")
        if self.pipe > 1 and (V > 1) != (self.schedule == "interleaved"):
            raise refuse(
                f"parallel.schedule={self.schedule} and parallel.virtual_stages={V} do not go together: interleaved takes 2 or "
                f"more, 1f1b and gpipe take 1."
            )
        overlaps = self.overlap_passes and self.pipe > 1
        if overlaps and self.schedule == "gpipe":
            raise refuse(
                "parallel.overlap_passes=true takes ticks that go both ways, and gpipe has none: set parallel.schedule=1f1b."
            )
        if overlaps and self.remat == "none":
            # Compiled for H100s, 8B over pipe 2 and tensor 2 takes 114.8 GiB, and 104.1 with one pass after the other.
            raise refuse(
                "parallel.overlap_passes=true and parallel.remat=none do not go together, XLA would hold a tenth more: set "
                "parallel.remat=selective."
            )
        return self


SourceKind = Literal["python_stdlib", "files", "chat", "prepared", "megatron"]
PATHS_MEAN = {
    "files": "files or glob patterns",
    "chat": "files of JSON lines or glob patterns",
    "prepared": "folders",
    "megatron": "files without their .bin or .idx",
}


def _check_paths(where: str, source: str, paths: tuple[str, ...]) -> None:
    if source == "python_stdlib":
        if paths:
            raise refuse(
                f"{where}.paths is not read with {where}.source=python_stdlib: name another source, or remove the paths."
            )
    elif not paths:
        raise refuse(f"{where}.source={source} needs {where}.paths: give {PATHS_MEAN[source]}.")
    if source in ("files", "chat"):
        for pattern in paths:
            if not any(Path(p).is_file() for p in glob.iglob(pattern, recursive=True)):
                raise refuse(f"{where}.paths: no file matches {pattern!r}; check the path (it is relative to {Path.cwd()}).")


class SourceConfig(Section):
    """One part of a mixture."""

    name: str
    """What logs call it; unique in the mixture."""
    source: SourceKind
    paths: Paths = ()
    weight: PositiveFloat
    """Its share of the samples, relative to the other weights."""


class DataConfig(Section):
    """What is read, and how documents become samples. Which documents are held out does not depend on the machine."""

    source: SourceKind = "python_stdlib"
    """python_stdlib: the sources of the running Python's standard library; files: texts, one document each; chat:
    conversations, of which only the answers are learnt; prepared: folders that `jaxllm data prepare` wrote; megatron:
    Megatron-LM's .bin and .idx."""
    paths: Paths = ()
    """files: files or glob patterns (** for folders); chat: the same, of JSON lines with messages, or prompt and completion;
    prepared: folders; megatron: files without their .bin or .idx. With packing=best_fit conversations that fit into a sequence
    are not cut."""
    mixture: tuple[SourceConfig, ...] = ()
    """Several sources by weight, instead of source and paths."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, or bytes. Default: bytes for texts, for prepared folders the tokenizer they were made
    with."""
    chat_template: str | None = None
    """A Jinja file by which conversations are written. Default: the tokenizer folder's own."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents one after another, cut where a sequence is full; best_fit: documents are put together so that none
    that fits into a sequence is cut."""
    mask_documents: Switch = True
    """A token sees its own document alone, and the end of one does not predict the next. False: one endless text."""
    held_out_fraction: Fraction = 0.05

    @model_validator(mode="after")
    def _check(self):
        if not self.mixture:
            _check_paths("data", self.source, self.paths)
        elif extra := self.model_fields_set & {"source", "paths"}:
            raise refuse(f"data.mixture and data.{sorted(extra)[0]} both say what to read: remove one of them.")
        for number, part in enumerate(self.mixture):
            _check_paths(f"data.mixture[{number}]", part.source, part.paths)
            if part.name in [other.name for other in self.mixture[:number]]:
                raise refuse(f"data.mixture holds two sources named {part.name}: give each a name of its own.")
        if self.chat_template is not None:
            if not any(part.source == "chat" for part in self.sources):
                raise refuse("data.chat_template belongs to data.source=chat: name that source, or remove the template.")
            if not Path(self.chat_template).is_file():
                raise refuse(f"data.chat_template={self.chat_template} is no file (it is relative to {Path.cwd()}): check it.")
        if self.packing == "best_fit" and not self.mask_documents:
            raise refuse("data.packing=best_fit keeps documents apart: set data.mask_documents=true, or packing=concat.")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The mixture, or the one source as a mixture of one."""
        return self.mixture or (SourceConfig(name=self.source, source=self.source, paths=self.paths, weight=1.0),)


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019) with global-norm clipping; weight decay on matrices only."""

    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat | None = 1.0
    """Gradients with a larger global norm are scaled down to it; null: never."""
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: PositiveFloat = 1e-8
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: half a cosine, a line, or (wsd) constant and then a line over the last decay_tokens."""
    warmup_tokens: Count = 0
    """A run shorter than this ends on the way up, and says so at the start."""
    decay_tokens: Count | None = None
    """wsd only; default: the last fifth of training."""
    final_learning_rate_fraction: Fraction = 0.1
    """Of learning_rate, at the end of the schedule."""


class TrainConfig(Section):
    steps: PositiveInt
    sequence_length: PositiveInt
    global_batch_sequences: PositiveInt
    """Sequences of one optimizer step, over all devices; with batch_schedule, of the first steps."""
    batch_schedule: BatchSchedule = ()
    """[[from_tokens, global_batch_sequences], ...]: other batches from so many consumed tokens on, such as
    [[1_000_000_000, 2048], [4_000_000_000, 4096]]. The microbatch stays as it is, and a step has more of them. train.steps
    counts steps of any batch."""
    batch_lr: Literal["none", "sqrt", "linear"] = "none"
    """Ties the learning rate to the batch: it is multiplied by (batch / last batch of batch_schedule), by the root of that, or
    by nothing, so that optimizer.learning_rate is the last batch's. sqrt is the rule of practice for Adam."""
    microbatch_sequences: PositiveInt | None = None
    """Sequences one data rank computes at once; default: its whole share of global_batch_sequences, one microbatch a step."""
    seed: Seed = 0
    init_from: str | None = None
    """Start from the weights alone of a model's folder (Hugging Face's or jaxllm's own), a run directory, or one of its
    checkpoints. Default: the folder that model.name names, if it names one; null: fresh weights."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Adds this times logsumexp(logits)^2 to the objective (PaLM used 1e-4); the reported loss leaves it out."""
    max_skips_in_a_row: PositiveInt = 10
    """A step whose loss or gradient norm is not finite is skipped: it changes neither weights nor moments. So many in a row end
    the run."""
    spike_deviations: PositiveFloat | None = 6.0
    """A step whose loss or gradient norm lies so many standard deviations above the mean of the last 128 is a spike:
    metrics.jsonl marks it, and run.dir/spikes.jsonl says which samples it read. null: none is."""
    skip_spikes: Switch = False
    """Skip spikes too, as OLMo-core's SkipStepAdamW does. The losses and norms of the last 128 steps are then part of the
    state."""
    loss_chunk_tokens: PositiveInt = 4096
    """Logits exist for about this many tokens at a time."""
    diloco_steps: PositiveInt | None = None
    """DiLoCo (Douillard et al., 2023): each island of parallel.replica trains on its own, on its share of the global batch, and
    after so many steps, and after the last, one outer step brings them together; null: they take every step together."""
    diloco_lr: PositiveFloat = 0.7
    """Of the outer step."""
    diloco_momentum: Decay = 0.9
    """Nesterov's, of the outer step; 0: plain SGD."""
    diloco_after_steps: Count = 0
    """Steps that all islands take together first, without DiLoCo: a fifth of a run is a good start."""
    eval_every_steps: PositiveInt | None = None
    """Held-out loss every so often; it is taken at the end in any case. With DiLoCo it is that of the last outer step."""
    eval_batches: PositiveInt | None = None
    """Batches of held-out text, of each source, in each evaluation on the way; default: all of it. A batch is
    microbatch_sequences on every data rank, times parallel.pipe. The evaluation at the end reads all, up to 16,777,216 tokens
    of each source."""


class CheckpointConfig(Section):
    """The last step is saved in any case, and so is the present one when a signal ends the run."""

    every_steps: PositiveInt | None = None
    """Save so often, counted in steps."""
    every_minutes: PositiveFloat | None = 30.0
    """Save so often by the clock too; null: never."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints of multiples of this step are saved, and kept for good."""
    asynchronous: Switch = True
    """Write while training goes on: the run waits only for the copy from the devices."""


class LogConfig(Section):
    every_steps: PositiveInt = 10
    """A line on the terminal (or in the log file); metrics.jsonl gets every step."""
    baselines: Switch = False
    """At the end, print byte bigram and trigram losses on the same held-out text."""
    sample_tokens: Count = 0
    """Length of the text sampled at the end."""
    sample_prompt: Annotated[str, Field(min_length=1)] = "The "
    """What that text begins with."""
    tensorboard: Switch = False
    wandb_project: str | None = None
    layer_norms_every: PositiveInt | None = None
    """Every so many steps, each layer's gradient norm and the root mean square of its output in one microbatch, which costs
    that microbatch's forward pass; null: never."""
    noise_scale_every: PositiveInt | None = None
    """Every so many steps, measure the gradient noise scale: what a larger batch would give. It compares the parts that data
    ranks and microbatches make of a step, so there must be two. Above 1 such steps have a program of their own, compiled when
    the first is due; null: never."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """[first, last]: write a profiler trace of these steps into run.dir/profile."""


class RunConfig(Section):
    dir: str = "runs/default"
    """Checkpoints, metrics.jsonl and the config are kept here; a second start with the same directory resumes."""
    cpu_devices: PositiveInt | None = None
    """Run on this many CPU devices of this machine, to try any mesh at home. Of several processes, each has as many."""
    deterministic: Switch = False
    """Bit-equal reruns on GPU: XLA takes no kernel whose sums depend on which thread is first, and chooses none by timing.
    Costs speed: matmuls run with untimed tiles, and attention's backward in cuDNN's slower way."""
    xla_options: Annotated[tuple[XlaOptions, ...], BeforeValidator(one_or_more)] = ()
    """Sets of XLA's options to try on GPUs, such as [double_buffering]; jaxllm/runtime/xla_flags.py says what each does. None
    is on by itself: they change the order of the step and with it its memory, which `jaxllm compile` then tells, not the
    estimate."""
    allow_overcommit: Switch = False
    """Start even where the estimate says that a step does not fit into the GPU's memory."""
    peer_timeout_s: PositiveFloat = 60
    """Of several processes, one silent for so many seconds is given up, and all leave. JAX's own limit is twice that."""
    stuck_factor: Annotated[float, Field(gt=1)] = 20
    """A step that takes so many times the median of the last 50, and at least run.stuck_min_s, is stuck: the process shows
    where it stands and leaves, to be started again."""
    stuck_min_s: PositiveFloat = 300
    """Seconds that a step may always take, the first of a start above all."""
    phase_timeout_s: PositiveFloat = 3600
    """Seconds that any other work may take before the process counts as stuck: start, compilation, one batch of data or of an
    evaluation, one save."""
