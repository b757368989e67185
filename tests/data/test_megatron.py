import re
import struct

import numpy as np
import pytest
from megatron_files import CODES, write

from jaxllm.config import ConfigError
from jaxllm.data.disk_documents import MegatronDocuments

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[]], [list(range(7, 100))]]


def whole(documents):
    n = len(documents.lengths)
    return documents.read(np.arange(n), np.zeros(n, int), documents.lengths)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_documents_are_the_sequences_between_bounds(tmp_path, dtype, suffix):
    prefix = write(tmp_path / "text_document", DOCUMENTS, dtype)
    documents = MegatronDocuments(f"{prefix}{suffix}")
    assert documents.lengths.tolist() == [3, 3, 0, 93]
    assert [ids.tolist() for ids in whole(documents)] == [[1, 2, 3], [4, 5, 6], [], list(range(7, 100))]
    (part,) = documents.read(np.array([3]), np.array([10]), np.array([13]))
    assert part.tolist() == [17, 18, 19]


def test_keys_scatter_evenly_and_do_not_move(tmp_path):
    many = MegatronDocuments(write(tmp_path / "many", [[[1]]] * 2000))
    few = MegatronDocuments(write(tmp_path / "few", [[[1]]] * 500))
    assert (many.keys[:500] == few.keys).all()
    assert len(set(many.keys.tolist())) == 2000
    share = (many.keys / 2**64 < 0.1).mean()
    assert abs(share - 0.1) < 3 * np.sqrt(0.1 * 0.9 / 2000)


def test_another_order_has_another_fingerprint(tmp_path):
    one, two = (MegatronDocuments(write(tmp_path / f"{i}", DOCUMENTS[::step])) for i, step in enumerate((1, -1)))
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == MegatronDocuments(write(tmp_path / "again", DOCUMENTS)).fingerprint


class Named:
    """The part of a tokenizer that fingerprints read."""

    def __init__(self, sha256):
        self.sha256 = sha256


@pytest.mark.parametrize("tokens", [10, 1_000_000])
def test_other_ids_of_the_same_lengths_have_another_fingerprint(tmp_path, tokens):
    """A small file is hashed completely; of a large one the first and last block, and one between."""
    ids = np.zeros(tokens, np.uint16)
    prints = set()
    # Of 65 equal steps the 13th ends at a fifth of the file.
    for number, place in enumerate((None, 0, (2 * tokens - 4096) * 13 // 65 // 2 + 1, tokens - 1)):
        changed = ids.copy()
        if place is not None:
            changed[max(place, 0)] = number
        prefix = write(tmp_path / str(number), [[changed]])
        prints.add(MegatronDocuments(prefix).fingerprint)
    assert len(prints) == 4
    assert {(tmp_path / f"{number}.idx").read_bytes() for number in range(4)} == {(tmp_path / "0.idx").read_bytes()}


def test_a_fingerprint_knows_the_tokenizer(tmp_path):
    prefix = write(tmp_path / "x", DOCUMENTS)
    prints = [MegatronDocuments(prefix, tokenizer).fingerprint for tokenizer in (None, Named("a"), Named("b"), Named("a"))]
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


def cut_index(index, tokens):
    index.write_bytes(index.read_bytes()[:-5])


def empty_index(index, tokens):
    index.write_bytes(b"")


def cut_tokens(index, tokens):
    tokens.write_bytes(tokens.read_bytes()[:-2])


def other_format(index, tokens):
    index.write_bytes(b"TNTIDX\x00\x00" + index.read_bytes()[8:])


def floats(index, tokens):
    raw = bytearray(index.read_bytes())
    raw[17] = 7
    index.write_bytes(raw)


def out_of_order(index, tokens):
    raw = bytearray(index.read_bytes())
    raw[34] = 2  # the length of the first sequence, one token less
    index.write_bytes(raw)


def bounds_that_wrap(index, tokens):
    raw = bytearray(index.read_bytes())
    count, bounds = struct.unpack_from("<QQ", raw, 18)
    # Differences of 64 bits would all seem to be positive.
    wrapped = [0, *[2**63 - 1] * (bounds - 3), count + 1 - 2**63, count]
    struct.pack_into(f"<{bounds}q", raw, len(raw) - 8 * bounds, *wrapped)
    index.write_bytes(raw)


def no_tokens(index, tokens):
    tokens.unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut_index, r"x\.idx has \d+ bytes and should have \d+: the file is truncated; copy it again\.$"),
        (empty_index, r"x\.idx has 0 bytes, fewer than an index header: the file is truncated; copy it again\.$"),
        (cut_tokens, r"x\.bin has 196 bytes and x\.idx lists 198: the file is truncated or belongs to another index"),
        (other_format, r"x\.idx is not an index in Megatron-LM's current format: make it again"),
        (floats, r"x\.idx holds ids of type 7, which is not an integer type: make it again"),
        (out_of_order, r"x\.idx does not list contiguous sequences: make it again"),
        (bounds_that_wrap, r"x\.idx does not list contiguous sequences: make it again"),
        (no_tokens, r"There is no file .*x\.bin: data\.paths names Megatron-LM files without their \.bin or \.idx\.$"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, damage, sentence):
    prefix = write(tmp_path / "x", DOCUMENTS)
    damage(tmp_path / "x.idx", tmp_path / "x.bin")
    with pytest.raises(ConfigError) as error:
        MegatronDocuments(prefix)
    assert re.search(sentence, str(error.value)), str(error.value)


@pytest.mark.parametrize("documents", [[], [[[]]]])
def test_an_empty_data_set_is_refused(tmp_path, documents):
    with pytest.raises(ConfigError, match=r"x\.idx lists no documents: name files that contain documents\.$"):
        MegatronDocuments(write(tmp_path / "x", documents))
