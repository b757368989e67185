"""A run's lines: metrics.jsonl and trackers, the console's, and what stands in run.dir beside them."""

from __future__ import annotations

from typing import Any

from jaxllm.cluster import distributed
from jaxllm.cost_model.flops import mfu
from jaxllm.cost_model.hardware import gpu_from_device_kind
from jaxllm.run.hooks import Run
from jaxllm.run.messages import what_went_wrong, who_was_left_out
from jaxllm.run.metrics import Record, open_sinks
from jaxllm.run.run_dir import keep_companions, keep_config


def register(run: Run) -> None:
    trainer, console, peak_flops = run.trainer, run.console, peak_flops_of(run.trainer)
    if distributed.is_main_process():
        for sink in open_sinks(trainer.config, run.first, run.require, lambda: trainer.config.train.steps):
            run.stack.callback(sink.close)
            run.on("line", sink.write)
        trainer.metrics.watch.recall(run.folder / "metrics.jsonl")
        keep_companions(run.folder, trainer)
    keep_config(run)

    def publish(record: Record) -> None:
        config = trainer.config
        record |= run.timer.record_keys(trainer, peak_flops)
        run.write(record)
        if record["skipped"] or record["loss_spike"]:
            console.say(what_went_wrong(record))
        if record.get("islands_left_out"):
            console.say(who_was_left_out(record))
        rate = float(record["tokens_per_s_per_device"])
        length = config.train.sequence_length // config.phase_at(int(record["step"]) - 1).parts
        utilisation = mfu(rate, config.model, length, peak_flops, config.frozen) if peak_flops else None
        due = record["step"] % config.log.every_steps == 0 or record["step"] in (run.first + 1, config.train.steps)
        console.step(record, utilisation, due)

    run.on("record", publish)


def peak_flops_of(trainer: Any) -> float | None:
    """Dense peak of this chip in the compute dtype, in FLOP/s; None for an unknown chip."""
    gpu = gpu_from_device_kind(trainer.mesh.devices.flat[0].device_kind)
    return gpu.peak_flops(trainer.config.model.compute_dtype) if gpu else None
