"""benchmarks/beside_maxtext.py: both sides have the same work, the pages have the stored figures. MaxText is not needed."""

import json
import math
import re

import pytest
import scripts

from jaxllm.compile.aot import can_compile_for_gpus, gpu_devices
from jaxllm.compile.report import compile_report
from jaxllm.config import ConfigError, load_config
from jaxllm.cost_model.flops import train_flops_per_token

beside = scripts.load("benchmarks/beside_maxtext.py")
STORED = beside.read(beside.FILE)


def rows(name):
    return STORED["steps"][name]


# ------------------------------------------------------------------------------------------------------------- equal work


@pytest.mark.parametrize("name", beside.STEPS)
@pytest.mark.parametrize("program", beside.THEIR_PROGRAMS)
def test_maxtext_is_asked_for_the_dims_and_tokens_of_jaxllm(name, program):
    config, keys = beside.configured(name), beside.maxtext_keys(name, program)
    model, train = config.model, config.train
    dims = {
        "base_num_decoder_layers": model.num_layers,
        "base_emb_dim": model.hidden_size,
        "base_mlp_dim": model.intermediate_size,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_target_length": train.sequence_length,
        "internal_compile_num_devices": config.devices,
    }
    assert {key: int(keys[key]) for key in dims} == dims
    assert keys["logits_via_embedding"] == str(model.tie_embeddings).lower()
    microbatch = float(keys["per_device_batch_size"]) * config.devices
    assert microbatch == train.microbatch_sequences * config.parallel.data
    assert microbatch * int(keys["gradient_accumulation_steps"]) == train.global_batch_sequences
    ranks = {key: int(size) for key, size in keys.items() if key.startswith("ici_")}
    assert math.prod(ranks.values()) == config.devices
    assert ranks.get("ici_tensor_sequence_parallelism", 1) == config.parallel.tensor


@pytest.mark.parametrize("name", beside.STEPS)
def test_all_stored_programs_do_the_same_work(name):
    """Tokens, as MaxText's own config has them; weights, moments and batch to a thousandth; no fewer FLOPs than the model's."""
    config = beside.configured(name)
    assert sorted(rows(name)) == sorted(beside.programs(name))
    ours = rows(name)[beside.OURS]
    least_flops = config.step_tokens * train_flops_per_token(config.model, beside.SEQUENCE_LENGTH) / config.devices
    for row in rows(name).values():
        assert row["tokens"] == config.step_tokens
        assert row["argument_bytes"] == pytest.approx(ours["argument_bytes"], rel=1e-3)
        assert row["product_flops"] > 0.99 * least_flops
        assert row["mfu"] * row["step_s"] == pytest.approx(ours["mfu"] * ours["step_s"])
        assert row["step_s"] > row["products_s"] + row["moves_s"] + row["exposed_s"]


def test_stored_figures_say_what_made_them():
    assert STORED["maxtext"] == beside.MAXTEXT
    assert STORED["versions"].keys() == beside.versions().keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", STORED["date"])
    assert re.fullmatch(r"[0-9a-f]{10}", STORED["commit"])


