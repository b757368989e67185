"""Presets of XLA's flags and of CUDA's and NCCL's variables: by kind of GPU, what the user set wins, nothing jaxlib lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import pytest
import yaml
from tiny import TINY

from jaxllm.config import ConfigError, RunConfig
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.memory import may_fit
from jaxllm.machine import xla_flags
from jaxllm.machine.xla_flags import gpu_kinds, gpu_presets

KIND = {name: gpu.device_kind for name, gpu in GPUS.items() if gpu.device_kind}
H100 = SimpleNamespace(platform="gpu", device_kind=KIND["h100-80gb"])
ON_ONE_GPU = xla_flags.NO_REMAT_GPU_OPTIONS | xla_flags.ALONE_GPU_OPTIONS
"""Those of the tiny model, whose layers are a loop."""
QUEUES, COMMANDS = "CUDA_DEVICE_MAX_CONNECTIONS", "xla_gpu_enable_command_buffer"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes NVIDIA's driver show GPUs of these kinds, in an environment that says nothing of its own."""
    monkeypatch.setattr(xla_flags, "DRIVER_FILES", tmp_path)
    for name in (*xla_flags.MEMORY_VARIABLES, "NCCL_DEBUG", QUEUES, xla_flags.CPU_THREADS):
        # Set first, so that what apply sets is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", "")

    def show(*kinds: str) -> None:
        for number, kind in enumerate(kinds):
            folder = tmp_path / f"0000:{number:02x}:00.0"
            folder.mkdir()
            (folder / "information").write_text(f"Model: \t\t {kind}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{number}\n")

    return show


def test_every_flag_is_one_that_jaxlib_has():
    """Left out they would be without a word: is_known is there for other versions."""
    flags = [*xla_flags.CPU_FLAGS, *xla_flags.SEVERAL_CPU_DEVICES_FLAGS, *xla_flags.DETERMINISTIC_GPU_FLAGS]
    for names in xla_flags.GPU_FLAGS_OF.values():
        flags += names
    assert [name for name in flags if not xla_flags.is_known(name)] == []


def test_every_option_is_one_that_the_compiler_takes():
    """Left out they would be without a word: is_accepted is there for other versions."""
    options = (
        xla_flags.MORE_AT_ONCE,
        xla_flags.OFFLOAD_GPU_OPTIONS,
        xla_flags.CUBLAS_GPU_OPTIONS | ON_ONE_GPU,
    )
    for one in (*options, dict.fromkeys(xla_flags.LAYER_COMBINED, 0)):
        assert all(xla_flags.is_accepted(name, value) for name, value in one.items())


def test_the_compiler_is_asked_for_names_and_values():
    assert xla_flags.is_accepted("xla_gpu_memory_limit_slop_factor", 95)
    assert not xla_flags.is_accepted("xla_gpu_memory_limit_slop_factor", "much")
    assert not xla_flags.is_accepted("xla_gpu_made_up_for_this_test", True)


def test_presets_are_those_of_the_chip():
    flags, variables = {}, {}
    for name, kind in KIND.items():
        flags[name], variables[name] = gpu_presets((kind, kind))
    assert {name for name, one in variables.items() if one.get(QUEUES) == "1"} == {
        name for name in KIND if name[:2] in ("h1", "h2", "gh")
    }
    assert {name for name, one in flags.items() if COMMANDS in one} == {"b200-192gb"}
    assert {one["NCCL_DEBUG"] for one in variables.values()} == {"WARN"}
    # Of two kinds, and of one that nobody described, what holds for any.
    for kinds in ((KIND["h100-80gb"], KIND["b200-192gb"]), ("NVIDIA GeForce RTX 5090",)):
        assert gpu_presets(kinds) == ({}, {"NCCL_DEBUG": "WARN"})


def test_kinds_are_read_from_the_driver(driver):
    assert gpu_kinds() == ()
    driver(KIND["h200-141gb"], KIND["h100-nvl-94gb"])
    assert gpu_kinds() == (KIND["h200-141gb"], KIND["h100-nvl-94gb"])


def test_presets_are_set_where_the_gpus_are(driver):
    driver(*[KIND["b200-192gb"]] * 8)
    added = xla_flags.apply(RunConfig())
    assert f"--{COMMANDS}=FUSION,CUSTOM_CALL" in added
    assert f"--{COMMANDS}=FUSION,CUSTOM_CALL" in os.environ["XLA_FLAGS"].split()
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert QUEUES not in os.environ
    assert xla_flags.apply(RunConfig()) == []


