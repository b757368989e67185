"""`jaxllm compile`: the report agrees with XLA's figures for the same compilation, and user errors give one sentence.

Skipped without the extra `aot`, except for tests that do not compile.
"""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest
import yaml
from rich.console import Console
from step_flops import step_matmul_flops
from tiny import SMALL_MODEL

from jaxllm.cli.app import app, main
from jaxllm.compile import aot
from jaxllm.compile import report as module
from jaxllm.compile.aot import OLDEST, can_compile_for_gpus, compile_step, gpu_devices, trace_step
from jaxllm.compile.hlo import origin
from jaxllm.compile.jaxpr_flops import kernel_flops
from jaxllm.compile.report import CompileReport, compile_report
from jaxllm.compile.text import render
from jaxllm.config import ConfigError, config_folder, load_config
from jaxllm.cost_model.gpu_choice import find_gpu
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.memory import estimate_memory
from jaxllm.machine import xla_flags
from jaxllm.run.memory_check import total_bytes
from jaxllm.untrusted import checked

H100 = GPUS["h100-80gb"]
RECIPE = {
    "model": SMALL_MODEL,
    "parallel": {"tensor": 2, "zero": 1},
    "train": {"steps": 2, "sequence_length": 512, "global_batch_sequences": 16, "microbatch_sequences": 2},
}
needs_gpu_compiler = pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")


def config(*overrides):
    return load_config(RECIPE, overrides)


