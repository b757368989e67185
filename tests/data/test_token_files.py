"""data.source=tokens: files of ids alone, as nanoGPT and llm.c write them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data.disk_documents import TokenFile
from jaxllm.data.sources import load_data

END = SimpleNamespace(sha256="of a tokenizer", eos_id=9, bos_id=7)
OTHER = "is compressed, a NumPy file or has ids of 8 bytes: unpack it, or write the ids alone, as uint16 or uint32"


def read(documents):
    n = len(documents.lengths)
    return [ids.tolist() for ids in documents.read(np.arange(n), np.zeros(n, int), documents.lengths)]


def write(path, ids, dtype=np.uint16, header=()):
    first = np.array([*header, *[0] * (256 - len(header))] if header else [], "<i4")
    path.write_bytes(first.tobytes() + np.array(ids, dtype).tobytes())
    return str(path)


@pytest.mark.parametrize(
    ("ids", "documents"),
    [
        ([1, 2, 9, 3, 9], [[1, 2, 9], [3, 9]]),
        ([1, 9, 9, 3], [[1, 9], [9], [3]]),
        ([9, 1, 2, 9, 3], [[9, 1, 2], [9, 3]]),  # llm.c's begin with it
        ([1, 2], [[1, 2]]),
        ([9], [[9]]),
    ],
)
def test_a_document_ends_with_the_end_of_text_or_begins_with_it(tmp_path, ids, documents, monkeypatch):
    path = write(tmp_path / "train.bin", ids)
    monkeypatch.setattr("jaxllm.data.disk_documents._SCANNED", 2)
    assert read(TokenFile(path, 100, END)) == documents
    assert read(TokenFile(path, 100)) == [ids]


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, np.uint16), (20240801, np.uint32)])
def test_llm_c_s_header_says_the_type(tmp_path, magic, dtype):
    path = write(tmp_path / "train.bin", [5, 6, 7], dtype, header=(magic, 1, 3))
    assert read(TokenFile(path, 100_000)) == [[5, 6, 7]]
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:-2])
    with pytest.raises(
        ConfigError, match=r"train\.bin has \d+ bytes of ids, and its header counts 3 of \d bytes: the file is trunc"
    ):
        TokenFile(path, 100_000)


@pytest.mark.parametrize(("magic", "mark"), [(20240520, 9), (20240801, 7)])
def test_a_document_of_llm_c_begins_with_its_mark(tmp_path, magic, mark):
    """Also in a file whose first document began in another."""
    ids = [1, 2, mark, 3, mark, 4, 5]
    dtype = np.uint16 if mark == 9 else np.uint32
    path = write(tmp_path / "train.bin", ids, dtype, header=(magic, 1, len(ids)))
    assert read(TokenFile(path, 100, END)) == [[1, 2], [mark, 3], [mark, 4, 5]]


def test_another_name_holds_out_others_and_has_another_fingerprint(tmp_path):
    one, two = (TokenFile(write(tmp_path / name, [1, 2, 9, 3]), 100, END) for name in ("a", "b"))
    assert read(one) == read(two)
    assert (one.keys != two.keys).all()
    assert one.fingerprint != two.fingerprint


def test_without_a_header_the_vocabulary_or_the_ids_say_it(tmp_path):
    ids = [1, 2, 300, 4]
    assert read(TokenFile(write(tmp_path / "2", ids), 2**16)) == [ids]
    assert read(TokenFile(write(tmp_path / "4", ids, np.uint32), 2**16 + 1)) == [ids]
    assert read(TokenFile(write(tmp_path / "int", ids, np.int32), 2**16)) == [ids]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "has 0 bytes of ids, and an id has 2: the file is truncated or no file of ids."),
        (b"abc", "has 3 bytes of ids, and an id has 2: the file is truncated or no file of ids."),
        (b"\x93NUMPY\x01\x00", OTHER),
        (b"\x1f\x8b\x08\x00", OTHER),
        (np.array([1, 2, 0, 4]).tobytes(), OTHER),
    ],
)
def test_other_files_are_refused(tmp_path, content, error):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'x.bin'} {error}")):
        TokenFile(str(tmp_path / "x.bin"), 100)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\): fix it or leave it out of data\.paths\.$"):
        TokenFile(str(tmp_path), 100)


def test_files_that_match_are_one_source_and_some_are_held_out(tmp_path, tiny_config, monkeypatch):
    # Names below the working directory decide what is held out.
    monkeypatch.chdir(tmp_path)
    shards = [[number * 10 + k for k in range(10)] for number in range(20)]
    for number, ids in enumerate(shards):
        write(tmp_path / f"shard_{number:02}.bin", ids)

    def load(pattern):
        return load_data(
            tiny_config(
                "data.source=tokens", f"data.paths=[{pattern}]", "data.held_out_fraction=0.3", "train.sequence_length=8"
            )
        )

    data = load("shard_*.bin")
    (source,) = data.sources
    assert read(source.documents) == shards
    assert 0 < len(source.held_out) < 20
    assert len(set(source.documents.keys.tolist())) == 20
    assert load("shard_1*.bin").fingerprint != data.fingerprint


def test_too_many_entries_are_refused(tmp_path, tiny_config, monkeypatch):
    for number in range(5):
        write(tmp_path / f"{number}.bin", [1, 2])
    config = tiny_config("data.source=tokens", f"data.paths=[{tmp_path}/*.bin]")
    monkeypatch.setattr("jaxllm.data.records.MOST_ENTRIES", 3)
    with pytest.raises(
        ConfigError, match=r"^data\.paths is too much to read at the start of each run \(.*\): name a smaller f"
    ):
        load_data(config)


def test_the_config_says_what_is_missing(tiny_config):
    with pytest.raises(ConfigError, match=r"^data\.source=tokens needs data\.paths: give files of ids or glob patterns\.$"):
        tiny_config("data.source=tokens", "data.paths=[]")
    with pytest.raises(ConfigError, match=r"^data\.paths: no file matches 'none/\*\.bin'; check the path"):
        tiny_config("data.source=tokens", "data.paths=[none/*.bin]")
