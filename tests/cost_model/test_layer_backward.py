"""The tensors that one layer's backward holds, by the rules that were counted from XLA's listings."""

import numpy as np
import pytest
from memory_config import A100, MODEL, config, layers_of_weights, working_set

from jaxllm.config.types import BLOCK_TENSORS, EXPERT_CHOICE, LAST_OUTPUT
from jaxllm.cost_model.layer_backward import HELD, MOMENTS, ROWS, facts, layer_backward, sizes_of
from jaxllm.cost_model.memory import Step

ATTENTION = ("query", "key", "all_keys", "halves")
"""Sizes of tensors that attention adds to the working set."""


def backward(gpu=None, **sections):
    return layer_backward(Step(config(**sections), gpu))


def attention(step, moment):
    sizes = sizes_of(step)
    return sum(count * sizes[size] for size, count in working_set(step, moment).items() if size in ATTENTION)


def test_every_named_tensor_is_in_a_group():
    """A new one needs a line in HELD: it says with which others it is copied and freed."""
    assert set(HELD) == {*BLOCK_TENSORS, LAST_OUTPUT, EXPERT_CHOICE}


def test_rows_name_facts_and_sizes_that_exist():
    step = Step(config(parallel={"data": 1}))
    rows = [row for rows in ROWS.values() for row in rows]
    assert {word.lstrip("-") for row in rows for word in row.when.split()} == facts(step).keys()
    assert {row.size for row in rows} <= sizes_of(step).keys()
    assert all(any(row.counts) and len(row.counts) <= len(MOMENTS) for row in rows)


def test_a_layer_recomputed_holds_more_beside_its_stack_than_one_kept():
    kept, full, nothing = (backward(parallel={"data": 4, "zero": 2, "remat": remat}) for remat in ("selective", "full", "none"))
    for moment in ("feed_forward", "feed_forward_end", "attention"):
        assert kept[moment]["working_set"] < full[moment]["working_set"]
    # Autodiff's residuals are copied like recomputed tensors, but attention does not run again.
    assert nothing["feed_forward"]["working_set"] < full["feed_forward"]["working_set"]
    assert nothing["attention"]["working_set"] == full["attention"]["working_set"]


def test_several_sequences_over_tensor_are_transposed():
    def whole_tensors(microbatch, tensor):
        sections = {"parallel": {"data": 2, "tensor": tensor}, "train": {"microbatch_sequences": microbatch}}
        step = Step(config(**sections))
        return step, backward(**sections)["feed_forward"]["working_set"]

    (one, with_one), (two, with_two) = whole_tensors(1, 2), whole_tensors(2, 2)
    layers = layers_of_weights(one) * one.units["layer"]
    assert two.units["whole"] == 2 * one.units["whole"]
    assert with_two - layers == 2 * (with_one - layers) + two.units["whole"]
    (one, with_one), (two, with_two) = whole_tensors(1, 1), whole_tensors(2, 1)
    layers = layers_of_weights(one) * one.units["layer"]
    assert with_two - layers == 2 * (with_one - layers)


def counted(step):
    """Bytes of a layer's offloaded tensors that rows count: all but keys and the last output."""
    return sum(sizes_of(step)[f"offloaded.{group}"] for group in ("hidden", "queries", "products"))


def test_what_is_offloaded_lies_twice_in_a_loop_that_runs_ahead():
    sections = {"parallel": {"data": 4, "remat": "offload"}}
    late = backward(A100, **sections)["feed_forward"]["layer_copies"]
    assert backward(**sections)["feed_forward"]["layer_copies"] - late == counted(Step(config(**sections)))
    # A stage of one layer has no next layer to fetch.
    alone = {"parallel": {"pipe": 8, "data": 1, "remat": "offload"}}
    assert backward(**alone)["feed_forward"]["layer_copies"] == 0


