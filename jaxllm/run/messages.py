"""A run's lines: the header before the first step, the steps' in metrics.jsonl, trackers and the console, and notes."""

from collections.abc import Iterator
from typing import Any

from jaxllm.cluster import distributed
from jaxllm.config import ATTENTION_RESULTS, Config, ModelConfig, ParallelConfig
from jaxllm.config.batch_schedule import Phase
from jaxllm.config.remat_policy import remat_words
from jaxllm.config.rounds import sends_codes
from jaxllm.config.types import zero_text
from jaxllm.cost_model.flops import parameter_words
from jaxllm.data.loader import SampleStream
from jaxllm.model.experts import EXPERT_ROWS_DROPPED, EXPERTS_USED
from jaxllm.parallel.parameters import stacking_of
from jaxllm.pipeline_schedule import USUAL_IDLE, idle_share, microbatches_for
from jaxllm.run import fewer_hosts
from jaxllm.run.hooks import Run
from jaxllm.run.metrics import Record, open_sinks

WELL_FILLED = 0.9
"""Fill ratio of sequences below which a run reports the free space."""


def print_header(run: Run) -> None:
    for line in filter(None, (*header(run.trainer), fewer_hosts.describe(run.asked, run.trainer.config))):
        run.console.say(line)


def header(trainer: Any) -> Iterator[str]:
    config, devices, start = trainer.config, trainer.mesh.devices, trainer.start
    kind, M = devices.flat[0].device_kind, config.num_microbatches
    axes = ", ".join(f"{axis} {size}" for axis, size in trainer.mesh.shape.items())
    zero = zero_text(config.parallel.zero, config.parallel.expert)
    yield f"{devices.size} {kind} device{'s' if devices.size > 1 else ''}; mesh {axes}; {zero}"
    yield (
        f"{parameter_words(config.model)}; {config.step_tokens:,} tokens a step in "
        f"{M} microbatch{'es' if M > 1 else ''}; {config.total_tokens:,} tokens in all"
    )
    yield from batch_notes(config)
    if config.parallel.pipe > 1:
        yield from pipeline_notes(config)
    if config.train.diloco_steps is not None:
        yield diloco_line(config)
    if start.memory_fit is not None:
        yield start.memory_fit.line
    if start.weights is not None:
        yield f"weights from {start.weights.description}; optimizer, step and data start from zero"
    if config.total_tokens < config.optimizer.warmup_tokens:
        yield f"note: the run ends during its warm-up of {config.optimizer.warmup_tokens:,} tokens"
    actions, attention = config.parallel.remat, trainer.programs.functions.attention
    yield f"attention {attention}; remat {remat_words(actions)}; {trainer.data.description}"
    named = set(actions) & set(ATTENTION_RESULTS) if isinstance(actions, dict) else ()
    if named and attention == "xla":
        yield f"note: plain XLA attention has no {', '.join(sorted(named))}: it is recomputed"
    if trainer.stream.sources:
        yield from data_notes(config, trainer.stream)


def batch_notes(config: Config) -> Iterator[str]:
    """Lines about train.batch_schedule and train.length_schedule. The program of each phase is compiled at its first step."""
    if not config.has_phases:
        return
    first, *later = config.phases
    if (most := config.train.batch_grows_to) is not None:
        yield (
            f"the batch doubles, up to {most} sequences, when the gradient noise scale is surely twice the batch; the run ends "
            f"after {config.total_tokens:,} tokens"
        )
    if first.parts > 1:
        yield f"at first a {describe_phase(config, first)}"
    for phase in later:
        if phase.first_step < config.train.steps:
            tokens = config.tokens_before(phase.first_step)
            yield f"after step {phase.first_step} ({tokens:,} tokens) {describe_phase(config, phase)}, compiled then"
    if config.train.batch_lr != "none":
        rule = {"sqrt": "the square root of the batch", "linear": "the batch"}[config.train.batch_lr]
        last = config.train.batch_grows_to or config.phases[-1].sequences
        yield f"learning rate proportional to {rule}; optimizer.learning_rate is that of {last} sequences"
    if later and later[-1].first_step >= config.train.steps:
        yield f"note: the run ends before its schedule reaches a {describe_phase(config, later[-1])}"


def describe_phase(config: Config, phase: Phase) -> str:
    own = config.in_phase(phase)
    M, tokens = own.num_microbatches, own.step_tokens
    length = f" of {length:,} tokens" if (length := config.length_of(phase)) else ""
    what = f"batch of {own.train.global_batch_sequences} sequences{length}"
    return f"{what}, {tokens:,} tokens a step in {M} microbatch{'es' if M > 1 else ''}"


def pipeline_notes(config: Config) -> Iterator[str]:
    """Lines about the cost of the pipeline: its bubble, and identity layers."""
    stages, virtual, M = config.parallel.pipe, config.parallel.virtual_stages, config.num_microbatches
    stacking = stacking_of(config)
    chunks = f" x {virtual} chunks" if virtual > 1 else ""
    plural, idle = "s" if stacking.chunk > 1 else "", idle_share(stages, M, virtual)
    schedule, layers = config.parallel.schedule, f"{stacking.chunk} layer{plural}"
    yield f"pipeline {schedule}, {stages} stages{chunks} of {layers}; idle {100 * idle:.1f}% of a step"
    if extra := stacking.identity_layers:
        layers = f"{extra} identity layers pad the last stages" if extra > 1 else "1 identity layer pads the last stage"
        yield f"note: {layers}: computed, never changed"
    if idle >= USUAL_IDLE:
        enough = microbatches_for(USUAL_IDLE, stages, virtual)
        size = enough * config.train.global_batch_sequences // M
        yield (
            f"note: stages are idle {100 * idle:.1f}% of a step; {enough} microbatches (such as "
            f"train.global_batch_sequences={size}) reduce that below {100 * USUAL_IDLE:.0f}%"
        )


