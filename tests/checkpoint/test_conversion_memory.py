"""A conversion needs memory for one tensor, independent of the model's size."""

import subprocess
import sys

import numpy as np
import pytest
from golden.weights import shapes_of_theirs
from hf_folders import DTYPES, HUB, model_of, write_folder

from jaxllm.data.tokenizer import save_byte_tokenizer

LARGE = {
    **HUB,
    "vocab_size": 16_000,
    "hidden_size": 2048,
    "intermediate_size": 17_408,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
"""1.2 GB in bfloat16. The largest tensors have 71 MB, and they are transposed."""

BUFFERS = 135e6
"""Bytes beside the imports and the largest tensor. Conversions took 94 to 100 MB, with three tensors at once 175 MB."""

CHILD = """
import sys
from jaxllm.weights.gguf_convert import to_gguf
from jaxllm.weights.hf_convert import from_hf, to_hf
def peak():
    # Not ru_maxrss, which a child inherits from its parent.
    return next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
imports = peak()
{"from_hf": from_hf, "to_hf": to_hf, "to_gguf": to_gguf}[sys.argv[1]](*sys.argv[2:])
print(imports, peak())
"""


@pytest.fixture
def large_folder(tmp_path):
    noise = np.random.default_rng(0).standard_normal(2**20).astype(DTYPES["BF16"])
    weights = {name: np.resize(noise, shape) for name, shape in shapes_of_theirs(model_of(LARGE)).items()}
    save_byte_tokenizer(folder := write_folder(tmp_path / "hf", LARGE, weights, shards=7))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_the_largest_tensor(large_folder, tmp_path):
    total = sum(path.stat().st_size for path in large_folder.iterdir())
    assert total > 1.2e9
    largest = 2 * 2048 * LARGE["intermediate_size"]
    ours, file = tmp_path / "ours", tmp_path / "model.gguf"
    ways = (("from_hf", large_folder, ours), ("to_hf", ours, tmp_path / "back"), ("to_gguf", ours, file))
    for way, source, target in ways:
        command = [sys.executable, "-c", CHILD, way, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
        imports, peak = (1024 * int(word) for word in done.stdout.split())
        print(f"{way}: {peak / 1e6:.0f} MB for {total / 1e9:.2f} GB, {imports / 1e6:.0f} MB of them imports")
        assert peak < imports + largest + BUFFERS
