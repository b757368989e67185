"""Closed forms of parameters and FLOPs, against published counts and against a forward pass that counts its matmuls."""

import numpy as np
import pytest

from jaxllm.config import ModelConfig, load_config, published_models
from jaxllm.cost_model.flops import (
    attention_flops_per_token,
    matmul_parameters,
    mfu,
    parameter_count,
    train_flops_per_token,
)

# Gemma 3's from 4B on: the published counts without the vision tower and its projection, 416,866,032 + 1,152 (D + 1).
PUBLISHED_PARAMETERS = {
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
}


def published_model(name: str) -> ModelConfig:
    train = {"steps": 1, "sequence_length": 8, "global_batch_sequences": 1}
    return load_config({"model": {"name": name}, "train": train}).model


def tiny_model(**changes) -> ModelConfig:
    # All sizes differ, so that a formula with the wrong letter cannot agree by chance.
    layer = {"hidden_size": 20, "intermediate_size": 28, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
    return ModelConfig(**{"num_layers": 3, "vocab_size": 50, **layer, **changes})


class CountingLlama:
    """A Llama without norms and rotary angles, in NumPy; `flops` adds up its matmuls, `matrices` its weights."""

    def __init__(self, model: ModelConfig):
        self.model, self.matrices, self.flops, self.attention_flops = model, 0, 0, 0

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def project(self, x: np.ndarray, width: int) -> np.ndarray:
        weight = np.ones((x.shape[1], width))
        self.matrices += weight.size
        return self.matmul(x, weight)

    def attend(self, x_SD: np.ndarray) -> np.ndarray:
        model, length = self.model, x_SD.shape[0]
        q_SNH = self.project(x_SD, model.num_heads * model.head_dim).reshape(length, model.num_heads, -1)
        k_SKH, v_SKH = (
            self.project(x_SD, model.num_kv_heads * model.head_dim).reshape(length, model.num_kv_heads, -1) for _ in range(2)
        )
        before, heads = self.flops, []
        for head in range(model.num_heads):
            group = head * model.num_kv_heads // model.num_heads
            scores_ST = self.matmul(q_SNH[:, head], k_SKH[:, group].T)
            heads.append(self.matmul(scores_ST, v_SKH[:, group]))
        self.attention_flops += self.flops - before
        return self.project(np.concatenate(heads, axis=1), model.hidden_size)

    def forward(self, sequence_length: int) -> np.ndarray:
        x_SD = np.zeros((sequence_length, self.model.hidden_size))
        for _ in range(self.model.num_layers):
            x_SD = x_SD + self.attend(x_SD)
            gate_SF, up_SF = (self.project(x_SD, self.model.intermediate_size) for _ in range(2))
            x_SD = x_SD + self.project(gate_SF * up_SF, self.model.hidden_size)
        return self.project(x_SD, self.model.vocab_size)


def test_every_published_shape_has_a_count_here():
    assert set(published_models()) == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_published_parameter_count(name):
    assert parameter_count(published_model(name)) == PUBLISHED_PARAMETERS[name]


def test_matmul_parameters_are_the_matrices_of_a_forward_pass():
    model = tiny_model()
    counted = CountingLlama(model)
    assert counted.forward(5).shape == (5, model.vocab_size)
    assert matmul_parameters(model) == counted.matrices


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 16])
def test_forward_flops_are_those_of_a_forward_pass(sequence_length):
    model = tiny_model()
    counted = CountingLlama(model)
    counted.forward(sequence_length)
    attention = attention_flops_per_token(model, sequence_length, causal=False)
    assert attention * sequence_length == counted.attention_flops
    assert (2 * matmul_parameters(model) + attention) * sequence_length == counted.flops
    # The backward: for c = a b, one matmul for the gradient of a and one for that of b, each as large as the forward's.
    assert train_flops_per_token(model, sequence_length, causal=False) * sequence_length == 3 * counted.flops


def test_causal_attention_is_half_the_square():
    model, length = tiny_model(), 64
    full, causal = (attention_flops_per_token(model, length, causal) for causal in (False, True))
    assert 2 * causal == full
    # A perfect kernel computes the pairs (i, j) with j <= i, diagonal included: more by one part in S.
    pairs = sum(j <= i for i in range(length) for j in range(length))
    assert full * pairs / length**2 == pytest.approx(causal * (1 + 1 / length), rel=1e-12)
    assert train_flops_per_token(model, length) == train_flops_per_token(model, length, causal=True)


def test_tied_head_is_stored_once_and_multiplied_all_the_same():
    tied, untied = tiny_model(tie_embeddings=True), tiny_model(tie_embeddings=False)
    assert parameter_count(untied) - parameter_count(tied) == untied.vocab_size * untied.hidden_size
    assert matmul_parameters(untied) == matmul_parameters(tied)


def test_norms_are_parameters_but_no_matmul():
    model = tiny_model(tie_embeddings=True)
    assert parameter_count(model) - matmul_parameters(model) == (2 * model.num_layers + 1) * model.hidden_size


@pytest.mark.parametrize(
    ("name", "full_gflops", "causal_gflops"),
    [("llama-3-8b", 57.9, 51.5), ("llama-3-70b", 481, 449), ("llama-3.1-405b", 2625, 2524)],
)
def test_train_flops_of_llama_3_at_8192_tokens(name, full_gflops, causal_gflops):
    # Published TFLOP/s divided by published tokens/s under the two conventions, to three or four digits.
    model = published_model(name)
    assert train_flops_per_token(model, 8192, causal=False) / 1e9 == pytest.approx(full_gflops, rel=1e-3)
    assert train_flops_per_token(model, 8192, causal=True) / 1e9 == pytest.approx(causal_gflops, rel=1e-3)


def test_mfu_is_one_at_the_peak():
    model, peak_flops = tiny_model(), 1e12
    tokens_per_s = peak_flops / train_flops_per_token(model, 32)
    assert mfu(tokens_per_s, model, 32, peak_flops) == pytest.approx(1.0)
    assert mfu(tokens_per_s / 2, model, 32, peak_flops) == pytest.approx(0.5)
