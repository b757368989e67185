"""The sections of a config, key by key, with the checks inside one section. `Config` (config.py) combines the sections."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxllm.config.errors import refuse
from jaxllm.config.types import (
    AUTO,
    DOCUMENTS,
    GIVEN,
    Count,
    PositiveFloat,
    PositiveInt,
    Remat,
    Section,
    Switch,
    Tokens,
    one_or_more,
)
from jaxllm.untrusted import RefusedInput, shown

Ranks = Annotated[int, Field(ge=1, le=2**17, strict=True)]
"""Size of a mesh axis: no cluster has more GPUs."""
Seed = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
OffloadState = Annotated[
    Literal["none", "optimizer", "optimizer_and_master", "all"],
    BeforeValidator(lambda value: "none" if value is None else value),
]
Paths = Annotated[tuple[str, ...], BeforeValidator(one_or_more)]
PATHS_MEAN = {
    "files": "files or glob patterns",
    "chat": "files of JSON lines or glob patterns",
    "preferences": "files of JSON lines or glob patterns",
    "prepared": "folders",
    "megatron": "files without their .bin or .idx",
    "tokens": "files of ids or glob patterns",
}
"""What data.paths holds, by data.source."""


def _pairs(key: str, names: str, schedule: Any) -> Any:
    if schedule is None:
        return ()
    if not isinstance(schedule, Sequence) or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in schedule):
        raise refuse(
            f"train.{key}={shown(schedule)} is not a list of pairs: write [[{names}], ...], such as [[1000000000, 2048]]."
        )
    return schedule


_Pairs = tuple[tuple[Tokens, PositiveInt], ...]
BatchSchedule = Annotated[_Pairs, BeforeValidator(partial(_pairs, "batch_schedule", "from_tokens, global_batch_sequences"))]
LengthSchedule = Annotated[_Pairs, BeforeValidator(partial(_pairs, "length_schedule", "until_tokens, sequence_length"))]


class ParallelConfig(Section):
    """Sizes of the mesh axes (their product is the number of devices) and how the work is split over them."""

    pipe: Ranks = 1
    """Pipeline stages, each with a part of the layers and of the vocabulary."""
    data: Ranks | Literal["auto"] = AUTO
    """auto: all devices that the other axes leave."""
    context: Ranks = 1
    tensor: Ranks = 1
    expert: Ranks = 1
    """Neighbouring data ranks that share the experts of a layer; tokens travel between them. 1: each rank has all experts."""
    expert_buffer: Annotated[float, Field(ge=1, le=1e3, allow_inf_nan=False)] | None = 1.5
    """Rows that a rank may send to each of these ranks, as a multiple of an equal share; more are dropped, and counted in the
    metrics. null: none is dropped, in `expert` times the memory."""
    replica: Ranks = 1
    """Replicas (HSDP), over the slowest network; ZeRO shards within a replica. Gradients are summed over replicas once per
    step, or, with train.diloco_steps, weights are synchronised once per that many steps."""
    replica_gbit_per_s: Annotated[float, Field(ge=1e-3, allow_inf_nan=False)] | None = None
    """For predictions: Gbit/s each way of a replica's link to the others, shared by all its GPUs. null: as between hosts."""
    replica_latency_ms: Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)] | None = None
    """For predictions: milliseconds of a message between replicas, half of what ping prints. null: as between hosts."""
    zero: Literal[0, 1, 2, 3] = 1
    """0 replicates the state over data ranks; 1 shards master weights and moments; 2 also gradients; 3 also weights (FSDP)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which ranks send and add a microbatch's gradients with ZeRO 2 and 3. bfloat16 halves the bytes, and rounds."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """gpipe: all microbatches forward, then all backward; memory grows with their number. 1f1b: forward and backward in turn,
    in constant memory. interleaved: 1f1b over virtual stages; the bubble is 1/virtual_stages as long."""
    virtual_stages: PositiveInt = 1
    """Chunks of layers on each stage, for interleaved. Identity layers, which cost time, fill the last chunk where layers do
    not divide over pipe x virtual_stages."""
    remat: Remat = "selective"
    """none keeps all activations; selective the matmul outputs; full one tensor per layer; offload those of selective, in host
    memory. Or keep, offload or recompute (the default) for each tensor: {query: keep, mlp_up: offload}."""
    offload_state: OffloadState = "none"
    """What waits in pinned host memory (docs/remat.md). optimizer: AdamW's moments; optimizer_and_master: also the float32
    master weights; all: also the layers' weights in the compute dtype and the sums of their gradients."""
    context_method: Literal["ring", "all_gather", "auto"] = "auto"
    """ring: keys travel between context ranks while blocks compute. all_gather: every rank gathers all keys first. auto: ring,
    unless S / context x query heads per key-value head is below 4096."""
    tensor_ring: Switch | None = None
    """Tensor ranks send a sequence in chunks, behind the matmuls. null: chunks of 8 MiB and more from Hopper on, without FP8,
    remat=none and scan_layers=false (docs/tensor.md)."""

    retired = {
        "overlap_passes": (False, "parallel.overlap_passes was removed, as tensor ranks in a ring wait less: leave it out.")
    }

    @property
    def slots_per_row(self) -> float:
        """Slots of buffers for each row that goes to an expert."""
        return min(self.expert, self.expert_buffer or self.expert)

    @property
    def drops_rows(self) -> bool:
        """Whether a row that finds no slot on its way to an expert is dropped."""
        return self.expert > 1 and self.expert_buffer is not None

    @property
    def names_replica_network(self) -> bool:
        """Whether a network of their own connects several replicas."""
        return self.replica > 1 and (self.replica_gbit_per_s, self.replica_latency_ms) != (None, None)

    @model_validator(mode="after")
    def _check(self):
        if self.reduce_dtype != "float32" and self.zero < 2:
            raise refuse(f"parallel.reduce_dtype={self.reduce_dtype} is for ZeRO 2 and 3: set zero=2, or leave it out.")
        if (V := self.virtual_stages) > 1 and self.pipe == 1:
            raise refuse(f"parallel.virtual_stages={V} needs a pipeline: set parallel.pipe, or virtual_stages=1.")
        if self.pipe > 1 and (V > 1) != (self.schedule == "interleaved"):
            found = f"parallel.schedule={self.schedule} and parallel.virtual_stages={V}"
            raise refuse(f"{found} do not go together: interleaved takes 2 or more, 1f1b and gpipe take 1.")
        return self


