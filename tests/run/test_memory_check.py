"""A run that cannot fit is refused with a change that would fit. A run that runs out of memory ends in advice."""

import shlex
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.hardware import FIT_SHARE, GPUS, RESERVE_BYTES
from jaxllm.cost_model.memory import MemoryEstimate, StageMemory, estimate_memory
from jaxllm.display import readable
from jaxllm.machine import host
from jaxllm.plan.advice import changed, changes_that_fit
from jaxllm.plan.quote import predicted_speed
from jaxllm.run import loop
from jaxllm.run.evaluation import conclude
from jaxllm.run.memory_check import (
    capacity_of,
    check_memory,
    explain_out_of_memory,
    is_out_of_memory,
    out_of_memory_lines,
    total_bytes,
)
from jaxllm.run.trainer import Trainer
from jaxllm.run_report import for_runs

GIB = 2**30
RECIPE = {
    "model": {"name": "llama-3.1-8b"},
    "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 128, "microbatch_sequences": 8},
}
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes.\nmore"


class Device:
    """The parts of a jax.Device that the check reads."""

    def __init__(self, platform="gpu", device_kind="NVIDIA H100 80GB HBM3", stats=None):
        self.platform, self.device_kind, self._stats = platform, device_kind, stats

    def memory_stats(self):
        return self._stats


def eight(*overrides):
    return load_config(RECIPE, overrides).resolve(8)


def holding(capacity_bytes):
    """A device on which a step may take so many bytes."""
    return Device(stats={"bytes_limit": int(capacity_bytes) + RESERVE_BYTES})


def refusal(config, device=None):
    with pytest.raises(ConfigError) as caught:
        check_memory(config, device or Device())
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ at the start


def test_capacity_is_what_the_process_holds_else_the_tables_else_unknown():
    assert capacity_of(Device(stats={"bytes_limit": 70 * GIB})) == 70 * GIB - RESERVE_BYTES
    assert capacity_of(Device()) == GPUS["h100-80gb"].capacity_bytes
    assert capacity_of(Device(device_kind="something new")) is None
    assert capacity_of(Device("cpu", stats={"bytes_limit": GIB})) is None
    assert capacity_of(jax.devices()[0]) is None


def test_what_fits_is_told_in_one_line():
    config = eight("train.microbatch_sequences=1", "parallel.remat=full", "parallel.zero=3")
    fit = check_memory(config, Device())
    estimate = estimate_memory(config)
    assert fit.fits
    assert (fit.memory, fit.capacity_bytes) == (estimate, GPUS["h100-80gb"].capacity_bytes)
    share = f"{estimate.peak_bytes / fit.capacity_bytes:.1%}"
    line = f"memory by the estimate {readable(estimate.peak_bytes)}, {share} of the 72.3 GiB that a step may take"
    assert fit.speed == predicted_speed(config, GPUS["h100-80gb"], 8)
    assert fit.line == f"{line}; {fit.speed.text(' tokens/s/GPU predicted', 0)}"
    unknown = check_memory(config, Device(device_kind="something new", stats={"bytes_limit": 72 * GIB}))
    assert unknown.speed is None
    assert unknown.line.endswith("that a step may take")


def test_on_cpu_devices_only_what_no_such_machine_holds_is_refused(monkeypatch):
    monkeypatch.setattr(host, "host_memory", lambda: (80 * GIB, GIB))
    with pytest.raises(ConfigError, match=r"^Weights, optimizer state and batch need at least 89\.7 GiB, and this mac"):
        check_memory(eight(), Device("cpu"))
    assert check_memory(eight("run.allow_overcommit=true"), Device("cpu")) is None
    monkeypatch.setattr(host, "host_memory", lambda: (90 * GIB, GIB))
    assert check_memory(eight(), Device("cpu")) is None


def test_what_does_not_fit_is_refused_with_a_change_that_would():
    config = eight()
    sentence = refusal(config)
    assert sentence.startswith(f"A step needs {readable(estimate_memory(config).peak_bytes)} on a device by the estimate")
    assert sentence.endswith("or run.allow_overcommit=true to start anyway.")
    advised = sentence.split(": set ")[1].split(" (")[0].split()
    assert check_memory(load_config(RECIPE, advised).resolve(8), Device()).fits


def test_the_cheapest_of_them_is_the_one_predicted_fastest():
    found = changes_that_fit(eight(), int(FIT_SHARE * GPUS["h100-80gb"].capacity_bytes), GPUS["h100-80gb"], 8)
    assert f"set {found[0].overrides} ({found[0].figures})" in refusal(eight())
    assert found[0].step_s == min(change.step_s for change in found)


