"""Checks that compare sections of a config with each other."""

import fnmatch
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.config.batch_schedule import batches_of, doublings
from jaxllm.config.errors import ConfigError, refuse
from jaxllm.config.model_config import ModelConfig
from jaxllm.config.model_spec import LAYERS, OF_IMAGES, cached, has_experts, parameters
from jaxllm.config.run_sections import CheckpointConfig, LogConfig, RunConfig
from jaxllm.config.sections import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from jaxllm.config.types import AUTO, GIVEN, LAST_OUTPUT, block_tensors, divisors
from jaxllm.untrusted import one_line, shown, without_passwords

MOST_STEP_TOKENS = 2**40
"""The largest runs have 2^26 tokens a step."""
FP8_UNIT = 16
"""Dims of cuBLASLt's FP8 matmuls must be multiples of this (cuBLAS library documentation, cublasLtMatmul)."""


def sequence_unit(context: int, tensor: int) -> int:
    """Sequence lengths must be multiples of this to be split over these axes."""
    return context * math.lcm(2, tensor) if context > 1 else tensor


def causal_block_length(sequence_length: int, context: int) -> int:
    """Tokens of a causal block of attention: a sequence, or one of the two chunks that each context rank has."""
    return sequence_length // (2 * context if context > 1 else 1)


def effective_windows(windows: Iterable[int | None], sequence_length: int) -> tuple[int | None, ...]:
    """Sliding windows that are shorter than the sequence; None in the place of the others."""
    return tuple(window if window is not None and window < sequence_length else None for window in windows)


def repeats(kinds: Sequence[int | None], length: int) -> bool:
    """Whether each chunk of `length` layers has the same kinds of layers in the same order."""
    return all(kind == kinds[at % length] for at, kind in enumerate(kinds))


def check_split(model: ModelConfig, parallel: ParallelConfig, S: int) -> None:
    """Raises if heads, widths, sequence or layers do not divide over the axes that split them."""
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
    if model.multiplies_fp8:
        _check_fp8(model, parallel.tensor)
    if parallel.tensor_ring and parallel.tensor > 1 and (model.multiplies_fp8 or model.scan_layers is False):
        unlike = "model.matmul_dtype=fp8" if model.multiplies_fp8 else "model.scan_layers=false"
        raise refuse(f"parallel.tensor_ring=true multiplies in chunks, which {unlike} does not: set tensor_ring=false.")
    if parallel.tensor_ring and parallel.tensor > 1 and has_experts(model):
        raise refuse(
            "parallel.tensor_ring=true multiplies in chunks, and experts sort the tokens of whole sequences: set "
            "tensor_ring=false."
        )
    # Each context rank has two chunks of a sequence (parallel/zigzag.py), and each tensor rank has a part of those.
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


def check_experts(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, log: LogConfig, layer_norms_every: int | None
) -> None:
    """Raises if the config has what parallel.expert does not support."""
    if (e := parallel.expert) == 1:
        return
    if not has_experts(model):
        raise refuse(f"parallel.expert={e} has no effect without model.num_experts: leave it out.")
    needs = {
        f"parallel.zero={parallel.zero}": ("zero=3", parallel.zero != 3),
        f"parallel.context={parallel.context}": ("context=1", parallel.context > 1),
        f"parallel.pipe={parallel.pipe}": ("pipe=1", parallel.pipe > 1),
        f"train.batch_grows_to={train.batch_grows_to}": ("batch_grows_to=null", train.batch_grows_to is not None),
        f"log.noise_scale_every={log.noise_scale_every}": ("noise_scale_every=null", log.noise_scale_every is not None),
    }
    if found := next((key for key, (_, is_set) in needs.items() if is_set), None):
        raise refuse(f"parallel.expert={e} does not go together with {found}: set {needs[found][0]}, or expert=1.")
    if parallel.drops_rows and layer_norms_every is None:
        what = "parallel.offload_state=all" if parallel.offload_state == "all" else "train.freeze of all layers"
        raise refuse(
            f"parallel.expert_buffer={parallel.expert_buffer} may drop rows, which a run does not count with {what}: set "
            f"expert_buffer=null, or expert=1."
        )
    if parallel.data != AUTO and (parallel.data % e or (model.num_experts or 0) % parallel.data):
        raise refuse(
            f"parallel.expert={e} must divide parallel.data={parallel.data}, which must divide model.num_experts="
            f"{model.num_experts}: change one of them."
        )


