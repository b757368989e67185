"""Held-out loss during a run and at its end: cross-entropy of text, or DPO's loss of pairs (train/dpo.py)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.cluster import distributed, progress
from jaxllm.config import ConfigError
from jaxllm.data.loader import PackedDocuments, SampleStream
from jaxllm.data.manifest import read_npy, sync
from jaxllm.json_lines import read_lines
from jaxllm.mesh.axes import CONTEXT
from jaxllm.parallel.device_batches import evaluated_microbatches, put_global_batch
from jaxllm.parallel.zigzag import inverse
from jaxllm.run.hooks import Moment, Run, is_multiple
from jaxllm.run.memory_check import is_out_of_memory
from jaxllm.run.metrics import Record
from jaxllm.terminal import progress_shown
from jaxllm.untrusted import RefusedInput, reason_of

FINAL_EVAL_TOKENS = 2**24
"""Tokens per source in the final evaluation, because a hundredth of a large corpus would take days."""


class Evaluation(NamedTuple):
    """Losses on held-out text."""

    loss: float
    """Nats per token; of pairs, nats per pair."""
    tokens: int
    """Number of scored tokens; of pairs, their number."""
    by_source: dict[str, float]
    """The loss of each source of a mixture."""
    accuracy: float | None = None
    """Share of pairs whose chosen answer gained more log-probability over the reference than the rejected; None for text."""


def evaluate(
    trainer: Any,
    max_batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    show: Callable[..., None] = lambda *_: None,
) -> Evaluation | None:
    """Held-out loss of the present state on max_batches per source (of parallel.pipe microbatches), or on all. Returns None if
    `stop`, equal on all processes, returns True after up to four batches. `show` is told ("evaluation", of these groups done,
    of all).

    Raises:
      ConfigError: nothing is held out.
    """
    config = trainer.config
    batch, together = (count * config.microbatch_rows for count in (config.parallel.pipe, evaluated_microbatches(config)))
    score = _pairs if config.train.loss == "dpo" else _text
    sums: dict[str, np.ndarray] = {}
    most = sys.maxsize if max_batches is None else max_batches * batch
    batches = [range(0, min(source.packing.num_samples, most), together) for source in trainer.data.held_out]
    done, count = 0, sum(map(len, batches))
    with jax.set_mesh(trainer.mesh):
        for number, source in enumerate(trainer.data.held_out):
            # In float64, because a float32 sum over a million tokens would lose its last digits.
            total, pending = np.zeros(3), (0, 0, 0)
            for first in batches[number]:
                # Each batch counts as progress for the watchdog, because an evaluation may take hours.
                with progress.phase("evaluate"):
                    # One behind, so that a batch is read while the devices score the one before it.
                    samples = first + np.arange(together)
                    # Numbers past the last sample give empty rows.
                    samples = np.where(samples < batches[number].stop, samples, source.packing.num_samples)
                    before, pending = pending, score(trainer, number, source, samples)
                    total += jax.device_get(before)
                show("evaluation", done := done + 1, count)
                if stop():
                    return None
            with progress.phase("evaluate"):
                sums[source.name] = total + jax.device_get(pending)
    loss, count, right = sum(sums.values(), start=np.zeros(3))
    if not count:
        raise ConfigError("Nothing is held out to evaluate on: set data.held_out_fraction above 0, or give more files.")
    by_source = {name: float(total[0] / total[1]) for name, total in sums.items() if total[1]}
    return Evaluation(float(loss / count), int(count), by_source, float(right / count) if score is _pairs else None)


def reference_of(trainer: Any) -> Reference:
    """The log-probabilities of all pairs, by the present weights."""
    parts = trainer.stream.sources, trainer.data.held_out
    with jax.set_mesh(trainer.mesh), progress_shown(visible=distributed.is_main_process()) as show:
        found = [[log_p(trainer, each, np.arange(each.packing.num_samples), show) for each in part] for part in parts]
    return Reference(*found)


def token_losses(
    trainer: Any, source: PackedDocuments, samples: np.ndarray, show: Callable[..., None] = lambda *_: None
) -> np.ndarray:
    """-log p of each target of these samples, float32 [samples, S], on every process."""
    config = trainer.config
    M, R, S = evaluated_microbatches(config), config.microbatch_rows, config.train.sequence_length
    padded = np.concatenate([samples, np.full(-len(samples) % (M * R), source.packing.num_samples)])
    found, batches = [], padded.reshape(-1, M, R)
    for numbers in batches:
        with progress.phase("evaluate"):
            batch = put_global_batch(trainer.mesh, source.in_order, numbers, S)
            found.append(np.asarray(trainer.programs.token_losses(trainer.state.params, batch)).reshape(M * R, S))
        show(f"reference of {source.name}", len(found), len(batches))
    return np.concatenate(found)[: len(samples), inverse(S, trainer.mesh.shape[CONTEXT])]


def _text(trainer: Any, number: int, source: PackedDocuments, samples: np.ndarray) -> tuple[jax.Array, jax.Array, int]:
    rows, S = samples.reshape(-1, trainer.config.microbatch_rows), trainer.config.train.sequence_length
    batch = put_global_batch(trainer.mesh, source.in_order, rows, S)
    return *trainer.programs.loss_sum(trainer.state.params, batch), 0


def _pairs(trainer: Any, number: int, source: PackedDocuments, samples: np.ndarray) -> np.ndarray:
    """(sum of losses, pairs, pairs whose chosen answer has gained more than the rejected), float64 [3]"""
    samples = samples[samples < source.packing.num_samples]
    # NaN where there is no text.
    ratios = log_p(trainer, source, samples).astype(np.float64) - trainer.reference.held_out[number][samples]
    margins = trainer.config.train.dpo_beta * (ratios[:, ::2] - ratios[:, 1::2])
    margins = margins[~np.isnan(margins)]
    return np.array([np.logaddexp(0.0, -margins).sum(), len(margins), (margins > 0).sum()])


def by_source(found: Evaluation) -> str:
    several = len(found.by_source) > 1
    return " (" + ", ".join(f"{name} {loss:.4f}" for name, loss in found.by_source.items()) + ")" if several else ""


def register(run: Run) -> None:
    """Evaluates by train.eval_every_steps, and at the end on all held-out text."""
    train = run.trainer.config.train

    def evaluate(moment: Moment) -> None:
        found = record_evaluation(run, run.write, train.eval_batches)
        if found is None:
            run.stop(run.signals.agreed_signal())
        else:
            run.console.say(f"step {moment.step}  held-out loss {found.loss:.4f}{by_source(found)}")

    def end() -> None:
        run.trainer.stopped_by = run.trainer.stopped_by or conclude(run)

    run.when(lambda moment: not moment.ends and is_multiple(moment.step, train.eval_every_steps), evaluate, name="evaluate")
    run.on("ended", end)


def record_evaluation(run: Run, write: Callable[[Record], None], max_batches: int | None = None) -> Evaluation | None:
    """Evaluates, and writes eval_loss, for a mixture also per source. Returns None if a signal interrupts it."""
    trainer = run.trainer
    found = trainer.evaluate(max_batches, lambda: run.signals.agreed_signal() is not None, run.console.progress)
    if found is None:
        return None
    record: Record = {"step": trainer.step, "eval_loss": found.loss}
    if found.accuracy is not None:
        record["eval_accuracy"] = found.accuracy
    if len(found.by_source) > 1:
        record |= {f"eval_loss/{name}": loss for name, loss in found.by_source.items()}
    write(record)
    return found


def conclude(run: Run) -> str | None:
    """Prints the loss over all held-out text, n-gram baselines on the same split, and a sample. Returns the signal that stopped
    the evaluation, or None.
    """
    trainer, console = run.trainer, run.console
    data, unit, config = trainer.data, trainer.data.unit, trainer.config
    if data.held_out_tokens > 1:
        batch_tokens = config.microbatch_rows * config.parallel.pipe * config.train.sequence_length
        # A repeated start with nothing to train has its evaluation line already.
        known = distributed.broadcast("yes" if has_evaluation(run.folder / "metrics.jsonl", trainer.step) else "")
        write = (lambda _: None) if known else run.write
        found = record_evaluation(run, write, -(-FINAL_EVAL_TOKENS // batch_tokens))
        if found is None:
            return run.signals.agreed_signal()
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
        from jaxllm.inference.generate import printable, sample

        begun = config.log.sample_prompt
        prompt = data.tokenizer.encode(begun, parse_special=True)
        if prompt.max(initial=0) >= config.model.vocab_size:
            console.say("no sample: log.sample_prompt has a token for which the model has no row")
            return None
        try:
            new = sample(trainer.model, prompt, length, window=config.train.sequence_length)
        except jax.errors.JaxRuntimeError as error:
            # Where zeros pad what ZeRO shards, each device needs all weights (parameters.without_padding).
            if not is_out_of_memory(error):
                raise
            console.say("no sample: the whole network does not fit on a device beside the training state")
            return None
        for line in ("sample:", *(begun + printable(data.tokenizer.decode(new))).expandtabs().split("\n")):
            console.say(line)
    return None


def ngram_baseline(train: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Held-out cross entropy of an n-gram model of bytes, in nats per byte.

    Interpolated Witten-Bell smoothing (Witten and Bell, 1991; Chen and Goodman, 1998, section 2.5):

        p(b | h) = (count(h b) + distinct(h) p(b | h')) / (count(h) + distinct(h))

    with distinct(h) the number of different bytes seen after h, and h' the context shortened by one byte. The single-byte
    model backs off to 1/256. This is a proper distribution without parameters, so no held-out text is needed to tune it.

    Args:
      train: uint8 [bytes], the text that is counted.
      held_out: uint8 [bytes], at least one byte. All bytes are scored; the first order - 1 of them have a shorter context.
      order: length of an n-gram in bytes, such as 3 (trigram). Counts are dense arrays of 256**order 8-byte integers: 128 MiB
        for trigrams, 32 GiB for order 4.
    """
    if not len(held_out):
        raise ValueError("There is no held-out text to score: raise data.held_out_fraction.")
    probability = np.full(len(held_out), 1 / 256)
    for n in range(1, order + 1):
        counts = np.bincount(_ngrams(train, n), minlength=256**n).reshape(-1, 256)
        total, distinct = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
        ngram = _ngrams(held_out, n)
        context = ngram // 256
        lower = probability[n - 1 :]
        # For a context that was never seen, keep the probability of the shorter context.
        np.divide(
            counts.reshape(-1)[ngram] + distinct[context] * lower,
            total[context] + distinct[context],
            out=lower,
            where=total[context] > 0,
        )
    return float(-np.log(probability).mean())


