"""Memory to load, evaluate or generate with a config's model, by closed forms: `jaxllm estimate --for`. No JAX.

report = estimate_inference(config, "generate", gpu="h100-80gb", gpus=1, prompts=8, prompt_tokens=4096)
report.fits, report.peak_bytes, report.host_bytes
print("\\n".join(report.lines()))
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from jaxllm.config import Config, ConfigError, DataConfig, TrainConfig, load_config, sequence_unit, with_overrides
from jaxllm.config.attention import require_runs
from jaxllm.config.checks import check_texts
from jaxllm.config.errors import one_sentence
from jaxllm.config.load import find_recipe, read_recipe
from jaxllm.config.model_spec import has_experts
from jaxllm.config.named import title_of
from jaxllm.config.types import ITEMSIZE
from jaxllm.cost_model import inference_memory
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import FIT_SHARE, Gpu, capacity_text, fits_text
from jaxllm.cost_model.hosts import HOST_GPUS, choose_gpus_per_host, hosts_text, require_devices
from jaxllm.cost_model.inference_memory import Moments, cache_positions, evaluation_rows, generation_moments
from jaxllm.cost_model.memory import StageMemory, Terms
from jaxllm.display import preformatted, readable
from jaxllm.plan.advice import CHUNK_TOKENS, changed
from jaxllm.plan.estimate import LABEL_WIDTH, MOST_CHANGES, memory_table

Purpose = Literal["load", "eval", "generate"]
PURPOSES = get_args(Purpose)
OF_PURPOSE = {
    "load": ("stored_dtype",),
    "eval": ("stored_dtype", "sequence_length"),
    "generate": ("stored_dtype", "prompts", "prompt_tokens", "max_new_tokens"),
}
"""Options of each purpose; training has none of them."""


@dataclass(frozen=True)
class Use:
    """What is done with a model.

    Raises:
      ConfigError: a value is not valid.
    """

    purpose: Purpose
    stored_dtype: str = "float32"
    """Dtype of the weights on disk: float32 in a run, most often bfloat16 in a Hugging Face folder."""
    sequence_length: int = 1024
    """Tokens of a window that is evaluated."""
    prompts: int = 1
    prompt_tokens: int = 1024
    max_new_tokens: int = 128

    def __post_init__(self):
        if self.purpose not in PURPOSES:
            raise ConfigError(f"--for={self.purpose} is not one of the choices: use train, {', '.join(PURPOSES)}.")
        if self.stored_dtype not in ITEMSIZE:
            raise ConfigError(f"--stored-dtype={self.stored_dtype} is not one of the choices: use {', '.join(ITEMSIZE)}.")
        for name, least in (("sequence_length", 2), ("prompts", 1), ("prompt_tokens", 1), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')}={getattr(self, name)} is not valid: use {least} or more.")

    def moments(self, config: Config, gpu: Gpu | None) -> Moments:
        """moment -> term -> bytes of one device."""
        if self.purpose == "load":
            return inference_memory.load_moments(config, self.stored_dtype)
        if self.purpose == "eval":
            return inference_memory.evaluation_moments(config, gpu, self.stored_dtype)
        if has_experts(config.model):
            raise ConfigError("--for=generate does not know the memory of experts: use load, eval or train.")
        return generation_moments(config, self.prompts, self.prompt_tokens, self.max_new_tokens, self.stored_dtype, gpu)

    def peak_bytes(self, config: Config, gpu: Gpu | None) -> int:
        return max(sum(terms.values()) for terms in self.moments(config, gpu).values())

    @property
    def words(self) -> str:
        if self.purpose == "load":
            return f"weights stored in {self.stored_dtype}"
        if self.purpose == "eval":
            rows = evaluation_rows(self.sequence_length)
            return f"{rows} window{'s' if rows > 1 else ''} of {self.sequence_length:,} tokens on each data rank at once"
        s, positions = "s" if self.prompts > 1 else "", cache_positions(self.prompt_tokens, self.max_new_tokens)
        return (
            f"{self.prompts:,} prompt{s} of up to {self.prompt_tokens:,} tokens, {self.max_new_tokens:,} new ones each; "
            f"{positions:,} positions in the cache"
        )


@dataclass(frozen=True)
class InferenceEstimate:
    """The complete result of `jaxllm estimate --for load`, `eval` or `generate`."""

    config: Config
    """Resolved, with the batch of this use."""
    use: Use
    gpu: Gpu | None
    gpus_per_host: int
    hosts_because: str
    moments: Moments
    host_bytes: Terms
    """Bytes of one process that holds all GPUs of a host, by way to load or convert (load_host_bytes)."""

    def __repr__(self) -> str:
        verdict = {None: "", True: ", which fits", False: ", which does not fit"}[self.fits]
        return f"<Estimate to {self.use.purpose}: {readable(self.peak_bytes)} on each device{verdict}>"

    def _repr_html_(self) -> str:
        return preformatted("\n".join(self.lines()))

    @property
    def moment(self) -> str:
        """The fullest."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def peak_bytes(self) -> int:
        """Bytes of one device."""
        return sum(self.moments[self.moment].values())

    @property
    def capacity_bytes(self) -> int | None:
        return self.gpu and self.gpu.capacity_bytes

    @property
    def fits(self) -> bool | None:
        """None without a GPU."""
        return None if self.capacity_bytes is None else self.peak_bytes <= self.capacity_bytes

    @cached_property
    def remedies(self) -> tuple[tuple[str, int], ...]:
        """The mildest change of each kind with which it would fit with room to spare, and its bytes then; empty if it fits."""
        found, limit = [], FIT_SHARE * (self.capacity_bytes or 0)
        for candidates in _changes(self.config, self.use) if self.fits is False else ():
            sizes = ((words, use.peak_bytes(new, self.gpu)) for words, new, use in candidates if new is not None)
            found += islice((one for one in sizes if one[1] <= limit), 1)
        return tuple(found[:MOST_CHANGES])

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        parallel = self.config.parallel
        own = ("gpus_per_host", "hosts_because", "moment", "peak_bytes", "capacity_bytes", "fits", "host_bytes")
        return {
            **{name: getattr(self, name) for name in own},
            "for": self.use.purpose,
            "gpu": self.gpu and self.gpu.name,
            "devices": self.config.devices,
            "mesh": {axis: getattr(parallel, axis) for axis in ("pipe", "data", "context", "tensor")},
            "stored_dtype": self.use.stored_dtype,
            "terms_bytes": self.moments[self.moment],
            "bytes_by_moment": {moment: sum(terms.values()) for moment, terms in self.moments.items()},
            "remedies": [{"change": words, "peak_bytes": size} for words, size in self.remedies],
        }

    def lines(self) -> Iterator[str]:
        """The estimate as terminal text."""
        config, parallel, devices = self.config, self.config.parallel, self.config.devices
        on = f"{devices} x {self.gpu.name}" if self.gpu else f"{devices} GPU{'s' if devices > 1 else ''}"
        yield (
            f"{title_of(config.model)} to {self.use.purpose} on {on}, {hosts_text(devices, self.gpus_per_host)} "
            f"({self.hosts_because})"
        )
        yield (
            f"  pipe {parallel.pipe}, data {parallel.data}, context {parallel.context}, tensor {parallel.tensor}; "
            f"ZeRO {parallel.zero}; computes in {config.model.compute_dtype}"
        )
        yield f"  {self.use.words}"
        yield ""
        yield f"Bytes on one device, when it is fullest ({self.moment.replace('_', ' ')})"
        yield from memory_table([StageMemory(0, self.moments[self.moment])])
        if self.gpu is not None:
            yield fits_text(self.peak_bytes, self.gpu.capacity_bytes)
            yield capacity_text(self.gpu.memory_bytes)
        if self.fits is False:
            yield "What would fit" if self.remedies else "Nothing tried here fits: use more GPUs, or a smaller model."
            yield from (f"  {words} ({readable(size)})" for words, size in self.remedies)
        if self.use.purpose == "load":
            yield ""
            gpus = f"{self.gpus_per_host} GPU{'s' if self.gpus_per_host > 1 else ''}"
            yield f"Bytes of the host, of one process with {gpus}, at most"
            for name, size in self.host_bytes.items():
                yield f"  {name.replace('_', ' '):<{LABEL_WIDTH}}{readable(size):>12}"


