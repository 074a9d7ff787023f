"""What the compiler makes of every kernel and every tile the tuner may try, for GPUs that need not be here.

Triton compiles for an architecture by name, so most of what ruins a kernel can be read without running it: registers
that spill to memory, shared memory beyond the limit, products that miss the tensor cores, copies that are not
asynchronous. The real launchers are called, with tensors on the CPU; a stand-in for the driver names the
architecture, and launching stops after compiling. Nothing here says how fast a kernel is.

    python -m kernels.inspect_compiled            # a table; --json for programs, --arch to choose

Runs in its own process, without TRITON_INTERPRET: an interpreted kernel is never compiled.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernels.checks import INTERPRETED
from kernels.flash_attention import flash_attention
from kernels.paged_attention import paged_attention

# Shared memory of one program, bytes, at most: T4, A100, RTX 30, RTX 40, H100.
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled: `case` says for which call, `tile` with which constants of the tuner.

    `registers` of a thread (255 at most), `stack` and `shared` memory in bytes; the rest counts instructions of the
    machine code: `spills` to and from the stack; tensor-core products, `hmma` of a warp, `hgmma` of four warps that
    read their operands from shared memory (Hopper); `async_copies` from global to shared memory, and how many of
    these move 16 bytes. `aligned` names the arguments known to be divisible by 16.
    """

    kernel: str
    case: str
    arch: int
    tile: str
    registers: int
    stack: int
    spills: int
    shared: int
    hmma: int
    hgmma: int
    async_copies: int
    wide_copies: int
    aligned: tuple[str, ...]


class NamedGPU:
    """The least that Triton asks of a driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """A number under which compiled kernels are remembered."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0


