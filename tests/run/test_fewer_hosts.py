"""Layouts for the hosts that are left: the batch stays, what fits is chosen, and what the leader sends is checked."""

import json
from types import SimpleNamespace

import jax
import pytest

from jaxllm.cluster import distributed
from jaxllm.cluster.host_choice import ALL_REQUIRED
from jaxllm.config import load_config
from jaxllm.run import fewer_hosts
from jaxllm.run.fewer_hosts import adapted, layout, layout_here, rules, with_layout
from jaxllm.run_report import for_runs
from jaxllm.run_report.for_runs import AS_BEFORE

DEVICES = jax.devices()
H100 = "NVIDIA H100 80GB HBM3"
BATCH = ("train.global_batch_sequences=24", "train.microbatch_sequences=1")


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "more",
    [(), ("parallel.zero=3",), ("parallel.pipe=2", "parallel.schedule=gpipe"), ("parallel.tensor=2", "parallel.remat=full")],
)
def test_a_layout_keeps_the_batch_and_what_has_been_tried(tiny_config, hosts, more):
    config = tiny_config(*BATCH, *more)
    found = with_layout(config, layout(config, hosts, 2)).resolve(2 * hosts)
    p = found.parallel
    assert p.data * p.pipe * p.context * p.tensor == 2 * hosts
    assert found.num_microbatches * found.train.microbatch_sequences * p.data == 24
    # One stage has no schedule.
    kept = AS_BEFORE if p.pipe > 1 else ("remat", "offload_state", "zero")
    assert {key: getattr(p, key) for key in kept} == {key: getattr(config.parallel, key) for key in kept}
    unchanged = {"parallel", "train"}
    assert found.model_dump(exclude=unchanged) == config.model_dump(exclude=unchanged)
    assert found.train.model_copy(update={"microbatch_sequences": 1}) == config.train


def test_no_layout_divides(tiny_config):
    """Two layers, four heads, sixteen positions and eight sequences over seven devices."""
    assert layout(tiny_config(), 7, 1) is None


def test_a_layout_fits_the_gpu():
    train = {"steps": 4, "sequence_length": 8192, "global_batch_sequences": 24}
    config = load_config({"model": {"name": "llama-3.1-70b"}, "train": train})
    assert layout(config, 1, 1, H100) is None
    assert with_layout(config, layout(config, 3, 8, H100)).resolve(24).parallel.zero > 0


def test_hosts_of_other_sizes_have_none(tiny_config):
    config = tiny_config(*BATCH, "run.cpu_devices=2")

    def of(*counts):
        return [[SimpleNamespace(cpu=True, gpus=None)] * count for count in counts]

    assert layout_here(config, of(1, 2)) is None
    assert layout_here(config, of(2, 2)) == layout(config, 2, 4)


def test_gpus_of_a_host_are_those_that_any_of_its_processes_sees(tiny_config, monkeypatch):
    """Two processes share four, or have two each."""
    monkeypatch.setattr(fewer_hosts, "gpu_kinds", lambda: (H100,) * 4)
    config = tiny_config(*BATCH)

    def of(*processes):
        return [[SimpleNamespace(cpu=False, gpus=list(gpus)) for gpus in processes] for _ in range(3)]

    assert layout_here(config, of("abcd", "abcd")) == layout_here(config, of("ab", "cd")) == layout(config, 3, 4, H100)
    assert layout_here(config, [*of("abcd")[:2], *of("abc")[:1]]) is None


@pytest.mark.parametrize(
    ("mesh", "cpu_devices", "host", "few"),
    [
        ("8", 2, {"cpu": True, "gpus": None}, True),
        ("6", 2, {"cpu": True, "gpus": None}, False),
        # XLA_FLAGS may have asked for more.
        ("8", None, {"cpu": True, "gpus": None}, False),
        ("8", None, {"cpu": False, "gpus": ["a", "b"]}, True),
        ("4", None, {"cpu": False, "gpus": ["a", "b"]}, False),
        ("auto", None, {"cpu": False, "gpus": ["a", "b"]}, False),
        ("8", None, {"cpu": False, "gpus": None}, False),
    ],
)
def test_a_mesh_of_more_devices_than_the_launch_has(tiny_config, mesh, cpu_devices, host, few):
    config = tiny_config(*BATCH, f"parallel.data={mesh}", f"run.cpu_devices={cpu_devices or 'null'}", "launch.least_hosts=2")
    assert rules(config).too_few([[SimpleNamespace(**host)]] * 3) is few


