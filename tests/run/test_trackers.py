"""Trackers hold what metrics.jsonl holds, over restarts, faults and kills. Read back by each library's own reader."""

import importlib.util
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing

import numpy as np
import pytest
from run_files import records
from store_servers import Server, serving

from jaxllm.config import ConfigError
from jaxllm.run import metrics as sinks_module
from jaxllm.run import tracker_kinds
from jaxllm.run.loop import fit
from jaxllm.run.metrics import JsonLines, open_sinks
from jaxllm.run.tracker_kinds import Gauges, Kind, WeightsAndBiases, grouped
from jaxllm.untrusted import without_passwords

RUN = ("run.cpu_devices=8", "parallel.data=8", "checkpoint.every_steps=2", "train.eval_every_steps=2")
RUN = (*RUN, "optimizer.schedule=constant")
SECRET = "hunter2hunter2hunter2hunter2hunter2hunter2"


class Recorder:
    """A sink of a user's own. It keeps what it got, by run directory."""

    taken: dict[str, list[dict]] = {}
    closed: list[str] = []

    def __init__(self, config):
        self.folder = config.run.dir
        self.lines = self.taken.setdefault(self.folder, [])

    def write(self, record):
        self.lines.append(record)

    def close(self):
        self.closed.append(self.folder)


class Failing(Recorder):
    """It refuses all lines while `broken`, and keeps them while not."""

    broken = threading.Event()

    def write(self, record):
        if self.broken.is_set():
            raise OSError(f"no route to https://me:{SECRET}@host/x")
        super().write(record)


class Hanging(Recorder):
    """It takes no line until `release`."""

    release = threading.Event()

    def write(self, record):
        self.release.wait()
        super().write(record)


def by_step(lines):
    """{(step, metric): value}, where a later line of a step replaces an earlier one. What metrics.jsonl has as null is NaN."""
    found = {}
    for line in lines:
        for name, value in line.items():
            if name != "step":
                found[line["step"], name] = np.nan if value is None else value
    return found


def last_lines(lines):
    """{(step, whether of an evaluation): the last such line}."""
    return {(line["step"], "eval_loss" in line or "eval/loss" in line): line for line in lines}


def charted(line):
    """The line by the names of charts."""
    return {"step": line["step"], **grouped(line)}