def cli(*arguments):
    command = [sys.executable, "-m", "jaxllm.cli", "compile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=config_folder().parent, timeout=500)


def text_of(report):
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    console.print(render(report))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def report(cache):
    return compile_report(config(), H100, 8, cache=cache)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


@pytest.fixture
def no_compiler(monkeypatch):
    """Makes the test fail if anything compiles."""

    def refuse(*_, **options):
        raise AssertionError("compiled")

    monkeypatch.setattr(module, "_compile", refuse)


# ---------------------------------------------------------------------------------------------------------------- bytes


@needs_gpu_compiler
def test_bytes_are_those_of_the_same_compilation(report):
    memory = compile_step(config(), gpu_devices(1, 8)).memory_analysis()
    assert report.argument_bytes == memory.argument_size_in_bytes
    assert report.temp_bytes == memory.temp_size_in_bytes
    assert report.output_bytes == memory.output_size_in_bytes
    assert report.alias_bytes == memory.alias_size_in_bytes
    assert report.total_bytes == report.argument_bytes + report.temp_bytes + report.output_bytes - report.alias_bytes
    assert report.host_bytes == 0
    assert (report.gpus, report.gpus_per_host, report.mesh["data"]) == (8, 8, 4)


@needs_gpu_compiler
def test_unrolled_layers_with_documents_take_what_the_estimate_says():
    """Over two ranks, whose schedule hides transfers: no gradient of a weight waits with its inputs, and no log-sum-exp of
    packed documents stays in cuDNN's layout. Without parallel/ordering.py's layer_by_layer and model/cudnn_attention.py's
    _with_lse the estimate is 12% too low."""
    sizes = {"num_layers": 6, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "num_kv_heads": 2}
    recipe = {
        "model": {**sizes, "vocab_size": 4096, "compute_dtype": "bfloat16"},
        "train": {"steps": 1, "sequence_length": 4096, "microbatch_sequences": 4, "global_batch_sequences": 16},
        "parallel": {"data": 2, "zero": 1},
    }
    chosen = load_config(recipe).resolve(2)
    compiled = total_bytes(compile_step(chosen, gpu_devices(1, 2)).memory_analysis())
    assert estimate_memory(chosen, H100, on_device=False).peak_bytes == pytest.approx(compiled, rel=0.08)


@needs_gpu_compiler
def test_the_verdict_follows_from_the_capacity(report):
    assert report.capacity_bytes == H100.capacity_bytes
    assert report.fits is True
    assert report.share_of_capacity == report.total_bytes / H100.capacity_bytes
    too_small = dataclasses.replace(report, capacity_bytes=report.total_bytes - 1, fits=False, share_of_capacity=1.0)
    assert "DOES NOT FIT" in text_of(too_small)


@needs_gpu_compiler
def test_too_little_memory_is_said_and_is_no_error(recipe, tmp_path, capsys):
    """A user-defined kind with 1.2 GiB leaves a step 113 MiB; the state of 4M parameters and the logits need more."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("{like: a100-40gb, name: tiny, memory_bytes: 1288490189}")
    overrides = ["model.vocab_size=8192", "train.sequence_length=1024", "train.loss_chunk_tokens=16384", "parallel.tensor=1"]
    options = ("--gpu", str(mine), "--gpus", "1", "--no-cache", "--json")
    app(["compile", recipe, *overrides, "parallel.zero=0", *options], standalone_mode=False)
    values = json.loads(capsys.readouterr().out)
    assert values["gpu"] == "tiny"
    assert values["capacity_bytes"] == find_gpu(str(mine)).capacity_bytes < values["total_bytes"]
    assert values["fits"] is False


@needs_gpu_compiler
@pytest.mark.slow
def test_a_nearly_full_gpu_computes_nothing_again(monkeypatch):
    """A step that fills 95% of a GPU has the FLOPs and bytes of endless memory. By default XLA computes values
    again."""
    chosen = config(
        "parallel.data=1", "parallel.tensor=1", "model.num_layers=6", "model.scan_layers=false", "parallel.remat=none"
    ).resolve(1)
    endless = module.compile_report(chosen, H100, 1)
    full = gpu_devices(1, 1, H100, int(endless.total_bytes / 0.95))
    same = module._with_real_memory(chosen, full, endless.total_bytes, endless.total_bytes)
    assert not same.rematerialises
    assert (same.total_bytes, same.compiled_flops) == (endless.total_bytes, endless.compiled_flops)
    monkeypatch.setattr(xla_flags, "NO_REMAT_GPU_OPTIONS", {})
    again = module._with_real_memory(chosen, full, endless.total_bytes, endless.total_bytes)
    assert again.rematerialises
    assert again.total_bytes < endless.total_bytes
    repeated = int(1.1 * endless.compiled_flops)
    told = dataclasses.replace(endless, real_memory=again, compiled_flops=repeated)
    assert "With the real memory XLA rematerialises" in text_of(told)
    assert "it repeats matmuls" in text_of(told)
    assert "repeats matmuls" not in text_of(endless)


@needs_gpu_compiler
@pytest.mark.slow
def test_what_lies_on_the_host_is_not_held_against_the_gpu(monkeypatch):
    """XLA counts host memory as if it were the GPU's. By default it would recompute values that do fit."""
    many = ("model.num_layers=48", "train.global_batch_sequences=64", "train.microbatch_sequences=64")
    chosen = config("parallel.data=1", "parallel.tensor=1", "parallel.remat=offload", *many)
    memory = compile_step(chosen, gpu_devices(1, 1)).memory_analysis()
    demand, on_host = module.total_bytes(memory), memory.host_temp_size_in_bytes
    assert on_host > demand
    enough = gpu_devices(1, 1, H100, 2 * demand)
    same = module._with_real_memory(chosen, enough, demand, demand)
    # XLA of JAX 0.12 recomputes one small instruction of this step, which saves nothing.
    assert same.rematerialised_instructions <= (jax.__version_info__ >= (0, 11))
    assert same.total_bytes == demand
    monkeypatch.setattr(xla_flags, "NO_REMAT_GPU_OPTIONS", {})
    assert module._with_real_memory(chosen, enough, demand, demand).rematerialised_instructions > 1


@needs_gpu_compiler
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("a100-40gb", "h200-141gb", "b200-192gb") else pytest.param(name, marks=pytest.mark.slow)
        for name, gpu in GPUS.items()
        if gpu.chip.compute_capability >= OLDEST
    ],
)
def test_every_kind_compiles(name):
    """XLA compiles for the given kind: the compute capability selects the kernels. Kinds with the same chip differ little."""
    gpu = GPUS[name]
    devices = gpu_devices(1, 1, gpu)
    assert str(devices[0].compute_capability) == ".".join(map(str, gpu.chip.compute_capability))
    small = ("model.num_layers=1", "model.hidden_size=64", "model.vocab_size=256", "train.sequence_length=64")
    compiled = compile_step(config(*small, "parallel.tensor=1"), devices)
    assert compiled.memory_analysis().temp_size_in_bytes > 0


