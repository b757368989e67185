"""Data that cannot be read is left out up to a share, by one rule for conversations, pairs and prepared texts."""

import json

import pytest

from jaxllm.config import ConfigError, DataConfig
from jaxllm.data import conversations
from jaxllm.data.conversations import read_conversations
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


def test_the_share_has_one_default(tmp_path):
    assert DataConfig().max_broken_share == BROKEN_SHARE
    with pytest.raises(ConfigError, match=r"--max-broken-share=2 is not valid: it should be from 0 to 1"):
        read("prepare", tmp_path, 1, 0, max_broken_share=2)


def test_only_the_first_reasons_are_kept():
    broken = conversations._Broken()
    for number in range(1000):
        broken.add(f"a.jsonl:{number}: not JSON")
    assert (broken.total, len(broken)) == (1000, conversations.BROKEN_SHOWN)
