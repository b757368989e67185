#!/usr/bin/env bash
# Trains a small model on this machine, CPU or GPU, from a fresh clone: launch/quickstart.sh [section.key=value ...]
# The top of configs/quickstart.yaml describes the run, its time and its expected loss.
# PYTHON and JAXLLM_VENV: see environment.sh.

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

for override in "$@"; do
  [[ "$override" != -* && "$override" == *=* ]] ||
    refuse "quickstart.sh does not know $override: give overrides as section.key=value, such as train.steps=20."
done

# shellcheck disable=SC2119  # "$@" are overrides, not extras
prepare_environment
exec "$python" -m jaxllm.cli train configs/quickstart.yaml "$@"