# ------------------------------------------------------------------------------------------------- collectives and FLOPs


@needs_gpu_compiler
def test_collectives_are_grouped_and_counted(report):
    """ZeRO 1 over four data ranks: one float32 gradient per parameter, one all-gather of the weights, in no loop."""
    parameters = 2 * (256 * 64 * (2 * 4 + 2 * 2) + 3 * 256 * 512 + 2 * 256) + 256 + 2 * 2048 * 256
    scattered = [line for line in report.collectives if line.kind == "reduce-scatter" and line.axes == ("data",)]
    gathered = [line for line in report.collectives if line.kind == "all-gather" and line.axes == ("data",)]
    assert {(line.dtype, line.in_loops) for line in scattered} == {("f32", False)}
    # Tensor ranks hold halves, except for norms; a rank keeps a quarter and sends the other three.
    norms = 5 * 256
    share = ((parameters - norms) / 2 + norms) / 4
    assert sum(line.bytes for line in scattered) == pytest.approx(4 * share, rel=0.01)
    assert sum(line.sent_bytes for line in scattered) == pytest.approx(3 * 4 * share, rel=0.01)
    assert {line.dtype for line in gathered} == {"bf16"}
    assert sum(line.sent_bytes for line in gathered) == pytest.approx(3 * 2 * share, rel=0.01)
    in_layers = [line for line in report.collectives if line.axes == ("tensor",) and line.in_loops]
    assert {"all-gather", "reduce-scatter"} <= {line.kind for line in in_layers}


@needs_gpu_compiler
def test_what_shows_of_the_collectives_is_told(report):
    assert {(line.kind, line.axes) for line in report.overlap} == {(c.kind, c.axes) for c in report.collectives if c.axes}
    assert sum(line.sent_bytes for line in report.overlap) == pytest.approx(sum(c.sent_bytes for c in report.collectives), 1e-6)
    for line in report.overlap:
        assert 0 <= line.bare_bytes <= line.sent_bytes
        assert 0 <= line.exposed_share <= 1
    assert "Exposed communication, by kind" in text_of(report)


@needs_gpu_compiler
def test_flops_are_those_of_the_closed_form(report):
    resolved = config().resolve(8)
    assert report.executed_flops == step_matmul_flops(resolved)
    assert report.attention_kernel_flops == 0
    assert report.compiled_flops == report.executed_flops
    assert report.model_flops < report.executed_flops


@needs_gpu_compiler
def test_cudnn_attention_is_counted_by_its_shapes():
    """One document: 4 B S S N H forward and 10 backward, half of it causal."""
    chosen = config("model.attention=cudnn", "data.mask_documents=false", "parallel.remat=none")
    step = trace_step(chosen, gpu_devices(1, 8))
    assert step.attention == "cudnn"
    square = 16 * 512 * 512 * 4 * 64 * 2  # all sequences, both layers
    assert kernel_flops(step.jaxpr) == (4 + 10) * square // 2


def test_names_of_results():
    assert origin("state.params['layers']['mlp']['up']", "jit(train_step)/convert_element_type") == "layers.mlp.up"
    assert origin("state.opt_state[0].mu['embedding']", "") == "opt_state.0.mu.embedding"
    path = "jit(train_step)/shard_map/while/body/closed_call/transpose(jvp(jvp()))/checkpoint/BSF,FD->BSD/dot_general"
    assert origin("", path) == "backward: BSF,FD->BSD/dot_general"
    assert origin("", "jit(train_step)/optimizer/mul") == "optimizer/mul"
    assert origin("", "input_transpose_fusion.3") == "input_transpose_fusion.3"


@needs_gpu_compiler
def test_large_results_are_named(report):
    sizes = [large.bytes for large in report.largest_results]
    assert sizes == sorted(sizes, reverse=True)
    assert all(large.origin for large in report.largest_results)


# ------------------------------------------------------------------------------------------------------------- warnings