CONVERSATIONS = ("chat", "preferences")
SourceKind = Literal["python_stdlib", "files", "chat", "preferences", "prepared", "megatron", "tokens", "documents"]


def _check_paths(where: str, source: str, paths: tuple[str, ...]) -> None:
    if source in ("python_stdlib", DOCUMENTS, GIVEN):
        if paths:
            raise refuse(f"{where}.paths is not read with {where}.source={source}: name another source, or remove the paths.")
    elif not paths:
        raise refuse(f"{where}.source={source} needs {where}.paths: give {PATHS_MEAN[source]}.")
    if source in ("files", "chat", "preferences", "tokens"):
        # Only files are looked for here.
        from jaxllm.config.file_patterns import MOST_ENTRIES, Listing

        for pattern in paths:
            if "://" in pattern:
                way = (
                    "tokenise it by jaxllm data prepare, and set source=prepared" if source == "files" else "copy it to a disk"
                )
                raise refuse(f"{where}.paths={shown(pattern)} is an address, which a run does not read: {way}.")
            try:
                is_one = any(Listing(MOST_ENTRIES).files(pattern))
            except RefusedInput as error:
                raise refuse(f"{where}.paths: no file was found and {error}: name a smaller folder.") from None
            if not is_one:
                raise refuse(
                    f"{where}.paths: no file matches {shown(pattern)!r}; check the path (it is relative to {Path.cwd()})."
                )


class SourceConfig(Section):
    """One part of a mixture."""

    name: str
    """Name in logs; unique in the mixture."""
    source: SourceKind
    paths: Paths = ()
    weight: PositiveFloat
    """Its share of the samples, relative to the other weights."""