def test_on_an_a100_a_pipeline_fetches_ahead_behind_gathered_keys_with_documents(older_xla):
    def ahead(documents, method):
        sections = {
            "parallel": {"pipe": 4, "data": 1, "context": 2, "remat": "offload", "context_method": method},
            "data": {"mask_documents": documents},
        }
        return backward(A100, **sections)["feed_forward"]["layer_copies"] / counted(Step(config(**sections)))

    assert [ahead(*case) for case in ((True, "all_gather"), (True, "ring"), (False, "all_gather"))] == [1, 0, 0]
    older_xla(False)
    assert ahead(True, "all_gather") == 0


def test_transfers_that_start_late_hold_less():
    for zero in (2, 3):
        sections = {"parallel": {"data": 4, "zero": zero}, "data": {"mask_documents": False}}
        layer = Step(config(**sections)).units["layer"]
        for moment, held in backward(**sections).items():
            assert held["working_set"] - backward(A100, **sections)[moment]["working_set"] == layer
    alike = {"parallel": {"data": 4}, "data": {"mask_documents": False}}
    assert backward(**alike) == backward(A100, **alike)


HALVES = MODEL | {"attention": "cudnn_halves"}


def test_documents_and_context_ranks_take_blocks():
    def queries(length=2048, documents=True, microbatch=1, gpu=None, **parallel):
        cfg = config(
            HALVES,
            parallel={"data": 2, "remat": "full", **parallel},
            train={"sequence_length": length, "microbatch_sequences": microbatch},
            data={"mask_documents": documents},
        )
        step = Step(cfg, gpu)
        return attention(step, "attention") / step.units["query"]

    # Half as many key-value heads as query heads.
    assert queries(documents=False) == 4 + 4 / 2
    # 2,048 rows are halved to 128 in four steps.
    assert queries() == 4 + 4 + 4 / 2
    assert queries(length=4096) - queries() == 1
    assert queries(documents=False, context=2, context_method="ring") == 6 + 12 / 2
    assert queries(documents=False, context=2, context_method="ring", microbatch=2, gpu=A100) == 6 + 3 + 12 / 2
    assert queries(documents=False, context=2, context_method="ring", microbatch=2) == 6 + 6 + 12 / 2
    assert queries(documents=False, context=2, context_method="all_gather") == 6 + 6 * 2 / 2
    # A zigzag chunk has a fourth of 2,048 rows: two halvings.
    assert queries(context=2, context_method="ring", gpu=A100) == 6 + 2 + 12 / 2
    assert queries(context=2, context_method="ring") == 6 + 2 + 12 / 2


def test_products_wait_less_in_a_pipeline_and_on_an_a100():
    def products(gpu=None, documents=False, batch=64, **parallel):
        cfg = config(
            HALVES,
            parallel={"data": 1, "remat": "full", **parallel},
            train={"global_batch_sequences": batch},
            data={"mask_documents": documents},
        )
        step = Step(cfg, gpu)
        held = layer_backward(step)["feed_forward"]["working_set"] - layers_of_weights(step) * step.units["layer"]
        return (held - 3 * step.units["whole"] - 3 * step.units["split"] - attention(step, "feed_forward")) / step.units["mlp"]

    assert products(batch=1) == products(documents=True) == products(context=2) == products(data=2, zero=2) == 5
    assert products(gpu=A100, documents=True) == products(gpu=A100, context=2) == 5
    assert products() == products(gpu=A100) == products(gpu=A100, batch=1) == 3
    assert products(pipe=4) == 4
    assert products(pipe=4, gpu=A100) == products(pipe=4, tensor=2) == 5
    assert products(pipe=4, batch=1) == products(pipe=4, batch=1, gpu=A100) == 3
    assert products(pipe=4, batch=1, documents=True) == 4
    # Chunks of one layer.
    assert products(pipe=8, gpu=A100) == 5
    assert products(pipe=8) == 5
    # In an interleaved pipeline whose tensor ranks send in a ring, those of the tick's forward pass are there too.
    rings, whole = ({"pipe": 8, "tensor": 2, "batch": 1, "tensor_ring": ring} for ring in (True, False))
    assert (products(**rings), products(**whole)) == (5, 5)
    rings, whole = (case | {"pipe": 4, "batch": 64, "schedule": "interleaved", "virtual_stages": 2} for case in (rings, whole))
    assert (products(**rings), products(**whole)) == (7, 5)
    assert products(**rings | {"virtual_stages": 1, "schedule": "1f1b", "pipe": 8}) == 5