@pytest.mark.slow
@pytest.mark.skipif(not can_compile_for_gpus(), reason="the extra aot is not installed")
def test_the_account_is_that_of_the_compile_command():
    shape = {"num_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}
    train = {"steps": 1, "sequence_length": 512, "global_batch_sequences": 4, "microbatch_sequences": 1}
    sections = {"model": {**shape, "vocab_size": 512}, "train": train, "data": {"mask_documents": False}}
    config = load_config(sections, ["parallel.zero=3"]).resolve(2)
    found = beside.figures(beside.compile_ours(config, gpu_devices(1, 2, beside.GPU)), config)
    report = compile_report(config, beside.GPU, 2)
    assert found["step_s"] == report.kernels.step_s
    assert found["mfu"] == report.kernels.mfu_full_square
    assert found["exposed_s"] == report.exposed_transfers_s
    assert found["total_bytes"] == report.total_bytes - report.workspace_bytes
    assert found["tokens"] == config.step_tokens


# ---------------------------------------------------------------------------------------------- a loop without a trip count

LOOP = """HloModule by_hand

%condition (state: (bf16[2,4,8,64])) -> pred[] {
  %state = (bf16[2,4,8,64]{3,2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%turn (state.1: (bf16[2,4,8,64])) -> (bf16[2,4,8,64]) {
  %state.1 = (bf16[2,4,8,64]{3,2,1,0}) parameter(0)
  %q = bf16[2,4,8,64]{3,2,1,0} get-tuple-element(%state.1), index=0
  %a = bf16[2,4,8,64]{3,2,1,0} custom-call(%q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %b = bf16[2,4,8,64]{3,2,1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %next = (bf16[2,4,8,64]{3,2,1,0}) tuple(%b)
}

ENTRY %main (p: bf16[2,4,8,64]) -> (bf16[2,4,8,64]) {
  %p = bf16[2,4,8,64]{3,2,1,0} parameter(0)
  %first = bf16[2,4,8,64]{3,2,1,0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %start = (bf16[2,4,8,64]{3,2,1,0}) tuple(%first)
  ROOT %loop = (bf16[2,4,8,64]{3,2,1,0}) while(%start), condition=%condition, body=%turn
}
"""


def test_runs_of_attention_give_the_trip_count_that_xla_does_not():
    assert beside.attention_runs(LOOP) == 3
    counted = beside.with_trip_count(LOOP, 1 + 2 * 7)
    assert '"known_trip_count":{"n":"7"}' in counted
    assert beside.attention_runs(counted) == 15
    assert beside.with_trip_count(counted, 15) == counted
    with pytest.raises(ValueError, match=r"No trip count of a loop gives 16 runs"):
        beside.with_trip_count(LOOP, 16)


# ---------------------------------------------------------------------------------------------------- a run, and refusals


def test_a_step_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        beside.main(["2b"])
    assert "there is no step 2b: choose from 1b, 8b-10-layers, 8b-zero3, 8b-tensor" in capsys.readouterr().err


@pytest.mark.parametrize(("found", "said"), [(None, "none is installed"), ("0.3.0", "0.3.0 is installed")])
def test_without_its_maxtext_the_command_that_installs_it_is_named(found, said, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "installed_version", lambda package: found)
    with pytest.raises(SystemExit) as refused:
        beside.main(["1b", "--file", str(tmp_path / "figures.json")])
    install = "pip install aqtp omegaconf && pip install --no-deps maxtext==0.2.5"
    assert str(refused.value) == f"MaxText 0.2.5 is needed, and {said}: {install}"


def test_figures_of_other_versions_are_not_mixed(tmp_path, monkeypatch):
    stored = {"versions": {**beside.versions(), "jax": "0.1"}, "steps": {"1b": {beside.OURS: {}}}}
    sentence = beside.refusal(stored, [("8b-zero3", beside.OURS)], tmp_path / "old.json")
    assert sentence.endswith("old.json has figures of other versions (jax 0.1): name another file with --file, or delete it.")
    monkeypatch.setattr(beside, "require_compiler", lambda gpu: None)
    assert beside.refusal(stored | {"versions": beside.versions()}, [("8b-zero3", beside.OURS)], tmp_path) is None


def test_missing_packages_of_nvidia_are_named(tmp_path, monkeypatch):
    def missing(gpu):
        raise ConfigError("Compiling needs more.")

    monkeypatch.setattr(beside, "require_compiler", missing)
    assert beside.refusal({"steps": {}}, [("1b", beside.OURS)], tmp_path) == "Compiling needs more."


def test_a_rerun_compiles_what_failed(tmp_path, monkeypatch, capsys):
    """And each program has its own process, with MaxText's flags of XLA where the program has them."""
    ran, fail = [], True

    def run(command, limit_s, variables):
        name, program = command[-2:]
        ran.append((name, program, bool(variables["XLA_FLAGS"])))
        return ([], "Killed.") if fail and program == beside.THEIRS else ([rows(name)[program]], None)

    monkeypatch.setattr(beside.subprocess_runner, "run", run)
    monkeypatch.setattr(beside, "refusal", lambda *arguments: None)
    file = tmp_path / "figures.json"
    with pytest.raises(SystemExit, match="1b, MaxText: Killed"):
        beside.main(["1b", "--file", str(file)])
    assert ran == [("1b", program, program in (beside.THEIRS, "MaxText, unrolled")) for program in beside.programs("1b")]
    ran.clear()
    fail = False
    beside.main(["1b", "--file", str(file)])
    assert ran == [("1b", beside.THEIRS, True)]
    table = capsys.readouterr().out.strip().splitlines()
    assert table[-6:] == beside.table({"steps": {"1b": rows("1b")}}).splitlines()[-6:]
    assert json.loads(file.read_text())["versions"] == beside.versions()


def test_pages_need_all_programs(tmp_path):
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({**STORED, "steps": {"1b": rows("1b")}}))
    with pytest.raises(SystemExit, match=r"lacks 16: nothing was written"):
        beside.main(["--table", "--write", "--file", str(file)])


def test_empty_modules_are_those_named_and_what_is_in_them():
    finder = scripts.load("benchmarks/gpu_peers.py").EmptyModules(("a.b", "c"))
    asked = ("a", "a.b", "a.b.c", "a.bc", "c", "c.d", "cd")
    assert [name for name in asked if finder.find_spec(name)] == ["a.b", "a.b.c", "c", "c.d"]


# ------------------------------------------------------------------------------------------------------------------- pages


def between(file):
    return file.read_text(encoding="utf-8").partition("<!-- beside-maxtext: begin -->\n")[2].partition("\n<!-- beside")[0]


def test_the_tables_of_the_pages_are_those_of_the_stored_figures():
    assert between(beside.RESULTS) == beside.table(STORED)
    assert between(beside.PAGE) == beside.short_table(STORED)


def section():
    text = beside.RESULTS.read_text(encoding="utf-8").partition("\n## Beside MaxText")[2].partition("\n## ")[0]
    return " ".join(text.split())