def test_it_is_off_by_default(tiny_config):
    assert rules(tiny_config()) is ALL_REQUIRED
    found = rules(tiny_config("launch.least_hosts=3", "launch.wait_s=7"))
    assert (found.least_hosts, found.wait_s) == (3, 7)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"parallel": {}}', '{"parallel": {"pipe": 0}, "microbatch_sequences": 1}'),
        '{"parallel": {}, "microbatch_sequences": -1}',
    ],
)
def test_what_is_no_layout_is_refused(tiny_config, text):
    with pytest.raises(ValueError):
        with_layout(tiny_config(), text)


def test_without_a_layout_the_config_is_the_same(tiny_config):
    config = tiny_config()
    assert with_layout(config, "") is config


def test_the_log_says_who_is_missing(tiny_config, monkeypatch):
    given = tiny_config(*BATCH, "parallel.data=4", "launch.least_hosts=2")
    config = with_layout(given, json.dumps({"parallel": {"data": 3}, "microbatch_sequences": 8})).resolve(3)
    assert fewer_hosts.describe(given, given) == ""
    monkeypatch.setattr(distributed, "absent_hosts", lambda: ["h3"])
    assert fewer_hosts.describe(given, config) == (
        "h3 is missing: training on without, the same batches in 1 microbatch, not 6; with all again when it returns"
    )


@pytest.mark.parametrize(("devices", "hosts", "absent"), [(3, 3, 1), (4, 2, 2), (6, 6, 2), (8, 4, 0), (8, 8, 0), (16, 4, 0)])
def test_hosts_that_the_launcher_did_not_start_are_counted(tiny_config, monkeypatch, devices, hosts, absent):
    """As where SLURM has three nodes for a job of three or four."""
    given = tiny_config(*BATCH, f"parallel.data={4 if devices == 3 else 8}", "launch.least_hosts=2")
    config = with_layout(given, json.dumps({"parallel": {"data": devices}, "microbatch_sequences": 1}))
    monkeypatch.setattr(fewer_hosts.jax, "device_count", lambda: devices)
    monkeypatch.setattr(distributed, "hosts", lambda: [f"h{rank % hosts}" for rank in range(devices)])
    assert fewer_hosts.absent_hosts(given) == absent
    assert fewer_hosts.absent_hosts(tiny_config(*BATCH, "launch.least_hosts=2", "parallel.data=auto")) == 0
    assert fewer_hosts.absent_hosts(tiny_config(*BATCH, "parallel.data=8")) == 0
    who = "1 host is" if absent == 1 else f"{absent} hosts are"
    said = fewer_hosts.describe(given, config)
    assert said.startswith(f"{who} missing: training on without, ") if absent else said == ""
    assert not absent or said.endswith("; with all again when the launcher starts all")


def test_fewer_devices_than_the_mesh_get_a_layout(tiny_config, monkeypatch, caplog):
    """As where SLURM starts a job of three or four nodes with three. Any other mistake in the mesh is left to be refused."""
    monkeypatch.setattr(fewer_hosts.jax, "devices", lambda: DEVICES[:3])
    config = tiny_config(*BATCH, "parallel.data=4", "parallel.zero=3")
    for same in (config, with_least(config, 2), with_least(tiny_config(*BATCH, "parallel.data=2"), 1)):
        assert adapted(same) is same
    assert caplog.text == ""
    found = adapted(with_least(config, 1)).resolve(3)
    assert found.parallel.data * found.parallel.tensor * found.parallel.context * found.parallel.pipe == 3
    assert "3 devices, and the mesh has 4: training in a layout for those." in caplog.text