@contextmanager
def compiling_for(arch: int) -> Iterator[list[tuple[JITFunction, dict[str, Any], Any]]]:
    """Inside, launching a kernel compiles it for `arch`, with every tile of its tuner, and launches nothing.

    Yields the list of what was compiled: (kernel, keyword arguments, result).
    """
    compiled = []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        compiled.append((self, kwargs, launch(self, *args, **{**kwargs, "warmup": True})))

    def every_tile(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    triton.runtime.driver.set_active(NamedGPU(arch))
    try:
        with patch.object(JITFunction, "run", compile_only), patch.object(Autotuner, "run", every_tile):
            yield compiled
    finally:
        if torch.cuda.is_available():  # else there is no driver to go back to
            triton.runtime.driver.reset_active()


def flash_case(dtype: torch.dtype, d: int, d_v: int, varlen: bool = False) -> Callable[[], object]:
    """A call of `flash_attention`: 1,024 tokens, 8 query heads on 2 key heads."""
    q, k, v = (torch.zeros(1024, heads, size, dtype=dtype) for heads, size in ((8, d), (2, d), (2, d_v)))
    bounds = torch.tensor([0, 1024], dtype=torch.int32) if varlen else None
    return lambda: flash_attention(q, k, v, None, bounds, bounds, 1024)


def paged_case(
    dtype: torch.dtype, d: int, d_v: int, count: int = 1, groups: int = 4, block_size: int = 16
) -> Callable[[], object]:
    """A call of `paged_attention`: 4 sequences of 1,024 tokens, 2 key heads, heads outside and slots inside."""
    blocks = 4 * 1024 // block_size
    k_pool, v_pool = (torch.zeros(2, blocks, block_size, size, dtype=dtype).permute(1, 2, 0, 3) for size in (d, d_v))
    tables = torch.arange(blocks, dtype=torch.int32).view(4, -1)
    lengths, counts = (torch.full((4,), x, dtype=torch.int32) for x in (1024, count))
    q = torch.zeros(4 * count, 2 * groups, d, dtype=dtype)
    return lambda: paged_attention(q, k_pool, v_pool, tables, lengths, counts, num_splits=8, max_count=count)


def cases(arch: int) -> dict[str, Callable[[], object]]:
    """What is compiled for `arch`, by name: the largest head sizes, which need the most, and one of each other kind."""
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    if arch < 80:
        return {
            "prefill fp16 128/128": flash_case(f16, 128, 128),
            "prefill fp32 128/128": flash_case(f32, 128, 128),
            "decode fp16 128/128": paged_case(f16, 128, 128),
            "decode fp32 128/128": paged_case(f32, 128, 128),
        }
    return {
        "prefill bf16 128/128": flash_case(bf16, 128, 128),
        "prefill bf16 128/128, many sequences": flash_case(bf16, 128, 128, varlen=True),
        "prefill bf16 64/64": flash_case(bf16, 64, 64),
        "prefill fp16 32/16": flash_case(f16, 32, 16),
        "prefill fp32 128/128": flash_case(f32, 128, 128),
        "decode bf16 128/128": paged_case(bf16, 128, 128),
        "decode bf16 128/128, 64 rows": paged_case(bf16, 128, 128, count=16),
        "decode fp16 64/64, blocks of 1": paged_case(f16, 64, 64, block_size=1),
        "decode fp32 128/128": paged_case(f32, 128, 128),
    }


def read_machine_code(cubin: bytes) -> tuple[int, int, Counter[str]]:
    """Registers of a thread, bytes of its stack, and how often each instruction occurs, with its modifiers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            for tool, options in (("cuobjdump", ["-res-usage"]), ("nvdisasm", []))
        )
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
    return registers, stack, Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.M))


def compile_all(archs: Sequence[int]) -> list[Compiled]:
    """Every kernel for every case and tile."""
    rows = []
    for arch in archs:
        for case, call in cases(arch).items():
            with compiling_for(arch) as compiled:
                call()
            rows += [_describe(case, arch, *x) for x in compiled]
    return rows


def _describe(case: str, arch: int, function: JITFunction, arguments: dict[str, Any], kernel: Any) -> Compiled:
    registers, stack, code = read_machine_code(kernel.asm["cubin"])

    def count(*instructions: str, with_modifier: str = "") -> int:
        return sum(n for x, n in code.items() if x.split(".")[0] in instructions and with_modifier in x)

    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return Compiled(
        kernel=function.__name__.strip("_"),
        case=case,
        arch=arch,
        tile=", ".join(f"{x.removeprefix('num_')} {arguments[x]}" for x in names if x in arguments),
        registers=registers,
        stack=stack,
        spills=count("LDL", "STL"),
        shared=kernel.metadata.shared,
        hmma=count("HMMA"),
        hgmma=count("HGMMA"),
        async_copies=count("LDGSTS"),
        wide_copies=count("LDGSTS", with_modifier=".128"),
        aligned=tuple(function.arg_names[i] for (i,), attrs in kernel.src.attrs.items() if attrs),
    )


def table(rows: Sequence[Compiled]) -> str:
    """The rows as text, one line each."""
    head = f"{'sm':>3} {'kernel':13} {'case':38} {'tile':42} {'registers':>9} {'spills':>6} {'shared KiB':>15}"
    lines = [f"{head} {'tensor core':>11} {'async copies':>12}"]
    for r in rows:
        shared = f"{r.shared / 1024:.0f} of {SHARED_MEMORY[r.arch] // 1024}"
        lines.append(
            f"{r.arch:3} {r.kernel:13} {r.case:38} {r.tile:42} {r.registers:9} {r.spills:6} {shared:>15} "
            f"{r.hmma + r.hgmma:11} {r.async_copies:12}"
        )
    return "\n".join(lines)


def main() -> None:
    """Compile everything and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m kernels.inspect_compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[75, 80, 90], choices=SHARED_MEMORY, help="sm numbers")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    args = parser.parse_args()
    if INTERPRETED:
        parser.error("unset TRITON_INTERPRET: interpreted kernels are not compiled")
    rows = compile_all(args.arch)
    print(json.dumps([asdict(r) for r in rows]) if args.json else table(rows))


if __name__ == "__main__":
    main()
