"""Data that cannot be read is left out up to a share, by one rule for conversations, pairs and prepared texts."""

import gzip
import json
from itertools import product
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxllm.config import ConfigError, DataConfig
from jaxllm.data import conversations
from jaxllm.data.conversations import read_conversations
from jaxllm.data.parts import zstd
from jaxllm.data.prepare import prepare
from jaxllm.data.records import BROKEN_SHARE
from jaxllm.data.tokenizer import load_tokenizer

GOOD = {
    "chat": {"prompt": "2+2=", "completion": "4"},
    "preferences": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "prepare": {"text": "law mesh"},
}


def read(kind, folder, good, bad, **options):
    """Number of the records that are left."""
    path = folder / f"{good}-{bad}-lines.jsonl"
    if not path.exists():
        path.write_text("no JSON\n" * bad + (json.dumps(GOOD[kind]) + "\n") * good)
    if kind == "prepare":
        return prepare([str(path)], folder / f"{path}.out", tokenizer="bytes", workers=1, progress=False, **options).documents
    found = read_conversations([str(path)], load_tokenizer("bytes"), None, pairs=kind == "preferences", **options)
    return len(found.lengths)


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_left_out_is_a_small_share_or_the_data_is_refused(kind, tmp_path, caplog):
    for good, bad in ((1, 1), (10, 10), (500, 10), (1980, 20)):
        assert read(kind, tmp_path, good, bad) == good
    for good, bad in ((1, 2), (71, 29), (100, 11), (1980, 21)):
        caplog.clear()
        with pytest.raises(ConfigError) as refused:
            read(kind, tmp_path, good, bad)
        said = str(refused.value)
        key = "--max-broken-share" if kind == "prepare" else "data.max_broken_share"
        assert f"{bad:,} of {good + bad:,} records of " in said
        assert "lines.jsonl:1: not JSON" in said
        share = float(said.partition(f"{key}=")[2].split()[0])
        # What the sentence says to set is enough, and the finished shards stay.
        assert read(kind, tmp_path, good, bad, max_broken_share=share) == good
    with pytest.raises(ConfigError, match=r"lines\.jsonl:1: not JSON"):
        read(kind, tmp_path, 5000, 1, max_broken_share=0)


def arrow(rows):
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue().to_pybytes()


def parquet(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=100)
    return sink.getvalue().to_pybytes()


def json_lines(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def damaged(content):
    """Its middle is lost, and Parquet's index at the end is not."""
    return content[: len(content) // 4] + b"\xff" * (len(content) // 2) + content[-len(content) // 4 :]


CUT = {
    "a.jsonl.gz": lambda rows: gzip.compress(json_lines(rows))[:-50],
    "a.jsonl.zst": lambda rows: damaged(zstd.compress(json_lines(rows))),
    "a.json": lambda rows: json.dumps(rows).encode()[:-50],
    "a.parquet": lambda rows: damaged(parquet(rows)),
    "a.arrow": lambda rows: damaged(arrow(rows)),
    "a.csv": lambda rows: ("text\n" + "".join(row["text"] + "\n" for row in rows) + '"b' + "\n" * 200_000).encode(),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*product(["prepare"], CUT), *product(["chat", "preferences"], [name for name in CUT if name[-1] not in "wv"])],
)
def test_files_that_are_cut_are_not_one_record(kind, name, tmp_path, monkeypatch):
    """How many more they held is unknown, and may be most of the data."""
    monkeypatch.setattr("jaxllm.data.records.LINE_BYTES", 100_000)
    random = Random(0)
    rows = [GOOD[kind] | {next(iter(GOOD[kind])): f"{random.getrandbits(400):x}"} for _ in range(500)]
    (tmp_path / name).write_bytes(CUT[name](rows))
    (tmp_path / "whole.jsonl").write_bytes(json_lines(rows))
    inputs = [str(tmp_path / name), str(tmp_path / "whole.jsonl")]

    def read(**options):
        if kind == "prepare":
            return prepare(inputs, tmp_path / "out", tokenizer="bytes", workers=1, progress=False, **options).documents
        found = read_conversations(inputs, load_tokenizer("bytes"), None, pairs=kind == "preferences", **options)
        return len(found.lengths)

    key = "--max-broken-share" if kind == "prepare" else "data.max_broken_share"
    with pytest.raises(
        ConfigError, match=rf"^\d\d% of .* cannot be read to the end, the first .*{name}.*: copy such"
    ) as refused:
        read()
    share = float(str(refused.value).partition(f"{key}=")[2].split()[0])
    assert 500 <= read(max_broken_share=share) < 1000 + (name == "a.csv")


def test_the_share_has_one_default(tmp_path):
    assert DataConfig().max_broken_share == BROKEN_SHARE
    with pytest.raises(ConfigError, match=r"--max-broken-share=2 is not valid: it should be from 0 to 1"):
        read("prepare", tmp_path, 1, 0, max_broken_share=2)


def test_only_the_first_reasons_are_kept():
    broken = conversations._Broken()
    for number in range(1000):
        broken.add(f"a.jsonl:{number}: not JSON")
    assert (broken.total, len(broken)) == (1000, conversations.BROKEN_SHOWN)
