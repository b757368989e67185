"""The config: typed, frozen, strict. Everything a run does is said here, and nonsense is refused before a device is touched.

    config = load_config("configs/quickstart.yaml", ["train.steps=20"])

A recipe is a YAML file with the sections below. `model.name` pulls in a published shape from configs/models; keys written
beside it override that shape. Every refusal is one sentence (ConfigError) that says what to change.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from jaxllm import hf_config
from jaxllm.batch_schedule import Phase, phase_at, phases_of, sequences_before
from jaxllm.config_errors import ConfigError, one_sentence, refuse, why_not_yaml
from jaxllm.html_tables import table

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]
AUTO = "auto"
FP8_UNIT = 16
"""Of what the dims of cuBLASLt's FP8 matmuls must be multiples (cuBLAS library documentation, cublasLtMatmul)."""


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


BLOCK_INPUT = "block_input"
ATTENTION_RESULTS = ("attention_output", "attention_lse")
BLOCK_TENSORS = (BLOCK_INPUT, "query", "key", "value", *ATTENTION_RESULTS, "attention_out", "mlp_gate", "mlp_up")
"""What a block may keep for its backward pass, in the order it computes them; the model gives these names to its tensors."""
ZERO_DIMS = ("embed", "mlp", "vocab", "head_dim", "heads", "kv_heads")
"""ZeRO shards the first of these dims that a parameter has, that divides, and that no other axis shards. It never shards a dim
that counts layers: ZeRO 3 gathers layer by layer."""
Fate = Literal["keep", "recompute", "offload"]


def _check_remat(remat: Any) -> Any:
    if not isinstance(remat, Mapping):
        return remat
    for name, fate in remat.items():
        if name not in BLOCK_TENSORS:
            nearest = difflib.get_close_matches(str(name), BLOCK_TENSORS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"the tensors of a block are {', '.join(BLOCK_TENSORS)}."
            raise refuse(f"parallel.remat.{name} is no tensor of a block: {hint}")
        if fate not in get_args(Fate):
            raise refuse(f"parallel.remat.{name}={fate} is not one of the choices: use {', '.join(get_args(Fate))}.")
    if remat.get(BLOCK_INPUT) == "recompute":
        raise refuse("parallel.remat.block_input=recompute cannot be: all else follows from it, so use keep or offload.")
    held = [name for name in ATTENTION_RESULTS if remat.get(name, "recompute") != "recompute"]
    if len(held) == 1:
        other = next(name for name in ATTENTION_RESULTS if name not in held)
        raise refuse(f"parallel.remat.{held[0]}={remat[held[0]]} gains nothing alone: keep or offload {other} too.")
    return dict(remat)


Remat = Annotated[Literal["none", "selective", "full", "offload"] | dict[str, Fate], BeforeValidator(_check_remat)]


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


def _one_is_a_list(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


Paths = Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)]


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


def _pairs(schedule: Any) -> Any:
    if schedule is None:
        return ()
    if not isinstance(schedule, Sequence) or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in schedule):
        raise refuse(
            f"train.batch_schedule={schedule} is no list of pairs: write [[from_tokens, global_batch_sequences], ...], such as "
            f"[[1000000000, 2048]]."
        )
    return schedule


class TrainConfig(Section):
    steps: PositiveInt
    sequence_length: PositiveInt
    global_batch_sequences: PositiveInt
    """Sequences of one optimizer step, over all devices; with batch_schedule, of the first steps."""
    batch_schedule: Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], BeforeValidator(_pairs)] = ()
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


XlaOptions = Literal["latency_hiding", "pipelined_collectives", "double_buffering", "layer_combined", "more_at_once"]