def load_untrained(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """As load_config, of a recipe whose model is only loaded or run: what training alone needs may be missing or not valid, but
    not unknown."""
    values = with_overrides(path if isinstance(path, Mapping) else read_recipe(find_recipe(Path(path))), overrides)
    check_texts(values)
    try:
        Config.model_validate(values)
    except ValidationError as error:
        if any(one["type"] == "extra_forbidden" for one in error.errors()):
            raise ConfigError(one_sentence(error, Config)) from None
    kept = {name: values[name] for name in ("model", "parallel", "run") if name in values}
    train, parallel = ({**found} if isinstance(found := values.get(name), dict) else {} for name in ("train", "parallel"))
    # A multiple of every axis.
    ranks = math.prod(size for size in parallel.values() if isinstance(size, int) and size > 0)
    batch = {"steps": 1, "sequence_length": 2 * ranks, "microbatch_sequences": 1, "global_batch_sequences": ranks}
    return load_config({**kept, "train": {key: train[key] for key in train if key == "loss_chunk_tokens"} | batch})


def estimate_inference(
    config: Config,
    purpose: Purpose,
    gpu: Gpu | str | None = None,
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    **sizes: Any,
) -> InferenceEstimate:
    """Estimates the memory to load, evaluate or generate with the model of a config, on GPUs that need not be present.

    Args:
      config: its model and, if it has one, its `parallel` section; without that the weights are sharded over data with ZeRO 3,
        as the commands do.
      purpose: load | eval | generate.
      gpu, gpus, gpus_per_host: as in `estimate`.
      sizes: fields of Use: stored_dtype, sequence_length, prompts, prompt_tokens, max_new_tokens.

    Raises:
      ConfigError: an option is not valid, the mesh has another size or cannot divide the sequences, or the GPU cannot run the
        model.
    """
    for name in sizes:
        if name not in OF_PURPOSE.get(purpose, () if purpose == "train" else (name,)):
            of = " or ".join(known for known in PURPOSES if name in OF_PURPOSE[known])
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --for {of}: leave it out with --for {purpose}.")
    use = Use(purpose, **sizes)
    kind = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if not config.parallel.model_fields_set:
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": 3})})
    resolved = _with_batch(config, use, require_devices(config, gpus))
    if kind is not None and purpose != "load":
        require_runs(resolved.model, kind.chip.compute_capability, kind.name)
    per_host, because = choose_gpus_per_host(resolved.devices, gpus_per_host, kind.gpus_per_host if kind else HOST_GPUS)
    host = inference_memory.load_host_bytes(resolved, use.stored_dtype, per_host)
    return InferenceEstimate(resolved, use, kind, per_host, because, use.moments(resolved, kind), host)


def _with_batch(config: Config, use: Use, devices: int) -> Config:
    """The config on its devices with the microbatches that an evaluation has, one for each stage. Of training it keeps nothing
    but train.loss_chunk_tokens."""
    p, unit = config.parallel, sequence_unit(config.parallel.context, config.parallel.tensor)
    if use.purpose == "eval" and use.sequence_length % unit:
        raise ConfigError(
            f"--sequence-length={use.sequence_length} does not divide over parallel.context={p.context} and tensor={p.tensor}: "
            f"use a multiple of {unit}."
        )
    length = -(-use.sequence_length // unit) * unit
    rows = evaluation_rows(length) if use.purpose == "eval" else 1
    batch = max(1, rows * devices // (p.context * p.tensor))
    sizes: dict[str, Any] = {"sequence_length": length, "microbatch_sequences": rows, "global_batch_sequences": batch}
    train = TrainConfig(steps=1, loss_chunk_tokens=config.train.loss_chunk_tokens, **sizes)
    found = Config.model_construct(parallel=p, model=config.model, train=train).resolve(devices)
    # FP8 is for training: the commands do without it.
    model = config.model.model_copy(update={"matmul_dtype": "compute_dtype"})
    # It reads no text.
    data = DataConfig(source="prepared", paths=("none",), mask_documents=False)
    try:
        return Config(model=model, parallel=found.parallel, data=data, train=train)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, Config)) from None


def _changes(config: Config, use: Use) -> Iterator[Iterator[tuple[str, Config | None, Use]]]:
    """(words, config, use) by kind, mildest first."""
    p = config.parallel
    if use.stored_dtype == "float32" and config.model.compute_dtype == "bfloat16":
        words = "weights stored in bfloat16: jaxllm export --dtype bfloat16"
        yield iter([(words, config, replace(use, stored_dtype="bfloat16"))])
    if use.purpose == "eval" and config.train.loss_chunk_tokens > CHUNK_TOKENS:
        keys = {"train.loss_chunk_tokens": CHUNK_TOKENS}
        yield iter([(f"train.loss_chunk_tokens={CHUNK_TOKENS}", changed(config, keys), use)])
    if use.purpose == "generate":
        fewer = [use.prompts >> by for by in range(1, use.prompts.bit_length())]
        yield ((f"--prompts {count}", config, replace(use, prompts=count)) for count in fewer)

    def wider(axis: str, **keys: Any) -> Iterator[tuple[str, Config | None, Use]]:
        for factor in (2, 4, 8):
            new, devices = {axis: int(getattr(p, axis)) * factor, **keys}, config.devices * factor
            words = " ".join(f"parallel.{name}={value}" for name, value in new.items())
            with suppress(ConfigError):
                found = _with_batch(config.model_copy(update={"parallel": p.model_copy(update=new)}), use, devices)
                yield f"{words} on {devices} GPUs", found, use

    yield wider("tensor")
    yield wider("data", zero=3)