def giants(*overrides, gpus=8, capacity=2**20, fits=True):
    return list(module.replicated_giants(config(*overrides).resolve(gpus), capacity, fits))


def test_weights_that_every_rank_holds_are_named():
    (found,) = giants("parallel.zero=0", "parallel.tensor=1")
    assert "embedding" in found
    assert "the same on all 8 data ranks: parallel.zero=1 or more shards them." in found
    assert giants("parallel.zero=1", "parallel.tensor=1") == []
    assert giants("parallel.zero=0", "parallel.tensor=1", capacity=2**40) == []
    (copies,) = giants("parallel.zero=1", "parallel.tensor=1", fits=False)
    assert "parallel.zero=3 gathers them a layer at a time" in copies


def test_synchronous_collectives_in_loops_are_named():
    quiet = module.CollectiveRow("all-gather", ("data",), "bf16", True, True, False, 1, 4, 2**24, 2**23)
    loud = dataclasses.replace(quiet, asynchronous=False)
    many = dataclasses.replace(quiet, in_loops=False, count=20, bytes=20 * 1024)
    assert list(module.warnings(config().resolve(8), [quiet], "", None, None, 0)) == []
    (warning,) = module.warnings(config().resolve(8), [loud], "", None, None, 0)
    assert "4 all-gathers of bf16 over data, 16.0 MiB a step, are synchronous inside loops" in warning
    (warning,) = module.warnings(config().resolve(8), [many], "", None, None, 0)
    assert "20 all-gathers over data move 1.0 KiB each on average: XLA did not combine them." in warning
    (warning,) = module.warnings(
        config().resolve(8), [], 'x = custom-call(), frontend_attributes={_xla_compute_type="host"}', None, None, 0
    )
    assert "on the host's CPU" in warning


# ----------------------------------------------------------------------------------------------------- the command line


@needs_gpu_compiler
def test_json_alone_and_from_the_cache(report, recipe, cache):
    started = time.perf_counter()
    result = cli("--json", recipe, "--gpu", "h100-80gb", "--gpus", "8", "--cache", str(cache))
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    contract = {"argument_bytes", "temp_bytes", "output_bytes", "alias_bytes", "total_bytes"}
    assert contract | {"capacity_bytes", "fits", "compile_s", "collectives"} <= values.keys()
    assert values["cached"] is True
    assert values == json.loads(json.dumps({**report.to_json(), "cached": True}))
    assert checked(values, CompileReport) == dataclasses.replace(report, cached=True)
    assert time.perf_counter() - started < 60


@needs_gpu_compiler
def test_the_cache_knows_what_a_report_depends_on(report, cache, no_compiler):
    assert compile_report(config("run.dir=elsewhere", "log.every_steps=7"), H100, 8, cache=cache).cached
    with pytest.raises(AssertionError, match="compiled"):
        compile_report(config("train.seed=1"), H100, 8, cache=cache)
    for gpu, per_host, real in ((GPUS["h200-141gb"], None, False), (H100, 4, False), (H100, None, True)):
        with pytest.raises(AssertionError, match="compiled"):
            compile_report(config(), gpu, 8, per_host, real_memory=real, cache=cache)


@needs_gpu_compiler
def test_a_broken_or_read_only_cache_does_no_harm(report, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "_compile", lambda *_, **options: report)
    monkeypatch.setattr(module, "cache_key", lambda *_: "key")
    (tmp_path / "key.json").write_text('{"total_bytes": 3')
    assert compile_report(config(), H100, 8, cache=tmp_path) == report
    assert "compiling again" in caplog.text
    assert json.loads((tmp_path / "key.json").read_text())["total_bytes"] == report.total_bytes
    assert compile_report(config(), H100, 8, cache=tmp_path).cached
    assert compile_report(config(), H100, 8, cache=tmp_path / "key.json" / "no-folder") == report
    assert "The report is not cached" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


