"""llama.cpp itself reads what `jaxllm export --to gguf` writes: its probabilities, ids and continuations are jaxllm's."""

import sys

import numpy as np
import pytest
from llama_cpp_answers import ask

import jaxllm
from jaxllm.cli import app as cli
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.run.loop import fit

pytest.importorskip("gguf")

from test_gguf import BASE, CASES, TEXTS, config_of, cuts, make_source, sentencepiece, trained, with_tokenizer

from jaxllm.weights import gguf_convert
from jaxllm.weights.gguf_convert import to_gguf

# No quick test: npm fetches llama.cpp.
pytestmark = pytest.mark.launcher

IDS = np.random.default_rng(1).integers(1, 256, 40).astype(np.int32)
OF_SENTENCEPIECE = ["a don it", "the xxxx ss, it's", "é on", " a", "xxxxx  a"]


def largest_difference(source, file, ids=IDS):
    """Between log probabilities above 1e-30 of llama.cpp with the file and of jaxllm with the folder it was made of."""
    logits_SV = np.asarray(jaxllm.load_model(source, "float32", {"data": 1})(ids[None]))[0].astype(np.float64)
    ours_SV = np.exp(logits_SV - logits_SV.max(axis=-1, keepdims=True))
    ours_SV /= ours_SV.sum(axis=-1, keepdims=True)
    theirs_SV = ask(file, ids=ids).probabilities_SV
    assert theirs_SV.shape == ours_SV.shape
    ours_SV, theirs_SV = (np.log(np.maximum(found_SV, 1e-30)) for found_SV in (ours_SV, theirs_SV))
    return np.abs(theirs_SV - ours_SV).max()


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same_probabilities(case, tmp_path):
    source, file = make_source(tmp_path / "hf", config_of(case)), tmp_path / "model.gguf"
    to_gguf(str(source), str(file))
    # Its GELU is a table in half precision.
    assert largest_difference(source, file) < (3e-2 if case.startswith("gemma3") else 1e-4)


def rows_as_they_are(source, shape):
    return source


def test_a_wrong_export_is_seen(tmp_path, monkeypatch):
    """Rows of queries and keys that are not put in llama.cpp's order."""
    monkeypatch.setattr(gguf_convert, "_pairs_together", rows_as_they_are)
    source, file = make_source(tmp_path / "hf", config_of("tied")), tmp_path / "model.gguf"
    to_gguf(str(source), str(file))
    assert largest_difference(source, file) > 0.1


def test_a_run_continues_as_jaxllm_does(tiny_config, tmp_path, monkeypatch):
    """From a training run on bytes through the command to the same ids."""
    run, file = tmp_path / "run", tmp_path / "run.gguf"
    fit(tiny_config(f"run.dir={run}", "data.held_out_fraction=0.0"))
    monkeypatch.setattr(sys, "argv", ["jaxllm", "export", str(run), str(file), "--to", "gguf"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    (ours,) = jaxllm.generate(run, "def ", max_new_tokens=12)
    theirs = ask(file, texts=TEXTS, prompt="def ", more=12)
    assert (theirs.continuation, len(theirs.continuation)) == (ours.ids, 12)
    assert theirs.encoded == [list(text.encode()) for text in TEXTS]
    assert theirs.eos == 0


@pytest.mark.parametrize("name", [name for name, *_ in cuts()])
def test_a_tokenizer_you_trained_gives_the_same_ids(name, tmp_path):
    pre_tokenizer, ignores = {found: rest for found, *rest in cuts()}[name]
    source = with_tokenizer(tmp_path / "hf", trained(pre_tokenizer, ignores))
    holds_the_same_ids(source, tmp_path / "model.gguf", TEXTS)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece_gives_the_same_ids(prefix, tmp_path):
    source = with_tokenizer(tmp_path / "hf", sentencepiece(prefix), BASE, add_bos_token=True)
    holds_the_same_ids(source, tmp_path / "model.gguf", OF_SENTENCEPIECE)


def holds_the_same_ids(source, file, texts):
    to_gguf(str(source), str(file))
    ours, theirs = load_tokenizer(source), ask(file, texts=texts)
    assert theirs.encoded == [ours.encode(text).tolist() for text in texts]
    assert theirs.eos == ours.eos_id


def test_the_real_smollm2s_first_layers(smollm2_first_layers, tmp_path):
    """Real weights, and a real vocabulary of 49,152 tokens."""
    file = tmp_path / "model.gguf"
    holds_the_same_ids(smollm2_first_layers, file, TEXTS)
    ids = load_tokenizer(smollm2_first_layers).encode("The capital of France is Paris.").astype(np.int32)
    assert largest_difference(smollm2_first_layers, file, ids) < 1e-3
