"""launch/Dockerfile by its text: sources, user, packages, versions and SBOM fit the rest. launch/try_image.sh builds it."""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
DOCKERFILE = CHECKOUT / "launch" / "Dockerfile"
CONSTRAINTS = "constraints/image.txt"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())


def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, rest of the line) of each stage by its name; those before the first FROM under ''."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for line in filter(None, text.splitlines()):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            source, name = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()
            found[name] = [(instruction, source)]
        else:
            found[list(found)[-1]].append((instruction, rest))
    return found


STAGES = stages()
COMMON = STAGES["common"]


def words(instruction: str, stage: str = "common") -> list[list[str]]:
    return [shlex.split(rest) for name, rest in STAGES[stage] if name == instruction]


def commands(stage: str = "common") -> list[list[str]]:
    return [
        shlex.split(command) for rest in (rest for name, rest in STAGES[stage] if name == "RUN") for command in rest.split("&&")
    ]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for line in words("ENV") for word in line)


def test_the_base_is_debian_which_brings_no_second_cuda():
    assert STAGES[""] == [("ARG", "BASE=debian:13-slim")]
    assert [(name, steps[0][1]) for name, steps in STAGES.items() if name] == [
        ("common", "${BASE}"),
        ("efa", "common"),
        ("jaxllm", "common"),
    ]
    assert "digest" in DOCKERFILE.read_text().split("ARG BASE=")[0]


def test_sources_exist_and_reach_the_build():
    copied = {source.rstrip("/") for line in words("COPY") for source in line[:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], CONSTRAINTS}
    assert needed | {*wheel["packages"], *wheel["force-include"]} == copied
    assert all((CHECKOUT / source).exists() for source in copied)
    ignored = [
        line for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert not any(fnmatch.fnmatch(source, line) for source in copied for line in ignored[1:])


def test_it_runs_as_a_user_without_privileges_and_as_any_other():
    """In group 0, as OpenShift starts it: what the owner may write the group may."""
    for stage in ("efa", "jaxllm"):
        assert STAGES[stage][-1] == ("USER", "1000:0")
    assert ("USER", "root") not in [step for steps in STAGES.values() for step in steps]
    (user,) = (command for command in commands() if command[0] == "useradd")
    assert user[user.index("--uid") + 1] == "1000"
    assert user[user.index("--gid") + 1] == "0"
    home = f"/home/{user[-1]}"
    assert ["chmod", "g=u", home] in commands()
    assert (environment()["HOME"], environment()["USER"]) == (home, user[-1])
    jobset = yaml.safe_load((CHECKOUT / "launch" / "k8s-jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]


def test_recipes_are_where_a_checkout_has_them():
    folders = [line[0] for line in words("WORKDIR")]
    assert folders[-1] == environment()["HOME"]
    at = COMMON.index(("WORKDIR", folders[-1]))
    assert ("COPY", "configs configs") in COMMON[at:]


def test_it_has_the_libraries_of_the_fabric():
    (install,) = (command for command in commands() if command[:2] == ["apt-get", "install"])
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1t64", "libnuma1", "numactl"} <= set(install)
    assert "--no-install-recommends" in install
    # The adapter's kernel module is the host's.
    (installer,) = (command for command in commands("efa") if command[0] == "./efa_installer.sh")
    assert {"--skip-kmod", "--skip-limit-conf", "--no-verify"} <= set(installer)


def pins() -> dict[str, Requirement]:
    lines = [line for line in (CHECKOUT / CONSTRAINTS).read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def test_every_package_has_one_version():
    assert ["export", "PIP_NO_CACHE_DIR=1", f"PIP_CONSTRAINT={CONSTRAINTS}"] in commands()
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) and pin.marker is None for pin in pins().values())
    (cuda,) = (rest.partition("=")[2] for name, rest in COMMON if name == "ARG")
    (package,) = (command[-1] for command in commands() if command[:2] == ["/opt/jaxllm/bin/pip", "install"])
    extras = re.search(r"\[(.+)\]", package)[1].replace("${CUDA}", cuda).split(",")
    optional = PROJECT["project"]["optional-dependencies"]
    assert set(extras) <= optional.keys()
    # Both versions of CUDA are pinned.
    wanted = [*PROJECT["project"]["dependencies"], *optional["parquet"], *optional["cuda12"], *optional["cuda13"]]
    wanted += PROJECT["build-system"]["requires"]
    for one in map(Requirement, wanted):
        if not one.marker or one.marker.evaluate({"python_version": "3.13"}):
            (version,) = pins()[canonicalize_name(one.name)].specifier
            assert one.specifier.contains(version.version), f"{version} is not {one}"
    for major in (12, 13):
        assert {
            f"jax-cuda{major}-plugin",
            f"jax-cuda{major}-pjrt",
            f"nvidia-nccl-cu{major}",
            f"nvidia-cudnn-cu{major}",
        } <= pins().keys()


def test_it_lists_what_it_has():
    written = [
        command for stage in STAGES for command in commands(stage) if any("/opt/jaxllm/sbom" in word for word in command)
    ]
    assert [command[0] for command in written] == ["mkdir", "/tmp/sbom/bin/cyclonedx-py", "dpkg-query", "dpkg-query"]
    assert "cyclonedx-bom" in pins()