@needs_gpu_compiler
def test_text_fits_80_columns_and_says_it_all(report):
    text = text_of(report)
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("8 x h100-80gb, 1 host of 8", "the largest divisor of 8", "Fits:", "of 79.6 GiB", "reduce-scatter", "TFLOP"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h100"], "There is no GPU h100: did you mean h100-80gb? Choose one of v100-16gb, v100-32gb"),
        (["--gpu", "nowhere.yaml"], "nowhere.yaml cannot be read as the description of a GPU: No such file or directory."),
        (["--gpu", "h100-80gb"], "parallel.data=auto uses all present GPUs: give their number with --gpus"),
        (["--gpu", "h100-80gb", "--gpus", "12", "--gpus-per-host", "5"], "--gpus-per-host=5 does not divide the 12 GPUs"),
        (["--gpu", "h100-80gb", "--gpus", "3"], "parallel.tensor=2 does not divide the 3 devices"),
    ],
)
def test_mistakes_end_in_one_sentence_and_code_2(recipe, arguments, sentence, monkeypatch, capfd):
    # 12 sequences instead of 16, so that six data ranks divide them and only the hosts are wrong.
    batch = ("train.global_batch_sequences=12", "train.microbatch_sequences=1")
    monkeypatch.setattr(sys, "argv", ["jaxllm", "compile", recipe, *batch, *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert sentence in line


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr("jaxllm.compile.aot.can_compile_for_gpus", lambda: False)
    with pytest.raises(ConfigError, match=r"needs NVIDIA's packages: pip install 'jaxllm\[aot\]'"):
        compile_report(config(), H100, 8)


@pytest.mark.parametrize(("installed", "told"), [("9.31.2.5", (9, 31, 2)), (None, (9, 12, 0))])
def test_xla_is_told_the_installed_cudnn(installed, told, monkeypatch):
    texts = []
    monkeypatch.setattr(aot, "can_compile_for_gpus", lambda: True)
    monkeypatch.setattr(aot, "installed_version", lambda package: installed if package == "nvidia-cudnn-cu13" else "0")
    monkeypatch.setattr(
        aot.topologies,
        "get_topology_desc",
        lambda target_config, **_: texts.append(target_config) or SimpleNamespace(devices=[]),
    )
    gpu_devices(1, 1)
    assert re.findall(r"dnn_version_info \{ major: (\d+) minor: (\d+) patch: (\d+) \}", texts[0]) == [tuple(map(str, told))]


@needs_gpu_compiler
def test_hosts_are_no_larger_than_the_kind_has(no_compiler, monkeypatch):
    taken = []
    monkeypatch.setattr(module, "_compile", lambda *arguments, **_: taken.append(arguments[-2:]))
    batch = ("train.global_batch_sequences=24", "train.microbatch_sequences=1")
    for name in ("h100-80gb", "h100-94gb"):
        compile_report(config(*batch), GPUS[name], 12)
    assert taken[0][0] == 6
    assert taken[1] == (4, "the largest divisor of 12 not above 4, or --gpus-per-host")


def test_the_devices_here_need_no_kind():
    """CPU devices: compiled as they are, without a verdict."""
    tiny = ("model.num_layers=1", "model.hidden_size=32", "model.vocab_size=256", "train.sequence_length=16")
    found = compile_report(config(*tiny, "model.compute_dtype=float32"))
    assert (found.gpus, found.fits, found.capacity_bytes) == (jax.device_count(), None, None)
    assert found.total_bytes > 0
    assert "is not known" in text_of(found)


# ----------------------------------------------------------------------------------------------------------------- size


@needs_gpu_compiler
@pytest.mark.slow
def test_70b_on_1024_gpus_takes_less_than_a_minute():
    mesh = ("parallel.pipe=8", "parallel.context=2", "parallel.tensor=4", "parallel.remat=full")
    train = {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 1024, "microbatch_sequences": 1}
    chosen = load_config({"model": {"name": "llama-3.1-70b"}, "train": train}, mesh)
    clock, cores = time.perf_counter(), sum(os.times()[:4])
    found = compile_report(chosen, H100, 1024)
    # Beside another test it takes more wall time; the CPU time of its threads and their assembler does not grow.
    assert min(time.perf_counter() - clock, sum(os.times()[:4]) - cores) < 60
    assert found.mesh == {"pipe": 8, "data": 16, "context": 2, "tensor": 4}
    assert found.fits