class RunConfig(Section):
    dir: str = "runs/default"
    """Checkpoints, metrics.jsonl and the config are kept here; a second start with the same directory resumes."""
    cpu_devices: PositiveInt | None = None
    """Run on this many CPU devices of this machine, to try any mesh at home. Of several processes, each has as many."""
    deterministic: Switch = False
    """Bit-equal reruns on GPU: XLA takes no kernel whose sums depend on which thread is first, and chooses none by timing.
    Costs speed: matmuls run with untimed tiles, and attention's backward in cuDNN's slower way."""
    xla_options: Annotated[tuple[XlaOptions, ...], BeforeValidator(_one_is_a_list)] = ()
    """Sets of XLA's options to try on GPUs, such as [double_buffering]; jaxllm/xla_flags.py says what each does. None is on by
    itself: they change the order of the step and with it its memory, which `jaxllm compile` then tells, not the estimate."""
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


class Config(Section):
    """One run. Shown, it is a recipe of what differs from the defaults; `model_dump()` has every key."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check(self):
        model, parallel, train = self.model, self.parallel, self.train
        kinds = {part.source for part in self.data.sources}
        reads_bytes = self.data.tokenizer in (None, "bytes") and "prepared" not in kinds
        for part in self.data.sources if reads_bytes and model.vocab_size < 256 else ():
            if part.source in ("python_stdlib", "files"):
                raise refuse(f"model.vocab_size={model.vocab_size} cannot hold bytes: data.source={part.source} needs 256.")
        if "chat" in kinds and self.data.tokenizer is None and "prepared" not in kinds:
            raise refuse("data.source=chat needs a tokenizer: set data.tokenizer to the folder of the model.")
        _check_split(model, parallel, train.sequence_length)
        _check_diloco(train, parallel)
        if parallel.data != AUTO:
            _check_microbatches(self)
        _check_batch_schedule(train)
        if train.skip_spikes and train.spike_deviations is None:
            raise refuse("train.skip_spikes=true needs train.spike_deviations: set it, such as 6.0, or skip_spikes=false.")
        if self.optimizer.decay_tokens is not None and self.optimizer.schedule != "wsd":
            raise refuse(f"optimizer.decay_tokens belongs to schedule=wsd, not {self.optimizer.schedule}: remove one of them.")
        _check_log(self, of_bytes=reads_bytes and len(kinds) == 1 and kinds <= {"python_stdlib", "files"})
        return self

    def __repr__(self) -> str:
        changed = self.model_dump(mode="json", exclude_defaults=True)
        recipe = yaml.safe_dump(changed, sort_keys=False, default_flow_style=None, width=78)
        return f"# what differs from the defaults\n{recipe}"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        changed = self.model_dump(mode="json", exclude_defaults=True)
        rows = [(section, "\n".join(f"{key}: {value}" for key, value in keys.items())) for section, keys in changed.items()]
        tokens = f"{self.total_tokens:,} tokens in {self.train.steps:,} steps; what differs from the defaults"
        return table(rows, left=2, caption=tokens)

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step; with train.batch_schedule, of the first."""
        return self.train.global_batch_sequences * self.train.sequence_length

    @property
    def total_tokens(self) -> int:
        return self.tokens_before(self.train.steps)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The batches of the run, in turn: one phase without train.batch_schedule."""
        train = self.train
        return phases_of(train.global_batch_sequences, train.batch_schedule, train.sequence_length)

    @property
    def batches(self) -> tuple[int, ...]:
        """All global batches, in sequences, that the config names."""
        return (self.train.global_batch_sequences, *(sequences for _, sequences in self.train.batch_schedule))

    def phase_at(self, step: int) -> Phase:
        """The phase of the step that follows `step` steps."""
        return phase_at(self.phases, step)

    def sequences_before(self, step: int) -> int:
        """Sequences that the first `step` steps consume: the number of the sample that comes next."""
        return sequences_before(self.phases, step)

    def tokens_before(self, step: int) -> int:
        """Tokens that the first `step` steps consume."""
        return self.sequences_before(step) * self.train.sequence_length

    def in_phase(self, phase: Phase) -> Config:
        """This config as if the batch of a phase were that of the whole run; needs a concrete parallel.data."""
        batch = {"global_batch_sequences": phase.sequences, "batch_schedule": (), "batch_lr": "none"}
        train = self.train.model_copy(update={**batch, "microbatch_sequences": self.microbatch_sequences})
        return self.model_copy(update={"train": train})

    @property
    def at_largest_batch(self) -> Config:
        """`in_phase` of the largest batch that the run comes to, whose step takes most memory. Itself without a schedule."""
        if not self.train.batch_schedule:
            return self
        reached = [phase for phase in self.phases if phase.first_step < self.train.steps]
        return self.in_phase(max(reached, key=lambda phase: phase.sequences))

    @property
    def devices(self) -> int:
        """Of the whole mesh; needs a concrete parallel.data."""
        p = self.parallel
        return p.replica * p.pipe * int(p.data) * p.context * p.tensor

    @property
    def chunk_layers(self) -> int:
        """Layers of one virtual stage of the pipeline, identity layers counted."""
        return math.ceil(self.model.num_layers / (self.parallel.pipe * self.parallel.virtual_stages))

    @property
    def microbatch_sequences(self) -> int:
        """Per data rank, in every phase; needs a concrete parallel.data."""
        if self.train.microbatch_sequences is not None:
            return self.train.microbatch_sequences
        ranks = self.parallel.replica * int(self.parallel.data)
        if self.train.global_batch_sequences % ranks:
            raise _batch_does_not_divide(self, ranks)
        return self.train.global_batch_sequences // ranks

    @property
    def microbatch_rows(self) -> int:
        """Sequences of one microbatch on all data ranks of all islands; needs a concrete parallel.data."""
        return self.parallel.replica * int(self.parallel.data) * self.microbatch_sequences

    @property
    def num_microbatches(self) -> int:
        """M = global / (replica x data x microbatch), in the first phase; needs a concrete parallel.data."""
        ranks = self.parallel.replica * int(self.parallel.data)
        per_microbatch = ranks * self.microbatch_sequences
        if self.train.global_batch_sequences % per_microbatch:
            raise _batch_does_not_divide(self, ranks)
        return self.train.global_batch_sequences // per_microbatch

    def resolve(self, num_devices: int) -> Config:
        """This config with parallel.data filled in for so many devices.

        Raises ConfigError when the mesh cannot be that many devices, or the batch does not divide over it.
        """
        p = self.parallel
        others = {"pipe": p.pipe, "context": p.context, "tensor": p.tensor, "replica": p.replica}
        rest = math.prod(others.values())
        wanted = "parallel." + " x ".join(f"{axis}={size}" for axis, size in others.items() if size > 1)
        if p.data == AUTO:
            if num_devices % rest:
                raise ConfigError(
                    f"{wanted} does not divide the {_devices(num_devices)} here: "
                    f"choose axis sizes whose product divides {num_devices}."
                )
            data = num_devices // rest
        else:
            data = int(p.data)
            if data * rest != num_devices:
                factors = "replica x pipe x data x context x tensor"
                sizes = " x ".join(map(str, (p.replica, p.pipe, data, p.context, p.tensor)))
                hint = (
                    f"set parallel.data={num_devices // rest}"
                    if num_devices % rest == 0
                    else f"change the axes so that their product is {num_devices}"
                )
                raise ConfigError(
                    f"The mesh {factors} = {sizes} is {_devices(data * rest)}, but there {'is' if num_devices == 1 else 'are'} "
                    f"{num_devices}: {hint}, or set run.cpu_devices={data * rest} to try it on this machine's CPU."
                )
        parallel = self.parallel.model_copy(update={"data": data})
        config = self.model_copy(update={"parallel": parallel})
        try:
            _check_microbatches(config)
        except PydanticCustomError as error:
            raise ConfigError(error.message()) from None
        return config


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def sequence_unit(context: int, tensor: int) -> int:
    """Of what a sequence's length must be a multiple, to be cut over these axes."""
    return context * math.lcm(2, tensor) if context > 1 else tensor


