"""launch/k8s-jobset.yaml and launch/Dockerfile without a cluster: compared with the published schema and the rest of jaxllm;
and the pods' commands, with the environments of pods, as processes of this machine.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from outside import free_port
from run_files import steps_of

from jaxllm.config import load_config
from jaxllm.runtime import exit_codes, launchers

CHECKOUT = Path(__file__).parents[2]
DOCKERFILE = CHECKOUT / "launch" / "Dockerfile"
JOBSET = yaml.safe_load((CHECKOUT / "launch" / "k8s-jobset.yaml").read_text())
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
COMMAND = [*CONTAINER["command"], *CONTAINER["args"]]
LABELS = {"jobset.sigs.k8s.io/jobset-uid": "5f0c", "jobset.sigs.k8s.io/restart-attempt": "3"}
"""Labels of a pod, as the JobSet controller sets them."""


SECRET = "0123456789abcdef\n"
"""What the command in the manifest's head puts into the Secret, shorter."""


def environment_of(index: int, labels: dict[str, str] = LABELS) -> dict[str, str]:
    """Environment that Kubernetes gives to the container of a pod."""

    def value(variable: dict) -> str:
        if "value" in variable:
            return variable["value"]
        if "secretKeyRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["secretKeyRef"] == {"name": "llm", "key": "secret"}
            return SECRET
        key = re.fullmatch(r"metadata\.labels\['(.+)'\]", variable["valueFrom"]["fieldRef"]["fieldPath"])[1]
        # A missing label is an empty text.
        return labels.get(key, "")

    return {variable["name"]: value(variable) for variable in CONTAINER["env"]} | {"JOB_COMPLETION_INDEX": str(index)}


def test_hosts_and_names_agree():
    hosts = JOB["parallelism"]
    assert hosts == JOB["completions"] == int(environment_of(0)["JAXLLM_NUM_PROCESSES"])
    name = JOBSET["metadata"]["name"]
    assert environment_of(0)["JAXLLM_COORDINATOR"].split(":")[0] == f"{name}-{REPLICATED['name']}-0-0.{name}"
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_each_pod_finds_its_rank():
    for index in range(JOB["completions"]):
        found = launchers.find(environment_of(index))
        assert (found.launcher, found.process_id, found.num_processes) == ("kubernetes", index, JOB["completions"])
        assert found.address == environment_of(0)["JAXLLM_COORDINATOR"]
        assert found.secret == SECRET.strip().encode()
        info = launchers.launch_info(environment_of(index))
        assert (info.launch_id, info.attempt) == ("5f0c", 3)
    assert launchers.launch_info(environment_of(0, labels={})).launch_id is None


def test_rules_outside_the_schema():
    """A server rejects other values, or accepts them and loses the run."""
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(JOBSET["spec"]) <= {"replicatedJobs", "network", "failurePolicy"}
    assert set(REPLICATED) == {"name", "replicas", "template"}
    assert JOBSET["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert (JOB["completionMode"], JOB["backoffLimit"], POD["restartPolicy"]) == ("Indexed", 0, "Never")


def test_bad_input_alone_ends_the_jobset():
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    codes = {"containerName": CONTAINER["name"], "operator": "In", "values": [exit_codes.BAD_INPUT]}
    assert rule["onExitCodes"] == codes
    policy = JOBSET["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert policy["maxRestarts"] > 0


def test_the_command_is_a_supervised_run_of_a_recipe_in_the_image():
    assert COMMAND[:3] == ["python", "-m", "jaxllm.runtime.supervisor"]
    program, command, recipe, *overrides = COMMAND[COMMAND.index("--") + 1 :]
    assert (program, command) == ("jaxllm", "train")
    config = load_config(CHECKOUT / recipe, overrides)
    gpus = JOB["completions"] * CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert config.train.global_batch_sequences % gpus == 0
    (claim,) = (volume["name"] for volume in POD["volumes"] if "persistentVolumeClaim" in volume)
    (mount,) = (mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == claim)
    assert Path(config.run.dir).is_relative_to(mount)


def test_the_image_has_what_the_package_and_the_manifest_need():
    lines = re.sub(r"\\\n", " ", DOCKERFILE.read_text()).splitlines()
    instructions = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    copied = {source.rstrip("/") for name, *words in instructions if name == "COPY" for source in words[:-1]}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | {*wheel["packages"], *wheel["force-include"]} == copied
    assert all((CHECKOUT / source).exists() for source in copied)
    # The folder and the user of the command.
    folders = [words[0] for name, *words in instructions if name == "WORKDIR"]
    after = instructions[[words[1:] for words in instructions].index([folders[-1]]) :]
    assert ["COPY", "configs", "configs"] in after
    (user,) = (words[0] for name, *words in instructions if name == "USER")
    assert user.split(":")[1] == str(POD["securityContext"]["fsGroup"])
    (cuda,) = (words[0].partition("=")[2] for name, *words in instructions if name == "ARG")
    (extras,) = (re.search(r"\[(.+)\]", words[-1])[1] for name, *words in instructions if words[:2] == ["pip", "install"])
    assert {*extras.replace("${CUDA}", cuda).split(",")} <= set(project["project"]["optional-dependencies"])


@pytest.mark.launcher
@pytest.mark.parametrize("version", ["1.31", "latest"])
def test_the_job_follows_the_published_schema(version):
    schema = validator()
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": REPLICATED["name"]}, "spec": JOB}
    version = schema.latest_version() if version == "latest" else version
    schema.validate(job, version, strict=True)
    with pytest.raises(schema.ValidationError, match="completionmode"):
        schema.validate(job | {"spec": JOB | {"completionmode": "Indexed"}}, version, strict=True)


def validator():
    """kubernetes_validate, installed if it is missing; skips if that fails."""
    try:
        return importlib.import_module("kubernetes_validate")
    except ImportError:
        install = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "kubernetes-validate"]
        try:
            result = subprocess.run(install, capture_output=True, text=True, timeout=200)
        except subprocess.TimeoutExpired:
            pytest.skip("kubernetes-validate cannot be installed here in 200 s")
        if result.returncode:
            pytest.skip(f"kubernetes-validate cannot be installed here: {result.stderr.strip()[-200:]}")
        importlib.invalidate_caches()
        return importlib.import_module("kubernetes_validate")


@pytest.mark.launcher
@pytest.mark.slow
def test_the_pods_commands_train_together(tmp_path):
    """Every pod is a process; the name of the first pod is this machine's."""
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable if word == "python" else word for word in COMMAND]
    at = command.index("jaxllm")
    command[at : at + 1] = [sys.executable, "-m", "jaxllm.cli"]
    changes = ["run.cpu_devices=1", "parallel.data=2", "model.num_layers=1", "train.steps=2", "train.eval_every_steps=null"]
    changes += ["log.baselines=false", "log.sample_tokens=0", "data.held_out_fraction=0.0", f"run.dir={tmp_path / 'run'}"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAXLLM_"))}
    pods = [
        subprocess.Popen(
            [*command, *changes],
            cwd=CHECKOUT,
            env=outside | environment_of(index) | {"JAXLLM_COORDINATOR": coordinator, "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for index in range(JOB["completions"])
    ]
    try:
        for pod in pods:
            output, _ = pod.communicate(timeout=200)
            assert pod.returncode == 0, output
    finally:
        for pod in pods:
            pod.kill()
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2]