class DataConfig(Section):
    """The text to read, and how documents become samples. The choice of held-out documents does not depend on the machine."""

    source: SourceKind | Literal["given"] = "python_stdlib"
    """python_stdlib: the sources of the running Python's standard library; files: texts, one document each; chat:
    conversations, with a loss on the answers only; preferences: pairs of answers, for train.loss=dpo; prepared: folders that
    `jaxllm data prepare` wrote; megatron: Megatron-LM's .bin and .idx; tokens: files of ids alone, uint16 or uint32, as
    nanoGPT's and llm.c's; documents: token ids that a Python program hands to Trainer (docs/extending.md); given: its batches,
    of which nothing is held out."""
    paths: Paths = ()
    """files: files or glob patterns (** for folders); chat: the same, of JSON lines with messages, or prompt and completion;
    preferences: the same with prompt, chosen and rejected; prepared: folders, also in s3://, gs:// or hf://datasets/; megatron:
    files without their .bin or .idx; tokens: files or glob patterns."""
    mixture: tuple[SourceConfig, ...] = ()
    """Several weighted sources, instead of source and paths."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, ORG/NAME of the Hub, or bytes. Default: bytes for texts, that of prepared folders."""
    chat_template: str | None = None
    """A Jinja file that formats conversations. Default: the template in the tokenizer folder."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents follow each other, cut where a sequence is full; best_fit: none that fits into a sequence is cut."""
    mask_documents: Switch = True
    """A token attends only to its own document, whose end does not predict the next. false: one continuous text."""
    max_documents: PositiveInt | None = None
    """Most documents of a sequence for which attention on GPUs is compiled. null: one for 128 tokens, or what the data has."""
    max_images: Count | None = None
    """With model.vision: images of a sequence at most; each is computed as if it had so many. null: as many as have room."""
    held_out_fraction: Fraction = 0.05
    max_broken_share: Fraction = 0.01
    """chat, preferences: largest share of unusable lines. A small file may have ten, up to half of it; with 0 none."""
    cache_dir: str | None = None
    """Each host's folder for prepared shards of stores. null: ~/.cache/jaxllm/data (with $XDG_CACHE_HOME, there)."""
    cache_gib: PositiveFloat = 100.0
    """GiB of these shards; above, those read longest ago are removed."""

    @model_validator(mode="after")
    def _check(self):
        if not self.mixture:
            _check_paths("data", self.source, self.paths)
        elif extra := self.model_fields_set & {"source", "paths"}:
            raise refuse(f"data.mixture and data.{sorted(extra)[0]} both name text to read: remove one of them.")
        for number, part in enumerate(self.mixture):
            _check_paths(f"data.mixture[{number}]", part.source, part.paths)
            if part.source == DOCUMENTS and DOCUMENTS in [other.source for other in self.mixture[:number]]:
                raise refuse("data.mixture has two sources of kind documents, and a program hands over one: remove the other.")
            if part.name in [other.name for other in self.mixture[:number]]:
                raise refuse(f"data.mixture holds two sources named {part.name}: give each its own name.")
        if self.chat_template is not None:
            if not any(part.source in CONVERSATIONS for part in self.sources):
                raise refuse("data.chat_template belongs to data.source=chat: name that source, or remove the template.")
            if not Path(self.chat_template).is_file():
                raise refuse(f"data.chat_template={self.chat_template} is not a file in {Path.cwd()}: check the path.")
        if any(part.source == "preferences" for part in self.sources) and self.packing != "best_fit":
            raise refuse("data.source=preferences needs whole pairs: set data.packing=best_fit.")
        if self.packing == "best_fit" and not self.mask_documents:
            raise refuse("data.packing=best_fit keeps documents apart: set data.mask_documents=true, or packing=concat.")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The mixture. A single source is a mixture of one; batches that are given are none."""
        if self.source == GIVEN:
            return ()
        return self.mixture or (SourceConfig(name=self.source, source=self.source, paths=self.paths, weight=1.0),)


class OptimizerConfig(Section):
    """The optimizer, with global-norm clipping; weight decay, times the learning rate, on matrices only."""

    name: Literal["adamw", "muon", "lion", "sgd", "given"] = "adamw"
    """adamw (Loshchilov and Hutter, 2019); muon (Jordan, 2024) for the matrices of the blocks, and AdamW for all else; lion
    (Chen et al., 2023); sgd with momentum; given: the optax transformation that a Python program hands to Trainer, with its own
    learning rate and weight decay (docs/optimizers.md)."""
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat | None = 1.0
    """Gradients of a larger global norm are scaled down to it; null: never."""
    beta1: Decay = 0.9
    """Decay of the mean of gradients, in adamw, lion, and muon's AdamW; beta2 belongs to the same."""
    beta2: Decay = 0.95
    epsilon: PositiveFloat = 1e-8
    momentum: Decay = 0.95
    """Decay in muon (Nesterov's) and sgd, which with 0 keeps no state."""
    moments: NonNegativeFloat | None = None
    """With name=given, for the estimate: float32 numbers of the state for each parameter. Trainer counts them."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: half a cosine, linear, or (wsd) constant, then linear over the last decay_tokens."""
    warmup_tokens: Count = 0
    """Tokens over which the learning rate rises from 0."""
    decay_tokens: Count | None = None
    """For wsd; default: the last fifth of training."""
    final_learning_rate_fraction: Fraction = 0.1
    """Learning rate at the end of the schedule, as a fraction of learning_rate."""

    @model_validator(mode="after")
    def _check(self):
        if (self.name == GIVEN) != (self.moments is not None):
            raise refuse(
                f"optimizer.name={self.name} and moments={'null' if self.moments is None else self.moments} do not fit: "
                f"with name=given set moments to what it keeps for each parameter (Trainer counts it), else leave it out."
            )
        return self

    @property
    def numbers(self) -> tuple[float, float]:
        """Float32 numbers in the optimizer's state for each element of a block's matrix, and for each other parameter."""
        momentum = 1 if self.momentum else 0
        known = {"adamw": (2, 2), "muon": (1, 2), "lion": (1, 1), "sgd": (momentum, momentum)}
        return (self.moments, self.moments) if self.moments is not None else known[self.name]


