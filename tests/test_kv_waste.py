"""Waste as the vLLM paper counts it, and three ways to reserve on the same requests."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.measure.kv_waste import Contiguous, Paged, Slots, request_slots, simulate
from minillm.measure.traces import RequestLengths, sharegpt_like


def test_the_worked_example_of_the_paper():
    """Kwon et al. 2023, figure 3: A reserves 2,048 slots, B 512; the token being written counts as held."""
    assert request_slots(capacity=2048, held=7 + 1, final=7 + 1 + 2) == Slots(8, 2, 2038, 0)
    assert request_slots(capacity=512, held=3 + 1, final=3 + 1 + 1) == Slots(4, 1, 507, 0)


def test_a_request_cannot_hold_more_than_it_has():
    with pytest.raises(ValueError, match="held=5, final=4, capacity=8"):
        request_slots(8, 5, 4)


def test_holes_between_runs_are_external_waste_until_neighbours_leave():
    policy = Contiguous(30, longest=10)
    request = RequestLengths(5, 5)
    a, b, c = (policy.start(request) for _ in range(3))
    assert policy.start(request) is None
    policy.stop(a)
    policy.stop(c)
    assert policy.holes == [(0, 10), (20, 10)], "two holes of 10: a request of 11 would not fit into 20 free slots"
    policy.stop(b)
    assert policy.holes == [(0, 30)], "neighbours join"


def test_powers_of_two_are_taken_above_the_answer():
    policy = Contiguous(1000, longest=None)
    sizes = [policy.capacity(policy.start(RequestLengths(10, n))) for n in (1, 2, 3, 25, 32)]
    assert sizes == [11, 12, 14, 42, 42]


def test_blocks_are_taken_when_the_last_is_full():
    policy = Paged(48, block_size=16)
    handle = policy.start(RequestLengths(15, 40))
    assert policy.capacity(handle) == 16, "15 of the prompt and one being written"
    assert policy.grow(handle, 17)
    assert policy.capacity(handle) == 32
    assert not policy.grow(handle, 49), "there are no more than 48 slots"
    policy.stop(handle)
    assert policy.free == 3


POLICIES = {
    "longest": lambda n: Contiguous(n, 64),
    "power of two": lambda n: Contiguous(n, None),
    "paged": lambda n: Paged(n, 4),
}


@pytest.mark.parametrize("policy", POLICIES)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20),
    slots=st.integers(64, 200),
)
def test_every_slot_is_counted_once_and_everything_is_given_back(policy, lengths, slots):
    requests = [RequestLengths(*x) for x in lengths]
    p = POLICIES[policy](slots)
    seen = simulate(p, slots, requests)
    if sum(seen.slots):
        assert sum(seen.slots) == pytest.approx(slots), "used, reserved, internal and external are all there is"
        assert min(seen.slots) >= 0
    assert (p.holes == [(0, slots)]) if isinstance(p, Contiguous) else (p.free == slots // 4)
    assert seen.steps >= max(r.output for r in requests) - 1


def test_a_request_that_fits_nowhere_is_an_error():
    with pytest.raises(ValueError, match=r"prompt=50, output=50\) does not fit into 60 slots"):
        simulate(Contiguous(60, None), 60, [RequestLengths(50, 50)])
    for policy, n, request in (
        (Paged(16, 4), 16, RequestLengths(4, 100)),
        (Contiguous(100, 10), 100, RequestLengths(5, 20)),
    ):
        with pytest.raises(ValueError, match="fits nowhere, not even alone"):
            simulate(policy, n, [request])


def test_the_trace_has_the_published_means_and_is_skewed():
    trace = sharegpt_like(3000)
    assert statistics.fmean(r.prompt for r in trace) == pytest.approx(161.31, abs=1)
    assert statistics.fmean(r.output for r in trace) == pytest.approx(337.99, abs=1)
    assert statistics.median(r.output for r in trace) < 250, "half the answers are far shorter than the mean"
    assert max(r.total for r in trace) <= 2048
    with pytest.raises(ValueError, match="longest=256 is too short"):
        sharegpt_like(50, longest=256)
    assert sharegpt_like(50, seed=1) == sharegpt_like(50, seed=1) != sharegpt_like(50, seed=2)


def test_paging_uses_nearly_all_of_what_it_reserves_where_contiguous_rows_waste_most():
    """OPT-13B with 12 GiB for keys and values has 15,728 slots; published shares in use: 20.4, 26.8 and 96.3 %."""
    n, trace = 15_728, sharegpt_like(400)
    longest, power, paged = (simulate(p, n, trace) for p in (Contiguous(n, 2048), Contiguous(n, None), Paged(n, 16)))
    assert paged.slots.share_used_of_reserved >= 0.96
    assert longest.slots.share_used_of_reserved < 0.40
    assert (
        longest.slots.share_used_of_reserved < power.slots.share_used_of_reserved < paged.slots.share_used_of_reserved
    )
    assert longest.mean_running == 15_728 // 2048
    assert paged.mean_running > 4 * longest.mean_running, "sequences in the same bytes"