def redo_from(folder, step):
    """As after a crash whose last checkpoint is that of `step`."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > step:
            checkpoint.rename(folder / f"lost-{checkpoint.name}")


@pytest.fixture(scope="module")
def restarted(tiny_config, tmp_path_factory):
    """(run folder, folder of gauges): six steps in two starts, of which the second does steps 3 and 4 again. All trackers that
    need no server and whose packages are installed."""
    folder, gauges = tmp_path_factory.mktemp("runs") / "whole", tmp_path_factory.mktemp("prom")
    keys = [*RUN, f"run.dir={folder}", f"log.prometheus_file={gauges / 'run.prom'}", "log.sinks=[test_trackers:Recorder]"]
    if has("tensorboardX"):
        keys += ["log.tensorboard=true"]
    if has("wandb"):
        keys += ["log.wandb_project=law", "log.wandb_entity=us", "log.wandb_group=g", "log.wandb_tags=[a, b]"]
    # Not imported yet: its import reads TRACKIO_DIR.
    if importlib.util.find_spec("trackio"):
        keys += ["log.trackio_project=law"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_API_KEY", SECRET)
        fit(tiny_config(*keys, "train.steps=4"))
        redo_from(folder, 2)
        fit(tiny_config(*keys, "train.steps=6"))
    return folder, gauges


def has(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def test_metrics_hold_the_steps_that_the_tests_below_compare_with(restarted):
    folder, _ = restarted
    assert [line["step"] for line in records(folder) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    again = {line["step"] for line in records(folder, "metrics-1.jsonl")}
    assert again == {3, 4}
    before, after = by_step(records(folder, "metrics-1.jsonl")), by_step(records(folder))
    assert before[3, "unix_s"] < after[3, "unix_s"]


def test_an_own_sink_gets_each_line_once_and_is_closed(restarted):
    folder, _ = restarted
    lines = Recorder.taken[str(folder)]
    again = records(folder, "metrics-1.jsonl")
    assert lines == [*records(folder)[:3], *again, *records(folder)[3:]]
    assert Recorder.closed.count(str(folder)) == 2


def test_the_gauges_are_the_newest_values(restarted):
    parser = pytest.importorskip("prometheus_client.parser")
    folder, gauges = restarted
    families = list(parser.text_string_to_metric_families((gauges / "run.prom").read_text()))
    assert {family.type for family in families} == {"gauge"}
    newest = {name: value for line in records(folder) for name, value in line.items()}
    samples = [sample for family in families for sample in family.samples]
    assert {(s.name, s.value) for s in samples} == {(f"jaxllm_{name}", value) for name, value in newest.items()}
    assert {tuple(s.labels.items()) for s in samples} == {(("run", str(folder)),)}
    assert [file.name for file in gauges.iterdir()] == ["run.prom"]


def test_parts_are_labels_and_any_text_and_number_can_be_read(tiny_config, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    folder = tmp_path / 'odd " \\ name'
    gauges = Gauges(tiny_config(f"run.dir={json.dumps(str(folder))}", f"log.prometheus_file={tmp_path / 'a.prom'}"))
    gauges.send([{"step": 1, "eval_loss/a b": 1.5, "eval_loss/é": np.inf, "loss": np.nan, "drop.rate": -np.inf}])
    samples = [s for f in parser.text_string_to_metric_families((tmp_path / "a.prom").read_text()) for s in f.samples]
    found = {(s.name, s.labels.get("part"), s.labels["run"]): s.value for s in samples}
    run = str(folder)
    assert np.isnan(found.pop(("jaxllm_loss", None, run)))
    assert found == {
        ("jaxllm_step", None, run): 1,
        ("jaxllm_eval_loss", "a b", run): 1.5,
        ("jaxllm_eval_loss", "é", run): np.inf,
        ("jaxllm_drop_rate", None, run): -np.inf,
    }


def test_gauges_keep_over_a_restart_what_its_first_lines_lack(tiny_config, tmp_path):
    path = tmp_path / "a.prom"
    config = tiny_config(f"run.dir={tmp_path}", f"log.prometheus_file={path}")
    with closing_all(open_sinks(config, 0)) as sinks:
        sinks[0].write({"step": 1, "eval_loss": 2.0})
    path.unlink()
    with closing_all(open_sinks(config, 1)) as sinks:
        write(sinks, 2)
    values = dict(line.rsplit(" ", 1) for line in path.read_text().splitlines() if not line.startswith("#"))
    run = f'{{run="{tmp_path}"}}'
    assert values == {f"jaxllm_step{run}": "2", f"jaxllm_eval_loss{run}": "2.0", f"jaxllm_loss{run}": "0.5"}


@pytest.mark.parametrize(
    ("name", "charted_as"),
    [
        ("loss", "train/loss"),
        ("noise_scale_tokens", "train/noise_scale_tokens"),
        ("eval_loss", "eval/loss"),
        ("eval_loss/my wiki", "eval/loss/my wiki"),
        ("epochs/wiki", "epochs/wiki"),
        ("layer_grad_norm/0", "layer_grad_norm/0"),
        ("mfu", "throughput/mfu"),
        ("tokens_per_s_per_device", "throughput/tokens_per_s_per_device"),
        ("data_s", "throughput/data_s"),
        ("start_data_s", "start/data_s"),
        ("memory_peak_bytes", "memory/peak_bytes"),
        ("gpu_power_w", "gpu/power_w"),
        ("predicted_tokens_per_s_per_device", "predicted/tokens_per_s_per_device"),
    ],
)
def test_charts_are_grouped_by_what_is_before_a_slash(name, charted_as):
    assert grouped({"step": 3, name: 1.5}) == {charted_as: 1.5}


def test_tensorboard_shows_each_step_once(restarted):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, _ = restarted
    events = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {}
    for (step, name), value in by_step(map(charted, records(folder))).items():
        # The file holds float32.
        expected.setdefault(name, []).append((step, float(np.float32(value))))
    assert shown == expected
    assert {"train/loss", "train/grad_norm", "eval/loss", "throughput/step_s", "start/other_s"} < shown.keys()
    assert {tag.partition("/")[0] for tag in shown} == {"train", "eval", "throughput", "memory", "start", "programs"}
    texts = events.Tensors("config/text_summary")
    assert [text.step for text in texts] == [1, 3]
    assert all(b"sequence_length: 16" in text.tensor_proto.string_val[0] for text in texts)


def wandb_rows(folder):
    """(record of the run, rows, file names) of each start, read by W&B itself."""
    found = []
    for run in sorted(folder.glob("wandb/offline-run-*")):
        # By name, a run of the same second would be ambiguous; by time of its file it is not.
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        kinds = [json.loads(line) for line in lines]
        (head,) = (kind["run"] for kind in kinds if kind["type"] == "run")
        rows = [kind["history"]["item"] for kind in kinds if kind["type"] == "history"]
        rows = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
        files = {file["path"] for kind in kinds if kind["type"] == "files" for file in kind["files"]["files"]}
        axes = [kind["metric"] for kind in kinds if kind["type"] == "metric" and "glob_name" in kind["metric"]]
        found.append((head, rows, files, axes))
    return found


def test_wandb_has_one_run_with_the_last_values_of_each_step(restarted):
    pytest.importorskip("wandb")
    folder, _ = restarted
    starts = wandb_rows(folder)
    assert len(starts) == 2
    for head, _, files, axes in starts:
        kept = ("run_id", "project", "entity", "run_group", "tags", "display_name", "resume")
        kept_id = json.loads((folder / "trackers" / "wandb.json").read_text())["id"]
        assert [head.get(name) for name in kept] == [kept_id, "law", "us", "g", ["a", "b"], "whole", True]
        assert "report.html" in files
        assert [(axis["glob_name"], axis["step_metric"]) for axis in axes] == [("*", "step")]
    rows = [row for _, rows, *_ in starts for row in rows]
    assert last_lines(rows) == last_lines(map(charted, records(folder)))
    assert [row["step"] for row in rows] == [line["step"] for line in Recorder.taken[str(folder)]]
    for run in folder.glob("wandb/offline-run-*"):
        assert "Where the time went" in (run / "files" / "report.html").read_text()


def test_trackio_has_one_run_with_each_line(restarted):
    pytest.importorskip("trackio")
    folder, _ = restarted
    name = json.loads((folder / "trackers" / "trackio.json").read_text())["id"]
    assert re.fullmatch("whole-[0-9a-f]{4}", name)
    program = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([S.get_runs('law'), S.get_logs('law', sys.argv[1]), S.get_run_config('law', sys.argv[1])]))"
    )
    environment = os.environ | {"TRACKIO_DIR": str(folder.parent / "trackio")}
    found = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True, env=environment)
    runs, rows, config = json.loads(found.stdout)
    assert runs == [name]
    rows = [{key: value for key, value in row.items() if key != "timestamp"} for row in rows]
    expected = [charted(line) for line in Recorder.taken[str(folder)]]
    assert sorted(map(repr_of, rows)) == sorted(map(repr_of, expected))
    assert config["train"]["sequence_length"] == 16


def test_what_counts_as_sent_to_trackio_survives_a_kill(tmp_path):
    """Its `log` queues, and its thread writes later."""
    pytest.importorskip("trackio")
    sends = (
        "import os; from types import SimpleNamespace as N; from jaxllm.run.tracker_kinds import Trackio; "
        "config = N(run=N(dir='run'), log=N(trackio_project='p'), model_dump=lambda mode: {}); tracker = Trackio(config); "
        "tracker.connect('r', 1); tracker.send([{'step': step, 'loss': 0.5} for step in (1, 2, 3)]); os._exit(0)"
    )
    reads = "from trackio.sqlite_storage import SQLiteStorage as S; print([row['step'] for row in S.get_logs('p', 'r')])"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment).stdout
        for program in (sends, reads)
    ]
    assert outputs[1] == "[1, 2, 3]\n"


def repr_of(row):
    return repr(sorted(row.items()))


def test_no_key_is_written_anywhere(restarted):
    folder, _ = restarted
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


# ------------------------------------------------------------------------------------------------------------------ faults


@pytest.fixture
def lines_of(tiny_config, tmp_path):
    """lines_of(sink) -> (sinks of a run that starts, its folder). They write lines without training."""

    def start(sink, last_step=0, *keys):
        return open_sinks(tiny_config(f"run.dir={tmp_path}", f"log.sinks=[test_trackers:{sink}]", *keys), last_step)

    return start


def write(sinks, *steps):
    for step in steps:
        for sink in sinks:
            sink.write({"step": step, "loss": 1.0 / step})


def close(sinks):
    for sink in reversed(sinks):
        sink.close()


def test_a_tracker_that_fails_says_so_once_and_later_gets_all(lines_of, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sinks_module, "RETRY_S", 0.01)
    Failing.broken.set()
    sinks = lines_of("Failing")
    write(sinks, 1, 2)
    close(sinks)
    name, metrics = "log.sinks=test_trackers:Failing", tmp_path / "metrics.jsonl"
    why = "no route to https://host/x"
    assert caplog.messages == [
        f"{name} takes no metrics ({why}): training continues, and it is tried again with all lines of {metrics}.",
        f"{name} lacks the last lines of {metrics}: the next start sends them.",
    ]
    Failing.broken.clear()
    sinks = lines_of("Failing", 2)
    write(sinks, 3)
    close(sinks)
    assert len(caplog.messages) == 2
    assert Failing.taken[str(tmp_path)] == records(tmp_path)
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3]


def test_a_tracker_that_comes_back_during_a_run_gets_all(lines_of, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sinks_module, "RETRY_S", 0.01)
    monkeypatch.setattr(sinks_module, "ROUND_S", 0.01)
    Failing.broken.set()
    with closing_all(lines_of("Failing")) as sinks:
        write(sinks, 1, 2)
        wait_for(lambda: caplog.messages)
        Failing.broken.clear()
        wait_for(lambda: len(Failing.taken[str(tmp_path)]) == 2)
        write(sinks, 3)
    assert Failing.taken[str(tmp_path)] == records(tmp_path)
    assert len(caplog.messages) == 1


def test_all_tries_to_begin_a_wandb_run_are_of_one_run(tiny_config, tmp_path, monkeypatch):
    """A server may have made the run although its answer was lost."""
    tries = []

    class Away(WeightsAndBiases):
        def connect(self, run_id, step):
            tries.append(run_id)
            if len(tries) % 3:
                raise OSError("no answer")

        def send(self, records):
            pass

        def close(self, ended):
            pass

    monkeypatch.setattr(sinks_module, "RETRY_S", 0.01)
    monkeypatch.setattr(tracker_kinds, "WeightsAndBiases", Away)
    for last_step in (0, 1):
        with closing_all(open_sinks(tiny_config(f"run.dir={tmp_path}", "log.wandb_project=p"), last_step)) as sinks:
            wait_for(lambda due=3 * (last_step + 1): len(tries) == due)
            write(sinks, last_step + 1)
    assert tries[0]
    assert tries == [json.loads((tmp_path / "trackers/wandb.json").read_text())["id"]] * 6


def test_a_sink_that_is_named_twice_gets_each_line_once(lines_of, tmp_path):
    with closing_all(lines_of("Recorder, test_trackers:Recorder")) as sinks:
        write(sinks, 1, 2)
    assert Recorder.taken[str(tmp_path)] == records(tmp_path)


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(lines_of, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sinks_module, "PATIENCE_S", 0.1)
    sinks = lines_of("Hanging")
    write(sinks, *range(1, 101))
    close(sinks)
    metrics = tmp_path / "metrics.jsonl"
    assert caplog.messages == [f"log.sinks=test_trackers:Hanging lacks the last lines of {metrics}: the next start sends them."]
    assert len(records(tmp_path)) == 100
    Hanging.release.set()


def test_a_tracker_named_later_gets_the_whole_run(tiny_config, lines_of, tmp_path):
    with closing(JsonLines(tmp_path / "metrics.jsonl", 0)) as before:
        write([before], 1, 2)
    with closing_all(lines_of("Recorder", 2)) as sinks:
        write(sinks, 3)
    assert Recorder.taken[str(tmp_path)] == records(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"target": "", "id": 3, "sent": 1}', '{"target": "", "id": null, "sent": -1}'])
def test_a_damaged_file_of_progress_sends_all_again(lines_of, tmp_path, caplog, content):
    close(lines_of("Recorder"))
    path = tmp_path / "trackers" / "test_trackers.Recorder.json"
    path.write_text(content)
    with closing_all(lines_of("Recorder")) as sinks:
        write(sinks, 1)
    assert caplog.messages == [f"{path} is damaged: that tracker begins a new run and gets all lines."]
    assert Recorder.taken[str(tmp_path)] == records(tmp_path)


def test_a_kill_before_progress_was_kept_leaves_tensorboard_exact(tiny_config, tmp_path):
    """The event file has more than trackers/tensorboard.json says, and a part of the last step's lines."""
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny_config(f"run.dir={tmp_path}", "log.tensorboard=true")
    lines = [
        line for step in (1, 2, 3) for line in ({"step": step, "loss": float(step)}, {"step": step, "eval_loss": step + 0.5})
    ]
    sizes = []
    with closing_all(open_sinks(config, 0)) as sinks:
        for line in lines:
            for sink in sinks:
                sink.write(line)
            sizes.append((tmp_path / "metrics.jsonl").stat().st_size)
    path = tmp_path / "trackers" / "tensorboard.json"
    path.write_text(json.dumps({"target": "", "id": None, "sent": sizes[2]}))
    with closing_all(open_sinks(config, 3)) as sinks:
        write(sinks, 4)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 3), (4, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(1, 1.5), (2, 2.5), (3, 3.5)]


