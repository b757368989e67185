"""`jaxllm estimate`: terms add up, the verdict follows from the capacity, the advice fits, and it does not import JAX."""

import dataclasses
import json
import shlex
import subprocess
import sys

import pytest
import yaml

import jaxllm
from jaxllm.config import ConfigError, config_folder, load_config
from jaxllm.cost_model.flops import train_flops_per_token
from jaxllm.cost_model.hardware import FIT_SHARE, GPUS, RESERVE_BYTES, XLA_MEMORY_FRACTION
from jaxllm.cost_model.hosts import UNKNOWN_HOST_BYTES, choose_gpus_per_host, named_devices, require_devices
from jaxllm.cost_model.megatron import megatron_flops_per_token, megatron_memory, record_text
from jaxllm.cost_model.memory import MemoryEstimate, StageMemory, estimate_memory
from jaxllm.cost_model.step_time import estimate_step_time
from jaxllm.plan.advice import changed, changes_that_fit, combinations, ladders, smallest_cluster
from jaxllm.plan.estimate import estimate, fold, memory_table
from jaxllm.plan.search import SearchOptions, search

ROOT = config_folder().parent
H100 = GPUS["h100-80gb"]
GIB = 2**30
RECIPE = {
    "model": {"name": "llama-3.1-8b"},
    "parallel": {"tensor": 2, "pipe": 4},
    "train": {"steps": 1, "sequence_length": 8192, "global_batch_sequences": 128, "microbatch_sequences": 2},
}


def config(*overrides):
    return load_config(RECIPE, overrides)


