"""Which tests the quick run holds, and which of the longer ones each `--all` repeats.

Without an entry in QUICK all tests of a file are quick, but those that a marker says are not. Most of them start no process
and compile little: refusals, formats, closed forms, tables. The files in QUICK compile steps of training. Of such a file the
quick run holds what is named, and the other tests are marked slow: for each law of CONTRIBUTING.md a case or two, on different
meshes, and what costs next to nothing. Of the files in SLOW it leaves out what is named: whole runs, waits, large inputs.

--all holds the quick tests and a third of the longer ones, another one for each commit. With names of files or other arguments,
--all runs each longer test (JAXLLM_TEST_PARTS=1), as --nightly does.
"""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import covers
import pytest

FOLDER = Path(__file__).parent
LONGER = ("slow", "gpu", "launcher", "notebook", "nightly")
"""Markers that the quick run leaves out."""
SHARED_OUT = ("slow", "launcher")
PARTS = "JAXLLM_TEST_PARTS"
USUAL_PARTS = 3

QUICK: dict[str, tuple[str, ...]] = {
    # ------------------------------------------------- any mesh has the loss and the gradients of one device
    "parallel/test_mesh_parity.py": (
        "test_loss_and_gradients_equal_one_device[zero2-data2-tensor4-gqa-untied]",
        "test_loss_and_gradients_equal_one_device[zero3-data2-tensor4-gqa-untied]",
    ),
    "parallel/test_pipeline_parity.py": (
        "test_the_cover_holds_every_pair",
        "test_loss_and_gradients_equal_one_device[1f1b-2-context2-zero2-mapping-gqa-tied]",
    ),
    "parallel/test_context_parity.py": (
        "test_loss_and_gradients_equal_one_device[context2-tensor2-data2-ring-packed-gqa-zero1]",
        "test_auto_gathers_short_sequences_and_rings_long_ones",
    ),
    "parallel/test_hybrid.py": (
        "test_loss_and_gradients_equal_one_device[mesh2-2]",
        "test_an_island_is_a_block_of_devices",
        "test_without_islands_the_mesh_has_no_axis_for_them",
        "test_a_batch_that_does_not_divide_over_islands_is_refused",
    ),
    "parallel/test_networks.py": ("test_loss_and_gradients_equal_one_device[(2, 1, 4, 1)-3-2-gqa-width-parallel.remat=full]",),
    "parallel/test_sending_once.py": (),
    "parallel/test_own_loss.py": ("test_it_is_the_mean_of_its_definition",),
    "parallel/test_lora_meshes.py": (),
    "parallel/test_any_ranks.py": ("test_the_first_dim_with_few_zeros_is_padded_else_the_one_with_fewest",),
    "parallel/test_remat.py": (
        "test_same_loss_and_gradients[scanned",
        "test_residuals_are_known_by_name",
        "test_what_cannot_be_offloaded_is_an_error",
        "test_names_in_the_config_are_the_models",
        "test_mistakes_are_refused",
        "test_a_mapping_can_be_given_on_the_command_line",
        "test_policies_name_the_tensors_of_the_network",
    ),
    "parallel/test_tensor_ring.py": ("test_what_cannot_be_cut_into_chunks_is_refused",),
    "parallel/test_fp8_meshes.py": ("test_a_kind_of_gpu_without_it_is_refused_before_anything_is_compiled",),
    "parallel/test_collectives.py": ("test_the_state_is_born_in_shares", "test_missing_gpu_packages_are_named"),
    "parallel/test_accumulate.py": (
        "test_a_matmul_adds_its_gradient_in_float32",
        "test_the_heads_gradient_is_added_in_the_forward_pass",
        "test_layers_have_their_own_arrays_where_that_pays",
    ),
    "parallel/test_pipeline_memory.py": (),
    "parallel/test_pipeline_compiled.py": (
        "test_every_stage_runs_as_many_chunks_as_theory_says",
        "test_without_pipeline_or_recomputation_they_are_the_model_flops",
        "test_kernels_that_count_for_themselves_have_no_closed_form",
        "test_axes_are_read_from_every_spelling_of_replica_groups",
    ),
    # ------------------------------------------------- no position sees a later one or another document
    "parallel/test_documents.py": ("test_a_documents_loss_has_no_gradient_in_any_other[data2-tensor2-best_fit]",),
    "parallel/test_pipeline_features.py": (
        "test_pipelines_that_cannot_be_are_refused",
        "test_interleaved_rounds_are_refused_once_the_data_ranks_are_known",
        "test_no_gradient_crosses_a_document_or_a_microbatch_or_goes_back_in_time",
    ),
    "parallel/test_ring_attention.py": (
        "test_every_causal_pair_of_chunks_is_computed_once_and_by_a_rank_that_has_the_queries",
        "test_every_rank_computes_two_products_at_every_step_half_of_a_ring_without_zigzag",
        "test_order_deals_out_chunks_and_inverse_takes_them_back",
        "test_the_table_as_text_and_picture",
        "test_a_row_that_sees_nothing_is_zero_and_has_no_gradient",
        "test_documents_leave_a_rectangle_of_a_block_that_is_not_causal",
        "test_an_unknown_jax_is_refused_by_the_cudnn_kernel",
        "test_output_and_gradients_are_those_of_the_whole_sequence[ring-8-mha-packed]",
        "test_no_gradient_reaches_a_later_position_or_another_document[ring]",
    ),
    "parallel/test_windows.py": (
        "test_a_block_is_cut_by_its_window",
        "test_a_rank_sends_what_others_see_and_no_more",
        "test_no_gradient_passes_the_window",
        "test_model_flops_count_the_window",
        "test_step_time_falls_with_the_window",
        "test_chunks_with_kinds_in_another_order_are_refused_beside_a_ring",
        "test_windows_without_effect_are_refused",
    ),
    # ------------------------------------------------- the step, its state and what may be offloaded
    "train/test_offload.py": ("test_none_may_be_written_as_null", "test_devices_without_host_memory_keep_the_state"),
    "train/test_dpo.py": (),
    "train/test_optimizers.py": (
        "test_the_estimate_knows_the_bytes_of_the_state",
        "test_without_momentum_sgd_keeps_nothing",
    ),
    "run/test_given.py": (
        "test_a_batch_is_refused_in_one_sentence",
        "test_an_iterable_is_read_once_in_order",
        "test_batches_for_the_loader_are_filled_in",
        "test_the_config_says_what_is_given",
    ),
    "train/test_fine_tuning.py": ("test_targets_that_are_not_scored_have_no_part_in_loss_or_gradient",),
    "train/test_instability.py": (
        "test_a_step_that_is_not_finite_changes_nothing_anywhere[zero 1]",
        "test_a_step_is_sound_if_loss_and_norm_are_finite",
        "test_a_step_without_targets_moves_nothing_and_has_no_loss",
        "test_steps_without_targets_are_neither_skipped_steps_nor_usual_ones",
        "test_a_spike_is_far_above_the_mean_of_the_last_steps",
        "test_too_few_steps_say_nothing_of_what_is_usual",
        "test_what_is_not_finite_is_not_remembered",
        "test_the_host_marks_spikes_and_counts_skipped_steps",
        "test_what_is_usual_is_recalled_from_the_metrics",
        "test_skips_in_a_row_end_a_run",
        "test_skipping_spikes_needs_a_rule",
        "test_metrics_of_all_layers_get_a_name_each",
    ),
    "train/test_batch_schedule.py": (
        "test_phases_are_those_of_a_run_that_counts",
        "test_whole_numbers_stay_exact_over_trillions_of_tokens",
        "test_what_is_done_are_the_phases_that_had_a_step",
        "test_a_config_counts_tokens_by_its_phases",
        "test_the_estimate_is_of_the_largest_batch",
        "test_every_phase_is_checked_at_the_start",
        "test_phases_are_checked_again_once_the_devices_are_known",
        "test_the_learning_rate_goes_with_the_batch",
    ),
    "train/test_length_schedule.py": (
        "test_phases_are_those_of_a_run_that_counts",
        "test_tokens_and_learning_rates_are_those_without_it",
        "test_mistakes_end_in_one_sentence",
    ),
    "run/test_noise_scale.py": (
        "test_known_covariance_is_found_within_five_percent",
        "test_the_interval_holds_the_truth_as_often_as_it_says",
        "test_the_average_forgets",
        "test_what_is_not_finite_is_left_out",
        "test_a_gradient_that_is_lost_in_the_noise_has_no_upper_end",
        "test_students_t",
        "test_the_reading",
        "test_parts_are_the_same_on_every_mesh[one device]",
        "test_what_a_tied_head_keeps_is_there_until_the_embedding_reads_it",
        "test_a_step_of_one_part_is_refused",
    ),
    # ------------------------------------------------- rounds of replicas
    "train/test_diloco.py": (
        "test_the_outer_step_is_nesterovs",
        "test_replicas_that_went_the_same_way_have_cosine_one",
        "test_a_replica_without_targets_is_in_no_mean",
        "test_what_cannot_be_is_refused",
    ),
    "train/test_outer_codes.py": (
        "test_the_error_is_at_most_half_a_step",
        "test_zeros_stay_zero",
        "test_what_was_sent_is_the_sum_of_changes_up_to_the_last_residual",
        "test_a_residual_that_is_not_finite_is_not_sent",
        "test_arrays_that_travel_together_are_as_each_alone",
    ),
    "train/test_fragments.py": ("test_what_cannot_be_is_refused",),
    "train/test_overlap_of_fragments.py": (
        "test_which_steps_exchange",
        "test_what_a_checkpoint_has_done_is_not_done_again_and_all_else_is",
    ),
    "train/test_replicas_change.py": (
        "test_the_mean_leaves_out_a_replica_that_is_not_finite",
        "test_without_any_finite_replica_the_outer_step_is_skipped",
        "test_metrics_of_fragments_keep_the_most_that_were_left_out",
    ),
    # ------------------------------------------------- checkpoints, exports and commands that train or start processes
    "checkpoint/test_stored_models.py": (
        "test_a_step_is_chosen",
        "test_what_a_store_refuses_is_one_sentence",
        "test_a_model_name_in_a_recipe_is_no_address",
    ),
    "checkpoint/test_joined_checkpoints.py": ("test_a_torn_part_is_passed_over", "test_parts_of_another_run_are_not_copied"),
    "checkpoint/test_two_places.py": (
        "test_keep_holds_in_each_place_and_what_is_kept_for_good_in_the_store_alone",
        "test_without_a_store_the_key_is_refused",
    ),
    "checkpoint/test_pipeline_checkpoint.py": ("test_a_model_of_other_layers_is_refused",),
    "commands/test_lm_eval.py": ("test_mistakes_are_one_sentence", "test_what_is_cut_is_counted"),
    "run/test_batch_growth.py": (
        "test_a_batch_of_128_tokens_doubles_when_the_noise_scale_is_surely_256",
        "test_memory_and_checks_are_of_the_largest_batch_it_may_grow_to",
        "test_what_it_cannot_follow_is_refused",
        "test_averages_that_went_through_a_file_go_on_alike",
    ),
    "benchmarks/test_benchmarks.py": (),
    "run/test_old_checkpoint.py": ("test_a_rope_scaling_with_fewer_keys_means_the_same",),
    "commands/test_predict.py": (
        "test_an_answer_differs_from_a_continuation",
        "test_scoring_refuses_in_one_sentence",
        "test_generating_refuses_in_one_sentence",
        "test_a_large_vocabulary_without_a_tokenizer_is_not_read_as_bytes",
        "test_a_tokenizer_of_another_model_is_refused",
    ),
    # ------------------------------------------------- compilations for GPUs
    "compile/test_compile_report.py": (
        "test_mistakes_end_in_one_sentence_and_code_2",
        "test_missing_packages_are_named_with_the_command_that_installs_them",
        "test_hosts_are_no_larger_than_the_kind_has",
    ),
}
"""By file, from the folder of tests: the tests of the quick run. A name without [ stands for all its cases, another one for
those that begin so."""

