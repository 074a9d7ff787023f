"""Peak memory against programmes whose peak is known, and storages counted once."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.measure.memory import peak_bytes, storage_bytes
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.naive_attention import naive_attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_gpu])]


# --- peak


@pytest.mark.parametrize("device", DEVICES)
def test_peak_of_a_known_programme_is_exact(device):
    def programme():
        a = torch.empty(1000, device=device)
        b = torch.empty(2000, device=device)  # 12,000 bytes are live
        del a
        c = torch.empty(500, device=device)  # 10,000 bytes
        del b
        return c

    result, peak = peak_bytes(programme, device)
    assert peak == 12_000, "4,000 and 8,000 bytes live together"
    assert result.shape == (500,), "what the programme returns"


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_live_before_does_not_count(device):
    x = torch.ones(1000, device=device)
    assert peak_bytes(lambda: x.neg_().view(10, 100)[2:], device)[1] == 0, "in place, and views"
    assert peak_bytes(lambda: x.neg(), device)[1] == 4000, "the result alone"
    assert peak_bytes(lambda: x.neg().exp(), device)[1] == 8000, "the negative lives while its exponential is written"


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.integers(0, 99)), max_size=30))
@settings(max_examples=40, deadline=None)
def test_peak_of_any_order_of_allocations_and_frees(operations):
    held: list[torch.Tensor] = []

    def programme():
        for elements, free, which in operations:
            if free and held:
                held.pop(which % len(held))
            else:
                held.append(torch.empty(elements))

    sizes: list[int] = []
    expected = 0
    for elements, free, which in operations:
        if free and sizes:
            sizes.pop(which % len(sizes))
        else:
            sizes.append(4 * elements)
        expected = max(expected, sum(sizes))
    assert peak_bytes(programme)[1] == expected, f"(elements, free?, which): {operations}"


def test_freeing_an_older_tensor_takes_nothing_off():
    def programme():
        held.pop()
        return torch.empty(1000)

    held = [torch.empty(5000)]
    assert peak_bytes(programme)[1] == 4000, "allocated before any measurement"
    held = [peak_bytes(lambda: torch.empty(5000))[0]]
    assert peak_bytes(programme)[1] == 4000, "allocated in an earlier measurement"


def test_scratch_memory_inside_an_operator_counts():
    x = torch.rand(10_000)
    assert peak_bytes(x.median)[1] >= 40_000, "the median partitions a copy of its input, which no Python code sees"


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_that_allocates_nothing_has_no_peak(device):
    assert peak_bytes(lambda: "text", device) == ("text", 0)


def attention_peak(n: int, m: int, heads: int = 4, d: int = 16) -> int:
    q, k = torch.randn(n, heads, d), torch.randn(m, heads, d)
    return peak_bytes(lambda: naive_attention(q, k, k))[1]


def test_naive_attention_of_a_whole_text_grows_with_its_square():
    short, long = attention_peak(256, 256), attention_peak(512, 512)
    assert 3.8 < long / short < 4.1, f"twice the tokens: {short:,} B, then {long:,} B"
    assert long >= 2 * 4 * 512**2 * 4, "scores and weights, 4 heads * 512² float32 each, live together"


def test_naive_attention_of_one_query_grows_with_the_keys():
    short, long = attention_peak(1, 2048), attention_peak(1, 4096)
    assert 1.8 < long / short < 2.1, f"twice the keys: {short:,} B, then {long:,} B"


def test_an_exception_passes_and_leaves_the_next_measurement_alone():
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(lambda: torch.empty(10))[1] == 40


def test_a_measurement_inside_a_measurement_is_refused():
    with pytest.raises(RuntimeError, match="a profiler is running"):
        peak_bytes(lambda: peak_bytes(lambda: None))


def test_other_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="not on meta"):
        peak_bytes(lambda: None, "meta")


def test_only_the_caller_writes_to_stderr(capfd):
    peak_bytes(lambda: os.write(2, b"from the call"))
    assert capfd.readouterr().err == "from the call", "the profiler's own lines are kept out, the caller's are not"


# --- storages


def test_views_of_one_storage_count_once():
    x = torch.zeros(10, 10)
    assert storage_bytes(x) == 400
    assert storage_bytes(x, x.view(-1), x.T, x[3:5]) == 400, "four names for one storage"
    assert storage_bytes(x[0]) == 400, "a row keeps the whole storage alive"


def test_different_storages_add_up():
    parts = torch.zeros(3, dtype=torch.int8), torch.zeros(3, dtype=torch.float64), torch.zeros(0)
    assert storage_bytes(*parts) == 3 + 24 + 0
    assert storage_bytes() == 0, "no tensors"
    x = torch.zeros(10)
    assert storage_bytes(x, x.clone(), x.detach()) == 80, "a clone is a second storage, a detached tensor is not"


def test_tensors_without_memory_count_by_their_shape():
    assert storage_bytes(torch.empty(1000, device="meta"), torch.empty(24, device="meta")) == 4096


def test_storage_of_a_model_is_its_parameters_once():
    model = Transformer(ModelConfig(32, 16, 2, 4, 2, 4, 24, max_seq_len=64))
    parameters = list(model.parameters())
    expected = 4 * sum(parameter.numel() for parameter in parameters)
    assert storage_bytes(*parameters, *parameters) == expected, "float32, each parameter once"
