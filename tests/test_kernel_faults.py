"""Faults put into the kernels one at a time: the checks of `test_kernels` notice each of them."""

import importlib

import pytest
import torch
from kernel_cases import Heads, check_flash, check_paged, check_varlen, paged_case
from triton_checks import BadAccess, memory_checked, seed_fault

from kernels.checks import INTERPRETED
from kernels.flash_attention import flash_attention
from kernels.paged_attention import paged_attention

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel that reads astray would end the process"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # infinities and NaN are what some faults make
]


def check_every_kind_of_prefill(attention) -> None:
    check_flash(attention, 40, 40, Heads(4, 2, 32, 16))
    check_flash(attention, 5, 37)
    check_flash(attention, 20, 3)
    check_varlen(attention, [(9, 20), (4, 4), (1, 33)])


def check_every_kind_of_decode(attention) -> None:
    check_paged(attention, paged_case([37, 5, 90], [1, 3, 2], 4), num_splits=1)
    check_paged(attention, paged_case([90, 33], [2, 1], 16), num_splits=3)
    check_paged(attention, paged_case([30], [16], 16, Heads(4, 1)), num_splits=1)
    check_paged(attention, paged_case([640], [1], 64, Heads(16, 1, 16, 16)), num_splits=20)  # merged 16 at a time
    check_paged(attention, paged_case([1, 0], [2, 1], 4), num_splits=2)


FLASH, PAGED, SOFTMAX = "flash_attention.py", "paged_attention.py", "online_softmax.py"

# In which file, what it says, and what it says with the fault.
PREFILL = {
    "no mask on the load of q": (FLASH, "q_tile, mask=row_mask[:, None], other=0.0)", "q_tile)"),
    "no mask on the load of k": (FLASH, "k_ptr + k_tile, mask=inside, other=0.0)", "k_ptr + k_tile)"),
    "no mask on the load of v": (FLASH, "v_ptr + v_tile, mask=inside, other=0.0)", "v_ptr + v_tile)"),
    "no mask on the store of out": (
        FLASH,
        "out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])",
        "out.to(out_ptr.dtype.element_ty))",
    ),
    "no mask on the store of lse": (FLASH, "lse, mask=row_mask)", "lse)"),
    "causal off by one": (FLASH, "[None, :] <= (diagonal", "[None, :] < (diagonal"),
    "no causal mask": (FLASH, "(diagonal + rows)[:, None], scores", "(m + rows)[:, None], scores"),
    "aligned top left": (FLASH, "diagonal = m - n + first_row", "diagonal = first_row"),
    "one tile too many without a mask": (
        FLASH,
        "tl.maximum(diagonal + 1, 0) //",
        "tl.maximum(diagonal + BLOCK_N, 0) //",
    ),
    "the last tile left out": (FLASH, "diagonal + BLOCK_M, m)", "diagonal, m)"),
    "acc not rescaled": (FLASH, "acc * factor[:, None]", "acc"),
    "sum not rescaled": (SOFTMAX, "total * factor", "total"),
    "maximum forgotten": (SOFTMAX, "new_top = tl.maximum(top, tl", "new_top = tl.maximum(top * 0.0, tl"),
    "rows without a key not guarded": (SOFTMAX, 'tl.where(new_top == float("-inf"), 0.0, new_top)', "new_top"),
    "not divided by the sum": (SOFTMAX, "acc / divisor[:, None]", "acc"),
    "lse in base 2": (SOFTMAX, "* LN_2", ""),
    "scale forgotten": (FLASH, "scale * LOG2_E.value", "LOG2_E.value"),
    "wrong KV head": (FLASH, "kv_head = head // groups", "kv_head = head % groups"),
    "values of key head 0": (FLASH, "kv_head * v_head", "0"),
    "keys of the first sequence": (FLASH, "k_ptr += k_start * k_row", "k_ptr += 0 * k_row"),
}

DECODE = {
    "unmasked page tail": (
        PAGED,
        "inside = position < last",
        "inside = position < tl.cdiv(last, BLOCK_SIZE) * BLOCK_SIZE",
    ),
    "table read past its used entries": (PAGED, "// BLOCK_SIZE, mask=inside, other=0)", "// BLOCK_SIZE)"),
    "no mask on the load of q": (PAGED, "[None, :], mask=row_mask[:, None], other=0.0", "[None, :]"),
    "no mask on the store of out": (
        PAGED,
        "out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])",
        "out.to(out_ptr.dtype.element_ty))",
    ),
    "slot number not within its block": (PAGED, "slot = position % BLOCK_SIZE", "slot = position"),
    "causal off by one": (PAGED, "length - count + token + 1", "length - count + token"),
    "new tokens see one another": (PAGED, "length - count + token + 1", "length + token * 0"),
    "tokens and heads of the rows exchanged": (
        PAGED,
        "rows // groups, kv_head * groups + rows % groups",
        "rows % count, kv_head * groups + rows // count",
    ),
    "wrong KV head": (PAGED, "kv_head * k_head", "0"),
    "queries of the first sequence": (PAGED, "q_rows = (q_start + token)", "q_rows = (0 + token)"),
    "only the first rows": (PAGED, "rows = row_tile * BLOCK_R + tl", "rows = tl"),
    "parts that are no whole tiles": (
        PAGED,
        "tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N",
        "tl.cdiv(length, num_splits)",
    ),
    "parts that overlap": (PAGED, "tl.minimum(first + part, length)", "length"),
    "acc not rescaled": (PAGED, "v, acc * factor[:, None]", "v, acc"),
    "merge that ignores lse": (
        PAGED,
        "online_softmax(lse[None, :], LOG2_E",
        'online_softmax(tl.where(lse == float("-inf"), lse, 0.0)[None, :], LOG2_E',
    ),
    "merge in the wrong base": (PAGED, "lse[None, :], LOG2_E", "lse[None, :], 1.0"),
    "merge without rescaling": (PAGED, "acc = acc * factor[:, None] + tl.sum", "acc = acc + tl.sum"),
    "merge of the first parts only": (PAGED, "in range(0, num_splits, BLOCK_S)", "in range(0, BLOCK_S, BLOCK_S)"),
}


def test_the_kernels_as_they_are_pass():
    check_every_kind_of_prefill(flash_attention)
    check_every_kind_of_decode(paged_attention)


@pytest.mark.parametrize("fault", PREFILL)
def test_a_fault_in_prefill_is_noticed(tmp_path, fault):
    package = seed_fault(tmp_path, *PREFILL[fault])
    faulty = importlib.import_module(f"{package.__name__}.flash_attention").flash_attention
    with pytest.raises(AssertionError):
        check_every_kind_of_prefill(faulty)


@pytest.mark.parametrize("fault", DECODE)
def test_a_fault_in_decode_is_noticed(tmp_path, fault):
    package = seed_fault(tmp_path, *DECODE[fault])
    faulty = importlib.import_module(f"{package.__name__}.paged_attention").paged_attention
    with pytest.raises(AssertionError):
        check_every_kind_of_decode(faulty)


def test_a_fault_needs_a_text_to_replace(tmp_path):
    with pytest.raises(AssertionError, match=r"it cannot be seeded: checks\.py does not say 'no such text'"):
        seed_fault(tmp_path, "checks.py", "no such text", "")


def test_the_memory_check_knows_inputs_and_unused_memory():
    q = torch.zeros(4, 1, 16)
    with pytest.raises(BadAccess, match="load of memory that holds no data"), memory_checked([q], [q[3:]]):
        flash_attention(q, q, q)
    with memory_checked([q]):
        flash_attention(q, q, q)