SLOW: dict[str, tuple[str, ...]] = {
    # ------------------------------------------------- runs to their end, and again
    "checkpoint/test_checkpoint.py": (
        "test_a_full_disk_stops_the_run_and_loses_nothing",
        "test_another_mesh_and_zero_level_goes_on_alike",
    ),
    "checkpoint/test_lora_folders.py": ("test_a_run_equals_peft", "test_resuming_equals_never_stopping_bit_for_bit"),
    "checkpoint/test_store.py": (
        "test_a_new_machine_continues_bit_for_bit",
        "test_a_kill_inside_a_copy_leaves_the_checkpoint_before",
        "test_a_damaged_checkpoint_is_named_and_passed_over[missing]",
        "test_a_checkpoint_that_orbax_cannot_read_is_damaged",
        "test_a_run_that_is_further_than_another_does_not_displace_its_checkpoints",
        "test_a_damaged_local_checkpoint_does_not_displace_one_of_the_store",
        "test_one_run_holds_a_store[gs]",
        "test_training_continues_without_the_store_and_says_so_at_the_end",
        "test_a_slow_store_does_not_hold_up_training",
        "test_a_checkpoint_that_is_damaged_in_the_store_is_copied_again",
        "test_keep_and_keep_every_steps_hold_in_the_store",
    ),
    "checkpoint/test_store_faults.py": (
        "test_a_store_that_dies_at_any_request_of_a_copy_has_a_whole_checkpoint",
        "test_a_store_that_throttles_each_request_once_and_is_slow_is_only_slower",
        "test_a_kill_inside_a_file_of_several_parts_leaves_nothing_that_is_taken_for_whole",
        "test_a_copy_that_fails_leaves_the_checkpoint_before[gs-",
        "test_a_damaged_checkpoint_is_named_passed_over_and_replaced[gs-",
        "test_a_restore_that_fails_leaves_nothing_half_and_passes_over_nothing[gs-",
    ),
    "inference/test_smollm2_inference.py": (
        "test_a_window_scores_what_pytorch_says",
        "test_greedy_continuations_of_a_batch_are_those_of_pytorch",
        "test_the_command_answers_a_question_by_the_chat_template",
    ),
    "run/test_trainer.py": (
        "test_a_finished_run_trains_no_further",
        "test_steps_yields_every_step_and_stops_at_will",
        "test_an_implicit_transfer_in_a_step_is_an_error",
        "test_a_run_goes_on_only_as_the_same_run",
        "test_a_profile_is_written",
        "test_a_run_that_ends_in_its_warm_up_says_so",
        "test_a_pipeline_says_what_it_costs",
        "test_an_evaluation_that_the_end_of_a_run_lost_is_made_up_for",
    ),
    "train/test_step.py": ("test_bfloat16_computes_from_float32_masters",),
    # ------------------------------------------------- comparisons with other programs, and compilations for GPUs
    "checkpoint/test_against_transformers.py": (
        "test_the_real_smollm2_has_the_published_logits",
        "test_the_real_smollm2_comes_back_bit_for_bit",
    ),
    "checkpoint/test_gguf.py": ("test_transformers_reads_the_same_model",),
    "checkpoint/test_exports.py": (
        "test_transformers_continues_as_jaxllm_does",
        "test_a_run_exports_its_checkpoints_itself",
        "test_an_export_that_hangs_is_ended",
        "test_an_export_whose_run_was_killed_ends",
        "test_training_does_not_wait_and_one_runs_at_a_time",
    ),
    "compile/test_save.py": ("test_a_run_takes_what_was_saved",),
    "commands/test_plan_command.py": (
        "test_ctrl_c_in_the_search_with_fp8_leaves_the_plan",
        "test_compilations_run_in_other_processes_which_end_with_the_plan",
        "test_the_best_is_compiled",
    ),
    "cost_model/test_lora_estimates.py": ("test_the_estimate_is_what_xla_allocates",),
    "cost_model/test_step_time.py": ("test_predictions_of_a_group_left_out_are_those_of_a_fit_to_the_others",),
    "data/test_cached.py": ("test_a_run_resumes_from_the_same_folder_in_a_store",),
    "data/test_prepare.py": ("test_the_benchmarks_figures_agree",),
    "weights/test_read_weights.py": ("test_a_run_goes_on_and_out_when_the_folder_it_names_has_gone",),
    "weights/test_hub.py": ("test_the_shape_needs_no_weights_and_a_run_keeps_its_commit",),
    "model/test_packed_documents.py": ("test_documents_of_all_lengths_fill_their_calls",),
    "compile/test_pretend.py": ("test_the_step_that_runs_is_the_runs_own",),
    "run/test_trainer_files.py": (
        "test_a_saved_run_continues_as_one_that_never_stopped",
        "test_a_save_between_steps_has_the_last_step_and_loses_no_metrics",
        "test_files_beside_the_first_weights_go_out_after_a_step",
        "test_what_was_changed_is_written",
    ),
    "data/test_given_documents.py": ("test_a_run_resumes_on_the_same_documents_alone",),
    "run/test_hooks.py": (
        "test_after_the_last_step_a_hook_stops_nothing",
        "test_a_hook_stops_the_run_which_saves_and_resumes[when]",
    ),
    "machine/test_program_cache.py": ("test_a_killed_run_goes_on_without_compiling",),
    "benchmarks/test_gpu_grouped.py": ("test_numbers_agree_with_float32",),
    "benchmarks/test_gpu_pretend.py": ("test_runs_on_cpu_devices",),
    "inference/test_generate.py": (
        "test_a_cache_holds_keys_with_their_biases_and_norms",
        "test_a_cache_is_as_long_as_the_window",
        "test_parameters_on_several_devices_give_the_same_tokens",
        "test_prompts_that_vary_within_buckets_compile_two_programs_a_bucket",
    ),
    "benchmarks/test_gpu_benchmark.py": (
        "test_both_sides_agree_with_themselves_and_each_other",
        "test_the_trace_says_where_the_time_goes",
        "test_attention_alone_agrees_with_float32",
        "test_parts_and_ceilings",
    ),
    # ------------------------------------------------- processes and waits
    "cluster/test_multiprocess.py": (
        "test_missing_processes_are_refused_after_the_time_limit",
        "test_a_taken_port_is_refused",
    ),
    "run/test_signals.py": (
        "test_a_signal_stops_saved_and_the_run_resumes_alike",
        "test_a_signal_to_one_process_stops_all_at_the_same_step",
        "test_a_signal_to_one_process_during_the_first_compilation_ends_all_alike",
        "test_a_second_signal_leaves_at_once_even_from_a_stuck_main_thread",
    ),
    # ------------------------------------------------- large inputs, large spaces
    "hostile/test_hostile_inputs.py": (
        "test_one_sentence_or_taken_rightly[tx-ten-thousand]",
        "test_one_sentence_or_taken_rightly[resume: metrics with lines of no step, and no last newline]",
        "test_one_sentence_or_taken_rightly[mg-ids-big-late]",
        "test_one_sentence_or_taken_rightly[pp-good]",
        "test_one_sentence_or_taken_rightly[array-sparse-20gb]",
        "test_one_sentence_or_taken_rightly[ch-dos-1",
        "test_one_sentence_or_taken_rightly[zst-bomb-",
    ),
    "plan/test_search.py": (
        "test_pruning_changes_nothing_but_the_work[4-16-1]",
        "test_pruning_changes_nothing_but_the_work[2-4-0.6]",
        "test_pruning_changes_nothing_but_the_work[2-16-0.6]",
        "test_nothing_is_lost[False-0.2]",
        "test_more_memory_is_never_slower",
        "test_the_winner_is_the_best_of_all_by_the_real_estimates[4]",
    ),
    "plan/test_remat_ladder.py": (
        "test_fp8_is_apart_and_only_where_the_chip_has_it",
        "test_nothing_drawn_at_random_is_faster",
    ),
}
"""By file: the tests that are slow, beside those with a marker of their own. The rest of these files is quick."""

