"""benchmarks/findings.py: pairs of published runs that differ in one setting, and the pages that it writes."""

import statistics

import pytest
import scripts

findings = scripts.load("benchmarks/findings.py")
published_rule = scripts.load("benchmarks/published_rule.py")


@pytest.fixture(scope="module")
def rows():
    return findings.published_rows()


def counts(finding, rows):
    """(pairs, those of them in which the finding holds)."""
    found = findings.pairs(finding, rows)
    return len(found), sum(pair.gain > 0 for pair in found)


def test_the_counts_of_the_page(rows):
    assert [counts(finding, rows) for finding in findings.FINDINGS] == [
        *((72, 70), (30, 30), (43, 43), (32, 32), (28, 28), (7, 7), (10, 10)),
        *((48, 9), (14, 13), (28, 16), (37, 31)),
    ]


def test_the_prose_has_the_gains_of_the_tables(rows):
    """With the decimals of the page; of a pipeline in place of tensor it gives no mean."""
    prose = " ".join(findings.PAGE.read_text(encoding="utf-8").partition("## Four findings")[2].split())
    gains = [statistics.fmean(pair.gain for pair in findings.pairs(finding, rows)) for finding in findings.FINDINGS]
    wider = [f"{gain:.0%}".removesuffix("%") for gain in gains[5:7]]
    assert f"{wider[0]} to {wider[1]}%" in prose
    assert [gain for gain in [*gains[:5], *gains[7:9], gains[10]] if f" {abs(gain):.1%}" not in prose] == []
    losses = findings.fewest_ranks_losses(rows)
    assert f"In {losses.count(0)} of {len(losses)} combinations" in prose
    assert f"lose at most {max(losses):.1%}" in prose


def test_the_prose_has_the_speeds_of_the_table_of_zero():
    """ZeRO 3 beside the fastest ZeRO 1 of the table that takes at most 95% of the capacity."""
    page = " ".join(findings.PAGE.read_text(encoding="utf-8").split())
    for gpu, text in (("a100-40gb", "predicted {} faster than tensor 4, pipe 2"), ("h100-80gb", "{} faster than tensor 2")):
        rows = [line[2:-2].split(" | ") for line in findings.zero_table() if line.startswith(f"| {gpu}")]
        speeds = {
            (mesh, zero): float(speed.replace(",", ""))
            for _, mesh, _, _, zero, _, share, speed in rows
            if float(share.strip("%")) <= 95
        }
        own = speeds.pop(("data only", "3"))
        mesh, _ = max(speeds, key=lambda key: speeds[key])
        assert text.endswith(f" {mesh}")
        assert text.format(f"{own / max(speeds.values()) - 1:.0%}") in page


def test_the_counts_on_shorter_sequences(rows):
    short = [row for row in rows if row.sequence_length == 8192 and (row.gpu == "h100-94gb" or row.gpus <= 32)]
    assert [counts(finding, short) for finding in findings.FINDINGS[:2]] == [(43, 43), (16, 16)]


def test_larger_microbatches_fail_only_where_a_group_of_two_hosts_is_everything(rows):
    against = [pair.slower for pair in findings.pairs(findings.FINDINGS[0], rows) if pair.gain < 0]
    assert all(findings.crosses_hosts(row) and row.config.parallel.data == 1 for row in against)


@pytest.mark.parametrize("finding", findings.FINDINGS, ids=lambda finding: finding.text)
def test_the_contrary_has_the_same_pairs(finding, rows):
    """With the runs swapped, and inverse gains."""
    there = {(named(pair.slower), named(pair.faster)): pair for pair in findings.pairs(finding, rows)}
    contrary = findings.pairs(findings.Finding("", tuple(1 / factor for factor in finding.factors)), rows)
    back = {(named(pair.faster), named(pair.slower)): pair for pair in contrary if finding.holds_for(pair.faster)}
    assert there.keys() == back.keys()
    for runs, pair in there.items():
        assert (1 + pair.gain) * (1 + back[runs].gain) == pytest.approx(1)
        assert (1 + pair.predicted) * (1 + back[runs].predicted) == pytest.approx(1)


def named(row):
    return findings.machine_of(row), findings.setting_of(row)


def test_a_larger_microbatch_takes_more_memory(rows):
    """So the finding on microbatches is one on memory."""
    found = findings.pairs(findings.FINDINGS[0], rows)
    assert all(findings.share_of_memory(pair.faster) > findings.share_of_memory(pair.slower) for pair in found)


def test_the_memory_of_a_run_is_its_authors_figure(rows):
    """Printed without decimals, and published for some."""
    printed = {(row.mesh, row.sequence_length, row.microbatch_sequences): row.estimate_percent for row in findings.read_rows()}
    compared = 0
    for row in rows:
        tensor, context, pipe, microbatch = findings.setting_of(row)
        mesh = published_rule.Mesh(row.gpu, row.gpus_per_host, row.gpus, tensor, context, pipe)
        if percent := printed[mesh, row.sequence_length, microbatch]:
            assert 100 * findings.share_of_memory(row) == pytest.approx(percent, abs=0.51)
            compared += 1
    assert compared > 50


def test_the_fullest_of_h100s_are_fast_and_of_a100s_not(rows):
    losses = {
        machine: findings.losses_of_fullest(there) for machine, there in findings.by_machine(rows).items() if len(there) > 1
    }
    assert all((found[0] == 0) == (gpu == "h100-94gb") for (gpu, _, _), found in losses.items())
    # Equally full, and 26% apart.
    assert losses["h100-94gb", 16384, 64][-1] == pytest.approx(0.261, abs=0.0005)


def test_the_rule_on_compiled_steps_counts_all_of_them():
    steps = [row for row in findings.read_table(findings.TABLE) if not row["error"]]
    by_rule = findings.rule_on_compiled(steps)
    assert by_rule.safe + by_rule.unsafe == len(steps)
    assert by_rule.safe_and_ran + by_rule.unsafe_and_ran == findings.safety(steps)["fit"]


def test_a_microbatch_takes_its_share_of_the_step(rows):
    """At the speed that the model predicts: its step, over microbatches and the bubble's ticks."""
    for row in rows[::20]:
        speed = findings.estimate(row.config, row.gpu, row.gpus, row.gpus_per_host, "megatron").speed
        ticks = row.config.num_microbatches + row.config.parallel.pipe - 1
        assert findings.microbatch_s(row, speed.tflops_per_gpu) == pytest.approx(speed.step_s / ticks)


def test_the_pages_are_what_the_script_writes():
    for (page, name), text in findings.sections().items():
        assert f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->" in page.read_text(encoding="utf-8"), (
            f"{page.name} is not what the script makes: run `python benchmarks/findings.py --write`."
        )
