#!/usr/bin/env bash
# Style, imports and tests: launch/test.sh [--all | --nightly] [pytest arguments ...]
# Without an option it runs the quick tests (tests/selection.py). --all adds types, two notebooks and a third of the slow tests,
# of launchers and of comparisons with PyTorch, another third at each commit; with pytest arguments it runs all of them. --nightly
# runs every test but those for GPUs, and runs them without the compilation cache of earlier runs (tests/program_cache.py). A
# line every half minute says how long it still takes; a failed test is named at once (tests/progress.py). GPU tests are in
# launch/gpu_check.sh. All checks run even if one fails; the exit code is that of the first failure. Packages have the versions of
# constraints/ci.txt; with JAXLLM_VERSIONS=lowest or newest, those that pyproject.toml allows (in an environment of its own:
# JAXLLM_VENV).
# PYTHON and JAXLLM_VENV: see environment.sh.

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

constraints=constraints/ci.txt
case "${JAXLLM_VERSIONS:-}" in
  "") ;;
  newest) constraints="" ;;
  lowest)
    constraints="$(mktemp)"
    "$(find_python)" launch/lowest_versions.py >"$constraints"
    ;;
  *) refuse "JAXLLM_VERSIONS=$JAXLLM_VERSIONS is neither lowest nor newest: correct or unset it." ;;
esac
markers="not slow and not gpu and not launcher and not notebook and not nightly"
all=false
limit=80m
case "${1:-}" in
  --all)
    shift
    all=true
    markers="not gpu and not nightly"
    if (($#)); then export JAXLLM_TEST_PARTS="${JAXLLM_TEST_PARTS:-1}"; fi
    ;;
  --nightly)
    shift
    all=true
    limit=180m
    markers="not gpu"
    export JAX_ENABLE_COMPILATION_CACHE=0
    ;;
esac

# Where a CPU build of this release is on offer, pip prefers it ("2.13.0+cpu" sorts above "2.13.0"); left to choose, it
# takes the newest release and with it gigabytes of CUDA.
install_reference() {
  if [[ "$(uname -sm)" == "Linux x86_64" ]] && ! have_gpu && ! has_module torch; then
    say "installing PyTorch for the reference tests ..."
    pip_install torch==2.13.0 || pip_install torch || return 1
  fi
  install_jaxllm reference
}

# By [tool.pyright] in pyproject.toml, with what the environment's own interpreter imports.
check_types() { "$python" -m basedpyright --pythonpath "$python" --level error; }

# Two processes, a file of tests at a time: most of a test is one thread that compiles. More would starve the devices that a
# CPU is split into. A process that dies ends the run: pytest-xdist would start another one and may then wait for it forever
# (its issue 1378). Not every system has `timeout` (macOS); a hang is then for the caller to end.
run_tests() {
  local limited="" processes="" reasons="" preload
  # What is skipped holds nothing: --all says so.
  if $all; then reasons="-rs"; fi
  if command -v timeout >/dev/null; then limited="timeout --kill-after=60 $limit"; fi
  if has_module xdist; then processes="--numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0"; fi
  # XLA's compiler allocates and frees without end: an eighth of the time (a pipeline's gradient: 17.1 s of CPU, not 19.7).
  preload="$(ldconfig -p 2>/dev/null | awk '/libjemalloc\.so\.2/ { print $NF; exit }')"
  # shellcheck disable=SC2086  # words, on purpose
  LD_PRELOAD="${preload:-${LD_PRELOAD:-}}" $limited "$python" -m pytest $processes $reasons -m "$markers" "$@"
}

# Some machines keep no bytecode. Hundreds of processes then compile the same code again, and each worker rewrites all asserts.
unset PYTHONDONTWRITEBYTECODE

prepare_environment test
if $all && [[ "$venv" != none ]]; then
  install_jaxllm types 2>/dev/null || say "basedpyright cannot be installed here."
  install_reference 2>/dev/null || say "PyTorch cannot be installed here: tests against it are skipped."
  install_jaxllm notebook 2>/dev/null || say "Jupyter's kernel cannot be installed here: notebooks are not run."
  install_jaxllm trackers 2>/dev/null || say "W&B and others cannot be installed here: trackers are not read back."
  install_jaxllm lm-eval 2>/dev/null || say "lm-evaluation-harness cannot be installed here: its tasks are not tested."
  install_jaxllm aot 2>/dev/null || say "NVIDIA's compiler cannot be installed here: compiling for GPUs is not tested."
fi

run_check "ruff check" "$python" -m ruff check .
run_check "ruff format" "$python" -m ruff format --check .
run_check "import rules" "$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
if $all && has_module basedpyright; then
  run_check "types" check_types
elif $all; then
  say "without basedpyright types are not checked."
fi
run_check "pytest" run_tests "$@"
closing_summary
