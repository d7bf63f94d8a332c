"""Acceptance from the metrics of engines, counted by hand."""

from __future__ import annotations

import pytest

from lightning_specdec.audit.engine_metrics import DraftCounts, read_draft_counts

VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 6.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 4.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
"""
OURS = """
lightning_specdec_acceptance_length_count 5.0
lightning_specdec_acceptance_length_sum 11.0
lightning_specdec_draft_tokens_total{position="0"} 5.0
lightning_specdec_draft_tokens_total{position="1"} 3.0
lightning_specdec_accepted_tokens_total{position="0"} 4.0
lightning_specdec_accepted_tokens_total{position="1"} 2.0
"""


@pytest.mark.parametrize("prefix", ["vllm:", "llamacpp:"])
def test_counts_are_summed_over_engines_and_rates_follow(prefix: str) -> None:
    counts = read_draft_counts(VLLM.replace("vllm:", prefix))
    assert counts is not None
    assert counts.num_rounds == 10
    # 12 accepted tokens in 10 rounds, and the target's own token in each.
    assert counts.acceptance_length == 2.2
    assert counts.acceptance_rate == 0.6
    assert counts.acceptance_by_position == [0.8, 0.4]


def test_our_counts_know_how_many_tokens_were_drafted_at_each_position() -> None:
    counts = read_draft_counts(OURS)
    assert counts is not None
    assert counts.acceptance_length == 2.2
    assert counts.acceptance_rate == 0.75
    assert counts.acceptance_by_position == [0.8, 2 / 3]


def test_earlier_counts_are_subtracted_and_new_positions_kept() -> None:
    later = DraftCounts(10, 20, 12, None, {}, {0: 8, 1: 4})
    earlier = DraftCounts(4, 8, 6, None, {}, {0: 4})
    counts = later.since(earlier)
    assert counts.num_rounds == 6
    assert counts.acceptance_length == 2
    assert counts.acceptance_by_position == [4 / 6, 4 / 6]


def test_engines_that_do_not_draft_have_no_counts() -> None:
    assert read_draft_counts("") is None
    assert read_draft_counts("vllm:num_requests_running 1.0\n<html>") is None
    idle = read_draft_counts(
        "lightning_specdec_acceptance_length_count 0.0\n"
        "lightning_specdec_acceptance_length_sum 0.0\n"
    )
    assert idle is not None
    assert idle.acceptance_length is None
    assert idle.acceptance_rate is None
