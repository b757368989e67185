#!/usr/bin/env bash
# Checks that need a GPU: launch/gpu_check.sh [--dry-run] [1 | 2]
# Runs benchmarks/gpu.py, then the tests marked gpu, and writes the output to gpu_check.log in the folder $OUT, or in
# runs/gpu_check without OUT. The benchmark's rows are in gpu.jsonl beside it: when restarted, it measures the missing ones.
# 1, 2: only a block of benchmarks/gpu_day.py, for a machine that is there for fifteen minutes: the first ends after 9.5, the
# second after 4, and leaves what nvidia-smi and `jaxllm doctor` say of the machine.
# --dry-run runs the same steps on a CPU at tiny sizes.
# MINUTES              time for the benchmark; default: 60
# WHEELS               a folder of pack_wheels.sh, for a machine that has JAX and no network
# PYTHON, JAXLLM_VENV  see environment.sh

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

dry_run=false
block=""
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=true ;;
    1 | 2) block="$argument" ;;
    *) refuse "gpu_check.sh does not know $argument: it takes --dry-run, and 1 or 2 for a block of benchmarks/gpu_day.py." ;;
  esac
done

show_versions() {
  "$python" -c '
import importlib.metadata as metadata, platform
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
print("python", platform.python_version(), *(f"| {name} {version(name)}" for name in ("jax", "jaxlib", "flax")))'
}

collect_tests() {
  local code=0
  "$python" -m pytest --collect-only -q -m gpu tests/gpu || code=$?
  # 5: there are no tests yet.
  ((code == 5)) || return "$code"
}

run_block() {
  # Rows of the other block: OUT may be another folder then.
  local rows="$checkout/runs/gpu_check/rows.jsonl" options=(--block "$block" --gone-s "$SECONDS")
  if $dry_run; then
    run_check "block $block" "$python" benchmarks/gpu.py --dry-run "${options[@]}"
    return
  fi
  [[ ! -e "$rows" ]] || options+=(--known "$rows")
  run_check "block $block" "$python" benchmarks/gpu.py "${options[@]}" --out "$out/gpu.jsonl"
  mkdir -p "$(dirname "$rows")"
  cat "$out/gpu.jsonl" >>"$rows" || true
  if [[ "$block" == 2 ]]; then
    nvidia-smi -q -x >"$out/nvidia-smi.xml" || true
    nvidia-smi topo -m >"$out/nvidia-smi-topo.txt" || true
    timeout 20 "$python" -m jaxllm.cli doctor --json >"$out/doctor.json" || true
  fi
}

check() {
  if $dry_run; then
    echo "no GPU used: dry run"
  else
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  fi
  show_versions
  if [[ -n "$block" ]]; then
    run_block
    closing_summary
    return
  fi
  # The benchmark comes first: on a cold machine the tests take minutes.
  if $dry_run; then
    run_check "benchmarks/gpu.py" "$python" benchmarks/gpu.py --dry-run
    run_check "memory in use" "$python" benchmarks/memory_in_use.py --dry-run
    run_check "gpu tests, collected" collect_tests
  else
    run_check "benchmarks/gpu.py" "$python" benchmarks/gpu.py --minutes "${MINUTES:-60}" --out "$out/gpu.jsonl"
    # Its steps run in separate processes, which must find the GPU free.
    run_check "memory in use" "$python" -m pytest -s -m gpu tests/gpu/test_memory_in_use.py
    run_check "gpu tests" "$python" -m pytest -m gpu tests/gpu --ignore tests/gpu/test_memory_in_use.py
  fi
  closing_summary
}

if $dry_run; then
  export JAX_PLATFORMS=cpu
elif ! have_gpu; then
  refuse "no NVIDIA GPU answers here (nvidia-smi fails): run this on a machine with one, or try --dry-run."
fi

out="$(absolute "${OUT:-$checkout/runs/gpu_check}")"
mkdir -p "$out"
[[ -z "${WHEELS:-}" ]] || use_wheels "$(absolute "$WHEELS")"
prepare_environment test
check 2>&1 | tee "$out/gpu_check.log"