def _check_split(model: ModelConfig, parallel: ParallelConfig, S: int) -> None:
    """Heads, widths, sequence and layers over the axes that split them."""
    if model.num_heads % parallel.tensor:
        raise refuse(
            f"model.num_heads={model.num_heads} cannot be split over parallel.tensor={parallel.tensor}: "
            f"use one of {list(divisors(model.num_heads))}."
        )
    if model.num_kv_heads % parallel.tensor and parallel.tensor % model.num_kv_heads:
        raise refuse(
            f"model.num_kv_heads={model.num_kv_heads} can be neither split over parallel.tensor={parallel.tensor} nor "
            f"repeated evenly: make one a multiple of the other."
        )
    if (size := model.intermediate_size) % parallel.tensor:
        raise refuse(
            f"model.intermediate_size={size} is not a multiple of parallel.tensor={parallel.tensor}: "
            f"make it {math.ceil(size / parallel.tensor) * parallel.tensor} or change parallel.tensor."
        )
    if model.matmul_dtype == "fp8":
        _check_fp8(model, parallel.tensor)
    # Each context rank holds two chunks of a sequence (parallel/zigzag.py), and each tensor rank a part of those.
    c = parallel.context
    unit = sequence_unit(c, parallel.tensor)
    if S % unit:
        nearest = f"{S // unit * unit} or {math.ceil(S / unit) * unit}" if unit < S else str(unit)
        parts = f"in two chunks over parallel.context={c} and each part " if c > 1 else ""
        raise refuse(
            f"train.sequence_length={S} does not divide {parts}over parallel.tensor={parallel.tensor}: "
            f"set train.sequence_length={nearest}."
        )
    chunks = parallel.pipe * parallel.virtual_stages
    if not all_have_layers(model.num_layers, chunks):
        fix = _fewer_chunks(model.num_layers, parallel)
        raise refuse(
            f"model.num_layers={model.num_layers} leaves a chunk of parallel.pipe={parallel.pipe} x "
            f"virtual_stages={parallel.virtual_stages} = {chunks} without a layer: {fix}."
        )


