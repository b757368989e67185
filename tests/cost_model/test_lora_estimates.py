"""Memory, FLOPs and time of steps with frozen parameters."""

import jax
import pytest

from jaxllm.compile import aot
from jaxllm.config import load_config
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.plan.estimate import estimate
from jaxllm.run.memory_check import total_bytes

TOLERANCE = 0.03
ABOVE = {"frozen MLPs, ZeRO 3": 0.14}
"""Share by which the estimate is above XLA's bytes of JAX 0.12, which allocates the embedding's gradient when it is needed: JAX
0.10 had it from the loss on, and the estimate counts that."""
LORA = ("model.lora.rank=16",)
CASES = {
    # model, GPUs, kind, sequences in a step, tokens of a sequence, keys
    "one GPU": ("llama-3.2-1b", 1, "h100-80gb", 8, 4096, LORA),
    "ZeRO 1": ("llama-3.2-1b", 8, "h100-80gb", 16, 4096, LORA),
    "frozen MLPs, ZeRO 3": ("llama-3.2-1b", 8, "h100-80gb", 16, 4096, ("train.freeze=[layers.mlp.*]", "parallel.zero=3")),
    "frozen embedding": ("llama-3.2-1b", 1, "h100-80gb", 8, 4096, ("train.freeze=[embedding]",)),
    "8B": ("llama-3-8b", 1, "h100-80gb", 8, 2048, (*LORA, "parallel.remat=full")),
    "8B, no remat": ("llama-3-8b", 1, "h100-80gb", 8, 4096, (*LORA, "parallel.remat=none")),
    "8B, ZeRO 2": ("llama-3-8b", 8, "h100-80gb", 16, 4096, (*LORA, "parallel.zero=2", "parallel.remat=full")),
    "8B, ZeRO 2, tensor": (
        *("llama-3-8b", 8, "h100-80gb", 4, 2048),
        (*LORA, "parallel.zero=2", "parallel.tensor=2", "parallel.remat=full"),
    ),
    "8B, ZeRO 3": ("llama-3-8b", 8, "h100-80gb", 16, 8192, (*LORA, "parallel.zero=3")),
    "8B, tensor": ("llama-3-8b", 8, "h100-80gb", 16, 8192, (*LORA, "parallel.tensor=4")),
    "8B, pipe": ("llama-3-8b", 8, "h100-80gb", 16, 8192, (*LORA, "parallel.pipe=4")),
    "8B, context": ("llama-3-8b", 8, "h100-80gb", 4, 32768, (*LORA, "parallel.context=4", "parallel.zero=3")),
    "70B, ZeRO 3": ("llama-3-70b", 8, "h100-80gb", 8, 4096, (*LORA, "parallel.zero=3", "parallel.remat=full")),
}
QUICK = ("one GPU", "frozen MLPs, ZeRO 3")


def config_of(model, gpus, sequences, length, keys):
    train = {"steps": 10, "sequence_length": length, "global_batch_sequences": sequences, "microbatch_sequences": 1}
    values = {"model": {"name": model}, "train": train, "data": {"mask_documents": False}}
    return load_config(values, keys).resolve(gpus)


@pytest.mark.skipif(not aot.can_compile_for_gpus(), reason="the extra aot is not installed")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in CASES])
def test_the_estimate_is_what_xla_allocates(name):
    model, gpus, kind, sequences, length, keys = CASES[name]
    config, gpu = config_of(model, gpus, sequences, length, keys), find_gpu(kind)
    found = total_bytes(aot.compile_step(config, aot.gpu_devices(1, gpus, gpu)).memory_analysis())
    estimated = estimate_memory(config, gpu, on_device=False).peak_bytes
    if name in ABOVE and jax.__version_info__ >= (0, 12):
        assert found < estimated <= (1 + ABOVE[name]) * found
    else:
        assert estimated == pytest.approx(found, rel=TOLERANCE)


def test_frozen_parameters_take_two_bytes_each():
    config = config_of("llama-3-8b", 1, 8, 2048, (*LORA, "parallel.remat=full"))
    terms = estimate_memory(config, find_gpu("rtx4090-24gb")).stages[0].terms_bytes
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert terms["master_weights"] == 4 * adapters
    assert terms["optimizer"] == 8 * adapters
    assert terms["frozen_weights"] == 2 * 8_030_261_248


def test_8b_with_lora_fits_into_24_gb():
    found = estimate(config_of("llama-3-8b", 1, 8, 2048, (*LORA, "parallel.remat=full")), find_gpu("rtx4090-24gb"))
    assert found.fits


def test_frozen_matrices_take_a_third_less():
    lora, full = (config_of("llama-3-8b", 1, 8, 2048, keys) for keys in (LORA, ()))
    flops = [train_flops_per_token(c.model, 2048, frozen=c.frozen) for c in (lora, full)]
    attention = 3 * 2 * 2048 * 32 * 128 * 32
    matmuls = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert flops == [4 * matmuls + 6 * adapters + attention, 6 * matmuls + attention]
    speeds = [estimate(c, find_gpu("h200-141gb")).speed.step_s for c in (lora, full)]
    assert 0.6 < speeds[0] / speeds[1] < 0.85
