"""Speed of the data pipeline: tokenising text into a prepared folder, and random reads from that folder.

    python benchmarks/data.py [--megabytes N] [--seconds S] [--json] [--quick]

The text is the source of Python's standard library as JSON lines, one file per line, repeated to the requested size. The
tokenizer is a byte-level BPE of 8,192 ids, trained on a part of it. Both are made in a temporary folder. Preparation is timed
for the command `jaxllm data prepare`, including the start of its processes. Samples are batches of 16 sequences of 2,048 tokens
as in a training run, made by one process from a folder in the page cache: from complete files, and from the same text in
documents of 400 characters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.disk_documents import PreparedDocuments
from jaxllm.data.loader import PackedDocuments, SampleStream, document_order
from jaxllm.data.prepare import prepare

VOCABULARY = 8192
SHARDS = 4
SEQUENCES, SEQUENCE_LENGTH = 16, 2048
SHORT = 400
"""Characters of a short document."""
PACKAGES = ("array-record", "numpy", "tokenizers")


def main() -> None:
    options = parse()
    megabytes, seconds = (0.5, 0.1) if options.quick else (options.megabytes, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), int(megabytes * 1e6), seconds)
    print(json.dumps(report, indent=2) if options.json else text(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40.0, help="megabytes of text to prepare (default 40)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of reading, each way (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="a trial with half a megabyte and a tenth of a second")
    return parser.parse_args()


def measure(folder: Path, size: int, seconds: float) -> dict[str, Any]:
    written = write_text(folder / "text.jsonl", size)
    train_tokenizer(folder)
    prepared = [measure_prepare(folder, workers) for workers in (1, 2)]
    write_text(folder / "short.jsonl", size // 4, SHORT)
    prepare([str(folder / "short.jsonl")], folder / "short", tokenizer=str(folder / "tokenizer"), workers=1, progress=False)
    return {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "text_bytes": written,
        "prepare": prepared,
        "samples": [
            measure_samples(folder / name, packing, seconds)
            for name in ("prepared-1", "short")
            for packing in ("concat", "best_fit")
        ],
    }


def measure_prepare(folder: Path, workers: int) -> dict[str, Any]:
    text = folder / "text.jsonl"
    shard_bytes = -(-text.stat().st_size // SHARDS)
    started = time.perf_counter()
    summary = prepare(
        [str(text)],
        folder / f"prepared-{workers}",
        tokenizer=str(folder / "tokenizer"),
        workers=workers,
        shard_bytes=shard_bytes,
        progress=False,
    )
    elapsed = time.perf_counter() - started
    return {
        "workers": workers,
        "seconds": elapsed,
        "tokens": summary.tokens,
        "tokens_per_s": summary.tokens / elapsed,
        "text_mb_per_s": summary.text_bytes / elapsed / 1e6,
        "bytes_per_token": sum(path.stat().st_size for path in Path(summary.folder).glob("tokens-*")) / summary.tokens,
    }


def measure_samples(folder: Path, packing: str, seconds: float) -> dict[str, Any]:
    """Times batches as a training run reads them: random documents, packed, with targets, positions and segments."""
    documents = PreparedDocuments(folder)
    order = document_order(np.arange(len(documents.lengths)), 0, 0)
    started = time.perf_counter()
    source = PackedDocuments("text", documents, order, SEQUENCE_LENGTH, packing, True, VOCABULARY)
    opening_s = time.perf_counter() - started
    stream, sequences = SampleStream([source], [1.0], seed=0), 0
    stream.samples(np.arange(SEQUENCES))
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not sequences:
        stream.samples(np.arange(sequences, sequences + SEQUENCES))
        sequences += SEQUENCES
    full = source.packing.num_tokens / source.packing.num_samples / SEQUENCE_LENGTH
    tokens = sequences * SEQUENCE_LENGTH
    return {
        "packing": packing,
        "documents": len(documents.lengths),
        "tokens_a_document": source.packing.num_tokens / len(documents.lengths),
        "tokens_per_s": tokens / elapsed,
        "seconds": elapsed,
        "filled": full,
        "packing_s": opening_s,
    }


def library_texts() -> Iterator[str]:
    """Yields sources of the standard library in a fixed order, repeated without end."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts))
    if not files:
        sys.exit(f"benchmarks/data.py: there is no Python source below {root}.")
    while True:
        for path in files:
            yield path.read_text(encoding="utf-8", errors="replace")


def write_text(file: Path, size: int, document: int | None = None) -> int:
    """Writes JSON lines with at least `size` bytes of text, in documents of the given length. Returns the number of bytes."""
    written = 0
    with open(file, "w", encoding="utf-8") as lines:
        for text in library_texts():
            for start in range(0, len(text), document or max(len(text), 1)):
                part = text[start : start + document] if document else text
                lines.write(json.dumps({"text": part}, ensure_ascii=False) + "\n")
                written += len(part.encode())
            if written >= size:
                return written
    raise AssertionError("unreachable: the texts never end")


def train_tokenizer(folder: Path) -> None:
    """Trains a byte-level BPE on at most 4 MB of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, size = [], 0
    with open(folder / "text.jsonl", encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size += len(line)
            if size > 4e6:
                break
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    (folder / "tokenizer").mkdir()
    bpe.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')


def text(report: dict[str, Any]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = [f"{machine}; {report['text_bytes'] / 1e6:.1f} MB of Python source"]
    lines += [f"{'':36}{'tokens/s':>12}{'text MB/s':>12}{'seconds':>10}"]
    for row in report["prepare"]:
        name = f"prepare, {row['workers']} worker{'s' if row['workers'] > 1 else ''}"
        lines.append(f"{name:36}{row['tokens_per_s']:12,.0f}{row['text_mb_per_s']:12.2f}{row['seconds']:10.2f}")
    for row in report["samples"]:
        name = f"{row['packing']}, {row['tokens_a_document']:,.0f} tokens a document"
        filled = f"{100 * row['filled']:.2f}% full; {row['documents']:,} documents packed in {row['packing_s']:.2f} s"
        lines.append(f"{name:36}{row['tokens_per_s']:12,.0f}{'':12}{row['seconds']:10.2f}  {filled}")
    lines.append(f"{report['prepare'][0]['bytes_per_token']:.2f} bytes a token on disk, indices included")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
