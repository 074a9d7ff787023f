"""The benchmark of the kernels, with another clock and tiny sizes: what it counts, checks, writes and says."""

import json
import sys
import time

import pytest
import torch
from kernel_cases import DEVICE

from kernels import bench
from kernels.bench import (
    Decode,
    Prefill,
    bench_decode,
    bench_prefill,
    check_last_rows,
    copy_bandwidth,
    graph_timer,
    save,
)


def one_millisecond(f) -> float:
    f()
    return 1e-3


def prefill() -> list[Prefill]:
    return bench_prefill([16, 40], 16, one_millisecond, DEVICE, torch.float16, tokens=40, width=32, largest_math=16)


def decode() -> list[Decode]:
    return bench_decode([1, 3], 50, one_millisecond, DEVICE, torch.float16, heads=(4, 2), head_size=16, block_size=4)


def test_prefill_counts_the_flops_of_visible_keys():
    rows = prefill()
    assert [(x.length, x.sequences, x.head_size) for x in rows] == [(16, 2, 16), (40, 1, 16)]
    flops = 4 * 16 * 2 * 2 * (16 * 17 / 2)  # head size, heads, sequences, pairs of a query and a key it sees
    assert rows[0].tflops[bench.OURS] == pytest.approx(flops / 1e-3 / 1e12)
    assert rows[0].tflops["math"] == pytest.approx(flops / 1e-3 / 1e12)
    assert set(rows[0].tflops) == {bench.OURS, *bench.BACKENDS}


def test_the_backend_that_writes_all_scores_runs_up_to_a_limit():
    assert prefill()[1].tflops["math"] is None


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the cudnn backend may run")
def test_a_backend_that_does_not_run_here_has_no_figure():
    assert prefill()[0].tflops["cudnn"] is None


def test_decode_counts_the_bytes_of_keys_and_values():
    assert decode() == [
        Decode(50, batch, 1e-3, pytest.approx(2 * batch * 50 * 2 * 16 * 2 / 1e-3 / 1e9)) for batch in (1, 3)
    ]


def test_a_copy_reads_and_writes():
    assert copy_bandwidth(one_millisecond, DEVICE, 1000) == pytest.approx(2 * 1000 / 1e-3 / 1e9)


def test_no_time_is_reported_for_a_wrong_output(monkeypatch):
    monkeypatch.setattr(bench, "paged_attention", lambda q, *_, **__: (q * 0, None))
    monkeypatch.setattr(bench, "flash_attention", lambda q, *_: (q * 0, None))
    with pytest.raises(RuntimeError, match=r"this kernel, 16 tokens: the output is off by .* No time is reported"):
        prefill()
    with pytest.raises(RuntimeError, match="this kernel, batch 1, context 50: the output is off by"):
        decode()


def test_the_check_is_causal_and_aligned_at_the_last_position():
    q, k = torch.ones(3, 1, 16), torch.ones(4, 1, 16)
    v = torch.arange(4.0)[:, None, None].expand(4, 1, 16)
    out = torch.tensor([0.5, 1.0, 1.5])[:, None, None].expand(3, 1, 16)  # means of 0 .. 1, 0 .. 2, 0 .. 3
    check_last_rows(out, q, k, v, "right")
    with pytest.raises(RuntimeError, match=r"wrong: the output is off by 5\.0e-01"):
        check_last_rows(out - 0.5, q, k, v, "wrong")


def test_results_and_plot_are_written(tmp_path):
    path = save("NVIDIA Test-GPU 9", torch.float16, 1.5, prefill(), decode(), tmp_path / "figures")
    assert path.name == "kernels_nvidia_test_gpu_9.json"
    written = json.loads(path.read_text())
    assert (written["gpu"], written["dtype"], written["copy_gb_per_s"]) == ("NVIDIA Test-GPU 9", "float16", 1.5)
    assert written["versions"]["torch"] == torch.__version__
    assert [x["batch"] for x in written["decode"]] == [1, 3]
    assert len(written["prefill"]) == 2
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench"])
    bench.main()
    said = capsys.readouterr().out
    assert said.startswith("No GPU here: nothing is measured.")
    assert said.count("\n") == 1


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")
def test_large_inputs_on_a_gpu_are_right():
    bench_prefill([1000, 4096, 16_384], 128, one_millisecond, largest_math=0)
    bench_decode([1, 32], 4097, one_millisecond)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")
def test_the_gpu_timer_times_what_it_is_given():
    x = torch.randn(4096, 4096, device=DEVICE)
    start = time.perf_counter()
    assert 0 < graph_timer(lambda: x @ x) < time.perf_counter() - start
