"""The config: typed, frozen, strict. It defines all that a run does, and invalid values are refused before any device is used.

    config = load_config("configs/quickstart.yaml", ["train.steps=20"])

A recipe is a YAML file with the sections below. `model.name` loads a published shape from configs/models; keys beside it
override that shape. Every error is one sentence (ConfigError) that says what to change.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError

from jaxllm.config import checks
from jaxllm.config.batch_schedule import Phase, batches_of, doublings, phase_at, phases_of, sequences_before
from jaxllm.config.errors import ConfigError, one_sentence, refuse
from jaxllm.config.load import find_recipe, read_recipe, refuse_code
from jaxllm.config.model_config import SHAPE_KEYS, ModelConfig
from jaxllm.config.model_spec import has_experts, layer_parameters
from jaxllm.config.run_sections import CheckpointConfig, LaunchConfig, LogConfig, RunConfig
from jaxllm.config.sections import CONVERSATIONS, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from jaxllm.config.types import AUTO, Section, divisors
from jaxllm.display import table
from jaxllm.untrusted import RefusedInput, parse_yaml, shown

log = logging.getLogger(__name__)

EXPERTS_WATCHED_EVERY = 100
"""Steps between records of the layers of a mixture, whose forward pass of one microbatch is then 1% of a step or less."""


class Config(Section):
    """The config of one run. Its repr is a recipe of the keys that differ from the defaults; `model_dump()` has every key."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    run: RunConfig = RunConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _check(self):
        model, parallel, train = self.model, self.parallel, self.train
        kinds = {part.source for part in self.data.sources}
        reads_bytes = self.data.tokenizer in (None, "bytes") and "prepared" not in kinds
        for part in self.data.sources if reads_bytes and model.vocab_size < 256 else ():
            if part.source in ("python_stdlib", "files"):
                raise refuse(f"model.vocab_size={model.vocab_size} cannot hold bytes: data.source={part.source} needs 256.")
        for kind in CONVERSATIONS:
            if kind in kinds and self.data.tokenizer is None and "prepared" not in kinds:
                raise refuse(f"data.source={kind} needs a tokenizer: set data.tokenizer to the folder of the model.")
        checks.check_preferences(train, self.data)
        checks.check_split(model, parallel, train.sequence_length)
        checks.check_remat(model, parallel)
        checks.check_experts(model, parallel, train, self.log, self.layer_norms_every)
        checks.check_frozen(model, parallel, train, self.log)
        checks.check_images(model, parallel, train, self.data, self.images_per_sequence)
        windows = checks.effective_windows(model.windows, train.sequence_length)
        if parallel.context > 1 and parallel.pipe > 1 and not checks.repeats(windows, self.chunk_layers):
            raise refuse(
                f"model.sliding_window is on some of the layers, in another order in each chunk of {self.chunk_layers} layers, "
                f"and with parallel.pipe={parallel.pipe} and context={parallel.context} all stages send at the same time: set "
                f"one of these to 1, or cut the layers at whole periods of model.full_attention_every."
            )
        checks.check_diloco(train, parallel, self.chunk_layers)
        checks.check_optimizer(model, self.optimizer, parallel)
        checks.check_loss(model, train, parallel, self.log)
        checks.check_tokens(train)
        checks.check_store(self.run, self.checkpoint)
        checks.check_all_on_host(model, parallel, self.log)
        if parallel.data != AUTO:
            _check_microbatches(self)
        checks.check_batch_schedule(train)
        checks.check_batch_growth(train, self.data, self.log)
        unit = checks.sequence_unit(parallel.context, parallel.tensor)
        for _, length in train.length_schedule:
            if length % unit:
                raise refuse(
                    f"train.length_schedule has a length of {length}, which does not divide over parallel.context="
                    f"{parallel.context} and tensor={parallel.tensor}: use a multiple of {unit}."
                )
            checks.check_split(model, parallel, length)
        if train.skip_spikes and train.spike_deviations is None:
            raise refuse("train.skip_spikes=true needs train.spike_deviations: set it, such as 6.0, or skip_spikes=false.")
        if self.optimizer.decay_tokens is not None and self.optimizer.schedule != "wsd":
            raise refuse(f"optimizer.decay_tokens belongs to schedule=wsd, not {self.optimizer.schedule}: remove one of them.")
        checks.check_log(
            self.data, train, self.log, of_bytes=reads_bytes and len(kinds) == 1 and kinds <= {"python_stdlib", "files"}
        )
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
        """Tokens per optimizer step; with train.batch_schedule, in the first step."""
        return self.train.global_batch_sequences * self.train.sequence_length

    @property
    def total_tokens(self) -> int:
        return self.tokens_before(self.train.steps)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of train.batch_schedule and train.length_schedule, in order. Without them there is one phase."""
        train = self.train
        return phases_of(train.global_batch_sequences, train.batch_schedule, train.sequence_length, train.length_schedule)

    @property
    def has_phases(self) -> bool:
        return bool(self.train.batch_schedule or self.train.length_schedule or self.train.batch_grows_to)

    @property
    def batches(self) -> tuple[int, ...]:
        """All global batch sizes in the config, in sequences."""
        return batches_of(self.train.global_batch_sequences, self.train.batch_schedule)

    def phase_at(self, step: int) -> Phase:
        """The phase of the step that follows `step` steps."""
        return phase_at(self.phases, step)

    def sequences_before(self, step: int) -> int:
        """Sequences that the first `step` steps consume, which is also the index of the next sample."""
        return sequences_before(self.phases, step)

    def tokens_before(self, step: int) -> int:
        """Tokens that the first `step` steps consume."""
        return self.sequences_before(step) * self.train.sequence_length

    def cut(self, parts: int) -> Config:
        """This config with each sequence cut into so many, and as many tokens in a step and in a microbatch; needs a concrete
        parallel.data."""
        train = self.train
        update = {
            "sequence_length": train.sequence_length // parts,
            "global_batch_sequences": train.global_batch_sequences * parts,
            "microbatch_sequences": self.microbatch_sequences * parts,
            "batch_schedule": tuple((tokens, sequences * parts) for tokens, sequences in train.batch_schedule),
            "batch_grows_to": train.batch_grows_to and train.batch_grows_to * parts,
            "length_schedule": (),
        }
        return self.model_copy(update={"train": train.model_copy(update=update)})

    def length_of(self, phase: Phase) -> int | None:
        """Tokens of a sequence in the phase; None if all phases have the same."""
        return self.train.sequence_length // phase.parts if self.train.length_schedule else None

    def in_phase(self, phase: Phase) -> Config:
        """This config with the batch size and the length of `phase` for all steps; needs a concrete parallel.data."""
        cut = self.cut(phase.parts)
        batch = {"global_batch_sequences": phase.sequences * phase.parts, "batch_schedule": (), "batch_lr": "none"}
        return cut.model_copy(update={"train": cut.train.model_copy(update=batch | {"batch_grows_to": None})})

    @property
    def at_largest_batch(self) -> Config:
        """`in_phase` of `largest_phase`, whose step needs most memory. Unchanged without a schedule."""
        return self.in_phase(self.largest_phase) if self.has_phases else self

    @property
    def largest_phase(self) -> Phase:
        """The phase with the largest batch that the run reaches, or may grow to, and of these with the longest sequences."""
        reached = [phase for phase in self.phases if phase.first_step < self.train.steps]
        if self.train.batch_grows_to is not None:
            last = reached[-1]
            reached += [last._replace(sequences=n) for n in doublings(last.sequences, self.train.batch_grows_to)]
        return max(reached, key=lambda phase: (phase.sequences, -phase.parts))

    @property
    def frozen(self) -> frozenset[str]:
        """Paths of the parameters that are not trained (config/model_spec.py)."""
        return checks.frozen_parameters(self.model, self.train.freeze)

    @property
    def images_per_sequence(self) -> int:
        """Images that are computed for each sequence: conversations have some, and batches of a caller."""
        sources = {part.source for part in self.data.sources}
        if (vision := self.model.vision) is None or (sources and "chat" not in sources):
            return 0
        room = self.train.sequence_length // vision.tokens_per_image
        return room if self.data.max_images is None else min(room, self.data.max_images)

    @property
    def layer_norms_every(self) -> int | None:
        """Steps between records of the layers, of which log.layer_norms_every speaks."""
        every = self.log.layer_norms_every
        if every is not None or not has_experts(self.model) or self.parallel.offload_state == "all":
            return every
        trained = {spec.path for spec in layer_parameters(self.model)} - self.frozen
        return EXPERTS_WATCHED_EVERY if trained else None

    @property
    def devices(self) -> int:
        """Number of devices in the mesh; needs a concrete parallel.data."""
        p = self.parallel
        return p.replica * p.pipe * int(p.data) * p.context * p.tensor

    @property
    def chunk_layers(self) -> int:
        """Layers of one virtual stage of the pipeline, including identity layers."""
        return math.ceil(self.model.num_layers / (self.parallel.pipe * self.parallel.virtual_stages))

    @property
    def data_ranks(self) -> int:
        """Data ranks of all replicas; needs a concrete parallel.data."""
        return self.parallel.replica * int(self.parallel.data)

    @property
    def microbatch_sequences(self) -> int:
        """Sequences per microbatch on one data rank, in every phase; needs a concrete parallel.data."""
        if self.train.microbatch_sequences is not None:
            return self.train.microbatch_sequences
        if self.train.global_batch_sequences % self.data_ranks:
            raise _batch_does_not_divide(self)
        return self.train.global_batch_sequences // self.data_ranks

    @property
    def microbatch_rows(self) -> int:
        """Sequences per microbatch on all data ranks of all replicas; needs a concrete parallel.data."""
        return self.data_ranks * self.microbatch_sequences

    @property
    def num_microbatches(self) -> int:
        """M = global / (replica x data x microbatch), in the first phase; needs a concrete parallel.data."""
        per_microbatch = self.microbatch_rows
        if self.train.global_batch_sequences % per_microbatch:
            raise _batch_does_not_divide(self)
        return self.train.global_batch_sequences // per_microbatch

    def resolve(self, num_devices: int) -> Config:
        """This config with parallel.data filled in for a number of devices.

        Raises:
          ConfigError: the mesh cannot have that many devices, or the batch does not divide over it.
        """
        p = self.parallel
        others = {"pipe": p.pipe, "context": p.context, "tensor": p.tensor, "replica": p.replica}
        rest = math.prod(others.values())
        data = num_devices // rest if p.data == AUTO else int(p.data)
        if data * rest != num_devices:
            if p.data == AUTO:
                wanted = "parallel." + " x ".join(f"{axis}={size}" for axis, size in others.items() if size > 1)
                raise ConfigError(
                    f"{wanted} does not divide the {_devices(num_devices)} here: "
                    f"choose axis sizes whose product divides {num_devices}."
                )
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
        config = self.model_copy(update={"parallel": p.model_copy(update={"data": data})})
        try:
            checks.check_all_on_host(config.model, config.parallel, config.log)
            checks.check_experts(config.model, config.parallel, config.train, config.log, config.layer_norms_every)
            _check_microbatches(config)
        except PydanticCustomError as error:
            raise ConfigError(error.message()) from None
        return config


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _check_microbatches(config: Config) -> None:
    """Raises if the batch of a phase does not divide over the data ranks, if its microbatches do not divide over an interleaved
    pipeline, or if it has a single part where the noise scale needs two."""
    _check_rounds(config)
    _check_parts(config)
    unit = config.microbatch_rows
    for from_tokens, batch in config.train.batch_schedule:
        if batch % unit:
            below, above = batch // unit * unit, (batch // unit + 1) * unit
            raise refuse(
                f"train.batch_schedule has {batch} sequences from {from_tokens:,} tokens on, which do not divide into data "
                f"ranks x microbatch = {config.data_ranks} x {config.microbatch_sequences} = {unit}: use "
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
    """Raises if a step that measures the noise scale has only one part."""
    if (every := config.log.noise_scale_every) is None:
        return
    least = min(config.batches)
    # With DiLoCo each replica measures alone.
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


def _batch_does_not_divide(config: Config) -> PydanticCustomError:
    batch, micro, ranks = config.train.global_batch_sequences, config.train.microbatch_sequences, config.data_ranks
    if micro is None:
        step = ranks
        each = f"parallel.replica x data = {ranks} ranks" if config.parallel.replica > 1 else f"parallel.data={ranks} ranks"
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


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Reads a recipe.

    Args:
      path: a YAML file, or its content as a mapping; or the name of a recipe that comes with jaxllm, such as quickstart or
        configs/quickstart.yaml, if that file does not exist here.
      overrides: `section.key=value` strings with the value in YAML; later ones win.

    Raises:
      ConfigError: one sentence that names the key and what to change.
    """
    if isinstance(path, str | Path):
        values = read_recipe(find_recipe(Path(path)))
        refuse_code(path, values, overrides)
    else:
        values = {k: v for k, v in path.items()}
    # A section whose keys are all commented out is None in YAML.
    values = with_overrides(values, overrides)
    # First, because other refusals show values.
    checks.check_texts(values)
    if isinstance(model := values.get("model"), dict) and model.get("name") is not None:
        from jaxllm.config.named import take_named

        take_named(values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, Config)) from None


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Copies the sections of an unchecked config and applies `section.key=value` strings. Another model.name replaces the sizes
    in `values`, with a warning, and keeps those among the strings.

    Raises:
      ConfigError: a string has another form.
    """
    values = {section: dict(keys) if isinstance(keys, Mapping) else keys or {} for section, keys in values.items()}
    # Other trainers write them with dashes, or with hydra's plus.
    plain = [override.lstrip("+-") for override in overrides]
    for override in sorted(plain, key=lambda one: not one.startswith("model.name=")):
        _apply(override, values)
    return values


def _apply(override: str, values: dict[str, Any]) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if len(keys) == 1 and separator and keys[0] not in Config.model_fields:
        from jaxllm.config.key_hints import meant

        if hint := meant(Config, keys, {}):
            raise ConfigError(f"Unknown key {shown(keys[0])}: {hint}")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError(f"Cannot read the override {shown(override)!r}: write section.key=value, such as train.steps=100.")
    try:
        value = parse_yaml(text)
    except RefusedInput as error:
        raise ConfigError(f"Cannot read the value of {shown(override)!r} ({error}): quote it, or write it as YAML.") from None
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", text.strip()):
        # YAML reads 3e-4 as a string, because it has no dot.
        value = float(value)
    node = values
    for key in keys[:-1]:
        child = node.get(key)
        if child is None:
            child = {}
        if not isinstance(child, Mapping):
            raise ConfigError(f"{shown(override)!r} does not name a key: {key} has no keys below it.")
        node[key] = dict(child)
        node = node[key]
    if keys == ["model", "name"] and value not in (None, node.get("name")):
        node, before = {key: kept for key, kept in node.items() if key not in SHAPE_KEYS}, node
        values["model"] = node
        if sizes := [key for key in before if key not in node]:
            rest = [key for key in node if key != "name"]
            kept = f", whose {', '.join(rest)} {'stay' if len(rest) > 1 else 'stays'}" if rest else ""
            log.warning("%s replaces %s of the recipe%s.", shown(override), ", ".join(sizes), kept)
    node[keys[-1]] = value


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors."""
    schema = Config.model_json_schema()
    # A recipe may leave sizes to model.name.
    schema["$defs"]["ModelConfig"].pop("required", None)
    return schema