def test_results_name_the_versions():
    versions = STORED["versions"]
    assert section().startswith(f"({STORED['date']})")
    assert f"MaxText {beside.MAXTEXT} and jaxllm (commit {STORED['commit']}) compiled by JAX {versions['jax']}," in section()
    assert f"cuDNN {versions['cudnn']} and nvcc {versions['nvcc']} for absent H100s" in section()
    assert f"a step may take {beside.GPU.capacity_bytes / 2**30:.1f} GiB" in section()


def ratio(name, program, figure="step_s", to=beside.OURS):
    return rows(name)[program][figure] / rows(name)[to][figure]


def gb(program, figure="sent_bytes", name="8b-zero3"):
    return f"{rows(name)[program][figure] / 1e9:,.0f}"


def more_gib(name, program):
    return (rows(name)[program]["total_bytes"] - rows(name)[beside.OURS]["total_bytes"]) / 2**30


def test_results_say_in_words_what_the_figures_say():
    shipped, lean, best = beside.THEIRS, "MaxText, XLA's flags", "MaxText, XLA's flags, unrolled"
    zero3, tensor, rounded = "8b-zero3", "8b-tensor", "jaxllm, bfloat16 sums"
    again = [row["attention_again_s"] / row["step_s"] for name in beside.STEPS for row in rows(name).values()]
    again = sorted(share for share in again if share)
    times = sorted(ratio(name, shipped) for name in beside.STEPS)
    too_large = [name for name in beside.STEPS if not beside.fits(rows(name)[shipped])]
    more = sorted(more_gib(name, lean) for name in too_large)
    assert beside.best_of_theirs(rows(zero3)) == beside.best_of_theirs(rows(tensor)) == best
    exposed = {program: f"{1e3 * rows(zero3)[program]['exposed_s']:.0f}" for program in (best, beside.OURS)}
    of_tensor = {program: f"{1e3 * rows(tensor)[program]['exposed_s']:.0f}" for program in (shipped, beside.OURS)}
    alone = [f"{ratio(name, beside.best_of_theirs(rows(name))):.2f}" for name in ("1b", "8b-10-layers")]
    said = (
        f"its scanned steps would be {again[0]:.0%} to {again[-1]:.0%} shorter",
        f"sends {1 - ratio(zero3, shipped, 'sent_bytes'):.0%} less, {gb(shipped)} GB instead of {gb(beside.OURS)}",
        f"with sums in bfloat16 jaxllm sends {gb(rounded)}",
        f"its ZeRO 3 step is {1 - ratio(zero3, best):.0%} shorter than jaxllm's",
        f"{1 - ratio(zero3, best, to=rounded):.0%} shorter than that with bfloat16 sums",
        f"moves {gb(best, 'moved_bytes')} GB through memory instead of {gb(beside.OURS, 'moved_bytes')}",
        f"{exposed[best]} ms of transfers are exposed instead of {exposed[beside.OURS]}",
        f"takes {more_gib(zero3, best):.1f} GiB more and {ratio(zero3, best, 'cpu_s'):.0f} times as long to compile",
        f"moves {1 - ratio(tensor, shipped, 'moved_bytes'):.0%} fewer bytes through memory",
        f"launches {1 - ratio(tensor, shipped, 'launches'):.0%} fewer kernels",
        f"compiles in {ratio(tensor, lean, 'cpu_s'):.1f} of the time",
        f"As shipped, MaxText takes {times[0]:.2f} to {times[-1]:.2f} times as long",
        f"takes {' and '.join(alone)} times as long, with tensor ranks {ratio(tensor, best):.2f}",
        f"{ {1: 'one', 2: 'two', 3: 'three'}[len(too_large)] } of the four steps do not fit",
        f"with {more[0]:.1f} to {more[-1]:.1f} GiB more than jaxllm",
        f"sends {ratio(tensor, shipped, 'sent_bytes'):.2f} times the bytes; {of_tensor[shipped]} ms",
        f"exposed, {of_tensor[beside.OURS]} of jaxllm's",
        f"has {ratio(tensor, 'MaxText, unrolled', 'product_flops'):.2f} times the FLOPs of jaxllm's",
    )
    assert [words for words in said if words not in section()] == []
    assert all(beside.fits(rows(name)[lean]) for name in beside.STEPS)


def test_the_comparison_says_what_the_figures_say():
    """Where MaxText is better, and that its other steps are longer."""
    text = " ".join(beside.PAGE.read_text(encoding="utf-8").split())
    best = beside.best_of_theirs(rows("8b-zero3"))
    assert f"this step is also {1 - ratio('8b-zero3', best):.0%} shorter" in text
    assert f"{ratio('8b-zero3', best, 'cpu_s'):.0f} times the compile time" in text
    assert ratio("8b-zero3", beside.THEIRS, "sent_bytes") == pytest.approx(0.75, abs=0.05)
    assert ratio("8b-tensor", "MaxText, XLA's flags", "cpu_s") == pytest.approx(0.5, abs=0.1)
    assert ratio("8b-tensor", beside.THEIRS, "moved_bytes") < 0.9
    others = [(name, program) for name in beside.STEPS for program in beside.THEIR_PROGRAMS if name != "8b-zero3"]
    assert all(ratio(name, program) > 1 for name, program in others)