class closing_all:
    def __init__(self, sinks):
        self.sinks = sinks

    def __enter__(self):
        return self.sinks

    def __exit__(self, *error):
        close(self.sinks)


def wait_for(condition):
    """Waits for something that a thread does soon. pytest's time-out ends it."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("module", "key", "extra"),
    [
        ("tensorboardX", "log.tensorboard=true", "tensorboard"),
        ("wandb", "log.wandb_project=p", "wandb"),
        ("mlflow", "log.mlflow_experiment=e", "mlflow"),
        ("trackio", "log.trackio_project=p", "trackio"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tiny_config, tmp_path, monkeypatch, module, key, extra):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    key_name = key if module == "tensorboardX" else key.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key_name} needs the package {module}: .*'jaxllm\[{extra}\]'"):
        fit(tiny_config(f"run.dir={tmp_path / 'run'}", key))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("log.sinks=[nowhere.at.all:Sink]", "cannot be imported (No module named 'nowhere'): put its module on PYTHONPATH"),
        ("log.sinks=[test_trackers:Missing]", "cannot be imported (module 'test_trackers' has no attribute 'Missing')"),
        ("log.prometheus_file=/nowhere/at/all/x.prom", "cannot be written: create /nowhere/at/all with write access."),
    ],
)
def test_what_cannot_work_is_refused_before_the_run_begins(tiny_config, tmp_path, key, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        fit(tiny_config(f"run.dir={tmp_path / 'run'}", key))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["log.wandb_group=g"], "log.wandb_entity, wandb_group and wandb_tags have no effect alone: set log.wandb_project"),
        (["log.prometheus_file=x.txt"], "log.prometheus_file=x.txt is not valid"),
        (["log.sinks=[plain]"], "log.sinks[0]=plain is not valid"),
    ],
)
def test_keys_that_do_not_fit_are_refused(tiny_config, keys, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tiny_config(*keys)


@pytest.mark.parametrize("key", ["data.paths=[%s]", "model.name=%s", "log.wandb_group=%s", "data.paths=%s"])
def test_a_password_in_a_url_is_refused_and_not_repeated(tiny_config, key):
    with pytest.raises(ConfigError, match="has a user, a password or a query in a URL") as caught:
        tiny_config(key % f"s3://me:{SECRET}@host/bucket")
    assert SECRET not in str(caught.value)
    assert without_passwords("a hf://datasets/o/n@main and gs://b/c@d") == "a hf://datasets/o/n@main and gs://b/c@d"


def test_wandb_without_a_key_is_refused(tiny_config, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    sentence = "log.wandb_project needs a key: run `wandb login`"
    # W&B reads its variables once in a process.
    code = """if True:
        import sys, jaxllm.config as c, jaxllm.run.tracker_kinds as k
        for kind in k.kinds_of(c.load_config(sys.argv[1])):
            kind.check()"""
    path = tmp_path / "config.yaml"
    path.write_text(Kind(tiny_config("log.wandb_project=p")).recipe())
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode != 0
    assert sentence in ended.stderr


# --------------------------------------------------------------------------------------------------------------- MLflow


class FakeMLflow(Server):
    """Answers what MLflow's client asks (mlflow.org/docs/latest/api_reference/rest-api.html), and keeps what it gets.

    Attributes:
      refused: the number of next parameters that it refuses.
    """

    def __init__(self, artifacts):
        super().__init__()
        self.artifacts, self.runs, self.params, self.refused = artifacts, 0, {}, 1

    def answer(self, method, path, query, headers, body):
        call, run = path.partition("/mlflow/")[2], {"run_id": f"run{self.runs}", "artifact_uri": self.artifacts.as_uri()}
        found = {"experiment": {"experiment_id": "1"}} if call.startswith("experiments") else {}
        if call == "runs/create":
            self.runs += 1
            found = {"run": {"info": {**run, "run_id": f"run{self.runs}"}}}
        elif call == "runs/get":
            found = {"run": {"info": run, "data": {"params": [{"key": k, "value": v} for k, v in self.params.items()]}}}
        elif call == "runs/log-batch" and (params := json.loads(body).get("params")):
            if self.refused:
                self.refused -= 1
                return 400, {}, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "no"}'
            self.params |= {param["key"]: param["value"] for param in params}
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()


def test_a_try_that_fails_after_it_made_the_mlflow_run_leaves_no_second_one(tiny_config, tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setattr(sinks_module, "RETRY_S", 0.01)
    long = tmp_path / ("x" * 200)
    long.write_text("law mesh " * 1000)
    keys = ["data.source=files", f"data.paths={json.dumps([str(long)] * 40)}", "log.mlflow_experiment=law"]
    with serving(FakeMLflow(tmp_path / "artifacts")) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        with closing_all(open_sinks(tiny_config(f"run.dir={tmp_path}", *keys), 0)) as sinks:
            write(sinks, 1)
            wait_for(lambda: (tmp_path / "trackers/mlflow.json").exists() and len(server.params) > 100)
    assert caplog.messages[0].startswith("MLflow takes no metrics (INVALID_PARAMETER_VALUE: no): training continues")
    assert (server.runs, json.loads((tmp_path / "trackers/mlflow.json").read_text())["id"]) == (1, "run1")
    assert server.params["train.sequence_length"] == "16"
    # A longer one would refuse all, for ever.
    assert len(server.params["data.paths"]) == 6000


@pytest.fixture
def mlflow_server(tmp_path):
    """(address, process) of a server of MLflow's own."""
    pytest.importorskip("mlflow.server.fastapi_app")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log, env=environment)

    def answers():
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).status == 200
        except OSError:
            return False

    try:
        wait_for(answers)
        yield f"127.0.0.1:{port}", server
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