def check_remat(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises if a mapping names a tensor that only a norm after the MLP reads, where there is none."""
    if isinstance(parallel.remat, dict) and LAST_OUTPUT in set(parallel.remat) - set(block_tensors(model)):
        raise refuse(
            f"parallel.remat.{LAST_OUTPUT} has no effect with model.block_norms={model.block_norms}, as no backward pass reads "
            f"it: leave it out."
        )


def check_diloco(train: TrainConfig, parallel: ParallelConfig, chunk_layers: int) -> None:
    """chunk_layers: Config.chunk_layers."""
    if train.diloco_steps is None:
        if train.diloco_overlap:
            raise refuse("train.diloco_overlap moves outer steps, and there are none: set train.diloco_steps, or leave it out.")
        return
    if parallel.offload_state != "none":
        raise refuse(
            f"train.diloco_steps={train.diloco_steps} keeps every replica's state on its devices: set "
            f"parallel.offload_state=none, not {parallel.offload_state}, or leave DiLoCo out."
        )
    if train.diloco_after_steps >= train.steps:
        raise refuse(
            f"train.diloco_after_steps={train.diloco_after_steps} leaves DiLoCo none of train.steps={train.steps}: "
            f"make it smaller, or leave train.diloco_steps out."
        )
    if (H := train.diloco_steps) % (count := train.diloco_fragments) or count > chunk_layers:
        above = f"is above {chunk_layers}, the layers of a stage's chunk"
        why = f"does not divide train.diloco_steps={H}" if H % count else above
        fitting = ", ".join(str(n) for n in range(1, chunk_layers + 1) if H % n == 0)
        raise refuse(f"train.diloco_fragments={count} {why}: use one of {fitting}.")


def check_optimizer(model: ModelConfig, optimizer: OptimizerConfig, parallel: ParallelConfig) -> None:
    """Raises if the state of an optimizer that may need whole matrices would be updated a rank's piece at a time."""
    if optimizer.name == "muon" and has_experts(model):
        raise refuse("optimizer.name=muon does not know the matrices of model.num_experts: set it to adamw, lion or sgd.")
    if optimizer.name in ("muon", GIVEN) and parallel.offload_state != "none":
        raise refuse(
            f"optimizer.name={optimizer.name} takes whole matrices, and parallel.offload_state={parallel.offload_state} takes "
            f"them apart: set offload_state=none, or optimizer.name to adamw, lion or sgd."
        )


def check_loss(model: ModelConfig, train: TrainConfig, parallel: ParallelConfig, log: LogConfig) -> None:
    """Raises if the config has what only cross-entropy supports, whose count is known before the step."""
    unlike = {
        f"train.z_loss_weight={train.z_loss_weight:g}": train.z_loss_weight > 0,
        f"log.noise_scale_every={log.noise_scale_every}": log.noise_scale_every is not None,
        f"parallel.offload_state={parallel.offload_state}": parallel.offload_state == "all",
    }
    if train.loss != "cross_entropy" and (found := next((key for key, is_set in unlike.items() if is_set), None)):
        raise refuse(
            f"train.loss={train.loss} and {found} do not go together, as that belongs to cross-entropy: leave one of them out."
        )
    if train.loss != "cross_entropy" and has_experts(model) and (model.balance_loss_weight or model.router_z_loss_weight):
        raise refuse(
            f"train.loss={train.loss} may count something else than tokens, for which a router's losses are: set "
            f"model.balance_loss_weight=0 and router_z_loss_weight=0."
        )


def check_preferences(train: TrainConfig, data: DataConfig) -> None:
    """Raises if the loss, the sources of data and the lengths of sequences do not belong together."""
    kinds = {part.source for part in data.sources}
    if train.length_schedule and kinds & {"preferences", GIVEN}:
        raise refuse(
            f"train.length_schedule cuts sequences, and those of data.source={data.source} must stay whole: remove one of them."
        )
    if train.loss == "cross_entropy" and "preferences" in kinds:
        raise refuse("data.source=preferences holds pairs of answers: set train.loss=dpo.")
    if train.loss == "dpo" and kinds != {"preferences"}:
        raise refuse("train.loss=dpo learns from pairs of answers alone: set data.source=preferences.")
    if train.loss == "dpo" and train.init_from is None:
        raise refuse("train.loss=dpo needs a model to begin with, which is the reference too: set train.init_from.")


def check_all_on_host(model: ModelConfig, parallel: ParallelConfig, log: LogConfig) -> None:
    """Raises if the config has what parallel.offload_state=all does not support."""
    if found := unlike_all_on_host(model, parallel, log):
        raise refuse(
            f"parallel.offload_state=all moves the layers of one loop between host and GPU, which {found} does not allow: "
            f"change that, or set offload_state=optimizer_and_master."
        )
    if parallel.offload_state == "all" and keeps_whole_layers(parallel):
        raise refuse(
            f"parallel.offload_state=all keeps each rank's shard of the layers on the host, and with parallel.zero="
            f"{parallel.zero} ranks have whole layers: set parallel.zero=3, or offload_state=optimizer_and_master."
        )


def keeps_whole_layers(parallel: ParallelConfig) -> bool:
    """Whether each of several ranks has whole layers; False as long as parallel.data is auto."""
    return (parallel.data not in (AUTO, 1) or parallel.context > 1) and parallel.zero < 3


def unlike_all_on_host(model: ModelConfig, parallel: ParallelConfig, log: LogConfig) -> str | None:
    """The key=value that parallel.offload_state=all does not support; None if there is none, or for another offload_state.
    Replicas would sum whole gradients, and the measurements read gradients on the device."""
    if parallel.offload_state != "all":
        return None
    unlike = {
        f"parallel.pipe={parallel.pipe}": parallel.pipe > 1,
        f"parallel.replica={parallel.replica}": parallel.replica > 1,
        "model.scan_layers=false": model.scan_layers is False,
        f"log.noise_scale_every={log.noise_scale_every}": log.noise_scale_every is not None,
        f"log.layer_norms_every={log.layer_norms_every}": log.layer_norms_every is not None,
    }
    return next((key for key, is_set in unlike.items() if is_set), None)


def _check_fp8(model: ModelConfig, tensor: int) -> None:
    """Raises if FP8 does not support a matmul dim of a block, as sharded on a tensor rank."""
    widths = {
        "hidden_size": (model.hidden_size, 1),
        "intermediate_size": (model.intermediate_size, tensor),
        "num_heads x head_dim": (model.num_heads * model.head_dim, tensor),
        # Replicated on every rank if the heads do not divide.
        "num_kv_heads x head_dim": (model.num_kv_heads * model.head_dim, 1 if model.num_kv_heads % tensor else tensor),
    }
    for key, (full, ranks) in widths.items():
        if (width := full // ranks) % FP8_UNIT:
            split = f" over parallel.tensor={tensor}" if ranks > 1 else ""
            raise refuse(
                f"model.matmul_dtype=fp8 multiplies {FP8_UNIT} numbers at a time, and model.{key}{split} is {width}: make it a "
                f"multiple of {FP8_UNIT}, or set model.matmul_dtype=compute_dtype."
            )


def all_have_layers(layers: int, chunks: int) -> bool:
    """Whether every chunk has a layer if all chunks but the last are full."""
    return layers > (chunks - 1) * math.ceil(layers / chunks)


def _fewer_chunks(layers: int, parallel: ParallelConfig) -> str:
    """Settings that give every chunk a layer: fewer virtual stages if that is enough, else fewer stages."""
    # More chunks than layers never work.
    for virtual_stages in range(min(parallel.virtual_stages - 1, layers), 1, -1):
        if all_have_layers(layers, parallel.pipe * virtual_stages):
            return f"set parallel.virtual_stages={virtual_stages}"
    if parallel.virtual_stages > 1 and all_have_layers(layers, parallel.pipe):
        return "set parallel.virtual_stages=1 and schedule=1f1b"
    stages = next(pipe for pipe in range(min(parallel.pipe - 1, layers), 0, -1) if all_have_layers(layers, pipe))
    return f"set parallel.pipe={stages}" + (", virtual_stages=1 and schedule=1f1b" if parallel.virtual_stages > 1 else "")


def check_tokens(train: TrainConfig) -> None:
    """Raises if a step, or the run, has more tokens than arrays and counters hold."""
    batches = batches_of(train.global_batch_sequences, train.batch_schedule)
    largest = max((*batches, *doublings(batches[-1], train.batch_grows_to or 0)))
    if (tokens := largest * train.sequence_length) > MOST_STEP_TOKENS:
        raise refuse(
            f"train.global_batch_sequences={largest} x sequence_length={train.sequence_length} are {tokens:.1e} tokens a step, "
            f"and at most {MOST_STEP_TOKENS:.1e} are supported: make one of them smaller."
        )


def check_batch_schedule(train: TrainConfig) -> None:
    """Raises if the thresholds do not rise, or if batch_lr is set without a schedule."""
    for key, schedule, name in (
        ("batch_schedule", train.batch_schedule, "from_tokens"),
        ("length_schedule", train.length_schedule, "until_tokens"),
    ):
        for (before, _), (after, _) in itertools.pairwise(schedule):
            if after <= before:
                raise refuse(f"train.{key} goes from {before:,} tokens to {after:,}: its {name} must rise; put them in order.")
    for _, length in train.length_schedule:
        if train.sequence_length % length:
            raise refuse(
                f"train.length_schedule has a length of {length}, which does not divide train.sequence_length="
                f"{train.sequence_length}: use one of {list(divisors(train.sequence_length))}."
            )
    if train.batch_lr != "none" and not train.batch_schedule and train.batch_grows_to is None:
        raise refuse(
            f"train.batch_lr={train.batch_lr} needs train.batch_schedule, and there is none: set one, or set batch_lr=none."
        )


def check_batch_growth(train: TrainConfig, data: DataConfig, log: LogConfig) -> None:
    """Raises if train.batch_grows_to cannot be followed."""
    if train.batch_grows_to is None:
        return
    of = f"train.batch_grows_to={train.batch_grows_to}"
    if log.noise_scale_every is None:
        raise refuse(f"{of} follows the gradient noise scale, which is not measured: set log.noise_scale_every=1.")
    if train.diloco_steps is not None:
        raise refuse(f"{of} does not go with train.diloco_steps={train.diloco_steps}: leave one of them out.")
    if data.source == GIVEN:
        raise refuse(f"{of} does not go with batches that the caller gives: leave it out.")
    last = batches_of(train.global_batch_sequences, train.batch_schedule)[-1]
    if train.batch_grows_to not in (reached := (last, *doublings(last, train.batch_grows_to))):
        raise refuse(f"{of} is not {last} doubled: use {' or '.join(str(n) for n in (*reached[1:], 2 * reached[-1])[-2:])}.")
    fewest = train.steps * last // train.batch_grows_to
    if log.profile_steps and log.profile_steps[1] > fewest:
        raise refuse(f"log.profile_steps={list(log.profile_steps)} may come after the last step, as {of} may leave {fewest}.")


def check_log(data: DataConfig, train: TrainConfig, log: LogConfig, of_bytes: bool) -> None:
    """Checks the log section. `of_bytes`: the run reads one text in memory, as bytes."""
    wants = train.eval_every_steps or log.baselines
    if wants and (data.source == GIVEN or data.held_out_fraction == 0):
        fix = ", and data.source=given has none:" if data.source == GIVEN else ": set data.held_out_fraction above 0 or"
        raise refuse(f"train.eval_every_steps and log.baselines need held-out text{fix} remove them.")
    if log.baselines and not of_bytes:
        raise refuse(
            "log.baselines counts bytes of one text in memory: set log.baselines=false, or read files without a tokenizer."
        )
    if log.wandb_project is None and (log.wandb_entity or log.wandb_group or log.wandb_tags):
        raise refuse(
            "log.wandb_entity, wandb_group and wandb_tags have no effect alone: set log.wandb_project, or remove them."
        )
    if log.profile_steps and not 1 <= log.profile_steps[0] <= log.profile_steps[1] <= train.steps:
        raise refuse(f"log.profile_steps={list(log.profile_steps)} is not [first, last] within 1..{train.steps}.")


@cached
def frozen_parameters(model: ModelConfig, patterns: tuple[str, ...]) -> frozenset[str]:
    """Paths of the parameters that are not trained, with these patterns of train.freeze."""
    if model.lora is not None:
        return frozenset(spec.path for spec in parameters(model) if not spec.is_lora)
    paths = [spec.path for spec in parameters(model)]
    return frozenset(path for pattern in patterns for path in _matching(paths, pattern))


def _matching(paths: list[str], pattern: str) -> list[str]:
    # All layers are one stack, so "layers.*.mlp.*" means layers.mlp.*; and a name alone means all below it.
    pattern = pattern.replace("layers.*.", "layers.", 1)
    return [path for path in paths if fnmatch.fnmatchcase(path, pattern) or path.startswith(pattern + ".")]


def check_frozen(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, log: LogConfig) -> None:
    """Raises if nothing would be trained, a pattern has no effect, or the config has what frozen parameters do not support."""
    if train.init_adapter is not None and model.lora is None:
        raise refuse("train.init_adapter has no effect without model.lora: set model.lora.rank, or leave it out.")
    if model.lora is not None and train.freeze:
        raise refuse("model.lora freezes all other parameters already: leave train.freeze out.")
    paths = [spec.path for spec in parameters(model)]
    for pattern in train.freeze:
        if not _matching(paths, pattern):
            raise refuse(
                f"train.freeze={shown(pattern)} is the name of no parameter: use patterns of {', '.join(paths)}. All layers "
                f"are one stack, so none can be frozen alone."
            )
    if not (frozen := frozen_parameters(model, train.freeze)):
        return
    if len(frozen) == len(paths):
        raise refuse("train.freeze leaves no parameter to train: remove one of its patterns.")
    what = "model.lora" if model.lora is not None else "train.freeze"
    trains_layers = any(path.startswith(LAYERS) for path in paths if path not in frozen)
    unlike = {
        f"train.diloco_steps={train.diloco_steps}": train.diloco_steps is not None,
        f"parallel.offload_state={parallel.offload_state}": parallel.offload_state == "all"
        or (parallel.offload_state != "none" and not trains_layers),
        f"log.layer_norms_every={log.layer_norms_every}": log.layer_norms_every is not None and not trains_layers,
        f"log.noise_scale_every={log.noise_scale_every}": log.noise_scale_every is not None and parallel.pipe > 1,
        "parallel.tensor_ring=true": parallel.tensor_ring is True,
    }
    if found := next((key for key, is_set in unlike.items() if is_set), None):
        raise refuse(f"{found} does not go together with {what}: leave one of them out.")


def check_images(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, data: DataConfig, images: int) -> None:
    """Raises if the config has what a vision tower does not support. `images`: Config.images_per_sequence."""
    if (vision := model.vision) is None:
        if data.max_images is not None:
            raise refuse(f"data.max_images={data.max_images} has no effect without model.vision: leave it out.")
        return
    frozen = frozen_parameters(model, train.freeze)
    parts = {name: {s.path for s in parameters(model) if s.path.startswith(name)} for name in OF_IMAGES}
    if cut := next((name[:-1] for name, paths in parts.items() if paths & frozen and paths - frozen), None):
        raise refuse(f"train.freeze={shown(list(train.freeze))} freezes a part of {cut}: freeze all of it, or nothing.")
    unlike = {
        f"parallel.pipe={parallel.pipe}": parallel.pipe > 1,
        f"parallel.context={parallel.context}": parallel.context > 1,
        f"parallel.tensor={parallel.tensor}": math.gcd(vision.num_heads, vision.intermediate_size) % parallel.tensor > 0,
        f"parallel.offload_state={parallel.offload_state}": parallel.offload_state == "all",
        f"train.loss={train.loss}": train.loss == "dpo",
        f"train.diloco_steps={train.diloco_steps}": train.diloco_steps is not None,
        "train.length_schedule": bool(train.length_schedule),
    }
    if found := next((key for key, is_set in unlike.items() if is_set), None):
        raise refuse(f"{found} does not go together with model.vision: leave it out, or set it to its default.")
    if images and data.sources and data.packing != "best_fit":
        raise refuse("model.vision needs whole images in a sequence: set data.packing=best_fit, or data.max_images=0.")
    if data.sources and not images and any(paths - frozen for paths in parts.values()):
        keys = f"data.source={data.source}, max_images={data.max_images} and train.sequence_length={train.sequence_length}"
        raise refuse(f"No image is read with {keys}: change these, or set train.freeze=[vision, projector].")


def check_store(run: RunConfig, checkpoint: CheckpointConfig) -> None:
    if "://" in run.dir:
        raise refuse(
            f"run.dir={run.dir} is an address, but a run needs a local folder: set run.dir to one, and "
            f"checkpoint.store={run.dir}."
        )
    # Other commands take * ? [ for a pattern.
    if checkpoint.store is not None and not re.fullmatch(r"(s3|gs)://[\w.-]+/[^*?#\[\]]*[^/*?#\[\]]", checkpoint.store):
        raise refuse(
            f"checkpoint.store={shown(checkpoint.store)} is not an address of a store: write s3://BUCKET/PREFIX or "
            f"gs://BUCKET/PREFIX."
        )
    if checkpoint.store is None and checkpoint.store_every_steps is not None:
        raise refuse(
            f"checkpoint.store_every_steps={checkpoint.store_every_steps} chooses what is copied to a store, and there is "
            f"none: set checkpoint.store=s3://BUCKET/PREFIX, or use checkpoint.every_steps or checkpoint.keep_every_steps."
        )


STEERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end a line, steer a terminal or turn the direction of text, and bytes of a path that are not UTF-8."""


def check_texts(values: Any, key: str = "") -> None:
    """Refuses a password in a URL anywhere in an unchecked config, because config.yaml and trackers would keep it, and a name
    or a path that could write a line of its own in a log, a page or a tracker."""
    if isinstance(values, str) and key != "log.sample_prompt" and (found := STEERS.search(values)):
        raise ConfigError(f"{key}={shown(values)} holds the character {one_line(found[0])}: use one without it.")
    if isinstance(values, str) and without_passwords(values) != values:
        raise ConfigError(
            f"{key} has a user, a password or a query in a URL, which config.yaml would keep: remove it, and give keys in the "
            f"variables that the library of that address reads."
        )
    if isinstance(values, Mapping):
        for name, value in values.items():
            check_texts(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            check_texts(value, f"{key}[{number}]")