def _check_diloco(train: TrainConfig, parallel: ParallelConfig) -> None:
    if train.diloco_steps is None:
        return
    if parallel.offload_state != "none":
        raise refuse(
            f"train.diloco_steps={train.diloco_steps} keeps every island's state on its devices: set "
            f"parallel.offload_state=none, not {parallel.offload_state}, or leave DiLoCo out."
        )
    if train.diloco_after_steps >= train.steps:
        raise refuse(
            f"train.diloco_after_steps={train.diloco_after_steps} leaves DiLoCo none of train.steps={train.steps}: "
            f"make it smaller, or leave train.diloco_steps out."
        )


def _check_log(config: Config, of_bytes: bool) -> None:
    """`of_bytes`: the run reads one text in memory, as bytes."""
    log = config.log
    if config.data.held_out_fraction == 0 and (config.train.eval_every_steps or log.baselines):
        raise refuse(
            "train.eval_every_steps and log.baselines need held-out text: set data.held_out_fraction above 0 or remove them."
        )
    if log.baselines and not of_bytes:
        raise refuse(
            "log.baselines counts bytes of one text in memory: set log.baselines=false, or read files without a tokenizer."
        )
    if log.profile_steps and not 1 <= log.profile_steps[0] <= log.profile_steps[1] <= config.train.steps:
        raise refuse(f"log.profile_steps={list(log.profile_steps)} is not [first, last] within 1..{config.train.steps}.")