def test_overcommitment_is_warned_of_and_allowed(caplog):
    fit = check_memory(eight("run.allow_overcommit=true"), Device())
    assert not fit.fits
    assert "may take 72.3 GiB: the run starts anyway" in caplog.text


def test_what_may_fit_after_all_is_warned_of_and_started(caplog):
    peak = estimate_memory(eight()).peak_bytes
    fit = check_memory(eight(), holding(peak / 1.09))
    assert not fit.fits
    assert "the run starts anyway, because the estimate may be off by this much." in caplog.text
    assert "the run starts anyway" not in refusal(eight(), holding(peak / 1.11)).split(": set")[0]


def test_where_nothing_fits_here_a_number_of_gpus_is_named(monkeypatch):
    """Needs 100 GiB in total on any number of devices: 16 have too little memory, and 24 do not divide the batch."""

    def shared_out(config, **_):
        p = config.parallel
        devices = p.pipe * p.data * p.context * p.tensor
        return MemoryEstimate(devices, (StageMemory(0, {"state": 100 * GIB // devices}),), 0)

    monkeypatch.setattr("jaxllm.run.memory_check.estimate_memory", shared_out)
    sentence = refusal(eight(), holding(5 * GIB))
    assert "no change that was tried makes it fit on 8 GPUs, but 32 would do with parallel.data=32 " in sentence
    assert "(3.1 GiB), or run.allow_overcommit=true" in sentence
    nowhere = refusal(eight(), holding(1000))
    assert "no change that was tried makes it fit on 8 GPUs or on more of them" in nowhere


def test_what_every_mesh_is_searched_for_is_not_said_to_be_impossible():
    """Long sequences need context ranks in the place of tensor ranks."""
    long = ("train.sequence_length=655360", "train.global_batch_sequences=8", "model.attention=cudnn_halves")
    config = eight("parallel.tensor=8", "parallel.remat=none", *long)
    advised = shlex.split(refusal(config).split(": set ")[1].split(" (")[0])
    assert any(change in advised for change in ("parallel.tensor=1", "parallel.tensor=2"))
    assert check_memory(load_config(config.model_dump(mode="json", exclude_unset=True), advised), Device()).fits


def test_a_sample_that_does_not_fit_is_left_out(tiny_config, monkeypatch):
    """The run has ended by then. Any other error is raised."""
    said, text = [], SimpleNamespace(encode=lambda text, parse_special: np.array([*text.encode()]))
    data = SimpleNamespace(unit="byte", held_out_tokens=0, tokenizer=text)
    trainer = SimpleNamespace(data=data, config=tiny_config("log.sample_tokens=5"), model=None)

    def fails_with(message):
        def sample(*inputs, **options):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr("jaxllm.inference.generate.sample", sample)
        return conclude(SimpleNamespace(trainer=trainer, console=SimpleNamespace(say=said.append)))

    assert fails_with(EXHAUSTED) is None
    assert said == ["no sample: the whole network does not fit on a device beside the training state"]
    text.encode = lambda text, parse_special: np.array([256])
    assert fails_with("INTERNAL: a bug") is None
    assert said[1:] == ["no sample: log.sample_prompt has a token for which the model has no row"]
    text.encode = lambda text, parse_special: np.array([255])
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        fails_with("INTERNAL: a bug")


def test_a_run_asks_before_it_makes_anything(tiny_config, monkeypatch):
    asked = []

    def refuse(config, device):
        asked.append((config.parallel.data, device))
        raise ConfigError("too large")

    monkeypatch.setattr("jaxllm.run.trainer.check_memory", refuse)
    monkeypatch.setattr("jaxllm.run.trainer.load_data", lambda config: pytest.fail("data was read"))
    with pytest.raises(ConfigError, match="too large"):
        Trainer(tiny_config())
    assert asked == [(8, jax.local_devices()[0])]


# ----------------------------------------------------------------------------------------------------------- running out


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        (EXHAUSTED, True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("INTERNAL: NCCL operation failed: unhandled cuda error 'out of memory'", True),
        ("INVALID_ARGUMENT: shapes", False),
    ],
)
def test_running_out_is_told_from_other_errors(message, is_one):
    assert is_out_of_memory(jax.errors.JaxRuntimeError(message)) is is_one
    assert not is_out_of_memory(ValueError(message))


def test_advice_has_both_figures_and_what_would_take_less(tiny_config, monkeypatch):
    trainer = Trainer(tiny_config("parallel.remat=none", "train.microbatch_sequences=1"))
    next(iter(trainer.steps(1)))
    capacity = GIB
    monkeypatch.setattr(jax, "local_devices", lambda: [holding(capacity)])
    first, *rest = out_of_memory_lines(jax.errors.JaxRuntimeError(EXHAUSTED), trainer.config, trainer)
    estimate = estimate_memory(trainer.config)
    compiled = total_bytes(trainer.programs.current.memory_analysis())
    assert first.startswith("A device ran out of memory in step 1: ")
    text = "\n".join(rest)
    assert f"by the estimate       {readable(estimate.peak_bytes)}, {estimate.peak_bytes / capacity:.1%} of 1.0 GiB" in text
    assert f"by XLA, as compiled   {readable(compiled)}, {compiled / capacity:.1%} of 1.0 GiB" in text
    assert "Either would fit: look in nvidia-smi" in text
    assert rest[-1] == "  JAX says: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes."
    for line in rest:
        if line.strip()[0].isdigit():
            keys = dict(pair.split("=") for pair in line.split(". ", 1)[1].split(" (")[0].split())
            values = {key: int(value) if value.isdigit() else value for key, value in keys.items()}
            assert estimate_memory(changed(trainer.config, values)).peak_bytes <= 0.9 * estimate.peak_bytes + 1
    trainer.close()


def test_advice_takes_less_by_as_much_as_xla_takes_more(tiny_config, monkeypatch):
    """The compiled step needs three times the estimate; the capacity is above the estimate."""
    config = tiny_config("parallel.remat=none", "train.microbatch_sequences=1")
    peak = estimate_memory(config.resolve(8)).peak_bytes

    class Compiled:
        class memory_analysis:
            argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes = 3 * peak, 0, 0, 0

    class Trained:
        programs, step = SimpleNamespace(current=Compiled), 1

    Trained.config = config.resolve(8)
    capacity = 2 * peak
    monkeypatch.setattr(jax, "local_devices", lambda: [holding(capacity)])
    targets = []

    def asked(config, capacity_bytes, *rest):
        targets.append(capacity_bytes)
        return []

    monkeypatch.setattr(for_runs, "changes_that_fit", asked)
    text = "\n".join(out_of_memory_lines(jax.errors.JaxRuntimeError(EXHAUSTED), config, Trained))
    assert targets == [int(FIT_SHARE * capacity / 3)]
    assert "would fit" not in text


def test_on_a_cpu_the_estimate_is_said_to_be_of_a_gpu(tiny_config):
    text = "\n".join(out_of_memory_lines(jax.errors.JaxRuntimeError(EXHAUSTED), tiny_config(), None))
    assert "of a GPU, which this device is not" in text


def test_before_there_is_a_trainer_the_advice_does_without(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    text = "\n".join(out_of_memory_lines(jax.errors.JaxRuntimeError(EXHAUSTED), load_config(RECIPE), None))
    assert text.startswith("A device ran out of memory while the state was made: set ")
    assert "by XLA, as compiled   not known" in text
    assert "of a GPU, which this device is not" not in text
    monkeypatch.setattr(jax, "local_devices", lambda: [holding(2**50)])
    roomy = "\n".join(out_of_memory_lines(jax.errors.JaxRuntimeError(EXHAUSTED), load_config(RECIPE), None))
    assert "By the estimate it would fit: look in nvidia-smi" in roomy
    numbered = [line.strip() for line in text.splitlines() if line.strip()[0].isdigit()]
    assert numbered
    assert [line[0] for line in numbered] == [str(n) for n in range(1, len(numbered) + 1)]


def test_other_errors_pass_as_they_are(tiny_config):
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes"), explain_out_of_memory(tiny_config()):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes")


@pytest.mark.parametrize(("at", "when"), [("compile_step", "before the train step was compiled"), ("advance", "in step 1")])
def test_a_run_that_runs_out_ends_in_advice(tiny_config, tmp_path, monkeypatch, at, when):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError(EXHAUSTED)

    monkeypatch.setattr(Trainer, at, exhausted)
    with pytest.raises(ConfigError) as caught:
        loop.fit(tiny_config(f"run.dir={tmp_path / 'run'}"))
    text = str(caught.value)
    assert text.startswith(f"A device ran out of memory {when}: ")
    assert "JAX says: RESOURCE_EXHAUSTED" in text
    assert "Traceback" not in text
    assert caught.value.__cause__ is None
