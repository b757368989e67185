"""All ways to spread a config over a number of GPUs: meshes, ZeRO levels, microbatches, schedules, state on the host. Which
tensors of a block are kept is the matter of remat_ladder.py.

    for mesh in meshes(config, gpus=64):
        if why_not(config, mesh, gpus_per_host=8) is None:
            for group in groups(config, mesh): ...
    group.choice("full", 1, "none").applied_to(config)         a resolved config, as if loaded from YAML

Divisibility is plain arithmetic here, with the same rules that Config checks, so that a config costs microseconds.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic_core import PydanticCustomError

from jaxllm.config import AUTO, Config, ConfigError, Remat, all_have_layers, divisors, sequence_unit
from jaxllm.config.attention import HOPPER, why_no_experts
from jaxllm.config.checks import check_split, effective_windows, keeps_whole_layers, repeats, unlike_all_on_host
from jaxllm.config.errors import nearest
from jaxllm.config.remat_policy import offloads, remat_text
from jaxllm.config.types import EXPERT_UNIT, GPIPE, INTERLEAVED, OFFLOAD_STATES, ONE_F_ONE_B, zero_text

REMATS = ("full", "offload", "selective", "none")
"""Ordered by memory, those that need least first."""
ZEROS = (0, 1, 2, 3)
MOST_VIRTUAL_STAGES = 8
"""With more chunks, most models have one layer per chunk, and the messages cost more than the bubble."""
KEEPABLE = ("pipe", "data", "context", "tensor", "zero", "schedule", "remat", "microbatch_sequences", "offload_state", "expert")
"""Settings that a search can leave as the config has them."""
STATE_WORDS = {"optimizer": "moments", "optimizer_and_master": "moments, master", "all": "moments, master, layers"}
"""What parallel.offload_state moves to the host, in a table."""

BEYOND_HOST = "context x tensor reaches beyond a host"
UNEVEN = "the number of microbatches is not a multiple of pipe, as interleaving needs"


@dataclass(frozen=True)
class Mesh:
    pipe: int
    data: int
    context: int
    tensor: int

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in asdict(self).items())


@dataclass(frozen=True)
class Choice:
    """The settings in which candidates differ."""

    mesh: Mesh
    zero: int
    schedule: str
    virtual_stages: int
    remat: Remat
    microbatch_sequences: int
    offload_state: str
    expert: int

    def __str__(self) -> str:
        schedule = schedule_text(self.schedule, self.virtual_stages)
        pipeline = "" if self.mesh.pipe == 1 else f", {schedule}"
        state = "" if self.offload_state == "none" else f", offload_state {self.offload_state}"
        return (
            f"{self.mesh}, {zero_text(self.zero, self.expert)}, microbatch {self.microbatch_sequences}{pipeline}, remat "
            f"{remat_text(self.remat)}{state}"
        )

    @property
    def uses_host(self) -> bool:
        """Whether activations or state wait in the host's memory."""
        return self.offload_state != "none" or offloads(self.remat)

    @property
    def settings(self) -> dict[str, Any]:
        """Key -> value: microbatch_sequences of the section train, all others of parallel."""
        settings = {**vars(self), **vars(self.mesh)}
        del settings["mesh"]
        return settings

    def applied_to(self, config: Config) -> Config:
        """The config with these values, resolved. Nothing is validated again: a choice divides by construction."""
        parallel = self.settings
        train = {"microbatch_sequences": parallel.pop("microbatch_sequences")}
        update: dict[str, Any] = {"train": config.train.model_copy(update=train)}
        parallel |= {} if parallel["zero"] > 1 else {"reduce_dtype": "float32"}
        update["parallel"] = config.parallel.model_copy(update=parallel)
        if config.run.cpu_devices is not None:
            # A recipe for a small test names CPU devices; a plan is for GPUs.
            update["run"] = config.run.model_copy(update={"cpu_devices": None})
        return config.model_copy(update=update)


@dataclass(frozen=True)
class Group:
    """Choices that differ only in remat, microbatch and state on the host."""

    mesh: Mesh
    zero: int
    schedule: str
    virtual_stages: int
    remats: tuple[Remat, ...]
    """The named policies, and the config's own; with `remat` kept, that one alone. Without, a search adds those of a ladder."""
    offload_states: tuple[str, ...]
    microbatches: tuple[int, ...]
    """Sequences per microbatch, ascending."""
    uneven_microbatches: tuple[int, ...] = ()
    """Those that are impossible, because they are UNEVEN."""
    expert: int = 1

    def choice(self, remat: Remat, microbatch_sequences: int, offload_state: str) -> Choice:
        of_group = (self.mesh, self.zero, self.schedule, self.virtual_stages)
        return Choice(*of_group, remat, microbatch_sequences, offload_state, self.expert)