def test_chunks_in_a_pipeline_s_ring_are_not_transposed():
    def wholes(ring, pipe):
        parallel = {"data": 1, "tensor": 2, "pipe": pipe, "tensor_ring": ring}
        cfg = config(parallel=parallel, train={"microbatch_sequences": 2})
        return layer_backward(Step(cfg))["feed_forward"]["working_set"] / Step(cfg).units["whole"]

    assert wholes(False, 4) - wholes(True, 4) == 1
    assert wholes(False, 8) == wholes(True, 8)
    assert wholes(False, 1) == wholes(True, 1)


def test_an_interleaved_pipeline_without_remat_has_two_more_stacks(older_xla):
    def copied(**parallel):
        cfg = config(
            parallel={"data": 1, "tensor": 2, "pipe": 2, "remat": "none", **parallel}, train={"microbatch_sequences": 2}
        )
        step = Step(cfg)
        return layer_backward(step)["feed_forward"]["layer_copies"] / step.units["whole"], step

    assert copied()[0] == 0
    found, step = copied(schedule="interleaved", virtual_stages=2)
    assert found == 2 * step.slots * 2
    assert copied(schedule="interleaved", virtual_stages=2, tensor_ring=True)[0] == found
    older_xla(False)
    assert copied(schedule="interleaved", virtual_stages=2)[0] == 0


def test_products_are_read_in_place():
    for batch in (64, 1):
        for scan, copied in (({"scan_layers": True}, 1), ({}, 0)):
            sections = {"model": MODEL | scan, "parallel": {"data": 1, "pipe": 4}, "train": {"global_batch_sequences": batch}}
            found, sizes = backward(**sections), sizes_of(Step(config(**sections)))
            assert found["feed_forward"]["layer_copies"] == copied * (sizes["kept.hidden"] + sizes["kept.queries"])


def test_since_jax_0_12_products_of_pipelines_wait_less_where_transfers_start_late(older_xla):
    def products(documents, remat="selective", gpu=A100, pipe=4, batch=64):
        sections = {"parallel": {"data": 1, "pipe": pipe, "remat": remat}, "data": {"mask_documents": documents}}
        step = Step(config(HALVES, **sections, train={"global_batch_sequences": batch}), gpu)
        moments = layer_backward(step)
        return [moments[name]["working_set"] / step.units["mlp"] for name in MOMENTS[:3]]

    cases = [
        ((False,), [1, 1, 1]),
        ((True,), [2, 2, 2]),
        ((False, "selective", None), [0, 0, 0]),
        ((True, "selective", A100, 8, 1), [2, 2, 2]),
        ((True, "none", A100, 8), [1, 1, 2]),
        ((True, "offload", A100, 4, 1), [0, 2, 0]),
    ]
    before = [products(*case) for case, _ in cases]
    older_xla(False)
    for older, (case, fewer) in zip(before, cases, strict=True):
        assert np.subtract(older, products(*case)) == pytest.approx(fewer), case


def test_where_transfers_start_late_wide_sequences_wait_for_each_other(older_xla):
    def whole(gpu, width):
        model = {**MODEL, "intermediate_size": width}
        sections = {"parallel": {"data": 1, "tensor": 2, "remat": "full"}, "train": {"microbatch_sequences": 2}}
        step = Step(config(model, **sections), gpu)
        end = layer_backward(step)["feed_forward_end"]["working_set"] - attention(step, "feed_forward_end")
        rest = 4 * step.units["mlp"] + 3 * step.units["split"] + layers_of_weights(step) * step.units["layer"]
        return (end - rest) / step.units["whole"]

    assert whole(A100, 768) == whole(None, 256) == 5 + 1
    assert whole(A100, 256) == 5 + 1 + 3
    older_xla(False)
    assert whole(A100, 256) == 5 + 1
