"""Presets of XLA's flags and of CUDA's and NCCL's variables: by kind of GPU, what the user set wins, nothing jaxlib lacks."""

import os

import pytest

from jaxllm import xla_flags
from jaxllm.config import RunConfig
from jaxllm.plan.hardware import GPUS
from jaxllm.xla_flags import gpu_kinds, gpu_presets, unknown_flags

KIND = {name: gpu.device_kind for name, gpu in GPUS.items() if gpu.device_kind}
QUEUES, COMMANDS = "CUDA_DEVICE_MAX_CONNECTIONS", "xla_gpu_enable_command_buffer"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes NVIDIA's driver show GPUs of these kinds, in an environment that says nothing of its own."""
    monkeypatch.setattr(xla_flags, "DRIVER_FILES", tmp_path)
    for name in (*xla_flags.MEMORY_VARIABLES, "NCCL_DEBUG", QUEUES):
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
    options = (xla_flags.PIPELINE_GPU_OPTIONS, xla_flags.OFFLOAD_GPU_OPTIONS, xla_flags.HOST_GPU_OPTIONS)
    for names in (*options, *xla_flags.GPU_FLAGS_OF.values()):
        flags += names
    assert [name for name in flags if not xla_flags.is_known(name)] == []


def test_presets_are_those_of_the_chip():
    flags, variables = {}, {}
    for name, kind in KIND.items():
        flags[name], variables[name] = gpu_presets((kind, kind))
    assert {name for name, one in variables.items() if one.get(QUEUES) == "1"} == {name for name in KIND if name[0] == "h"}
    assert {name for name, one in flags.items() if COMMANDS in one} == {name for name in KIND if name[0] == "b"}
    assert {one["NCCL_DEBUG"] for one in variables.values()} == {"WARN"}
    # Of two kinds, and of one that nobody described, what holds for any.
    for kinds in ((KIND["h100-80gb"], KIND["b200-192gb"]), ("NVIDIA GeForce RTX 4090",)):
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


def test_a_flag_of_another_jaxlib_is_left_out(driver, monkeypatch):
    monkeypatch.setattr(xla_flags, "GPU_FLAGS_OF", {xla_flags.HOPPER: {"xla_gpu_made_up_for_this_test": "true"}})
    driver(KIND["h100-80gb"])
    xla_flags.apply(RunConfig())
    assert "made_up" not in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        ("", []),
        ("--xla_gpu_autotune_level=0 --xla_dump_to=/tmp/--dump", []),
        ("--xla_gpu_no_such=1 --xla_cpu_nor_this --xla_gpu_no_such=2", ["xla_gpu_no_such", "xla_cpu_nor_this"]),
        # A beginning of a name, and what else the library holds, is no flag; a file of flags is not opened.
        ("--xla_gpu_autotune_leve=1 /tmp/flags", ["xla_gpu_autotune_leve"]),
        ("--xla_dump_to='/tmp/a b' --nope", ["nope"]),
    ],
)
def test_flags_that_would_end_the_process(given, unknown, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    assert unknown_flags() == unknown