# ------------------------------------------------------------------------------------------------------------------ replicas

DILOCO = ("train.diloco_steps=4",)
SLOW = ("parallel.replica_gbit_per_s=10",)


def processes(of, ranks, each=1):
    """Hosts of so many processes, by the rank of the first, in a launch of `of` processes."""
    return [[SimpleNamespace(cpu=True, gpus=None, count=of, rank=rank + k) for k in range(each)] for rank in ranks]


@pytest.mark.parametrize("more", [(), DILOCO, SLOW], ids=str)
@pytest.mark.parametrize(
    ("replicas", "mesh", "hosts", "per_host", "left", "microbatch"),
    [
        (4, ("parallel.data=1",), 3, 1, 3, 1),
        (4, ("parallel.data=1",), 2, 1, 2, 1),
        (4, ("parallel.data=2", "parallel.zero=3"), 3, 2, 3, 1),
        (4, ("parallel.data=1", "train.microbatch_sequences=3"), 3, 1, 3, 2),
        (4, ("parallel.data=1", "train.microbatch_sequences=null"), 3, 1, 3, 4),
        (6, ("parallel.pipe=2", "parallel.data=1", "parallel.schedule=gpipe"), 4, 2, 4, 1),
    ],
)
def test_replicas_that_are_left_keep_their_mesh(
    tiny_config, monkeypatch, more, replicas, mesh, hosts, per_host, left, microbatch
):
    """Nothing is searched. A larger share of the batch is more microbatches, not larger ones."""
    monkeypatch.setattr(for_runs, "search", pytest.fail)
    config = tiny_config(*BATCH, f"parallel.replica={replicas}", *mesh, *more)
    found = with_layout(config, layout(config, hosts, per_host)).resolve(hosts * per_host)
    assert found.parallel == config.parallel.model_copy(update={"replica": left})
    assert found.train == config.train.model_copy(update={"microbatch_sequences": microbatch})
    assert found.model_dump(exclude={"parallel", "train"}) == config.model_dump(exclude={"parallel", "train"})
    assert found.num_microbatches * found.microbatch_rows == 24


@pytest.mark.parametrize(
    ("more", "hosts", "per_host", "together", "expected"),
    [
        # 32 sequences over three: one replica, but not over a slow network.
        ((), 3, 1, (), 1),
        (DILOCO, 3, 1, (), None),
        (SLOW, 3, 1, (), None),
        # Two halves of the first replica, and a whole one: replicas of half the size are too many.
        (SLOW, 3, 2, (1, 2), None),
        # Each replica has lost one of its hosts.
        (SLOW, 4, 2, (1, 1, 1, 1), 4),
        (DILOCO, 2, 2, (1, 1), 2),
        # As many devices as a replica had, on hosts of two of them, or of one.
        (SLOW, 2, 2, (1, 1), 2),
        (SLOW, 2, 2, (2,), 1),
        (DILOCO, 2, 2, (2,), 1),
        # One host alone.
        (SLOW, 1, 2, (1,), 1),
    ],
)
def test_no_replica_has_hosts_of_two(tiny_config, more, hosts, per_host, together, expected):
    sizes = "parallel.data=4" if per_host == 2 else "parallel.data=1"
    batch = ("train.global_batch_sequences=32", "train.microbatch_sequences=1", "train.sequence_length=48")
    config = tiny_config(*batch, "parallel.replica=4", sizes, *more)
    text = layout(config, hosts, per_host, together=together)
    assert (text and with_layout(config, text).resolve(hosts * per_host).parallel.replica) == expected


def test_there_are_as_many_replicas_as_fit(tiny_config):
    """Six devices are no number of replicas of four: three replicas of two, not one of six."""
    config = tiny_config(BATCH[1], "train.global_batch_sequences=48", "parallel.replica=4", "parallel.data=4")
    assert json.loads(layout(config, 3, 2))["parallel"]["replica"] == 3