def test_what_the_user_set_wins(driver, monkeypatch):
    driver(KIND["h100-80gb"])
    monkeypatch.setenv(QUEUES, "8")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    xla_flags.apply(RunConfig())
    assert (os.environ[QUEUES], os.environ["NCCL_DEBUG"]) == ("8", "INFO")


def test_a_run_on_cpu_devices_has_none(driver):
    driver(KIND["h100-80gb"])
    xla_flags.apply(RunConfig(cpu_devices=2))
    assert QUEUES not in os.environ
    assert "NCCL_DEBUG" not in os.environ


def test_each_cpu_device_has_threads_to_wait_in(driver, monkeypatch):
    """A ring hung for ever without, and a pipeline's loss was wrong (xla_flags.CPU_THREADS)."""
    xla_flags.apply(RunConfig(cpu_devices=16))
    assert int(os.environ[xla_flags.CPU_THREADS]) >= 128
    for given, devices in (("4", 2), ("5", 3), ("", 3)):
        monkeypatch.setenv(xla_flags.CPU_THREADS, given)
        xla_flags.apply(RunConfig(cpu_devices=devices))
        assert (os.environ[xla_flags.CPU_THREADS] == "4") is (devices == 2)
        assert int(os.environ[xla_flags.CPU_THREADS]) >= 2 * devices


