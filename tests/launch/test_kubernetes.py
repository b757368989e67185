"""launch/k8s-jobset.yaml, launch/kubeflow-trainjob.yaml and launch/skypilot.yaml without a cluster: compared with the published
schemas and the rest of jaxllm; and the pods' commands, with the environments of pods, as processes of this machine.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from outside import free_port
from run_files import steps_of

from jaxllm.cluster import exit_codes, launchers
from jaxllm.config import load_config

CHECKOUT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).parent / "schemas"


def manifest(name: str, variants: bool = False) -> dict:
    """A manifest; with `variants` also its lines behind `#:`, for what not every cluster has."""
    text = (CHECKOUT / "launch" / name).read_text()
    return yaml.safe_load(re.sub(r"^( *)#: ", r"\1", text, flags=re.MULTILINE) if variants else text)


JOBSET, TRAIN_JOB, SKY = (manifest(name) for name in ("k8s-jobset.yaml", "kubeflow-trainjob.yaml", "skypilot.yaml"))
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


def holds_a_supervised_recipe(command: list[str], gpus: int, mounts: list[str]) -> None:
    assert command[:3] == ["python", "-m", "jaxllm.cluster.supervisor"]
    program, verb, recipe, *overrides = command[command.index("--") + 1 :]
    assert (program, verb) == ("jaxllm", "train")
    config = load_config(CHECKOUT / recipe, overrides)
    assert config.train.global_batch_sequences % gpus == 0
    assert any(Path(config.run.dir).is_relative_to(mount) for mount in mounts)


def test_the_command_is_a_supervised_run_of_a_recipe_in_the_image():
    gpus = JOB["completions"] * CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    (claim,) = (volume["name"] for volume in POD["volumes"] if "persistentVolumeClaim" in volume)
    mounts = [mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == claim]
    holds_a_supervised_recipe(COMMAND, gpus, mounts)


def test_a_pod_has_what_nccl_needs():
    """Shared memory always; adapters, locked memory, a queue and a topology where the cluster has them."""
    (shared,) = (volume for volume in POD["volumes"] if "emptyDir" in volume)
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert {"name": shared["name"], "mountPath": "/dev/shm"} in CONTAINER["volumeMounts"]
    assert POD["securityContext"] == {"runAsNonRoot": True, "fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    variant = manifest("k8s-jobset.yaml", variants=True)
    pod = variant["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "rdma/ib": 1}
    assert variant["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert variant["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/podset-preferred-topology"]


# ---------------------------------------------------------------------------------- JobSet, Kubeflow Trainer and SkyPilot

HELD = [
    ("kubeflow-trainjob.yaml", "kubeflow-trainjob.yaml"),
    ("skypilot.yaml", "skypilot-task.yaml"),
    ("k8s-jobset.yaml", "jobset.yaml"),
]


def schema_of(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(yaml.safe_load((SCHEMAS / name).read_text()))


@pytest.mark.parametrize("variants", [False, True])
@pytest.mark.parametrize(("name", "schema"), HELD)
def test_a_manifest_follows_its_published_schema(name, schema, variants):
    schema_of(schema).validate(manifest(name, variants))


def objects(value, place=()):
    """Places of all objects in a value."""
    if isinstance(value, dict):
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from objects(inner, (*place, key))


def at(value, place):
    for key in place:
        value = value[key]
    return value


def test_an_unknown_key_is_refused_in_each_object_of_the_jobset():
    """But where users make keys."""
    validator = schema_of("jobset.yaml")
    accepted = set()
    for place in objects(manifest("k8s-jobset.yaml", variants=True)):
        changed = manifest("k8s-jobset.yaml", variants=True)
        at(changed, place)["unknown"] = "1"
        if validator.is_valid(changed):
            accepted.add(place)
    of_users = {place for place in accepted if place[:1] == ("metadata",) or place[-1] in ("annotations", "limits")}
    assert accepted == of_users


@pytest.mark.parametrize(
    ("name", "schema", "place", "value"),
    [
        (*HELD[0], ("spec", "trainer", "num_nodes"), 2),
        (*HELD[0], ("spec", "trainer", "numNodes"), "two"),
        (*HELD[0], ("apiVersion",), "kubeflow.org/v1"),
        (*HELD[0], ("spec", "trainer", "resourcesPerNode", "limits", "nvidia.com/gpu"), "four"),
        (*HELD[1], ("numNodes",), 2),
        (*HELD[1], ("resources", "job_recovery", "recover_on_exit_codes"), [75, 300]),
        (*HELD[1], ("envs", "JAXLLM-LAUNCH"), "x"),
        (*HELD[2], ("apiVersion",), "jobset.x-k8s.io/v1"),
        (*HELD[2], ("spec", "network", "enableDNSHostnames"), "true"),
        (*HELD[2], ("spec", "failurePolicy", "restartStrategy"), "Never"),
        (*HELD[2], ("spec", "failurePolicy", "rules", 0, "action"), "FailJob"),
        (*HELD[2], ("spec", "replicatedJobs", 0, "template", "spec", "completionmode"), "Indexed"),
    ],
)
def test_the_schema_refuses_what_a_server_would(name, schema, place, value):
    changed = manifest(name)
    at(changed, place[:-1])[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        schema_of(schema).validate(changed)


def test_the_trainjob_is_the_jobset_as_kubeflow_writes_it():
    trainer = TRAIN_JOB["spec"]["trainer"]
    gpus = trainer["numNodes"] * trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (patch,) = TRAIN_JOB["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # Names in the runtime jax-distributed of kubeflow/trainer.
    assert (TRAIN_JOB["spec"]["runtimeRef"], job["name"], container["name"]) == ({"name": "jax-distributed"}, "node", "node")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "runs"]
    holds_a_supervised_recipe([*trainer["command"], *trainer["args"]], gpus, mounts)
    assert [*trainer["command"], *trainer["args"]] == COMMAND
    for key in ("terminationGracePeriodSeconds", "securityContext", "volumes"):
        assert pod[key] == POD[key]
    for key in ("securityContext", "volumeMounts"):
        assert container[key] == CONTAINER[key]
    # Kubeflow sets the rank and the coordinator.
    ours = {variable["name"] for variable in CONTAINER["env"]} - {launchers.NUM_PROCESSES, launchers.COORDINATOR}
    assert {variable["name"] for variable in trainer["env"]} == ours


def test_the_skypilot_task_runs_the_checkout():
    gpus = SKY["num_nodes"] * int(SKY["resources"]["accelerators"].partition(":")[2])
    activate, command = SKY["run"].replace("\\\n", "").splitlines()
    assert activate == "source .venv/bin/activate"
    holds_a_supervised_recipe(shlex.split(command), gpus, list(SKY["volumes"]))
    assert SKY["resources"]["job_recovery"] == {"recover_on_exit_codes": [exit_codes.RESTART, exit_codes.LOST]}
    for script in (SKY["setup"], SKY["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=20).returncode == 0


# ---------------------------------------------------------------------------------------------------- published by Kubernetes


@pytest.mark.launcher
@pytest.mark.parametrize("version", ["1.31", "latest"])
def test_the_job_follows_the_published_schema(version):
    schema = validator()
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": REPLICATED["name"]}, "spec": JOB}
    version = schema.latest_version() if version == "latest" else version
    schema.validate(job, version, strict=True)
    variant = manifest("k8s-jobset.yaml", variants=True)["spec"]["replicatedJobs"][0]["template"]["spec"]
    schema.validate(job | {"spec": variant}, version, strict=True)
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