def test_hosts_are_of_the_replica_that_their_rank_says(tiny_config):
    """Two replicas of two hosts. What a launch of three hosts has is not known."""

    def replicas(hosts, devices=2):
        config = tiny_config(*BATCH, f"run.cpu_devices={devices}", "parallel.replica=2", "parallel.data=4", *DILOCO)
        text = layout_here(config, hosts)
        return text and json.loads(text)["parallel"]["replica"]

    assert [replicas(processes(4, ranks)) for ranks in ((0, 1), (2, 3), (1, 2), (3,), (0, 2, 3))] == [1, 1, 2, 1, None]
    assert [replicas(processes(8, ranks, each=2), 1) for ranks in ((4, 6), (2, 4))] == [1, 2]
    assert replicas(processes(3, (0, 1))) == 2


NOT_SHARED = (
    "32 sequences cannot be shared by 3 replicas, and one replica of several would use the slow network between them in every "
    "step: with a train.global_batch_sequences that 3 divides they train on"
)


def test_what_cannot_be_shared_is_named(tiny_config):
    config = tiny_config(
        *("train.global_batch_sequences=32", "run.cpu_devices=1", "parallel.replica=4", "parallel.data=1", *DILOCO),
        "launch.least_hosts=1",
    )
    assert fewer_hosts.why_none(config, processes(4, range(3))) == NOT_SHARED
    assert fewer_hosts.why_none(config, processes(4, range(2))).startswith("the batch does not divide over them, or")
    hybrid = config.model_copy(update={"train": config.train.model_copy(update={"diloco_steps": None})})
    assert "slow" not in fewer_hosts.why_none(hybrid, processes(4, range(3)))


@pytest.mark.parametrize(
    ("batch", "least", "why"),
    [
        # Five hosts have two whole replicas of two, and their batch is even.
        (32, 5, "4 of them could train on with launch.least_hosts=4"),
        # Seven hosts have three, on six hosts: with a batch that three divides, seven still would not train.
        (32, 7, "4 of them could train on with launch.least_hosts=4"),
        (48, 7, "6 of them could train on with launch.least_hosts=6"),
        (40, 7, "4 of them could train on with launch.least_hosts=4"),
        # Six do with such a batch, and four with this one.
        (32, 6, f"{NOT_SHARED}, or 4 of them with launch.least_hosts=4"),
    ],
)
def test_the_least_hosts_are_named_where_fewer_could_train(batch, least, why, tiny_config):
    config = tiny_config(
        *(f"train.global_batch_sequences={batch}", "run.cpu_devices=1", "parallel.replica=4", "parallel.data=2", *DILOCO),
        f"launch.least_hosts={least}",
    )
    here = processes(8, range(least))
    assert layout_here(config, here) is None
    assert fewer_hosts.why_none(config, here) == why
    text = layout_here(config, here[: int(why[-1])])
    assert text is not None
    assert json.loads(text)["parallel"]["replica"] == int(why[-1]) // 2


def test_without_replicas_the_least_hosts_are_named_too(tiny_config):
    config = tiny_config("run.cpu_devices=1", "parallel.data=4", "launch.least_hosts=3")
    assert layout_here(config, processes(4, range(3))) is None
    assert fewer_hosts.why_none(config, processes(4, range(3))) == "2 of them could train on with launch.least_hosts=2"


def test_the_log_says_how_many_replicas_are_left(tiny_config, monkeypatch):
    given = tiny_config(*BATCH, "parallel.replica=4", "parallel.data=1", "launch.least_hosts=2", *DILOCO)
    config = with_layout(given, layout(given, 3, 1)).resolve(3)
    monkeypatch.setattr(distributed, "absent_hosts", lambda: ["h3"])
    assert fewer_hosts.describe(given, config) == (
        "h3 is missing: training on with 3 of 4 replicas, the same batches in 8 microbatches, not 6; with all again when it "
        "returns"
    )


def with_least(config, hosts):
    return config.model_copy(update={"launch": config.launch.model_copy(update={"least_hosts": hosts})})
