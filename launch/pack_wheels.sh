#!/usr/bin/env bash
# Packs what jaxllm lacks on a machine without a network that has JAX, Flax, Optax and Orbax:
#   launch/pack_wheels.sh FOLDER [PYTHON_VERSION]
# Downloads the wheels with pip, without their dependencies, for Linux on x86_64 and that Python, by default 3.12: 13 MB.
# On the machine: WHEELS=FOLDER bash launch/gpu_check.sh
# PYTHON: see environment.sh; it needs pip, and may have another version.

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

(($# == 1 || $# == 2)) || refuse "pack_wheels.sh takes a folder, and perhaps a version of Python: launch/pack_wheels.sh FOLDER 3.12"
version="${2:-3.12}"
[[ "$version" =~ ^3\.[0-9]+$ ]] || refuse "$version is not a version of Python such as 3.12."
folder="$(absolute "$1")"
[[ -z "$(compgen -G "$folder/*.whl")" ]] || refuse "$1 has wheels already: name a new folder."
mkdir -p "$folder"

target=(--python-version "$version" --implementation cp)
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
  target+=(--platform "${platform}_x86_64")
done

download() {
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: "${target[@]}" --dest "$folder" "$@" ||
    refuse "pip cannot download $*: check the network, and that it has wheels for Python $version."
}

# The pydantic_core that a pydantic works with: no other version does.
core_of() {
  "$python" -c '
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    print(re.search(r"^Requires-Dist: (pydantic-core==[\w.]+)", wheel.read(name).decode(), re.MULTILINE)[1])
' "$1"
}

python="$(find_python)"
download pydantic
download "$(core_of "$folder"/pydantic-*.whl)" annotated-types typing-inspection typing_extensions \
  grain array-record backports.zstd portpicker nvidia-ml-py cryptography cffi pycparser
du -ch "$folder"/*.whl
