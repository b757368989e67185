"""The end of a run: held-out loss, baselines for comparison, and a sample. Also records evaluations during training."""

from __future__ import annotations

import math
from pathlib import Path

import jax

from jaxllm.data.baselines import ngram_baseline
from jaxllm.inference.generate import sample
from jaxllm.inference.text_stream import printable
from jaxllm.train.console import Console
from jaxllm.train.evaluation import Evaluation
from jaxllm.train.memory_check import is_out_of_memory
from jaxllm.train.messages import by_source
from jaxllm.train.metrics import Record, Sink
from jaxllm.train.run_dir import has_evaluation
from jaxllm.train.signals import SignalHandler
from jaxllm.train.trainer import Trainer

FINAL_EVAL_TOKENS = 2**24
"""Tokens per source in the final evaluation, because a hundredth of a large corpus would take days."""


def record_evaluation(
    trainer: Trainer, sinks: list[Sink], signals: SignalHandler, max_batches: int | None = None
) -> Evaluation | None:
    """Evaluates, and writes eval_loss, for a mixture also per source, to the sinks. Returns None if a signal interrupts it."""
    found = trainer.evaluate(max_batches, stop=lambda: signals.agreed_signal() is not None)
    if found is None:
        return None
    record: Record = {"step": trainer.step, "eval_loss": found.loss}
    if found.accuracy is not None:
        record["eval_accuracy"] = found.accuracy
    if len(found.by_source) > 1:
        record |= {f"eval_loss/{name}": loss for name, loss in found.by_source.items()}
    for sink in sinks:
        sink.write(record)
    return found


def conclude(trainer: Trainer, signals: SignalHandler, console: Console, sinks: list[Sink]) -> str | None:
    """Prints the loss over all held-out text, n-gram baselines on the same split, and a sample. Returns the signal that stopped
    the evaluation, or None.
    """
    data, unit, config = trainer.data, trainer.data.unit, trainer.config
    if data.held_out_tokens > 1:
        batch_tokens = config.microbatch_rows * config.parallel.pipe * config.train.sequence_length
        # A repeated start with nothing to train has its evaluation line already.
        known = has_evaluation(Path(config.run.dir) / "metrics.jsonl", trainer.step)
        found = record_evaluation(trainer, [] if known else sinks, signals, -(-FINAL_EVAL_TOKENS // batch_tokens))
        if found is None:
            return signals.agreed_signal()
        (source, *_) = data.sources
        for order, name in ((2, "bigrams"), (3, "trigrams")) if config.log.baselines else ():
            baseline = ngram_baseline(source.text(source.train), source.text(source.held_out), order)
            console.say(f"baseline: byte {name} {baseline:.3f} nats per byte ({baseline / math.log(2):.3f} bits)")
        if found.accuracy is not None:
            gained = f"the chosen answer gained more in {found.accuracy:.1%} of {found.tokens:,} held-out pairs"
            console.say(f"held-out loss {found.loss:.3f} nats per pair; {gained}{by_source(found)}")
            return None
        documents = sum(len(source.held_out) for source in data.sources)
        console.say(f"{found.tokens:,} held-out {unit}s scored in {documents:,} document{'s' if documents > 1 else ''}")
        console.say(f"held-out loss {found.loss:.3f} nats per {unit} ({found.loss / math.log(2):.3f} bits){by_source(found)}")
    if (length := config.log.sample_tokens) and data.tokenizer is not None:
        begun = config.log.sample_prompt
        try:
            new = sample(trainer.model, data.tokenizer.encode(begun), length, window=config.train.sequence_length)
        except jax.errors.JaxRuntimeError as error:
            # Where zeros pad what ZeRO shards, each device needs all weights (parameters.without_padding).
            if not is_out_of_memory(error):
                raise
            console.say("no sample: the whole network does not fit on a device beside the training state")
            return None
        console.say("sample:\n" + begun + printable(data.tokenizer.decode(new)))
    return None
