"""Times: what is absent stays absent, and the parts add up to the whole."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.measure.metrics import Spread, Timeline, environment, record, time_call


def test_one_token_has_no_time_per_output_token():
    t = Timeline(10.0, (10.5,))
    assert (t.ttft, t.gaps, t.tpot, t.latency, t.tokens_per_second) == (0.5, [], None, 0.5, 2.0)


def test_without_a_token_nothing_was_measured():
    t = Timeline(10.0)
    assert (t.ttft, t.gaps, t.tpot, t.latency, t.tokens_per_second) == (None, [], None, None, None)


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=30), st.floats(0, 1e6))
def test_first_token_and_gaps_add_up_to_the_latency(waits, submitted):
    times = [submitted + sum(waits[: i + 1]) for i in range(len(waits))]
    t = Timeline(submitted, tuple(times))
    assert len(t.gaps) == len(waits) - 1, "n tokens have n - 1 gaps"
    assert t.ttft + sum(t.gaps) == pytest.approx(t.latency)
    assert t.tpot == pytest.approx(sum(t.gaps) / len(t.gaps))


def test_record_counts_the_tokens_that_came_and_their_work():
    def stream():
        for token in (5, 6, 7):
            time.sleep(0.002)  # the work is done when the token is asked for
            yield token

    ids, times = record(stream())
    assert ids == [5, 6, 7]
    assert len(times.token_times) == 3
    assert times.submitted < times.token_times[0] < times.token_times[1] < times.token_times[2]
    assert times.ttft >= 0.002, "the first token's work lies between submission and its time"


def test_a_spread_is_median_and_extremes():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_time_call_leaves_the_warm_up_out():
    calls = []
    spread = time_call(lambda: calls.append(1), repeats=4, warmup=2)
    assert len(calls) == 6
    assert 0 <= spread.low <= spread.median <= spread.high


def test_environment_names_what_a_reader_must_know():
    line = environment()
    for part in ("cpu (", "thread", "float32", "torch 2.", "Python 3."):
        assert part in line, f"{part!r} is missing in {line!r}"
