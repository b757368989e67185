"""safetensors files: partial reads touch only the needed bytes, and errors describe the damage."""

import json

import ml_dtypes
import numpy as np
import pytest
from hf_folders import read_file, write_file

from jaxllm.config import ConfigError
from jaxllm.weights.safetensors import TensorFile, new_file


@pytest.fixture
def array():
    return np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)


@pytest.fixture
def counted(monkeypatch):
    """Number of bytes that are read for values."""
    seen = []
    plain = TensorFile.read_into
    monkeypatch.setattr(TensorFile, "read_into", lambda self, row, offset: (seen.append(row.size), plain(self, row, offset))[1])
    return seen


BOXES = [
    ((0, 4), (0, 6), (0, 5)),
    ((1, 3), (0, 6), (0, 5)),
    ((1, 3), (2, 5), (0, 5)),
    ((0, 4), (2, 5), (1, 2)),
    ((2, 3), (5, 6), (4, 5)),
    ((2, 2), (0, 6), (0, 5)),
]


@pytest.mark.parametrize("box", BOXES)
def test_a_box_is_read_by_its_own_bytes(box, array, tmp_path, counted):
    write_file(tmp_path / "a", {"other": np.ones(3, np.float32), "x": array})
    tensor = TensorFile(tmp_path / "a").tensors["x"]
    counted.clear()
    found = tensor.read(box)
    np.testing.assert_array_equal(found, array[tuple(slice(*span) for span in box)])
    assert sum(counted) == found.nbytes


def test_runs_of_bytes_are_as_long_as_they_can_be(array, tmp_path, counted):
    write_file(tmp_path / "a", {"x": array})
    tensor = TensorFile(tmp_path / "a").tensors["x"]
    for box, reads in (((1, 3), (0, 6), (0, 5)), 1), (((1, 3), (2, 5), (0, 5)), 2), (((1, 3), (2, 5), (0, 2)), 6):
        counted.clear()
        tensor.read(box)
        assert len(counted) == reads


def test_a_box_may_be_meant_in_another_shape(array, tmp_path):
    write_file(tmp_path / "a", {"x": array})
    found = TensorFile(tmp_path / "a").tensors["x"].read([(1, 3), (0, 2)], (24, 5))
    np.testing.assert_array_equal(found, array.reshape(24, 5)[1:3, :2])


def test_what_is_written_in_pieces_others_read(array, tmp_path):
    half = array[..., 0].astype(ml_dtypes.bfloat16)
    tensors = {"half": (half.dtype, half.shape), "x": (array.dtype, array.shape)}
    made = new_file(tmp_path / "a", tensors, {"format": "pt"})
    made["x"].write(array[2:], first=2 * 30)
    made["half"].write(half)
    made["x"].write(array[:2])
    for found in (read_file(tmp_path / "a"), pytest.importorskip("safetensors.numpy").load_file(tmp_path / "a")):
        np.testing.assert_array_equal(found["x"], array)
        np.testing.assert_array_equal(np.asarray(found["half"]).view(np.uint16), half.view(np.uint16))


def edited(path, change):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.write_bytes(b"abc"), "it has 3 bytes, too few for a header"),
        (lambda path: path.write_bytes(b"\xff" * 100), "its header claims"),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"{{{{"), "not the JSON of a safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "it is truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "and its tensors end at"),
        (lambda path: edited(path, lambda h: h["x"].update(shape=[4, 6, 4])), r"does not match F32 of shape \[4, 6, 4\]"),
        (lambda path: edited(path, lambda h: h["x"].update(data_offsets=[16, 496])), "does not begin where"),
        (lambda path: edited(path, lambda h: h["x"].pop("dtype")), "not the JSON of a safetensors file"),
        (lambda path: path.unlink(), "No such file or directory"),
    ],
)
def test_a_damaged_file_is_named_with_the_reason(spoil, sentence, array, tmp_path):
    write_file(tmp_path / "shard", {"other": np.ones(3, np.float32), "x": array})
    spoil(tmp_path / "shard")
    with pytest.raises(ConfigError, match=rf"shard (is damaged|cannot be read) \(.*{sentence}"):
        TensorFile(tmp_path / "shard")
