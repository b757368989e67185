"""`jaxllm compile --run`, on CPU devices, where all ranks are there."""

import pytest

from jaxllm.cli.app import main
from jaxllm.compile.pretend import run_rank
from jaxllm.compile.report import compile_report
from jaxllm.config import ConfigError


def test_the_step_that_runs_is_the_runs_own(tiny_config):
    config = tiny_config("parallel.data=4", "parallel.tensor=2", "parallel.zero=3")
    found = run_rank(config, 8, 2)
    assert (found.devices, len(found.step_s), found.transfers_run, found.in_use_bytes) == (8, 2, True, None)
    assert found.compiled_bytes == compile_report(config).total_bytes
    assert found.text().startswith("Rank 0 of 8 on one cpu, with all transfers: ")


def test_what_has_no_plain_step_is_refused(tiny_config):
    rounds = tiny_config("train.diloco_steps=2", "parallel.replica=2", "parallel.data=4")
    with pytest.raises(ConfigError, match=r"--run takes no rounds and no pairs"):
        run_rank(rounds, 8, 1)


def test_it_makes_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jaxllm", "compile", "configs/quickstart.yaml", "--gpu", "h100-80gb", "--run", "3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--run runs on the local GPU and makes no report" in capsys.readouterr().err
