"""Every kernel, with every tile its tuner may choose, compiled for GPUs that are not here; the machine code is read.

In a process of its own, since here the kernels are interpreted. Nothing in this file says that a kernel is fast.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_checks  # noqa: F401  skips where there is no Triton

from kernels import flash_attention, paged_attention
from kernels.checks import INTERPRETED
from kernels.inspect_compiled import SHARED_MEMORY, Compiled, main, table

ROOT = Path(__file__).parents[1]


def uninterpreted(*arguments: str) -> subprocess.CompletedProcess:
    """Python in a process of its own, in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    result = uninterpreted("-m", "kernels.inspect_compiled", "--json")
    assert result.returncode == 0, f"compiling failed:\n{result.stderr[-3000:]}"
    return [Compiled(**row) for row in json.loads(result.stdout)]


def on_tensor_cores(r: Compiled) -> bool:
    return r.arch >= 80 and "fp32" not in r.case and r.kernel != "merge_kernel"


def test_every_tile_is_compiled(compiled):
    tried = {
        (75, "prefill fp16 128/128"): flash_attention.WITHOUT_TENSOR_CORES,
        (80, "prefill bf16 128/128"): flash_attention.AMPERE,
        (90, "prefill bf16 128/128"): flash_attention.HOPPER,
        (90, "prefill fp32 128/128"): flash_attention.WITHOUT_TENSOR_CORES,
        (75, "decode fp16 128/128"): paged_attention.WITHOUT_TENSOR_CORES,
        (80, "decode bf16 128/128"): paged_attention.WITH_TENSOR_CORES,
        (90, "decode bf16 128/128, 64 rows"): paged_attention.WITH_TENSOR_CORES,
    }
    for (arch, case), tiles in tried.items():
        rows = [r.tile for r in compiled if (r.arch, r.case) == (arch, case) and r.kernel != "merge_kernel"]
        assert len(set(rows)) == len(tiles), f"sm_{arch}, {case}: {rows}"
    assert {r.arch for r in compiled if r.kernel == "merge_kernel"} == {75, 80, 90}


def test_shared_memory_is_within_the_limit(compiled):
    for r in compiled:
        assert r.shared <= SHARED_MEMORY[r.arch], r
        if r.arch == 80:
            assert r.shared <= SHARED_MEMORY[86], f"a GeForce of that generation has less: {r}"


def test_nothing_spills(compiled):
    for r in compiled:
        assert (r.spills, r.stack) == (0, 0), f"registers go to memory and back: {r}"


def test_products_of_16_bit_elements_run_on_tensor_cores(compiled):
    for r in compiled:
        assert (r.hmma + r.hgmma > 0) == on_tensor_cores(r), r


def test_hopper_uses_its_own_products_where_there_are_64_rows(compiled):
    for r in compiled:
        if r.arch == 90 and on_tensor_cores(r):
            enough_rows = r.kernel == "flash_kernel" or "64 rows" in r.case
            assert (r.hgmma > 0, r.hmma > 0) == (enough_rows, not enough_rows), r


def test_float32_is_not_rounded_on_its_way_in(compiled):
    rows = [r for r in compiled if "fp32" in r.case]
    assert rows
    assert all(r.hmma + r.hgmma == 0 for r in rows), "TF32 products run on tensor cores, exact ones do not"


def test_keys_and_values_are_copied_asynchronously_16_bytes_at_a_time(compiled):
    for r in compiled:
        if on_tensor_cores(r):
            entries = r.async_copies - r.wide_copies  # of the block table, 4 bytes each
            assert r.wide_copies > 0, r
            if "32/16" not in r.case:  # 32 rows of 16 values are 8 bytes a thread
                assert entries == 0 if r.kernel == "flash_kernel" else entries <= 7, r


def test_the_launchers_tell_the_compiler_what_is_aligned(compiled):
    strides = {
        "flash_kernel": {"q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "out_row", "out_head"},
        "part_kernel": {"q_row", "q_head", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head"},
        "merge_kernel": set(),
    }
    for r in compiled:
        pointers = {"out_ptr", "lse_ptr"} if r.kernel == "merge_kernel" else {"q_ptr", "k_ptr", "v_ptr", "out_ptr"}
        assert pointers | strides[r.kernel] <= set(r.aligned), r


def test_the_table_has_a_line_for_each(compiled):
    lines = table(compiled).splitlines()
    assert len(lines) == len(compiled) + 1
    assert all(r.case in line for r, line in zip(compiled, lines[1:], strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="the kernels are not interpreted here")
def test_an_interpreter_is_told_that_it_cannot_compile(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inspect_compiled"])
    with pytest.raises(SystemExit):
        main()
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU")
def test_without_gpu_and_interpreter_a_launcher_says_what_to_do():
    call = "import torch; from kernels.flash_attention import flash_attention; q = torch.ones(2, 1, 16)"
    result = uninterpreted("-c", f"{call}; flash_attention(q, q, q)")
    assert "q is on cpu and Triton finds no GPU: to interpret the kernels on the CPU set TRITON" in result.stderr