def gathered_in_a_loop_and_behind(x):
    inside = jax.lax.scan(lambda carry, _: (jax.lax.all_gather(carry, "data").sum(0), None), x, length=3)[0]
    return inside + jax.lax.psum(x, "data") + jax.lax.all_gather(x, "data").sum(0)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_each_collective_of_a_cpu_program_has_its_own_channel(platform):
    """Devices that wait on one channel may mix two collectives. On GPUs the channel does not matter, and texts stay JAX's."""
    mesh, split = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("data")
    step = jax.shard_map(gathered_in_a_loop_and_behind, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    (text,) = {jax.jit(step).trace(jnp.ones(8)).lower(lowering_platforms=(platform,)).as_text() for _ in range(2)}
    handles = re.findall(r"channel_handle<handle = (\d+)", text)
    assert len(set(handles)) == (3 if platform == "cpu" else 1)


def test_a_flag_of_another_jaxlib_is_left_out(driver, monkeypatch):
    monkeypatch.setattr(xla_flags, "GPU_FLAGS_OF", {xla_flags.HOPPER: {"xla_gpu_made_up_for_this_test": "true"}})
    driver(KIND["h100-80gb"])
    xla_flags.apply(RunConfig())
    assert "made_up" not in os.environ["XLA_FLAGS"]


def test_a_deterministic_step_is_compiled_so_where_nothing_runs(tiny_config, driver):
    """`jaxllm compile` sets none of the run's flags. A run has the flag from the start, and its step needs no option."""
    expected = {
        "xla_gpu_deterministic_ops": True,
        # Or XLA takes the first tiles it finds, untimed.
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_dynamic_slice_fusion": False,
    }
    asked = tiny_config("run.deterministic=true").resolve(1)
    plain = xla_flags.compile_options(tiny_config().resolve(1), H100)
    assert xla_flags.compile_options(asked, H100) == plain | expected
    assert not plain.keys() & expected.keys()
    xla_flags.apply(RunConfig(deterministic=True, cpu_devices=1))
    for name, value in expected.items():
        assert f"--{name}={str(value).lower()}" in os.environ["XLA_FLAGS"]
    assert xla_flags.compile_options(asked, H100) == plain


def test_xla_rematerialises_only_a_step_that_would_not_fit(tiny_config):
    def options(*overrides, device=H100):
        config = tiny_config(*overrides).resolve(1)
        return xla_flags.compile_options(config, device, may_fit(config, device))

    keeps = xla_flags.NO_REMAT_GPU_OPTIONS.items()
    too_large = ("model.hidden_size=8192", "model.intermediate_size=32768", "model.num_layers=80")
    assert keeps <= options().items()
    assert not options(*too_large).keys() & xla_flags.NO_REMAT_GPU_OPTIONS.keys()
    # Host memory counts against XLA's limit; a GPU that nobody described may be of any size.
    assert keeps <= options(*too_large, "parallel.offload_state=optimizer").items()
    assert keeps <= options(*too_large, device=SimpleNamespace(platform="gpu", device_kind="?")).items()


def test_one_gpu_hides_no_transfers_but_those_of_the_host(tiny_config):
    hides = "xla_gpu_enable_latency_hiding_scheduler"
    of = lambda *overrides, devices=1: xla_flags.compile_options(tiny_config(*overrides).resolve(devices), H100)  # noqa: E731
    assert of()[hides] is False
    assert hides not in of(devices=2)
    assert hides not in of("parallel.remat=offload")
    assert hides not in of("parallel.offload_state=optimizer")


@pytest.mark.parametrize("dtype", ["model.compute_dtype=bfloat16", "model.matmul_dtype=fp8", "model.compute_dtype=float32"])
def test_unrolled_layers_and_fp8_multiply_by_cublas_alone(tiny_config, dtype):
    """XLA would time each of the kernels that it generates for FP8: minutes for a step."""
    generates = "xla_gpu_enable_triton_gemm"
    unrolled, looped = (
        xla_flags.compile_options(tiny_config(dtype, f"model.scan_layers={loop}").resolve(1), H100)
        for loop in ("false", "true")
    )
    assert unrolled[generates] is False
    assert (generates in looped) == dtype.endswith("fp8")


def test_collectives_are_combined_up_to_a_layer(tiny_config, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert xla_flags.compile_options(tiny_config().resolve(1), H100) == ON_ONE_GPU
    combined = "xla_gpu_all_gather_combine_threshold_bytes"
    # 32 x 8 x (4 + 4 + 2 + 2) of attention and 3 x 32 x 64, float32, over two tensor ranks, and two norms.
    two = tiny_config("parallel.tensor=2", "parallel.zero=3").resolve(4)
    assert xla_flags.compile_options(two, H100)[combined] == 4 * (32 * 8 * 12 + 3 * 32 * 64) // 2 + 4 * 2 * 32
    halved = tiny_config("parallel.data=4", "parallel.zero=3", "parallel.reduce_dtype=bfloat16").resolve(4)
    whole = halved.model_copy(update={"parallel": halved.parallel.model_copy(update={"reduce_dtype": "float32"})})
    scatter = "xla_gpu_reduce_scatter_combine_threshold_bytes"
    assert 2 * xla_flags.layer_combined(halved)[scatter] == xla_flags.layer_combined(whole)[scatter] > 0
    experts = ("model.num_experts=4", "model.experts_per_token=2", "parallel.zero=3", "model.compute_dtype=bfloat16")
    shared = tiny_config(*experts, "parallel.expert=2").resolve(4)
    # The router and half of the experts, in bfloat16.
    assert xla_flags.layer_combined(shared)[combined] == 2 * (32 * 8 * 12 + 32 * 4 + 3 * 32 * 64 * 4 // 2 + 2 * 32)
    assert xla_flags.compile_options(two, SimpleNamespace(platform="cpu", device_kind="cpu")) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{combined}=1")
    assert combined not in xla_flags.compile_options(two, H100)


@pytest.mark.parametrize(
    ("overrides", "combines", "at_once"),
    [
        ("parallel.data=4 parallel.zero=1 train.microbatch_sequences=2", True, False),
        ("parallel.data=4 parallel.zero=1 train.microbatch_sequences=2 parallel.tensor=2", True, True),
        ("parallel.data=4 parallel.zero=1 train.microbatch_sequences=1", True, False),
        ("parallel.data=4 parallel.zero=0 train.microbatch_sequences=2", True, False),
        ("parallel.data=4 parallel.zero=1 train.microbatch_sequences=1 model.matmul_dtype=fp8", False, False),
        ("parallel.data=4 parallel.zero=2 train.microbatch_sequences=2", False, False),
        ("parallel.data=4 parallel.zero=3 parallel.tensor=2", True, False),
        ("parallel.data=1 parallel.tensor=2", False, False),
        ("parallel.data=2 parallel.pipe=2 parallel.zero=3 train.microbatch_sequences=1", False, True),
    ],
)
def test_options_follow_what_a_step_sends(tiny_config, monkeypatch, overrides, combines, at_once):
    monkeypatch.setenv("XLA_FLAGS", "")
    config = tiny_config("train.global_batch_sequences=8", "model.compute_dtype=bfloat16", *overrides.split())
    found = xla_flags.compile_options(config.resolve(config.devices), H100)
    assert (xla_flags.MORE_AT_ONCE.items() <= found.items()) == at_once
    # Two norms of 32, and matrices over the tensor ranks: gathered in bfloat16, reduced in float32 and then over four ranks,
    # except with ZeRO 0, whose gradients stay whole.
    matrices = (32 * 8 * 12 + 3 * 32 * 64) // config.parallel.tensor
    ranks = int(config.parallel.data) if config.parallel.zero else 1
    of_layer = {
        "all_gather": 2 * (matrices + 64),
        "reduce_scatter": 4 * (matrices + 64) // ranks,
        "all_reduce": 4 * (matrices + 64),
    }
    expected = {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in of_layer.items()}
    assert {name: value for name, value in found.items() if "combine" in name} == (expected if combines else {})


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        ("", []),
        ("--xla_gpu_autotune_level=0 --xla_dump_to=/tmp/--dump", []),
        ("--xla_gpu_no_such=1 --xla_cpu_nor_this --xla_gpu_no_such=2", ["xla_gpu_no_such", "xla_cpu_nor_this"]),
        # A beginning of a name, and what else the library holds, is no flag; a file of flags is not opened.
        ("--xla_gpu_autotune_leve=1 /tmp/flags", ["xla_gpu_autotune_leve"]),
        ("--xla_dump_to='/tmp/a b' --nope", ["nope"]),
        ('--xla_dump_to="/tmp/a \\" b" --nope', ["nope"]),
        ("--xla_dump_hlo_pass_re=don't --nope=1\n\t--xla_dump_to=/tmp", ["nope"]),
    ],
)
def test_flags_that_would_end_the_process(given, unknown, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    assert xla_flags.unknown(xla_flags.flag_names()) == unknown


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--xla_nope=1", "XLA_FLAGS has --xla_nope, which this JAX (jaxlib {}) does not know: remove it."),
        (
            "--xla_a --xla_dump_to=x --xla_b=1",
            "XLA_FLAGS has --xla_a and --xla_b, which this JAX (jaxlib {}) does not know: remove them.",
        ),
        ("--", "XLA_FLAGS has --, which this JAX (jaxlib {}) does not know: remove it."),
        ("garbage; rm -rf x", "XLA_FLAGS has garbage;, which is no flag: write --name=value for each flag, or unset it."),
        ("-xla_dump_to=x", "XLA_FLAGS has -xla_dump_to, which is no flag: write --name=value for each flag, or unset it."),
        # XLA would not read what comes behind.
        ("--xla_dump_to=x y --xla_nope", "XLA_FLAGS has y, which is no flag: write --name=value for each flag, or unset it."),
    ],
)
def test_flags_at_which_xla_would_end_the_process_are_refused(given, sentence, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    with pytest.raises(ConfigError) as error:
        xla_flags.require_known(xla_flags.given_flags())
    assert str(error.value) == sentence.format(jaxlib.__version__)


@pytest.mark.parametrize(
    "given", ["", " \n", "--xla_dump_to='/tmp/a b' --xla_cpu_enable_fast_math=false", os.environ["XLA_FLAGS"]]
)
def test_other_flags_are_taken(given, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    xla_flags.require_known(xla_flags.given_flags())


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 5000, "99999999999"], ids=lambda text: text[:20])
def test_a_number_of_cpu_devices_that_is_none_is_refused(driver, monkeypatch, number):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={number}")
    with pytest.raises(
        ConfigError, match=r"^XLA_FLAGS has --xla_force_host_platform_device_count=.*: it should be a whole number"
    ):
        xla_flags.apply(RunConfig())


@pytest.mark.parametrize("given", ["--xla_nope=1", "garbage; rm -rf x"])
@pytest.mark.parametrize("command", [["train", "base.yaml"], ["compile", "base.yaml"]], ids=" ".join)
def test_xla_does_not_end_a_command(command, given, tmp_path):
    """In a process of its own: here JAX has read its flags."""
    (tmp_path / "words.txt").write_text("law mesh ring\n" * 500)
    recipe = TINY | {"data": {"source": "files", "paths": "words.txt"}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    line = [sys.executable, "-m", "jaxllm.cli", *command]
    environment = os.environ | {"XLA_FLAGS": given, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("jaxllm: XLA_FLAGS has ")