def _ngrams(text: np.ndarray, n: int) -> np.ndarray:
    """Encodes each run of n bytes as one base-256 number: int64 [bytes - n + 1]."""
    length = max(len(text) - n + 1, 0)
    codes = np.zeros(length, np.int64)
    for i in range(n):
        codes = codes * 256 + text[i : i + length]
    return codes


FILE = "reference.npy"


def log_p(
    trainer: Any, source: PackedDocuments, samples: np.ndarray, show: Callable[..., None] = lambda *_: None
) -> np.ndarray:
    """log p of the answer in each text of these samples, float32 [samples, texts of a sample]; NaN where there is no text."""
    rows, losses = source.in_order(samples.tolist()), token_losses(trainer, source, samples, show)
    segments, mask = rows["segments"], rows["mask"]
    # The first column is free space. A piece has two texts at most.
    sums, counts = np.zeros((2, len(samples), 1 + 2 * source.packing.most_pieces))
    at = (np.arange(len(samples))[:, None], segments)
    np.add.at(sums, at, np.where(mask, -losses, 0.0))
    np.add.at(counts, at, mask)
    return np.where(counts > 0, sums, np.nan)[:, 1:].astype(np.float32)


@dataclass(frozen=True)
class Reference:
    """log p_ref of each text: what `log_p` returns for all samples of each source."""

    train: list[np.ndarray]
    held_out: list[np.ndarray]

    def save(self, run_dir: Path) -> None:
        """Writes FILE atomically."""
        aside = run_dir / f".{FILE}"
        with aside.open("wb") as file:
            np.save(file, np.concatenate([sums.reshape(-1) for sums in (*self.train, *self.held_out)]))
            sync(file)
        aside.replace(run_dir / FILE)

    @classmethod
    def load(cls, run_dir: Path, train: Sequence[PackedDocuments], held_out: Sequence[PackedDocuments]) -> Reference:
        """The reference of a run with this text; ConfigError if FILE is missing, or of another text."""
        path, packings = run_dir / FILE, [each.packing for each in (*train, *held_out)]
        shapes = [(packing.num_samples, 2 * packing.most_pieces) for packing in packings]
        try:
            flat = read_npy(path, np.float32)
            if len(flat) != sum(map(math.prod, shapes)):
                raise RefusedInput("it is that of another text")
        except (OSError, RefusedInput) as error:
            raise ConfigError(
                f"{path}, which holds the reference's log-probabilities, cannot be used ({reason_of(error)}): restore it, or "
                f"begin again in another run.dir."
            ) from None
        parts = np.split(flat, np.cumsum(list(map(math.prod, shapes)))[:-1])
        every = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return cls(every[: len(train)], every[len(train) :])

    def samples(self, stream: SampleStream, ks: np.ndarray) -> dict[str, np.ndarray]:
        """Samples ks of the training stream, with `reference`."""
        batch, places = stream.samples(ks), [stream.locate(int(k)) for k in np.asarray(ks)]
        segments, begins = batch["segments"], (batch["positions"] == 0) & (batch["segments"] > 0)
        # Sources may have different numbers of texts in a sample.
        sums = [self.train[source][sample] for source, sample, _ in places]
        found = np.stack([own[np.maximum(numbers - 1, 0)] for own, numbers in zip(sums, segments, strict=True)])
        batch["reference"] = np.where(begins, found, np.float32(0.0))
        return batch


def keep_reference(run: Run) -> None:
    """Stores what the reference says of the text before the first step, and reads it when the run resumes."""
    trainer = run.trainer
    if trainer.config.train.loss != "dpo":
        return
    if trainer.reference is None:
        trainer.reference = Reference.load(run.folder, trainer.stream.sources, trainer.data.held_out)
    elif distributed.is_main_process():
        run.require()
        trainer.reference.save(run.folder)


def has_evaluation(metrics: Path, step: int) -> bool:
    return any("eval_loss" in record and record["step"] == step for _, record in read_lines(metrics, "eval_loss"))
