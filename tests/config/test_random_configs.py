"""Random configs over every key end in one sentence or are taken, and what `estimate` takes a run takes too."""

import json
from typing import Any

import jax
import pytest
from covers import seed
from random_configs import random_configs

from jaxllm.compile.inspect import inspect_config
from jaxllm.config import Config, ConfigError, load_config
from jaxllm.plan.estimate import estimate
from jaxllm.run.trainer import Trainer

OF_THE_CALLER = "given"
"""What a Python program hands to Trainer, of which the config has the name alone."""


def refusal(call, *arguments: Any) -> tuple[Any, str]:
    """(the value, "") or (None, the sentence). Any other error fails."""
    try:
        return call(*arguments), ""
    except ConfigError as error:
        sentence = str(error)
        assert sentence.endswith((".", "?"))
        assert "\n" not in sentence
        assert len(sentence) < 2000
        return None, sentence


@pytest.fixture(autouse=True)
def _words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("law mesh ring axis shard gather tick stage\n" * 500)


def devices_of(config: Config) -> int:
    parallel = config.parallel
    others = parallel.pipe * parallel.context * parallel.tensor * parallel.replica
    return others * (max(1, 8 // others) if parallel.data == "auto" else parallel.data)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.nightly)])
def test_estimate_and_inspect_take_the_same(count):
    taken = 0
    for values in random_configs(seed(), count):
        config, refused = refusal(load_config, values)
        if config is None:
            continue
        devices = devices_of(config)
        found, refused = refusal(estimate, config, None, devices)
        of_inspect = refusal(inspect_config, config, devices)[1] if config.model.hidden_size < 1000 else refused
        assert of_inspect == refused, values
        for report in (found, refusal(estimate, config, "h100-80gb", devices)[0]):
            if report is not None:
                taken += 1
                json.dumps(report.to_json())
                assert all(line.isprintable() for line in report.lines())
    assert taken > count / 5


@pytest.mark.nightly
def test_what_estimate_takes_a_run_takes(monkeypatch):
    """Two steps of each on as many forced devices as its mesh has."""
    trained = 0
    for values in random_configs(f"{seed()} trained", 200):
        config, _ = refusal(load_config, values)
        if config is None or OF_THE_CALLER in (config.data.source, config.optimizer.name, config.train.loss):
            continue
        count, large = devices_of(config), max(config.model.hidden_size, config.train.global_batch_sequences)
        if config.data.tokenizer not in (None, "bytes"):
            continue
        if count > 8 or large > 128 or config.run.cpu_devices or config.model.attention.startswith("cudnn"):
            continue
        found, _ = refusal(estimate, config, None, count)
        devices = jax.devices()[:count]
        with monkeypatch.context() as patch:
            for name, value in {"devices": devices, "local_devices": devices, "device_count": count}.items():
                patch.setattr(jax, name, lambda *_, value=value, **__: value)
            trainer, refused = refusal(Trainer, config)
            assert (found is None) == (trainer is None), (values, refused)
            if trainer is not None:
                assert len(list(trainer.steps(min(2, config.train.steps)))) == min(2, config.train.steps)
                trainer.close()
                trained += 1
    assert trained > 20
