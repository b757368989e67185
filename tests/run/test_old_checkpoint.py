"""A run that version 0.1.0 saved, before its modules moved, is resumed by this version with the same losses."""

import shutil
from pathlib import Path

import pytest
from run_files import steps_of

from jaxllm import fit
from jaxllm.config import ConfigError
from jaxllm.run.saving import require_same_run

OLD_RUN = Path(__file__).parents[1] / "golden" / "run_0_1_0"
"""Two steps of the model below on one CPU device, JAX 0.10.2, with the checkpoint of step 2."""
SMALLER = ("model.hidden_size=16", "model.intermediate_size=32", "model.num_heads=2", "model.num_kv_heads=1")
OLD_LOSSES = {3: 5.530468940734863, 4: 5.5307536125183105}
"""Losses that version 0.1.0 logged when it resumed this checkpoint on that device."""


@pytest.mark.parametrize("mesh", ["parallel.data=8", "parallel.pipe=2 parallel.data=2 parallel.tensor=2"])
def test_a_checkpoint_of_version_0_1_0_is_resumed(tiny_config, text_file, tmp_path, monkeypatch, mesh):
    # The order of samples depends on the names of the files, as given.
    shutil.copy(text_file, tmp_path / "words.txt")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    shutil.copytree(OLD_RUN, folder)
    run = (
        "data.paths=[words.txt]",
        f"run.dir={folder}",
        "run.cpu_devices=8",
        "log.every_steps=1",
        "optimizer.schedule=constant",
    )
    fit(tiny_config(*SMALLER, *mesh.split(), *run))
    losses = {line["step"]: line["loss"] for line in steps_of(folder)}
    assert list(losses) == [1, 2, 3, 4]
    assert {step: losses[step] for step in OLD_LOSSES} == pytest.approx(OLD_LOSSES, rel=1e-6)


def test_a_rope_scaling_with_fewer_keys_means_the_same(tiny_config, tmp_path):
    config = tiny_config("model.rope_scaling={factor: 8.0}")
    before = config.model_dump(mode="json")
    before["model"]["rope_scaling"] = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 8192,
    }
    meta = {"config": before, "fingerprint": "same", "step": 1}
    require_same_run(tmp_path, meta, config, "same")
    before["model"]["rope_scaling"]["factor"] = 4.0
    with pytest.raises(ConfigError, match=r"holds a run with model.rope_scaling=.*'factor': 4.0"):
        require_same_run(tmp_path, meta, config, "same")