def cli(*arguments, expect=0):
    command = [sys.executable, "-m", "jaxllm.cli", "estimate", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == expect, result.stderr
    return result


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


# --------------------------------------------------------------------------------------------------------------- report


@pytest.mark.parametrize("overrides", [[], ["parallel.schedule=gpipe"], ["parallel.pipe=1", "parallel.zero=3"]])
def test_json_has_the_keys_and_its_sums_are_sums(overrides):
    values = json.loads(json.dumps(estimate(config(*overrides), "h100-80gb", 16).to_json()))
    assert values["devices"] == 16
    assert [stage["stage"] for stage in values["stages"]] == list(range(values["mesh"]["pipe"]))
    for stage in values["stages"]:
        assert stage["total_bytes"] == sum(stage["terms_bytes"].values())
    assert values["peak_bytes"] == max(stage["total_bytes"] for stage in values["stages"])
    assert values["capacity_bytes"] == H100.capacity_bytes
    assert values["fits"] is (values["peak_bytes"] <= values["capacity_bytes"])
    assert values["step_s"] == pytest.approx(sum(values["terms_s"].values()))
    assert values["tokens_per_s_per_gpu"] == pytest.approx(128 * 8192 / values["step_s"] / 16)
    flops = train_flops_per_token(config().model, 8192)
    assert values["tflops_per_gpu"] == pytest.approx(values["tokens_per_s_per_gpu"] * flops / 1e12)
    assert values["mfu"] == pytest.approx(values["tflops_per_gpu"] / 989)
    assert (values["gpu"], values["gpus_per_host"], values["convention"]) == ("h100-80gb", 8, "jaxllm")
    assert values["host_bytes"] == estimate_memory(config(*overrides).resolve(16)).host_bytes


def test_every_term_is_printed_with_its_bytes_and_its_seconds():
    report = estimate(config(), "h100-80gb", 16)
    text = "\n".join(report.lines())
    for term in report.memory.peak_stage.terms_bytes:
        if any(stage.terms_bytes[term] for stage in report.memory.stages):
            assert term.replace("_", " ") in text
    for term, time_s in report.speed.terms_s.items():
        assert time_s == 0 or term.replace("_", " ") in text
    assert f"{report.speed.tokens_per_s_per_gpu:,.0f} tokens/s/GPU" in text
    assert f"{report.peak_bytes / H100.capacity_bytes:.1%} of the 72.3 GiB that a step may take" in text


def test_the_megatron_convention_is_the_published_rule():
    chosen = config("parallel.remat=none").resolve(16)
    report = estimate(chosen, "h100-80gb", 16, convention="megatron")
    values = report.to_json()
    assert values["peak_bytes"] == megatron_memory(chosen).peak_bytes
    assert values["capacity_bytes"] == 64 * GIB
    assert values["fits"] is (megatron_memory(chosen).peak_bytes <= 64 * GIB)
    flops = megatron_flops_per_token(chosen.model, 8192)
    assert values["tflops_per_gpu"] == pytest.approx(values["tokens_per_s_per_gpu"] * flops / 1e12)
    assert values["step_s"] == pytest.approx(estimate_step_time(chosen, H100, 8, "megatron").step_s)
    own = values["by_convention"]["jaxllm"]
    assert own["peak_bytes"] == estimate_memory(chosen).peak_bytes
    assert own["capacity_bytes"] == H100.capacity_bytes
    assert set(estimate(chosen, "h100-80gb").by_convention) == {"jaxllm"}
    text = "\n".join(report.lines())
    assert f"{values['peak_bytes'] / (80 * GIB):.1%} of 80.0 GiB, of which it fills 80%" in text


def test_what_the_rule_does_not_know_is_said():
    chosen = config("parallel.remat=none").resolve(16)
    sentence = "ZeRO 0 and 1, and no recomputation"
    by_rule, own = ("\n".join(estimate(chosen, H100, convention=name).lines()) for name in ("megatron", "jaxllm"))
    assert sentence in by_rule
    assert record_text() in by_rule
    assert sentence not in own
    assert record_text() not in own


def test_stages_are_said_to_be_the_same_where_there_are_some():
    sentence = "(each stage the same: all run one program)"
    assert sentence in "\n".join(estimate(config(), H100, 16).lines())
    assert sentence not in "\n".join(estimate(config("parallel.pipe=1"), H100, 16).lines())


@pytest.mark.parametrize(("share", "doubted"), [(0.94, False), (0.96, True), (1.0, True), (1.01, False)])
def test_what_fits_by_a_little_is_said_to_be_in_doubt(share, doubted):
    chosen = config().resolve(16)
    capacity = estimate_memory(chosen).peak_bytes / share
    gpu = dataclasses.replace(H100, memory_bytes=round((capacity + RESERVE_BYTES) / XLA_MEMORY_FRACTION) + 1)
    report = estimate(chosen, gpu)
    assert report.fits is (share <= 1)
    assert ("above 95%, where the estimate alone is not enough" in "\n".join(report.lines())) is doubted


def test_without_a_gpu_there_are_bytes_alone():
    report = estimate(config(), gpus=16)
    assert report.peak_bytes == estimate(config(), H100, 16).peak_bytes
    values = report.to_json()
    for key in ("gpu", "capacity_bytes", "fits", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "step_s", "terms_s"):
        assert values[key] is None
    text = "\n".join(report.lines())
    assert "name one, such as --gpu h100-80gb" in text
    assert "fit:" not in text.lower().replace("does not fit", "fit")


def test_the_api_gives_the_same():
    assert jaxllm.estimate(config(), gpu="h100-80gb", gpus=16) == estimate(config(), H100, 16)


def test_neighbours_that_hold_the_same_share_a_column():
    terms = [{"weights": 5}, {"weights": 3}, {"weights": 3}, {"weights": 3}, {"weights": 5, "head": 2 * GIB}]
    stages = [StageMemory(number, held) for number, held in enumerate(terms)]
    assert [label for label, _ in fold(stages)] == ["stage 0", "stages 1-3", "stage 4"]
    heading, weights, head, total = memory_table(stages)
    assert heading.split() == ["stage", "0", "stages", "1-3", "stage", "4"]
    assert weights.split() == ["weights", "5", "B", "3", "B", "5", "B"]
    assert head.split() == ["head", "-", "-", "2.0", "GiB"]
    assert total.split()[0] == "total"
    assert len({len(line) for line in (heading, weights, head, total)}) == 1


# ------------------------------------------------------------------------------------------------------------- cluster


def test_the_mesh_says_how_many_gpus_there_are():
    assert require_devices(config("parallel.data=4"), None) == 32
    assert require_devices(config("parallel.data=4"), 16) == 16
    assert named_devices(config("run.cpu_devices=8"), None) == 8
    assert named_devices(config(), None) is None
    with pytest.raises(ConfigError, match=r"give their number with --gpus, or set parallel\.data"):
        estimate(config(), "h100-80gb")
    assert choose_gpus_per_host(12, None, 8)[0] == 6
    assert choose_gpus_per_host(7, None, 4)[0] == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": 0}, r"--gpus=0 is not valid"),
        ({"gpus": 12}, "does not divide the 12 devices"),
        ({"gpus": 16, "gpus_per_host": 5}, r"--gpus-per-host=5 does not divide the 16 GPUs: use one of 1, 2, 4, 8, 16"),
        ({"gpus": 16, "gpu": "h100"}, "did you mean h100-80gb"),
        ({"gpus": 16, "convention": "deepspeed"}, "use jaxllm, megatron"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        estimate(config(), **options)


# -------------------------------------------------------------------------------------------------------------- advice


def fake(config, held=2 * GIB):
    """2 GiB for each sequence of a microbatch, halved by remat=full, and 16 GiB of state over the ZeRO ranks and tensor."""
    p = config.parallel
    held = held * config.microbatch_sequences // (2 if p.remat in ("full", "offload") else 1)
    state = 16 * GIB // p.tensor // (int(p.data) if p.zero >= 3 else 1)
    return MemoryEstimate(config.devices, (StageMemory(0, {"held": held, "state": state}),), 0)


def eight(*overrides):
    return config("parallel.pipe=1", "parallel.tensor=1", "train.microbatch_sequences=8", *overrides).resolve(8)


def test_of_each_kind_the_mildest_change_that_fits_is_named():
    found = {change.overrides: change.peak_bytes for change in changes_that_fit(eight(), 24 * GIB, estimate=fake)}
    assert found == {
        "train.microbatch_sequences=4": 24 * GIB,
        "parallel.remat=full": 24 * GIB,
        "parallel.remat=offload": 24 * GIB,
        "parallel.zero=3": 18 * GIB,
        "parallel.tensor=2 parallel.data=4": 24 * GIB,
    }


def test_what_the_host_has_no_room_for_is_not_advised():
    def offloading(config):
        memory = fake(config)
        on_host = 2 * UNKNOWN_HOST_BYTES if config.parallel.remat == "offload" else 0
        return dataclasses.replace(memory, host_bytes=int(on_host))

    found = {change.overrides for change in changes_that_fit(eight(), 24 * GIB, estimate=offloading)}
    assert "parallel.remat=full" in found
    assert "parallel.remat=offload" not in found


def test_without_a_gpu_the_order_is_the_lists_and_with_one_that_of_predicted_steps():
    plain = changes_that_fit(eight(), 24 * GIB, estimate=fake)
    assert plain[0].overrides == "train.microbatch_sequences=4"
    assert plain[0].figures == "24.0 GiB"
    timed = changes_that_fit(eight(), 24 * GIB, H100, 8, estimate=fake)
    assert [change.step_s for change in timed] == sorted(change.step_s for change in timed)
    assert {change.overrides for change in timed} == {change.overrides for change in plain}
    before = estimate_step_time(eight(), H100, 8).step_s
    for change in timed:
        assert change.step_ratio == pytest.approx(change.step_s / before)


def test_where_one_change_is_not_enough_several_are_put_together():
    (together,) = changes_that_fit(eight(), 4 * GIB, estimate=fake)
    assert fake(together.config).peak_bytes == together.peak_bytes <= 4 * GIB
    assert len(together.keys) > 1
    assert changes_that_fit(eight(), GIB // 2, estimate=fake) == []


def test_the_smallest_cluster_is_a_multiple_that_fits_and_the_one_before_does_not():
    assert changes_that_fit(eight(), 2 * GIB, estimate=fake) == []
    larger = smallest_cluster(eight(), 2 * GIB, estimate=fake)
    assert fake(larger.config).peak_bytes <= 2 * GIB
    assert fake(larger.config).devices == 16
    assert smallest_cluster(eight(), 10, estimate=fake) is None


@pytest.mark.parametrize(
    "overrides",
    [[], ["parallel.remat=none"], ["parallel.remat={mlp_up: keep}"], ["parallel.zero=0"], ["parallel.offload_state=optimizer"]],
)
def test_no_rung_of_a_ladder_is_what_the_config_has_already(overrides):
    chosen = eight(*overrides)
    rungs = [keys for ladder in ladders(chosen) for keys in ladder] + list(combinations(chosen))
    for keys in rungs:
        assert all(getattr(getattr(chosen, name.split(".")[0]), name.split(".")[1]) != value for name, value in keys.items())
        new = changed(chosen, keys)
        if new is not None:
            assert estimate_memory(new).devices == 8


def test_a_change_keeps_all_else_and_what_cannot_be_is_none():
    chosen = eight()
    new = changed(chosen, {"parallel.tensor": 4, "parallel.data": 2})
    assert new == chosen.model_copy(update={"parallel": chosen.parallel.model_copy(update={"tensor": 4, "data": 2})})
    assert changed(chosen, {"parallel.tensor": 3}) is None
    assert changed(chosen, {"train.microbatch_sequences": 3}) is None


def test_a_mixture_may_be_changed_too(text_file):
    part = {"name": "words", "source": "files", "paths": [str(text_file)], "weight": 1.0}
    values = {**RECIPE, "data": {"mixture": [part]}, "model": {**RECIPE["model"]}}
    assert changed(load_config(values).resolve(8), {"parallel.remat": "full"}).parallel.remat == "full"


@pytest.mark.parametrize("overrides", [["parallel.data=8"], ["parallel.data=2", "parallel.tensor=4"]])
def test_what_the_estimate_advises_fits_by_the_estimate(overrides):
    chosen = config("parallel.pipe=1", "parallel.tensor=1", "train.microbatch_sequences=16", "parallel.remat=none", *overrides)
    report = estimate(chosen, "h100-80gb")
    assert report.fits is False
    assert report.changes
    for change in report.changes:
        assert estimate_memory(change.config).peak_bytes == change.peak_bytes <= FIT_SHARE * H100.capacity_bytes
        keys = ["parallel.remat=none", *overrides, "train.microbatch_sequences=16", *shlex.split(change.overrides)]
        again = load_config({**RECIPE, "parallel": {}}, keys)
        assert estimate(again, "h100-80gb").peak_bytes == change.peak_bytes
    text = "\n".join(report.lines())
    assert "DOES NOT FIT" in text
    assert report.changes[0].overrides in text


BATCH_OF_EIGHT = ["train.global_batch_sequences=8", "train.microbatch_sequences=8"]


@pytest.mark.parametrize("sequence_length", [655360, 786432])
def test_where_no_ladder_leads_there_every_mesh_is_looked_at(sequence_length):
    gpus, overrides = 8, ["parallel.tensor=8", f"train.sequence_length={sequence_length}", *BATCH_OF_EIGHT]
    chosen = config("parallel.remat=none", "parallel.pipe=1", "model.attention=cudnn_halves", *overrides).resolve(gpus)
    limit = int(FIT_SHARE * H100.capacity_bytes)
    assert not any(
        estimate_memory(new).peak_bytes <= limit
        for keys in [*combinations(chosen), *(keys for ladder in ladders(chosen) for keys in ladder)]
        if (new := changed(chosen, keys)) is not None
    )
    (found,) = changes_that_fit(chosen, limit, H100, gpus)
    assert estimate_memory(found.config).peak_bytes == found.peak_bytes <= limit
    assert found.config == search(chosen, H100, gpus, options=SearchOptions(device_bytes=limit)).best
    assert found.config == load_config(chosen.model_dump(mode="json", exclude_unset=True), shlex.split(found.overrides))
    assert changes_that_fit(chosen, limit, H100, gpus, estimate=lambda config: fake(config, held=2**50)) == []


def test_where_only_all_on_the_host_fits_it_is_advised_with_what_it_needs():
    """Weights and gradients of 13B fit two A100s of 40 GB on no mesh."""
    gpu = GPUS["a100-40gb"]
    chosen = load_config({**RECIPE, "model": {"name": "llama-2-13b"}}, ["parallel.pipe=1", "parallel.tensor=1"]).resolve(2)
    (found,) = changes_that_fit(chosen, int(FIT_SHARE * gpu.capacity_bytes), gpu, 2)
    assert (found.config.parallel.offload_state, found.config.parallel.zero) == ("all", 3)
    assert found.config == load_config(chosen.model_dump(mode="json", exclude_unset=True), shlex.split(found.overrides))
    assert "the optimizer's state and master weights over the host's link in every step" in found.cost


def test_tensor_is_not_advised_across_hosts():
    """Unless they cross hosts now. Without a kind of GPU there are no hosts."""
    chosen = eight("parallel.tensor=2")

    def tensors(config, **options):
        found = changes_that_fit(config, 12 * GIB, estimate=lambda config: fake(config, held=0), **options)
        return {change.config.parallel.tensor for change in found if "parallel.tensor" in change.keys}

    roomy = chosen.model_copy(update={"parallel": chosen.parallel.model_copy(update={"tensor": 1, "data": 8, "zero": 0})})
    assert tensors(roomy, gpu=H100, gpus_per_host=1) == set()
    assert tensors(roomy, gpu=H100, gpus_per_host=8) == tensors(roomy) == {2}
    big = load_config({**RECIPE, "model": {"name": "llama-3-70b"}}, ["parallel.tensor=8", "parallel.pipe=1"]).resolve(64)
    for keys in (change.keys for change in changes_that_fit(big, 2**50, H100, 8)):
        assert keys.get("parallel.tensor", 8) <= 8
    assert any(change.keys.get("parallel.tensor", 0) > 8 for change in changes_that_fit(big, 2**50))


def test_what_fits_is_given_no_advice():
    roomy = dataclasses.replace(H100, memory_bytes=2**50)
    assert estimate(config(), roomy, 16).changes == ()


# ------------------------------------------------------------------------------------------------------------- command


def test_the_command_needs_no_jax(recipe):
    code = (
        "import sys; sys.argv = ['jaxllm', 'estimate', *sys.argv[1:]]\n"
        "from jaxllm.cli.app import app\n"
        "try: app(standalone_mode=False)\n"
        "finally: assert not {'jax', 'flax', 'jaxlib', 'matplotlib'} & set(sys.modules), 'imported'\n"
        "import jaxllm; jaxllm.estimate\n"
        "assert 'jax' not in sys.modules"
    )
    command = [sys.executable, "-c", code, recipe, "--gpu", "h100-80gb", "--gpus", "16", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(json.dumps(estimate(config(), H100, 16).to_json()))


def test_the_command_prints_a_table_and_says_which_hosts_were_taken(recipe):
    twelve = ["parallel.pipe=1", "parallel.zero=0", "train.global_batch_sequences=120", "--gpu", "h100-80gb", "--gpus", "12"]
    result = cli(recipe, *twelve)
    assert "2 hosts of 6 (the largest divisor of 12 not above 8, or --gpus-per-host)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 160


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "16", "--over", "sequence"], "add --picture FILE"),
        (["--gpus", "16", "--over", "depth", "--picture", "x.png"], "use sequence, microbatch, step"),
        (["--gpus", "16", "--over", "step", "--picture", "x.png"], "name the kind of GPU"),
    ],
)
def test_mistakes_with_pictures_end_in_one_sentence(recipe, arguments, sentence):
    result = cli(recipe, *arguments, expect=2)
    assert sentence in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert result.stdout == ""


def test_megatrons_convention_is_of_bfloat16_and_fused_attention():
    train = {"steps": 1, "sequence_length": 128, "global_batch_sequences": 1}
    config = load_config({"model": {"name": "llama-3.2-1b", "compute_dtype": "float32"}, "train": train})
    with pytest.raises(
        ConfigError, match="--convention=megatron is of bfloat16 with fused attention, and v100-16gb has neither"
    ):
        jaxllm.estimate(config, gpu="v100-16gb", gpus=1, convention="megatron")