class TrainConfig(Section):
    steps: PositiveInt
    sequence_length: PositiveInt
    global_batch_sequences: PositiveInt
    """Sequences per optimizer step, over all devices; with batch_schedule, in the first steps."""
    batch_schedule: BatchSchedule = ()
    """[[from_tokens, global_batch_sequences], ...]: the batch after so many tokens, such as [[1_000_000_000, 2048],
    [4_000_000_000, 4096]], in more microbatches of the same size. train.steps counts steps of any batch."""
    batch_grows_to: PositiveInt | None = None
    """Double the global batch, up to this many sequences, whenever the measured gradient noise scale is surely twice the batch
    (docs/batch.md). The run reads the same tokens, in fewer steps."""
    length_schedule: LengthSchedule = ()
    """[[until_tokens, length], ...]: until so many tokens, sequences are cut into parts of `length`, such as [[1_000_000_000,
    512], [4_000_000_000, 1024]]; then sequence_length. A step has the same tokens, in more rows."""
    batch_lr: Literal["none", "sqrt", "linear"] = "none"
    """Scales the learning rate by batch / last batch (linear), by the square root of that (sqrt, usual for Adam) or not at all
    (none). optimizer.learning_rate is the rate of the last batch of batch_schedule or batch_grows_to."""
    microbatch_sequences: PositiveInt | None = None
    """Sequences that a data rank computes at once; default: its whole share of global_batch_sequences."""
    seed: Seed = 0
    init_from: str | None = None
    """Start from the weights of a model folder (Hugging Face's, jaxllm's own, or ORG/NAME on the Hub), a run directory or one
    of its checkpoints, also at s3:// or gs:// (docs/convert.md). Default: those of model.name, if it has any; null: fresh
    weights."""
    init_adapter: str | None = None
    """Folder in PEFT's format from which the adapters of model.lora start; null: A random, B zero."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(one_or_more)] = ()
    """Parameters that are not trained, by patterns of the names that `jaxllm inspect` prints: [embedding, layers.mlp.*]. They
    stay in model.compute_dtype, without gradients and moments."""
    loss: Literal["cross_entropy", "dpo", "given"] = "cross_entropy"
    """dpo: Direct Preference Optimization (Rafailov et al., 2023) of data.source=preferences, with init_from as the reference
    (docs/dpo.md); given: the loss that a Python program hands to Trainer (docs/extending.md)."""
    dpo_beta: PositiveFloat = 0.1
    """Weight in DPO of an answer's log-probability relative to the reference: the smaller, the farther the model may go from
    the reference."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Adds this times logsumexp(logits)^2 to the objective (PaLM: 1e-4), not to the reported loss."""
    max_skips_in_a_row: PositiveInt = 10
    """Steps in a row whose loss or gradient norm is not finite that end the run. Each is skipped: it changes neither weights
    nor moments (docs/instability.md)."""
    spike_deviations: PositiveFloat | None = 6.0
    """A loss or gradient norm this many standard deviations above the mean of the last 128 steps is a spike, which
    metrics.jsonl and run.dir/spikes.jsonl name. null: no spikes."""
    skip_spikes: Switch = False
    """Skip spikes too, like OLMo-core's SkipStepAdamW."""
    loss_chunk_tokens: PositiveInt = 4096
    """Logits are computed for about this many tokens at a time."""
    diloco_steps: PositiveInt | None = None
    """DiLoCo (Douillard et al., 2023): each replica trains alone, on its share of the batch. After this many steps, and after
    the last, an outer step synchronises them. null: every step does."""
    diloco_lr: PositiveFloat = 0.7
    """Learning rate of the outer optimizer."""
    diloco_momentum: Decay = 0.9
    """Nesterov momentum of the outer optimizer; 0: plain SGD."""
    diloco_bits: Literal[32, 8, 4] = 32
    """Bits of each number that replicas send in an outer step. What 8 and 4 leave out is sent in the next rounds."""
    diloco_fragments: PositiveInt = 1
    """Cuts the weights by layers into so many parts, each with an outer step of its own in every round (Streaming DiLoCo): a
    transfer is so many times smaller."""
    diloco_overlap: Switch = False
    """The outer step runs during the next step, and neither waits for the other. A replica keeps its change in that step."""
    diloco_after_steps: Count = 0
    """First steps without DiLoCo: a fifth of a run is a good start."""
    eval_every_steps: PositiveInt | None = None
    """Steps between evaluations of held-out loss; one always runs at the end."""
    eval_batches: PositiveInt | None = None
    """Batches of held-out text per source in evaluations before the end; default: all of the text. A batch has
    microbatch_sequences on every data rank, times parallel.pipe. The last evaluation reads all, up to 16,777,216 tokens per
    source."""