@pytest.mark.launcher
def test_mlflow_has_one_run_although_its_server_hung(mlflow_server, tiny_config, tmp_path, monkeypatch, caplog, capfd):
    """Steps 3 and 4 are done again while the server hangs. The third start, which has nothing to train, sends them."""
    address, server = mlflow_server
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "2")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@{address}")
    folder = tmp_path / "run"
    keys = (*RUN, f"run.dir={folder}", "log.mlflow_experiment=law")
    fit(tiny_config(*keys, "train.steps=4"))
    redo_from(folder, 2)
    os.killpg(server.pid, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, "jaxllm"):
        fit(tiny_config(*keys, "train.steps=6"))
    os.killpg(server.pid, signal.SIGCONT)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("jaxllm")]
    assert len(ours) == 2
    assert re.fullmatch(r"MLflow takes no metrics \(.*\): training continues, and .*", ours[0])
    assert ours[1] == f"MLflow lacks the last lines of {folder / 'metrics.jsonl'}: the next start sends them."
    fit(tiny_config(*keys, "train.steps=6"))

    client = __import__("mlflow").MlflowClient(f"http://{address}")
    (run,) = client.search_runs([client.get_experiment_by_name("law").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.info.end_time is None or run.info.end_time > run.info.start_time
    assert run.data.params["train.sequence_length"] == "16"
    found = {}
    for name in run.data.metrics:
        for point in sorted(client.get_metric_history(run.info.run_id, name), key=lambda point: point.timestamp):
            found[point.step, name] = point.value
    expected, again = (by_step(map(charted, records(folder, name))) for name in ("metrics.jsonl", "metrics-1.jsonl"))
    assert {at: found[at] for at in expected} == expected
    # MLflow forgets nothing: what only the first doing of a step had, such as the time of a save.
    assert found.keys() - expected.keys() == again.keys() - expected.keys()
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.yaml", "report.html"}
    written = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == []
    assert SECRET not in "".join(capfd.readouterr()) + caplog.text