def meshes(config: Config, gpus: int, keep: Collection[str] = ()) -> Iterator[Mesh]:
    """All products pipe x data x context x tensor = gpus, or a replica's share of them. Those with fewer stages and fewer
    tensor and context ranks come first.

    Raises:
      ConfigError: `keep` has a name that is not KEEPABLE, or one whose value the config leaves open; or the replicas do not
        divide the GPUs.
    """
    for name in keep:
        if name not in KEEPABLE:
            hint = nearest(name, KEEPABLE, f"choose among {', '.join(KEEPABLE)}.")
            raise ConfigError(f"--keep={name} is not a searched setting: {hint}")
    if "data" in keep and config.parallel.data == AUTO:
        raise ConfigError("--keep=data needs a number: set parallel.data, or leave it to the search.")
    if "microbatch_sequences" in keep and config.train.microbatch_sequences is None:
        raise ConfigError(
            "--keep=microbatch_sequences needs a value: set train.microbatch_sequences, or leave out this --keep."
        )
    if gpus % (replicas := config.parallel.replica):
        below, above = gpus // replicas * replicas, (gpus // replicas + 1) * replicas
        raise ConfigError(
            f"parallel.replica={replicas} does not divide the {gpus} GPU{'s' if gpus > 1 else ''}: set --gpus="
            f"{f'{below} or ' if below else ''}{above}, or change parallel.replica."
        )
    gpus //= replicas
    kept = {axis: getattr(config.parallel, axis) for axis in ("pipe", "data", "context", "tensor") if axis in keep}
    for pipe in divisors(gpus):
        for tensor in divisors(gpus // pipe):
            for context in divisors(gpus // (pipe * tensor)):
                mesh = Mesh(pipe, gpus // (pipe * tensor * context), context, tensor)
                if kept.items() <= asdict(mesh).items():
                    yield mesh


def why_not(config: Config, mesh: Mesh, gpus_per_host: int, across_hosts: bool = False) -> str | None:
    """The first rule that a mesh breaks; None if it breaks none. Meshes that break the same rule get the same text, which is
    used to count them."""
    model, S, t, c = config.model, config.train.sequence_length, mesh.tensor, mesh.context
    if gpus_per_host % t:
        return "tensor reaches beyond a host"
    if model.num_heads % t:
        return f"{model.num_heads} attention heads do not divide over tensor"
    if model.num_kv_heads % t and t % model.num_kv_heads:
        return f"{model.num_kv_heads} key-value heads can be neither split nor repeated over tensor"
    if model.intermediate_size % t:
        return f"intermediate_size={model.intermediate_size} does not divide over tensor"
    if why_no_experts(model, t, HOPPER, ""):
        return f"an expert of {model.intermediate_size} over tensor is no multiple of {EXPERT_UNIT}"
    if S % sequence_unit(c, t):
        return f"sequence_length={S} does not divide over context x tensor (over context in two chunks)"
    if gpus_per_host % (c * t) and not (across_hosts and c * t % gpus_per_host == 0):
        return BEYOND_HOST
    if not all_have_layers(model.num_layers, mesh.pipe):
        return f"{model.num_layers} layers leave a stage of pipe without one"
    if not any(_sends_alike(config, mesh, virtual_stages) for _, virtual_stages in schedules(model.num_layers, mesh.pipe)):
        return "layers of several kinds are in another order in each stage, beside context"
    if (model.multiplies_fp8 or config.parallel.tensor_ring) and not _divides(config, mesh):
        return "FP8 or tensor_ring does not go with so many tensor or context ranks"
    ranks, over = data_ranks(config, mesh), "replica x data" if config.parallel.replica > 1 else "data"
    if (G := config.train.global_batch_sequences) % ranks:
        return f"global_batch_sequences={G} does not divide over {over}"
    if uneven := [batch for batch in config.batches if batch % ranks]:
        return f"batch_schedule's {uneven[0]} sequences do not divide over {over}"
    return None


def data_ranks(config: Config, mesh: Mesh) -> int:
    """Data ranks of all replicas, if each has the mesh."""
    return config.parallel.replica * mesh.data


def _divides(config: Config, mesh: Mesh) -> bool:
    """Whether Config accepts the mesh, beyond the rules that why_not() has in plain arithmetic."""
    parallel = config.parallel.model_copy(update={**asdict(mesh), "schedule": ONE_F_ONE_B, "virtual_stages": 1})
    try:
        check_split(config.model, parallel, config.train.sequence_length)
    except PydanticCustomError:
        return False
    return True


def groups(config: Config, mesh: Mesh, gpus_per_host: int, keep: Collection[str] = ()) -> Iterator[Group]:
    """The choices of a mesh for which why_not() is None."""
    parallel = config.parallel
    # With a single rank to shard over, all levels are equal.
    zeros = (parallel.zero,) if "zero" in keep else ZEROS if mesh.data * mesh.context > 1 else (1,)
    # A microbatch has the same size in every phase of train.batch_schedule.
    shares = [batch // data_ranks(config, mesh) for batch in config.batches]
    microbatches = divisors(math.gcd(*shares))
    if "microbatch_sequences" in keep:
        microbatches = tuple(size for size in microbatches if size == config.train.microbatch_sequences)
    remats: tuple[Remat, ...] = REMATS if isinstance(parallel.remat, str) else (*REMATS, parallel.remat)
    if "remat" in keep:
        remats = (parallel.remat,)
    for schedule, virtual_stages in schedules(config.model.num_layers, mesh.pipe):
        if "schedule" in keep and mesh.pipe > 1 and schedule != parallel.schedule:
            continue
        if not _sends_alike(config, mesh, virtual_stages):
            continue
        even = microbatches
        if virtual_stages > 1:
            even = tuple(size for size in microbatches if all(share // size % mesh.pipe == 0 for share in shares))
        uneven = tuple(size for size in microbatches if size not in even)
        for zero in zeros:
            states = _offload_states(config, mesh, zero, keep)
            for expert in expert_ranks(config, mesh, zero, gpus_per_host, keep):
                # A run with all state on the host does not count what is dropped.
                counts = expert == 1 or config.parallel.expert_buffer is None
                if left := tuple(state for state in states if counts or state != "all"):
                    yield Group(mesh, zero, schedule, virtual_stages, remats, left, even, uneven, expert)


def expert_ranks(config: Config, mesh: Mesh, zero: int, gpus_per_host: int, keep: Collection[str] = ()) -> tuple[int, ...]:
    """Those over which the experts of a layer may be, in one host. A config with expert=1 keeps it: no row is dropped."""
    asked, found = config.parallel.expert, (1,)
    if asked > 1 and zero == 3 and mesh.pipe == mesh.context == 1 and (config.model.num_experts or 1) % mesh.data == 0:
        found = tuple(e for e in divisors(mesh.data) if gpus_per_host % (e * mesh.tensor) == 0 or e == asked)
    return tuple(e for e in found if e == asked) if "expert" in keep else found


def _offload_states(config: Config, mesh: Mesh, zero: int, keep: Collection[str]) -> tuple[str, ...]:
    """Those that Config accepts with this mesh and level."""
    parallel = config.parallel
    states = (parallel.offload_state,) if "offload_state" in keep else OFFLOAD_STATES
    if config.train.diloco_steps is not None:
        states = tuple(state for state in states if state == "none")
    if "all" in states:
        chosen = parallel.model_copy(update={**asdict(mesh), "zero": zero, "offload_state": "all"})
        if keeps_whole_layers(chosen) or unlike_all_on_host(config.model, chosen, config.log):
            states = tuple(state for state in states if state != "all")
    return states


def _sends_alike(config: Config, mesh: Mesh, virtual_stages: int) -> bool:
    """Whether stages with context ranks have the same kinds of layers in the same order, as Config requires."""
    chunk = math.ceil(config.model.num_layers / (mesh.pipe * virtual_stages))
    windows = effective_windows(config.model.windows, config.train.sequence_length)
    return mesh.pipe == 1 or mesh.context == 1 or repeats(windows, chunk)


@cache
def schedules(layers: int, pipe: int) -> tuple[tuple[str, int], ...]:
    """(schedule, virtual stages) for a number of stages. Interleaved comes with every number of virtual stages that gives each
    chunk a layer and another chunk size than every smaller number.
    """
    if pipe == 1:
        return ((ONE_F_ONE_B, 1),)
    choices, chunks = [(ONE_F_ONE_B, 1), (GPIPE, 1)], {math.ceil(layers / pipe)}
    for virtual_stages in range(2, MOST_VIRTUAL_STAGES + 1):
        chunk = math.ceil(layers / (pipe * virtual_stages))
        if all_have_layers(layers, pipe * virtual_stages) and chunk not in chunks:
            choices.append((INTERLEAVED, virtual_stages))
            chunks.add(chunk)
    return tuple(choices)


def choice_in(config: Config) -> Choice:
    """The choice that a resolved config makes."""
    p = config.parallel
    mesh = Mesh(p.pipe, int(p.data), p.context, p.tensor)
    of_mesh = (mesh, p.zero, p.schedule, p.virtual_stages)
    return Choice(*of_mesh, p.remat, config.microbatch_sequences, p.offload_state, p.expert)


def schedule_text(schedule: str, virtual_stages: int) -> str:
    return f"{schedule} x{virtual_stages}" if virtual_stages > 1 else schedule
