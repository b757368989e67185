"""benchmarks/gpu_pretend.py: its cases are valid, a step of rank 0 runs, and launches are counted between start and done."""

import json
import os
import subprocess
import sys

import pytest
import scripts

from jaxllm.compile.hlo import Module
from jaxllm.cost_model.hardware import GPUS
from jaxllm.cost_model.memory import estimate_memory

gpu_pretend = scripts.load("benchmarks/gpu_pretend.py")

GEMM = 'custom-call(%x), custom_call_target="__cublas$gemm"'
PROGRAM = f"""HloModule step

%graph (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %gemm.2 = f32[8]{{0}} {GEMM}
  ROOT %gemm.3 = f32[8]{{0}} {GEMM}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %all-gather-start.1 = (f32[8]{{0}}, f32[16]{{0}}) all-gather-start(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %call.1 = f32[8]{{0}} call(%x), to_apply=%graph
  %gemm.1 = f32[8]{{0}} {GEMM}
  %all-gather-done.1 = f32[16]{{0}} all-gather-done(%all-gather-start.1)
  ROOT %gemm.4 = f32[8]{{0}} {GEMM}
}}
"""
LAUNCHED = ["all-gather-start.1", "call.1", "gemm.1", "all-gather-done.1", "gemm.4"]


@pytest.mark.parametrize(("launched", "behind", "matmuls"), [(LAUNCHED, 1, 3), (LAUNCHED[:1] + LAUNCHED[3:], 0, 0)])
def test_matmuls_between_start_and_done(launched, behind, matmuls):
    found = gpu_pretend.order(iter(launched), Module(PROGRAM, {"data": 2}))
    assert found == {"all-gather over data": {"count": 1, "behind_matmuls": behind, "matmuls": matmuls}}


@pytest.mark.parametrize("gpu", ["h100-80gb", "h200-141gb"])
def test_cases_fit_by_the_estimate(gpu):
    for case in gpu_pretend.cases(dry=False):
        config = gpu_pretend.config_of(case["options"]["overrides"], case["about"]["gpus"])
        assert estimate_memory(config, GPUS[gpu]).peak_bytes <= 0.95 * GPUS[gpu].capacity_bytes, case["name"]


def test_runs_on_cpu_devices():
    program = [sys.executable, gpu_pretend.__file__, "--dry-run", "1F1B"]
    ran = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": ""}, check=True)
    (found,) = map(json.loads, ran.stdout.splitlines())
    assert found["finite"]
    assert found["transfers_run"]
    assert found["devices"] == 8
    assert found["step_s"]["median"] > 0
    assert 0 < found["estimate_bytes"] < found["compiled_bytes"]
    assert set(found["schedule"]) >= {"collective-permute over pipe", "all-reduce over tensor"}