IN_EACH_RUN = ("benchmarks/test_memory_accuracy.py", "benchmarks/test_overlap_bounds.py", "test_packaging.py")
"""Files whose slow tests --all never leaves to another commit: laws that no quick test holds, and the wheel."""


def is_named(name: str, kept: Iterable[str]) -> bool:
    return any(name.startswith(entry) if "[" in entry else name.partition("[")[0] == entry for entry in kept)


def parts() -> int:
    """A run with --all takes one in this many of the longer tests."""
    return int(os.environ.get(PARTS) or USUAL_PARTS)


def is_of_this_run(file: str, name: str, count: int, seed: str) -> bool:
    """Whether --all runs this one of the tests that it shares out, drawn by the commit. Cases of the same name come together
    where their tests are in one file: they often read the same compiled step."""
    case = name.partition("[")[2] or name
    return zlib.crc32(f"{seed} {file} {case}".encode()) % count == 0


def longer_share(markers: str) -> float:
    """The part of the longer tests that a run with these markers takes."""
    if f"not {LONGER[0]}" in markers:
        return 0.0
    return 1 / parts() if f"not {LONGER[-1]}" in markers else 1.0


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what QUICK leaves out, and as nightly what --all leaves to another commit."""
    for item in items:
        file, name = item.path.relative_to(FOLDER).as_posix(), item.nodeid.partition("::")[2]
        if is_named(name, SLOW.get(file, ())) or (file in QUICK and not is_named(name, QUICK[file])):
            item.add_marker(pytest.mark.slow)
        is_shared = file not in IN_EACH_RUN and any(item.get_closest_marker(marker) for marker in SHARED_OUT)
        if is_shared and not is_of_this_run(file, name, parts(), covers.seed()):
            item.add_marker(pytest.mark.nightly)
