#!/usr/bin/env bash
# Builds launch/Dockerfile and tries the image on this machine, without Docker and without a registry: launch/try_image.sh FOLDER
#
# debootstrap makes Debian's base from its packages, buildah runs each step of the Dockerfile on it in a chroot, and the image is
# tried as its own user and as a number that the image does not know, as OpenShift starts it: the versions of its constraints,
# the two SBOMs, libibverbs as NCCL opens it, and two steps of training on a CPU. The variant for EFA is not built: its installer
# comes from AWS.
#
# It needs root, Linux, debootstrap and buildah (Debian: apt-get install debootstrap buildah), and 15 GB in FOLDER, where the next
# try finds its base, and five to ten minutes.
#
# SSL_CERT_FILE  a file of certificates that pip trusts in the steps, for networks with one of their own

# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

(($# == 1)) || refuse "try_image.sh needs a folder with 15 GB of space: try_image.sh FOLDER"
for program in debootstrap buildah; do
  command -v "$program" >/dev/null || refuse "try_image.sh needs $program (Debian: apt-get install debootstrap buildah)."
done
((EUID == 0)) || refuse "try_image.sh needs root: debootstrap and buildah make a root file system."
folder="$(absolute "$1")"
mkdir -p "$folder"

base="$(sed -n 's/^ARG BASE=//p' launch/Dockerfile)"
image=jaxllm:tried
tool=(buildah --root "$folder/storage" --runroot "$folder/runroot")
trust=()
if [[ -n "${SSL_CERT_FILE:-}" ]]; then
  # Pip reads the file where it installs, and the setting where it builds a wheel.
  printf '[global]\ncert = /trusted.pem\n' >"$folder/pip.conf"
  trust=(--volume "$(realpath "$SSL_CERT_FILE"):/trusted.pem:ro" --volume "$folder/pip.conf:/etc/pip.conf:ro")
  trust+=(--env SSL_CERT_FILE=/trusted.pem)
fi

if ! "${tool[@]}" inspect --type image "$base" >/dev/null 2>&1; then
  say "making $base with debootstrap"
  [[ -d "$folder/debian" ]] || debootstrap --variant=minbase trixie "$folder/debian" >"$folder/debootstrap.log" ||
    refuse "debootstrap failed: see $folder/debootstrap.log, and remove $folder/debian before the next try."
  scratch="$("${tool[@]}" from scratch)"
  tar --directory "$folder/debian" --create --file "$folder/debian.tar" .
  "${tool[@]}" add --quiet "$scratch" "$folder/debian.tar" / >/dev/null
  "${tool[@]}" commit --quiet --rm "$scratch" "$base" >/dev/null
  rm -f "$folder/debian.tar"
fi

say "building launch/Dockerfile"
"${tool[@]}" bud --isolation chroot --network host --layers=false --pull-never "${trust[@]}" \
  --ignorefile launch/Dockerfile.dockerignore --file launch/Dockerfile --tag "$image" . >"$folder/build.log" 2>&1 ||
  refuse "the build failed: see $folder/build.log"

as_user() { "${tool[@]}" run --isolation chroot --user "$1" "$container" -- bash -euc "$2"; }

# shellcheck disable=SC2016  # the shell of the container reads it
tries='
  test "$(id -u):$(id -g)" = "$ME"
  touch "$HOME/writable"
  pip check
  pip freeze --exclude jaxllm | sort -f >"$HOME/frozen"
  python -c "
import ctypes, json, pathlib
ctypes.CDLL(\"libibverbs.so.1\")
sbom = pathlib.Path(\"/opt/jaxllm/sbom\")
components = {one[\"name\"].lower() for one in json.loads((sbom / \"python.cdx.json\").read_text())[\"components\"]}
assert {\"jax\", \"jaxlib\", \"flax\", \"jaxllm\"} <= components, components
assert \"libibverbs1\\t\" in (sbom / \"debian.tsv\").read_text()
"
  JAX_PLATFORMS=cpu jaxllm train configs/quickstart.yaml run.cpu_devices=2 train.steps=2 model.num_layers=1 \
    train.eval_every_steps=null log.baselines=false log.sample_tokens=0 run.dir="$HOME/run-$(id -u)"
'
container=""
remove() { [[ -z "$container" ]] || "${tool[@]}" rm "$container" >/dev/null; }
trap remove EXIT
for user in 1000:0 1000680000:0; do
  say "trying it as $user"
  remove
  container="$("${tool[@]}" from --pull-never "$image" 2>/dev/null)"
  as_user "$user" "ME=$user; $tries" || refuse "the image fails as user $user"
done
# shellcheck disable=SC2016
frozen="$(as_user "$user" 'cat "$HOME/frozen"' | sed 's/_/-/g; s/\./-/g' | tr '[:upper:]' '[:lower:]')"
pinned="$(sed 's/_/-/g; s/\./-/g' constraints/image.txt)"
loose="$(grep -vxF -f <(printf '%s\n' "$pinned") <<<"$frozen" || true)"
[[ -z "$loose" ]] || refuse "constraints/image.txt does not have: $loose"
say "the image works"
