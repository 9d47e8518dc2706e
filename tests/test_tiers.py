"""Every promise of README and tour has a test in ``make test``, and no test is in two tiers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from actds_testing.places import ROOT

# What README and tour promise in these words, and a test of ``make test`` that would break with it.
PROMISES = {
    "inside a real vLLM": "engine/test_engine_alignment.py::test_fp32_rows_equal_a_plain_forward",
    "bit for bit": "format/test_arrays.py::test_arrays_come_back_exactly",
    "exactly once": "engine/test_engine_conservation.py::"
    "test_preempted_requests_are_recomputed_and_never_stored_twice",
    "cannot be sealed": "format/test_seal.py::test_what_does_not_add_up_is_not_sealed",
    "digests of every byte": "spec/test_vectors.py::"
    "test_invalid_vector_gives_its_code_at_its_place",
    "refuses what is not sealed": "format/test_loader.py::"
    "test_refuses_an_unsealed_dataset_unless_told_in_so_many_words",
    "as often as it was served": "format/test_loader.py::"
    "test_multiplicity_serves_every_row_as_often_as_the_engine_did",
    "a function of the dataset's digest and a seed": "format/test_order.py::"
    "test_the_order_never_changes_between_versions",
    'exclude="first_position"': "format/test_loader_passes.py::"
    "test_rows_are_left_out_by_name_and_counted",
    "actds audit": "validators/test_audit_verdicts.py::test_a_loss_under_load_warns",
    "without this package": "spec/test_independent_reader.py::"
    "test_reads_the_valid_vectors_as_the_package_does",
    "tensorstore opens them": "format/test_zarr_plugin.py::test_tensorstore_returns_every_pattern",
    "vllm serve": "engine/test_engine_live.py::"
    "test_live_traffic_is_captured_by_rule_and_drained_on_sigterm",
    "--overflow block": "writers/test_pipeline.py::"
    "test_blocking_makes_the_engine_wait_and_loses_nothing",
    "drop_oldest": "writers/test_pipeline.py::"
    "test_a_stalled_writer_costs_whole_steps_and_each_is_logged",
    "actds recompress": "format/test_recompress.py::"
    "test_raw_shards_become_normal_with_every_row_in_its_place",
    "actds recover": "writers/test_recover.py::"
    "test_keeps_every_acknowledged_row_and_accounts_for_the_rest",
    "E507": "engine/test_engine_check.py::test_wrong_rows_stop_the_run_before_the_first_one",
    "E501": "engine/test_engine_failures.py::"
    "test_rows_that_differ_from_the_schedule_stop_the_harvest",
    "--canary": "engine/test_engine_transformers.py::"
    "test_canaries_replayed_alone_are_the_same_rows",
    "s3://": "format/test_s3.py::test_commands_and_readers_take_an_object_uri",
    "--metrics-port": "writers/test_metrics.py::test_the_last_scrape_is_the_summary",
    "actds plan": "writers/test_sizing.py::test_memory_of_a_real_pipeline_is_the_predicted_one",
    "[readouts]": "format/test_readouts.py::test_a_lost_row_leaves_its_readouts_behind",
}


def collect(expression: str) -> set[str]:
    """Return the ids of the tests that an expression of markers chooses."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", expression, "tests"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-2000:]
    return {line for line in said.stdout.splitlines() if "::" in line}


@pytest.mark.standard
def test_every_promise_of_readme_and_tour_has_a_test_in_make_test() -> None:
    chosen = {re.sub(r"\[.*", "", test) for test in collect("fast or standard")}
    pages = [(ROOT / page).read_text("utf-8") for page in ("README.md", "docs/tour.md")]
    text = " ".join(" ".join(pages).split())
    assert [words for words in PROMISES if words not in text] == []
    assert [test for test in PROMISES.values() if f"tests/{test}" not in chosen] == []


def test_the_tiers_of_the_makefile_are_all_there_are() -> None:
    chosen = re.findall(r'pytest -m ("[^"]+"|\w+)', (ROOT / "Makefile").read_text("utf-8"))
    assert {words.strip('"') for words in chosen} == {
        "fast", "fast or standard", "full and not matrix and not attack", "matrix", "attack",
        "consumers",
    }  # fmt: skip


def test_a_fast_test_that_starts_a_process_fails() -> None:
    with pytest.raises(RuntimeError, match="mark it standard"):
        subprocess.run([sys.executable, "-V"])
