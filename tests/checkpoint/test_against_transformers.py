"""Compares logits with transformers, from its folders and into them, in both dialects of config.json."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_folders import (
    GEMMA3,
    HUB,
    LLAMA3_ROPE,
    MIXTRAL,
    OLMO3,
    OLMOE,
    QWEN3_MOE,
    SMOLLM3,
    in_new_dialect,
    random_weights,
    read_folder,
    write_folder,
)

import jaxllm
from jaxllm.config import ConfigError, ModelConfig
from jaxllm.config.hf_config import hugging_face_config, model_section
from jaxllm.model.layers import attention_factor, rotary_frequencies
from jaxllm.weights import hf_convert
from jaxllm.weights.hf_convert import from_hf, to_hf, verify

TOLERANCE = 1e-4
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.npz"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "mha untied": {"num_key_value_heads": 4},
    "gqa llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5},
    "gqa tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 10, "rms_norm_eps": 1e-6},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 10},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gemma3 linear": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "yarn": {"rope_scaling": YARN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9},
    "qwen2 window": {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        **{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "gemma3": GEMMA3,
    "olmo3": OLMO3,
    "smollm3": SMOLLM3,
    "smollm3 yarn": {**SMOLLM3, "rope_scaling": YARN, "no_rope_layers": [0, 0, 0]},
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe window": {**QWEN3_MOE, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 9},
    "olmoe": OLMOE,
    "mixtral": MIXTRAL,
}


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def ids_BS():
    return np.random.default_rng(1).integers(0, HUB["vocab_size"], (2, 40)).astype(np.int32)


def logits_by_transformers(transformers, folder, ids_BS):
    import torch

    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return network(torch.tensor(ids_BS).long()).logits.numpy()


@pytest.mark.parametrize("dialect", [dict, in_new_dialect], ids=["hub", "transformers 5"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, dialect, transformers, ids_BS, tmp_path):
    config = dialect({**HUB, **CASES[case]})
    source = write_folder(tmp_path / "hf", config, random_weights(config), shards=2)
    theirs = logits_by_transformers(transformers, source, ids_BS)
    assert np.abs(theirs).max() > 1
    ours = np.asarray(jaxllm.load_model(source, "float32", {"data": 1})(ids_BS))
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    from_hf(str(source), str(tmp_path / "ours"))
    to_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    for dropped in (("rope_theta", "rope_scaling", "torch_dtype"), ("rope_parameters", "dtype")):
        # The config as either version of transformers reads it.
        written = json.loads((tmp_path / "back" / "config.json").read_text())
        (tmp_path / "back" / "config.json").write_text(
            json.dumps({key: value for key, value in written.items() if key not in dropped})
        )
        np.testing.assert_array_equal(logits_by_transformers(transformers, tmp_path / "back", ids_BS), theirs)
        (tmp_path / "back" / "config.json").write_text(json.dumps(written))
    np.testing.assert_array_equal(logits_by_transformers(transformers, tmp_path / "back", ids_BS), theirs)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
        {"rope_type": "linear", "factor": 3.0},
        YARN,
        {**YARN, "original_max_position_embeddings": 32768, "attention_factor": 0.7},
        {**YARN, "factor": 3.0, "beta_fast": 20.0, "beta_slow": 2.0},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(theta, head_dim, scaling, transformers):
    """To the last bit: at position p an error counts p times. At 1e6 one of torch's powers is not the nearest number."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {**HUB, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}
    written = hugging_face_config(model_section(config, ""), dtype="float32", max_position=131072)
    theirs, model = (
        LlamaRotaryEmbedding(transformers.LlamaConfig(**written)),
        ModelConfig.model_validate(model_section(config, "")),
    )
    np.testing.assert_array_max_ulp(rotary_frequencies(model), theirs.inv_freq.numpy(), maxulp=2 if theta == 1e6 else 0)
    assert attention_factor(model) == theirs.attention_scaling


def test_verify_measures_what_is_there(transformers, tmp_path, monkeypatch):
    weights = random_weights(HUB)
    source = write_folder(tmp_path / "hf", HUB, weights)
    same = from_hf(str(source), str(tmp_path / "ours"), verify=True).agreement
    assert same.largest_difference < TOLERANCE
    assert abs(same.mean_kl) < 1e-9
    # Half of the rotary base: all shapes are right, and only the logits show it.
    other = write_folder(tmp_path / "other", {**HUB, "rope_theta": 50.0}, weights)
    assert verify(source, other).largest_difference > 1e-2
    assert verify(source, other).mean_kl > 1e-5
    monkeypatch.setattr(hf_convert, "verify", lambda *arguments: verify(source, other))
    with pytest.raises(ConfigError, match=r"^The logits of 64 tokens .* that is above 0.001, so nothing was kept"):
        from_hf(str(source), str(tmp_path / "wrong"), verify=True)
    assert not (tmp_path / "wrong").exists()


def test_verify_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^--verify needs torch and transformers: pip install 'jaxllm\[reference\]'"):
        from_hf(str(tmp_path), str(tmp_path / "ours"), verify=True)


# ---------------------------------------------------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.mark.parametrize(
    "parallel", [{"data": 1}, pytest.param({"tensor": 3}, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
def test_the_real_smollm2_has_the_published_logits(parallel, smollm2_folder, golden):
    """SmolLM2-135M-Instruct against torch in float32: every 768th logit, log-sum-exp and argmax of each position."""
    model = jaxllm.load_model(smollm2_folder, "float32", parallel)
    prompts = [golden[f"ids_{i}"] for i in range(3)]
    ids_BS = np.zeros((3, max(map(len, prompts))), np.int32)
    for row, ids in zip(ids_BS, prompts, strict=True):
        row[: len(ids)] = ids
    logits_BSV = np.asarray(jax.device_get(model(ids_BS)), np.float64)
    for i, ids in enumerate(prompts):
        logits_SV = logits_BSV[i, : len(ids)]
        np.testing.assert_allclose(logits_SV[:, ::768], golden[f"logits_{i}"], atol=2e-4)
        np.testing.assert_array_equal(logits_SV.argmax(-1), golden[f"argmax_{i}"])
        np.testing.assert_allclose(np.logaddexp.reduce(logits_SV, axis=-1), golden[f"logsumexp_{i}"], atol=2e-4)


def test_the_real_smollm2_comes_back_bit_for_bit(smollm2_first_layers, tmp_path):
    """Runs the command in a new process. The first two layers are enough."""
    for arguments in (("from-hf", smollm2_first_layers, tmp_path / "ours"), ("to-hf", tmp_path / "ours", tmp_path / "back")):
        command = [sys.executable, "-m", "jaxllm.cli", "convert", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert "every tensor was read back" in done.stdout
        assert done.stderr == ""
    theirs, back = read_folder(smollm2_first_layers), read_folder(tmp_path / "back")
    assert theirs.keys() == back.keys()
    for name, array in theirs.items():
        assert array.dtype == back[name].dtype
        np.testing.assert_array_equal(array.view(np.uint32), back[name].view(np.uint32))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (smollm2_first_layers / name).read_bytes()
