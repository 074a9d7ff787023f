"""What Triton's interpreter does not check by itself, for tests of kernels; and the way to put a fault into one.

On a GPU the kernels run compiled: `memory_checked` and `bfloat16_repaired` then do nothing, and faults are not
seeded, since one that reads astray would end the process.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton exists on Linux only", allow_module_level=True)

import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from kernels.checks import INTERPRETED

KERNELS = Path(__file__).parents[1] / "kernels"


class BadAccess(AssertionError):
    """A kernel touched memory that it has no business with."""


class _Memory:
    """The legal addresses of the launch that is running."""

    def __init__(self, inputs: Sequence[Tensor], forbidden: Sequence[Tensor]) -> None:
        self.inputs = {x.untyped_storage().data_ptr() for x in inputs}
        pointers = [x.data_ptr() + x.element_size() * _offsets(x) for x in forbidden]
        self.forbidden = np.unique(np.concatenate(pointers)) if pointers else np.zeros(0, np.int64)
        self.readable: list[tuple[int, int]] = []
        self.writable: list[tuple[int, int]] = []

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """A launch with these tensor arguments begins."""
        self.readable, self.writable = [], []
        for x in tensors:
            if x.numel():
                last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
                end = x.data_ptr() + x.element_size() * (last + 1)
                self.readable.append((x.data_ptr(), end))
                if x.untyped_storage().data_ptr() not in self.inputs:
                    self.writable.append((x.data_ptr(), end))

    def check(self, what: str, pointers: TensorHandle, mask: TensorHandle, spans: list[tuple[int, int]]) -> None:
        """Raise BadAccess unless every address that is not masked off lies in one of the spans."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)
        inside = np.zeros(addresses.shape, bool)
        for start, end in spans:
            inside |= (addresses >= start) & (addresses + size <= end)
        if not inside.all():
            raise BadAccess(f"{what} outside every legal tensor: {(~inside).sum()} of {inside.size} addresses")
        if self.forbidden.size and np.isin(addresses, self.forbidden).any():
            raise BadAccess(f"{what} of memory that holds no data of this call")


def _offsets(x: Tensor) -> np.ndarray:
    """The offsets of all elements of x from its first."""
    offsets = np.zeros(1, np.int64)
    for n, stride in zip(x.shape, x.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(n) * stride).reshape(-1)
    return offsets


@contextmanager
def memory_checked(inputs: Sequence[Tensor], forbidden: Sequence[Tensor] = ()) -> Iterator[None]:
    """Inside, every load and store of an interpreted kernel is checked, lane by lane, before it is done.

    Legal to read: what lies in the extent of a tensor argument of the launch and not in one of the `forbidden`
    tensors (views of unused slots, say). Legal to write: the same, but not the `inputs`. A lane that is masked off
    may point anywhere. Raises BadAccess.
    """
    if not INTERPRETED:
        yield
        return
    memory = _Memory(inputs, forbidden)
    begin, load, store = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def checked_begin(self, args, kwargs):
        arguments = begin(self, args, kwargs)
        memory.launch([x for x in (*arguments[0], *arguments[1].values()) if isinstance(x, Tensor)])
        return arguments

    def checked_load(self, pointers, mask, *rest):
        memory.check("load", pointers, mask, memory.readable)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        memory.check("store", pointers, mask, memory.writable)
        return store(self, pointers, value, mask, *rest)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "_init_args_hst", checked_begin))
        stack.enter_context(patch.object(InterpreterBuilder, "create_masked_load", checked_load))
        stack.enter_context(patch.object(InterpreterBuilder, "create_masked_store", checked_store))
        try:
            yield
        except InterpreterError as error:  # the interpreter wraps what a kernel raises, once a function
            cause: BaseException | None = error
            while cause and not isinstance(cause, BadAccess):
                cause = cause.__cause__
            raise (cause or error) from None


@contextmanager
def bfloat16_repaired() -> Iterator[None]:
    """Inside, the interpreter multiplies bfloat16 matrices and rounds to bfloat16 as a GPU does.

    By itself it multiplies the bit patterns, and truncates. Only products and conversions are repaired: no kernel
    here does other arithmetic in bfloat16.
    """
    if not INTERPRETED:
        yield
        return
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def to_float32(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def repaired_dot(self, a, b, acc, *rest):
        return dot(self, to_float32(a), to_float32(b), acc, *rest)

    def repaired_cast(self, x, dtype):
        if dtype.scalar != tl.bfloat16 or x.dtype.scalar != tl.float32:
            return cast(self, x, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    with (
        patch.object(InterpreterBuilder, "create_dot", repaired_dot),
        patch.object(InterpreterBuilder, "cast_impl", repaired_cast),
    ):
        yield


def seed_fault(folder: Path, file: str, right: str, wrong: str) -> ModuleType:
    """A copy of the package `kernels` in which `right` reads `wrong` wherever it stands in `file`, imported.

    It has to be a copy on disk: Triton reads a kernel's source from its file.
    """
    name = f"faulty_{abs(hash((file, right, wrong)))}"
    copy = folder / name
    copy.mkdir()
    for path in KERNELS.glob("*.py"):
        source = path.read_text()
        if path.name == file:
            assert right in source, f"it cannot be seeded: {file} does not say {right!r}"
            source = source.replace(right, wrong)
        (copy / path.name).write_text(source.replace("from kernels.", f"from {name}."))
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