def _check_fp8(model: ModelConfig, tensor: int) -> None:
    """Raises if a dim of a block's matmuls, as a tensor rank has it, is none that FP8 multiplies."""
    widths = {
        "hidden_size": (model.hidden_size, 1),
        "intermediate_size": (model.intermediate_size, tensor),
        "num_heads x head_dim": (model.num_heads * model.head_dim, tensor),
        # Whole on every rank where the heads do not divide.
        "num_kv_heads x head_dim": (model.num_kv_heads * model.head_dim, 1 if model.num_kv_heads % tensor else tensor),
    }
    for key, (whole, ranks) in widths.items():
        if (width := whole // ranks) % FP8_UNIT:
            split = f" over parallel.tensor={tensor}" if ranks > 1 else ""
            raise refuse(
                f"model.matmul_dtype=fp8 multiplies {FP8_UNIT} numbers at a time, and model.{key}{split} is {width}: make it a "
                f"multiple of {FP8_UNIT}, or set model.matmul_dtype=compute_dtype."
            )


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending. In the root's time: a size mistyped by some digits is answered too."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(small + [number // n for n in reversed(small) if n * n != number])


def all_have_layers(layers: int, chunks: int) -> bool:
    """Whether every chunk has a layer, where all but the last are full."""
    return layers > (chunks - 1) * math.ceil(layers / chunks)


def _fewer_chunks(layers: int, parallel: ParallelConfig) -> str:
    """What to set so that every chunk has a layer: fewer virtual stages if that does, else fewer stages."""
    # More chunks than layers never do.
    for virtual_stages in range(min(parallel.virtual_stages - 1, layers), 1, -1):
        if all_have_layers(layers, parallel.pipe * virtual_stages):
            return f"set parallel.virtual_stages={virtual_stages}"
    if parallel.virtual_stages > 1 and all_have_layers(layers, parallel.pipe):
        return "set parallel.virtual_stages=1 and schedule=1f1b"
    stages = next(pipe for pipe in range(min(parallel.pipe - 1, layers), 0, -1) if all_have_layers(layers, pipe))
    return f"set parallel.pipe={stages}" + (", virtual_stages=1 and schedule=1f1b" if parallel.virtual_stages > 1 else "")


def _check_batch_schedule(train: TrainConfig) -> None:
    """Raises if the thresholds do not rise, or a rule has no schedule to go by."""
    thresholds = [tokens for tokens, _ in train.batch_schedule]
    for before, after in itertools.pairwise(thresholds):
        if after <= before:
            raise refuse(
                f"train.batch_schedule goes from {before:,} tokens to {after:,}: its from_tokens must rise; put them in order."
            )
    if train.batch_lr != "none" and not train.batch_schedule:
        raise refuse(
            f"train.batch_lr={train.batch_lr} ties the learning rate to train.batch_schedule, and there is none: give one, or "
            f"set batch_lr=none."
        )


def _check_microbatches(config: Config) -> None:
    """Raises if the batch of a phase does not divide over the data ranks, or its microbatches not over an interleaved
    pipeline; or one is a single part, where parts are to be compared."""
    _check_rounds(config)
    _check_parts(config)
    ranks = config.parallel.replica * int(config.parallel.data)
    unit = ranks * config.microbatch_sequences
    for from_tokens, batch in config.train.batch_schedule:
        if batch % unit:
            below, above = batch // unit * unit, (batch // unit + 1) * unit
            raise refuse(
                f"train.batch_schedule has {batch} sequences from {from_tokens:,} tokens on, which do not divide into data "
                f"ranks x microbatch = {ranks} x {config.microbatch_sequences} = {unit}: use "
                f"{f'{below} or ' if below else ''}{above}, or change train.microbatch_sequences or parallel.data."
            )
        pipe, M = config.parallel.pipe, batch // unit
        if config.parallel.virtual_stages > 1 and M % pipe:
            raise refuse(
                f"train.batch_schedule has {batch} sequences from {from_tokens:,} tokens on, in {M} microbatches, and "
                f"parallel.schedule=interleaved takes them in rounds of parallel.pipe={pipe}: use a multiple of {unit * pipe} "
                f"sequences, or another train.microbatch_sequences."
            )


def _check_parts(config: Config) -> None:
    """Raises if a step that is to measure the noise scale has nothing to compare."""
    if (every := config.log.noise_scale_every) is None:
        return
    least = min([config.train.global_batch_sequences, *(batch for _, batch in config.train.batch_schedule)])
    # With DiLoCo an island is on its own.
    own = least // config.parallel.replica if config.train.diloco_steps is not None else least
    if own // config.microbatch_sequences < 2:
        raise refuse(
            f"log.noise_scale_every={every} compares the parts of a step, and {own} sequences with microbatches of "
            f"{config.microbatch_sequences} on each data rank are one part: "
            + (
                f"set train.microbatch_sequences to {own // 2} or less."
                if own > 1
                else "make train.global_batch_sequences larger."
            )
        )


def _check_rounds(config: Config) -> None:
    parallel, M, G = config.parallel, config.num_microbatches, config.train.global_batch_sequences
    if parallel.virtual_stages == 1 or M % parallel.pipe == 0:
        return
    rounds = [near for near in (M // parallel.pipe * parallel.pipe, (M // parallel.pipe + 1) * parallel.pipe) if near]
    batches = " or ".join(str(G // M * near) for near in rounds)
    raise refuse(
        f"parallel.schedule=interleaved takes microbatches in rounds of parallel.pipe={parallel.pipe}, and a step has {M}: "
        f"make it {' or '.join(map(str, rounds))}, with train.global_batch_sequences={batches} or another microbatch_sequences."
    )


def _batch_does_not_divide(config: Config, ranks: int) -> PydanticCustomError:
    batch, micro = config.train.global_batch_sequences, config.train.microbatch_sequences
    if micro is None:
        replica = config.parallel.replica
        step = ranks
        each = f"parallel.replica x data = {ranks} ranks" if replica > 1 else f"parallel.data={ranks} ranks"
    else:
        step, each = ranks * micro, f"data ranks x microbatch = {ranks} x {micro} = {ranks * micro}"
    below, above = batch // step * step, (batch // step + 1) * step
    choices = f"{below} or {above}" if below else str(above)
    if micro is None or batch % ranks:
        instead = "change parallel.data"
    else:
        own = batch // ranks
        instead = f"set train.microbatch_sequences={max(n for n in divisors(own) if n <= micro)}"
    return refuse(f"train.global_batch_sequences={batch} does not divide into {each}: use {choices}, or {instead}.")


# ---------------------------------------------------------------------------------------------------------- loading


def config_folder() -> Path:
    """configs/ of the checkout, or of the installed wheel."""
    here = Path(__file__).parent
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def published_models() -> list[str]:
    return sorted(path.stem for path in (config_folder() / "models").glob("*.yaml"))


def find_recipe(path: Path) -> Path:
    """The file itself; where there is none, the recipe of that name that comes with jaxllm, if there is one."""
    name = path.name if path.suffix == ".yaml" else f"{path.name}.yaml"
    ours = config_folder() / name
    return ours if not path.is_file() and path.parent in (Path(), Path("configs")) and ours.is_file() else path


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read a recipe.

    Args:
      path: a YAML file, or its content as a mapping; or the name of a recipe that comes with jaxllm, such as quickstart or
        configs/quickstart.yaml, if there is no such file here.
      overrides: `section.key=value` strings, the value in YAML; later ones win.

    Raises:
      ConfigError: one sentence that names the key and what to change.
    """
    values = _read_yaml(find_recipe(Path(path))) if isinstance(path, str | Path) else {k: v for k, v in path.items()}
    # A section whose keys are all commented out is None in YAML.
    values = with_overrides(values, overrides)
    model = values.get("model")
    if isinstance(model, dict) and model.get("name") is not None:
        _take_named(values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, Config)) from None


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The sections of a config, not checked yet, with `section.key=value` strings applied; a copy.

    Raises:
      ConfigError: a string is none.
    """
    values = {section: dict(keys) if isinstance(keys, Mapping) else keys or {} for section, keys in values.items()}
    for override in overrides:
        _apply(override, values)
    return values


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors."""
    schema = Config.model_json_schema()
    # A recipe may leave sizes to model.name.
    schema["$defs"]["ModelConfig"].pop("required", None)
    return schema


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        nearest = difflib.get_close_matches(path.name, [p.name for p in config_folder().glob("*.yaml")], n=1)
        if nearest:
            hint = f"did you mean {config_folder() / nearest[0]}?"
        elif path.name in published_models():
            hint = f"that is a model's shape, which a recipe names as model.name={path.name}."
        else:
            hint = "give the path of a YAML recipe such as configs/quickstart.yaml."
        raise ConfigError(f"There is no config file {path}: {hint}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML ({why_not_yaml(error)}): mend it there.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no sections: write model:, train: and so on at the left margin.")
    return values


def _apply(override: str, values: dict[str, Any]) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError(f"Cannot read the override {override!r}: write section.key=value, such as train.steps=100.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"Cannot read the value of {override!r}: quote it, or write it as YAML.") from None
    if isinstance(value, str) and not text.lstrip().startswith(("'", '"')):
        # YAML reads 3e-4 as a string, because it wants a dot in it.
        try:
            value = float(value)
        except ValueError:
            pass
    node = values
    for key in keys[:-1]:
        child = node.get(key)
        if child is None:
            child = {}
        if not isinstance(child, Mapping):
            raise ConfigError(f"{override!r} does not name a key: {key} has no keys below it.")
        node[key] = dict(child)
        node = node[key]
    node[keys[-1]] = value


def _take_named(values: dict[str, Any]) -> None:
    """What model.name stands for, wherever `values` says nothing else: the shape, and of a folder its weights and tokenizer."""
    model, name = values["model"], values["model"]["name"]
    if set(hf_config.SHAPE_KEYS) <= model.keys():
        # A config as it ran: what the name stood for is written out, and a folder may be gone by now.
        return
    if isinstance(name, str) and name not in published_models():
        if Path(name).is_dir():
            return _take(values, *_of_folder(Path(name)))
        if ran := _as_it_ran(values, name):
            return _take(values, *ran)
    values["model"] = {**_published_shape(name), **model}


def _of_folder(path: Path) -> tuple[Mapping[str, Any], list[Path]]:
    """The shape of a folder's model, and where its tokenizer may be."""
    # Of a checkpoint, the run it is one of says it.
    home = path.parent.parent if path.parent.name == "checkpoints" else path
    if (shape := hf_config.folder_shape(path)) is None and (home / "config.yaml").is_file():
        shape = _read_yaml(home / "config.yaml").get("model")
    if not isinstance(shape, Mapping):
        raise ConfigError(
            f"model.name={path} holds no model: give a folder with config.json (Hugging Face) or model.json (jaxllm), a run "
            f"directory or one of its checkpoints, or one of {', '.join(published_models())}."
        )
    return shape, [home, home / "tokenizer"]


def _as_it_ran(values: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], list[Path]] | None:
    """The same from what run.dir keeps, if that is a run with the model of this name: the folder has gone since."""
    run = values.get("run")
    folder = Path(str((run if isinstance(run, Mapping) else {}).get("dir", RunConfig.model_fields["dir"].default)))
    model = _read_yaml(folder / "config.yaml").get("model") if (folder / "config.yaml").is_file() else None
    return (model, [folder / "tokenizer"]) if isinstance(model, Mapping) and model.get("name") == name else None


def _take(values: dict[str, Any], shape: Mapping[str, Any], tokenizers: Sequence[Path]) -> None:
    train, data = values.get("train"), values.setdefault("data", {})
    if isinstance(train, dict):
        train.setdefault("init_from", values["model"]["name"])
    values["model"] = {**{key: shape[key] for key in hf_config.SHAPE_KEYS if key in shape}, **values["model"]}
    found = [home for home in tokenizers if (home / "tokenizer.json").is_file()]
    if isinstance(data, dict) and found and _reads_texts(data):
        data.setdefault("tokenizer", str(found[0]))


def _reads_texts(data: Mapping[str, Any]) -> bool:
    """Whether a data section, not checked yet, reads texts and nothing that was tokenized before."""
    parts = data.get("mixture") or [data]
    kinds = [part.get("source", "python_stdlib") for part in parts if isinstance(part, Mapping)]
    return bool(kinds) and all(kind in ("python_stdlib", "files", "chat") for kind in kinds)


def _published_shape(name: Any) -> dict[str, Any]:
    path = config_folder() / "models" / f"{name}.yaml"
    if isinstance(name, str) and "/" in name:
        raise ConfigError(f"model.name={name} is no folder with a config.json: get the model there, or name another folder.")
    if not isinstance(name, str) or not path.is_file():
        nearest = difflib.get_close_matches(str(name), published_models(), n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose one of {', '.join(published_models())}."
        raise ConfigError(f"model.name={name} is no published shape, and no folder here: {hint}")
    return _read_yaml(path)
