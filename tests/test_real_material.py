"""The scripts that fetch real weights and conversations."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import real_material
import tokenizers

from jaxllm.data.tokenizer import load_tokenizer


def run(script, *arguments, **environment):
    command = [sys.executable, str(real_material.LAUNCH / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.parametrize("script", ["get_smollm2.py", "get_chatterbot.py"])
def test_without_a_network_there_is_one_sentence_and_nothing_else(script, tmp_path):
    pytest.importorskip("gguf")
    done = run(script, tmp_path / "new", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
    assert done.returncode == real_material.CANNOT_FETCH
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script.removesuffix('.py')}: pip cannot download ")
    assert line.endswith(": check the network and pip's settings, then try again.")
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="llama.cpp is fetched on Linux alone")
def test_llama_cpp_is_missed_in_one_sentence(tmp_path, monkeypatch):
    """Nobody answers at port 9."""
    monkeypatch.setattr(real_material, "CACHE", tmp_path)
    monkeypatch.setattr(real_material, "_missing", {})
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    reason = "npm cannot fetch node-llama-cpp: .*ECONNREFUSED" if shutil.which("npm") else "install Node.js 20 or newer"
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=reason):
            real_material.node_llama_cpp()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert real_material.npm_install(tmp_path / "new") == "llama.cpp comes from npm: install Node.js 20 or newer"
    assert not list(tmp_path.glob("node-llama-cpp-*[0-9]"))


@pytest.mark.parametrize("script", ["get_smollm2.py", "get_chatterbot.py"])
def test_what_is_there_is_not_overwritten(script, tmp_path):
    (tmp_path / "old").write_text("precious")
    done = run(script, tmp_path / "old")
    assert done.returncode == 2
    assert "exists already and nothing is overwritten" in done.stderr
    assert (tmp_path / "old").read_text() == "precious"


@pytest.mark.parametrize("script", ["get_smollm2.py", "get_chatterbot.py"])
def test_a_place_that_cannot_be_written_is_named(script, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "file").write_text("precious")
    done = run(script, tmp_path / "file" / "new")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path / 'file' / 'new'} cannot be written (" in line


def test_the_weights_are_those_that_transformers_reads_from_the_same_file(smollm2_folder):
    """Compares with the hash of a folder whose tensors were bit-equal to transformers 5.23's conversion of the GGUF."""
    with open(smollm2_folder / "model.safetensors", "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


def test_the_tokenizer_takes_digits_apart_and_gives_text_back(smollm2_folder):
    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer.encode("The capital of France is").tolist() == [504, 3575, 282, 4649, 314]
    assert len(tokenizer.encode("  2026")) == 5
    text = "été\n\tdef f(x): return x * 12  # 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    decoder = tokenizers.Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert decoder.decode([tokenizer.bos_id, tokenizer.eos_id], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_the_conversations_alternate(chatterbot_file):
    records = [json.loads(line)["messages"] for line in chatterbot_file.read_text(encoding="utf-8").splitlines()]
    assert len(records) == 2025
    for messages in records:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].strip() for message in messages)