def diloco_line(config: Config) -> str:
    """Line about DiLoCo: the replicas, their batch, and the outer step."""
    train, replicas = config.train, config.parallel.replica
    who = f"{replicas} replicas, each on 1/{replicas} of every batch" if replicas > 1 else "one replica"
    start = f" after {train.diloco_after_steps} synchronous steps" if train.diloco_after_steps else ""
    outer = f"Nesterov step of {train.diloco_lr:g}, momentum {train.diloco_momentum:g}"
    outer += f", in {train.diloco_bits} bits" if sends_codes(config) else ""
    each = f" for each of {train.diloco_fragments} fragments" if train.diloco_fragments > 1 else ""
    hidden = ", during the next step," if train.diloco_overlap else ""
    return f"DiLoCo: {who}{start}; an outer {outer}, every {train.diloco_steps} steps{each}{hidden} and after the last"


def data_notes(config: Config, stream: SampleStream) -> Iterator[str]:
    """Lines about the epochs of each source, if there are several or one is read more than once, and about free space."""
    epochs = stream.epochs(config.sequences_before(config.train.steps))
    if len(epochs) > 1 or max(epochs.values()) > 1:
        yield "epochs of the complete run: " + ", ".join(f"{name} {count:.2f}" for name, count in epochs.items())
    full = sum(
        share * source.packing.num_tokens / source.packing.num_samples
        for source, share in zip(stream.sources, stream.counts, strict=True)
    ) / (sum(stream.counts) * config.train.sequence_length)
    if full < WELL_FILLED:
        yield f"note: sequences are {100 * full:.1f}% full; data.packing=concat or longer sequences waste less"


def who_was_left_out(record: Record) -> str:
    """Message about replicas that an outer step left out (train/diloco.py)."""
    return (
        f"step {record['step']}: the outer step left out {record['islands_left_out']:.0f} of the replicas, whose weights are "
        f"not finite; they continue from the common weights"
    )


def who_collapsed(record: Record, model: ModelConfig) -> str | None:
    """Message about the layer that uses the fewest experts, if it sends its tokens to nearly the same ones; else None."""
    K, used = model.mlps_per_token, {name: used for name, used in record.items() if name.startswith(f"{EXPERTS_USED}/")}
    layer = min(used, key=used.__getitem__, default=None)
    if layer is None or used[layer] >= min(2 * K, (K + (model.num_experts or 0)) / 2):
        return None
    return (
        f"step {record['step']}: layer {layer.partition('/')[2]} sends its tokens to about {used[layer]:.1f} of "
        f"{model.num_experts} experts: raise model.balance_loss_weight={model.balance_loss_weight:g}, or lower "
        f"optimizer.learning_rate"
    )


def who_dropped(record: Record, parallel: ParallelConfig, before: float = 0.0) -> tuple[float, str] | None:
    """(share, message) of the layer that drops the largest share of its rows for want of a buffer; None if none drops more than
    twice the share `before`."""
    shares = {name: share for name, share in record.items() if name.startswith(f"{EXPERT_ROWS_DROPPED}/")}
    layer = max(shares, key=shares.__getitem__, default=None)
    if layer is None or shares[layer] <= 2 * before:
        return None
    return shares[layer], (
        f"step {record['step']}: layer {layer.partition('/')[2]} drops {100 * shares[layer]:.2g}% of its rows, whose tokens do "
        f"without that expert: raise parallel.expert_buffer={parallel.expert_buffer}, or set parallel.expert_buffer=null"
    )


def register(run: Run) -> None:
    trainer, console, told, dropped = run.trainer, run.console, [], 0.0
    if distributed.is_main_process():
        for sink in open_sinks(trainer.config, run.first, run.require, lambda: trainer.config.train.steps):
            run.stack.callback(sink.close)
            run.on("line", sink.write)
        trainer.metrics.watch.recall(run.folder / "metrics.jsonl")

    def publish(record: Record) -> None:
        nonlocal dropped
        config = trainer.config
        due = record["step"] % config.log.every_steps == 0 or record["step"] in (run.first + 1, config.train.steps)
        record |= run.timer.record_keys(trainer, due and distributed.is_main_process())
        run.write(record)
        if record["skipped"] or record["loss_spike"]:
            what = "a spike" if record["loss_spike"] else "not finite"
            skipped = f"; skipped, {record['skipped_steps']} so far" if record["skipped"] else ""
            loss, norm = record["loss"], record["grad_norm"]
            console.say(f"step {record['step']} is {what}: loss {loss:.4g}, gradient norm {norm:.4g}{skipped}")
        if record.get("no_targets") and record["step"] == trainer.metrics.watch.first_without_targets:
            console.say(
                f"step {record['step']} has no target: no token of it is learnt, or its gradient is exactly 0, so no weight "
                f"changes, as in all such steps; longer sequences or a larger batch make them rarer"
            )
        if record.get("islands_left_out"):
            console.say(who_was_left_out(record))
        if not told and (message := who_collapsed(record, config.model)):
            told.append(message)
            console.say(message)
        if found := who_dropped(record, config.parallel, dropped):
            dropped, message = found
            console.say(message)
        console.step(record, due)

    run.on("record", publish)
