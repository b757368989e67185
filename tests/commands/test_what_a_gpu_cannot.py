"""What a kind of GPU cannot compute is refused by estimate, plan, compile and train in the same words, however it is given."""

from types import SimpleNamespace

import jax
import pytest

import jaxllm
from jaxllm.compile import aot
from jaxllm.compile.report import compile_report
from jaxllm.config import ConfigError, load_config
from jaxllm.config.attention import takes_cudnn, why_not_cudnn
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.estimate import estimate
from jaxllm.plan.search import search
from jaxllm.run.trainer import Trainer

V100 = GPUS["v100-32gb"]
EIGHT_B = {
    "model": {"name": "llama-3.1-8b", "compute_dtype": "float32"},
    "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 128},
}
REFUSED = [
    ("v100-32gb", ["model.compute_dtype=bfloat16"], "8.0), and {} has 7.0: set model.compute_dtype=float32."),
    ("v100-32gb", ["model.attention=cudnn"], "it needs Ampere (compute capability 8.0) or newer and {} has 7.0: set model.att"),
    ("h100-80gb", ["model.attention=cudnn"], "it computes in bfloat16 and model.compute_dtype is float32: set model.attention"),
    ("a10g-24gb", ["model.matmul_dtype=fp8"], "8.9), and {} has 8.6: set model.matmul_dtype=compute_dtype."),
]


def as_yaml(gpu, folder):
    """The same chip, given as a file that is like an H100."""
    path = folder / "mine.yaml"
    path.write_text(f"{{like: h100-80gb, compute_capability: {list(gpu.chip.compute_capability)}}}")
    return find_gpu(str(path))


@pytest.mark.parametrize(("name", "overrides", "sentence"), REFUSED)
def test_all_commands_refuse_it_alike(name, overrides, sentence, tmp_path, monkeypatch):
    config = load_config(EIGHT_B, overrides)
    found = {}
    for gpu in (GPUS[name], as_yaml(GPUS[name], tmp_path)):
        for command in (estimate, search, compile_report):
            with pytest.raises(ConfigError) as refused:
                command(config, gpu, 8)
            found[command, gpu.name] = str(refused.value).replace(gpu.name, "{}")
    capability = GPUS[name].chip.compute_capability
    device = SimpleNamespace(platform="gpu", device_kind=GPUS[name].device_kind, compute_capability="{}.{}".format(*capability))
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(ConfigError) as refused:
        Trainer(config)
    found["train"] = str(refused.value).replace(device.device_kind, "{}")
    (same,) = set(found.values())
    assert sentence in same


def test_a_v100_is_planned_at_the_speed_of_its_cuda_cores(tmp_path):
    """Given as a file like an H100 it has neither TF32 nor cuDNN attention; a model that does not fit has a speed too."""
    config = load_config(EIGHT_B, ["train.microbatch_sequences=1"])
    found = estimate(config, V100, 8)
    assert found.fits is False
    assert found.speed is not None
    assert 0.3 * 15.7 < found.speed.tflops_per_gpu < 15.7
    assert found.mfu == pytest.approx(found.speed.tflops_per_gpu / 15.7)
    mine = as_yaml(V100, tmp_path)
    assert mine.peak_flops("float32") == GPUS["h100-80gb"].dense_flops["float32"]
    assert not takes_cudnn(config.model, V100.chip.compute_capability)
    assert estimate_step_time(config.resolve(8), V100, 8).terms_s["attention"] > 0


def test_no_compiler_for_a_v100(monkeypatch):
    """compile is refused; plan gives what it found, and says why nothing confirmed it."""
    monkeypatch.setattr(aot, "can_compile_for_gpus", lambda: True)
    with pytest.raises(ConfigError, match=r"no compiler for v100-32gb.*begins at compute capability 7\.5, and it has 7\.0"):
        compile_report(load_config(EIGHT_B), V100, 8)
    small = {**EIGHT_B, "model": {"name": "llama-3.2-1b", "compute_dtype": "float32"}}
    found = jaxllm.plan(load_config(small, ["train.sequence_length=1024"]), V100, 1, compile=1)
    assert found.candidates[0].compiled_bytes is None
    assert "There is no compiler for v100-32gb" in found.unconfirmed_because


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_what_each_kind_has(gpu):
    """By NVIDIA's data sheets: float16 alone on a V100; FP8 from Ada on; fused attention wherever there is bfloat16."""
    model = load_config(EIGHT_B, ["model.compute_dtype=bfloat16"]).model
    capability, is_v100 = gpu.chip.compute_capability, gpu.name.startswith("v100")
    assert takes_cudnn(model, capability) == (not is_v100)
    assert gpu.peak_flops("float32") == gpu.dense_flops["float32" if is_v100 else "tf32"]
    assert (gpu.float8_flops is not None) == gpu.name.startswith(("rtx4090", "l40s", "h", "gh", "b"))
    assert (why_not_cudnn(model, capability, gpu.name) is None) == (not is_v100)
