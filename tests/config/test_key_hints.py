"""What a name from another trainer, or a key in another section, is answered."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
from tiny import TINY

from jaxllm.config import Config, ConfigError, key_hints, load_config
from jaxllm.config.key_hints import foreign_keys
from jaxllm.untrusted import read_yaml

BASE = {"model": TINY["model"], "train": TINY["train"]}
WITH_LORA = load_config(BASE, ["model.lora.rank=4"])
KEY = rf"\b(?:{'|'.join(Config.model_fields)})(?:\.\w+)+"


def answer(*overrides, **sections):
    with pytest.raises(ConfigError) as error:
        load_config({**BASE, **sections}, overrides)
    return str(error.value)


@pytest.mark.parametrize("name", foreign_keys())
def test_a_foreign_name_has_its_answer_wherever_it_is_written(name):
    wanted = foreign_keys()[name]
    for key in re.findall(KEY, wanted):
        attrgetter(key)(WITH_LORA)
    wanted = f"did you mean {wanted}?" if re.fullmatch(KEY, wanted) else f"{wanted}."
    if "." in name:
        assert answer(f"{name}=1") == f"Unknown key {name}: {wanted}"
        return
    assert answer(f"train.{name}=1") == f"Unknown key train.{name}: {wanted}"
    assert answer(f"model.{name}=1") == f"Unknown key model.{name}: {wanted}"
    assert answer(f"{name}=1") == f"Unknown key {name}: {wanted}"
    assert answer(**{name: 1}) == f"Unknown key {name}: {wanted}"
    assert answer(theirs={name: 1}) == f"Unknown key theirs.{name}: {wanted}"
    dashed = name.replace("_", "-").upper()
    assert answer(f"train.{dashed}=1") == f"Unknown key train.{dashed}: {wanted}"


def test_the_table_is_long_and_hides_no_key_of_ours():
    ours = {key for field in Config.model_fields.values() for key in field.annotation.model_fields}
    table = read_yaml(Path(key_hints.__file__).with_name("foreign_keys.yaml"))
    assert sum(len(names.split()) for names in table.values()) == len(foreign_keys()) > 200
    assert not ours & foreign_keys().keys()
    assert all(re.fullmatch(r"[a-z0-9_.]+", name) for name in foreign_keys())


@pytest.mark.parametrize(
    ("override", "hint"),
    {
        "train.per_device_train_batch_size=4": "did you mean train.microbatch_sequences?",
        "train.gradient_accumulation_steps=4": "it follows from train.global_batch_sequences and train.microbatch_sequences.",
        "train.num_train_epochs=3": "runs are counted in steps, so set train.steps.",
        "parallel.tp=2": "did you mean parallel.tensor?",
        "parallel.fsdp=8": "FSDP is parallel.zero=3 over parallel.data ranks.",
        "log.wandb=true": "did you mean log.wandb_project?",
        "run.name=x": "the last part of run.dir is the run's name.",
        "trainer.num_train_steps=3": "did you mean train.steps?",
        "training.seq_len=3": "did you mean train.sequence_length?",
        "checkpoint.interval=3": "did you mean checkpoint.every_steps?",
        # A section of theirs, if its keys say nothing.
        "activation_checkpoint.mode=full": "did you mean parallel.remat?",
        "a.b.c=1": "the sections are model, parallel, data, optimizer, train, checkpoint, log, run, launch.",
        # Keys of ours, in no section or in another one.
        "learning_rate=1e-3": "did you mean optimizer.learning_rate?",
        "lerning_rate=1e-3": "did you mean optimizer.learning_rate?",
        "every_steps=3": "did you mean checkpoint.every_steps or log.every_steps?",
        "trainer.learning_rate=1e-3": "did you mean optimizer.learning_rate?",
        "Train.steps=3": "did you mean train.steps?",
        "trian.zzz=3": "did you mean train?",
        # What its own section has comes before the same name elsewhere.
        "checkpoint.steps=3": "did you mean checkpoint.every_steps?",
    }.items(),
)
def test_an_unknown_key_is_answered(override, hint):
    assert answer(override) == f"Unknown key {override.partition('=')[0]}: {hint}"


@pytest.mark.parametrize("prefix", ["--", "+", "++"])
def test_overrides_may_be_written_as_elsewhere(prefix):
    written = [f"{prefix}model.num_layers=2", f"{prefix}model.name=llama-3.1-70b", f"{prefix}train.steps=3"]
    assert load_config(BASE, written) == load_config(BASE, [one.lstrip("+-") for one in written])
    assert answer(f"{prefix}train.stpes=3") == "Unknown key train.stpes: did you mean train.steps?"


@pytest.mark.parametrize("override", ["zzz=3", "train=5", "train={steps: 3}", "=3", ".steps=3", "train.=3", "train.steps"])
def test_what_is_no_override_is_refused_as_a_whole(override):
    assert answer(override) == f"Cannot read the override {override!r}: write section.key=value, such as train.steps=100."
