"""Which cells of the long tables the default suite runs; `make test-slow` runs the others.

One place for it, so that the time of the default suite can be seen and held. A table that is not listed runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

KEPT: Mapping[str, Sequence[str]] = {
    "activations/test_empty.py::test_ranks_with_other_lengths_and_without_samples_take_part": ["way0", "way3", "way4"],
    "activations/test_partition.py::test_each_rank_keeps_its_part": ["units-host", "units-disk"],
    "activations/test_predicted.py::test_the_formula_knows_what_is_kept_and_computed_again": ["device-shape0", "disk-shape6"],
    "activations/test_predicted.py::test_the_formula_knows_what_is_moved_away": ["host"],
    "activations/test_recompute.py::test_bytes_of_checkpoints_follow_the_formula": ["units-1", "3-3-shape1"],
    "activations/test_recompute.py::test_every_policy_has_the_bits_of_plain_training": ["deep-3-shared", "own-3", "gpt-3"],
    "activations/test_recompute.py::test_everything_on_disk_has_the_bits_of_plain_training": ["[2]", "[3]", "[4]"],
    "activations/test_recompute.py::test_four_ranks_have_the_bits_of_plain_training": ["[3]"],
    "checkpoint/test_background.py::test_a_checkpoint_is_that_of_the_moment_of_the_call": [
        "[stage 0]",
        "stage 2",
        "bf16",
        "all on disk",
        "Adam, on disk",
        "buffers",
    ],
    "checkpoint/test_background.py::test_a_script_ends_when_its_last_checkpoint_is_complete": [],
    "cli/test_cli.py::test_checkpoints_of_another_job_are_left_alone": [],
    "cli/test_cli.py::test_fp16_scales_the_loss": [],
    "cli/test_cli.py::test_same_seed_same_losses": [],
    "cli/test_cli.py::test_the_probe_measures_shows_and_keeps": [],
    "cli/test_stopping.py::test_sigterm_to_one_rank_stops_all_at_the_same_step": [],
    "comm/test_hangs.py::test_every_survivor_fails_in_time_and_says_why": [
        "shared-raise",
        "shared-kill",
        "pairwise-skip",
        "combined-stop",
        "hybrid",
    ],
    "engine/test_compile.py::test_compiled_training_is_that_of_the_compiled_plain_model": [
        "model.compile",
        "torch.compile(block)",
    ],
    "engine/test_constant_buffers.py::test_buffers_do_not_grow_with_the_model": ["overlays", "copied", "computed again"],
    "engine/test_construction.py::test_peak_memory_of_building_gpt2_is_shards_plus_three_largest_units": [],
    "engine/test_full_state.py::test_a_rank_that_asks_alone_is_told_whom_it_waited_for": ["pairwise", "shared-load_state_dict"],
    "engine/test_hybrid.py::test_four_ranks_have_the_bits_of_plain_training": [
        "0-None-auto",
        "1-None-pairwise",
        "2-None-auto",
        "3-None-pairwise",
        "2-disk-auto",
        "3-disk-auto",
        "3-disk-pairwise",
    ],
    "engine/test_leaks.py::test_dropped_placements_leave_nothing": ["optimizer on disk"],
    "engine/test_leaks.py::test_dropped_runs_leave_nothing": ["2-pairwise", "3-auto"],
    "engine/test_offload.py::test_other_models_in_two_memories": ["paged", "branchy"],
    "engine/test_offload.py::test_two_memories_give_the_bits_of_one": ["[3]"],
    "planner/test_memory.py::test_measured_peaks_hold_to_the_formula": ["0-bf16", "1-fp32", "2-bf16", "3-fp32", "3-bf16"],
    "planner/test_memory.py::test_what_is_on_disk_costs_only_buffers": ["away0", "away3"],
    "testing/test_parity.py::test_other_transports_give_the_same_bits": ["[1]", "[3]"],
    "testing/test_parity.py::test_two_ranks_equal_plain_training_to_the_last_bit": [
        "gpt",
        "mlp-0",
        "mlp-3",
        "conv-1",
        "conv-3",
        "lstm-0",
        "lstm-3",
        "frozen-1",
        "frozen-3",
        "branchy-1",
        "branchy-3",
        "branchy-by-rank-3",
    ],
    "tiers/test_disk.py::test_the_native_engine_survives_what_a_kernel_may_do": ["short", "broken"],
    "tiling/test_tiles_and_activations.py::test_compiled_models_with_tiles": ["model-True-shared", "blocks-False-pairwise"],
}
"""By table: what the ids of the cells that are kept contain; none for an empty list."""


def is_kept(name: str) -> bool:
    """Whether the default suite runs a test; `name` is its id below `tests/`."""
    table = name.partition("[")[0]
    return table not in KEPT or any(part in name for part in KEPT[table])
