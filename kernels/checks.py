"""What the launchers of the attention kernels refuse, each with one message that names the value and the limit.

Only shapes, strides, element types and devices are looked at, never what lies in a tensor: on a GPU, reading it would
make the host wait for the device.
"""

import math

import torch
import triton
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run as Python on the CPU
HEAD_SIZES = (16, 32, 64, 128)  # powers of two, since a tile's sides must be; 256 does not fit the registers
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, k_name: str = "k", v_name: str = "v", k_layout: str = "[M, K, d]"
) -> None:
    """Raise ValueError unless q `[N, H, d]`, k `[..., K, d]` and v `[..., K, d_v]` go together and are supported."""
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}: the kernel takes {', '.join(map(str, DTYPES))}")
    layouts = (("q", q, "[N, H, d]"), (k_name, k, k_layout), (v_name, v, k_layout.replace("d]", "d_v]")))
    for name, x, layout in layouts:
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{name} must be {layout}, got the shape {list(x.shape)}")
    _check_runnable(q)
    for name, x, _ in layouts:
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, q is {q.dtype}: they must be of one type")
        _check_place(name, x, q)
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"shapes do not fit: q {list(q.shape)}, {k_name} {list(k.shape)}, {v_name} {list(v.shape)}")
    for name, size in (("d", k.shape[-1]), ("d_v", v.shape[-1])):
        if size not in HEAD_SIZES:
            raise ValueError(f"head size {name}={size} is not supported: the kernel takes {HEAD_SIZES}")
    n_heads, n_kv_heads = q.shape[1], k.shape[-2]
    if n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads are not a multiple of {n_kv_heads} key heads")


def check_integers(name: str, x: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    """Raise ValueError unless `x` holds int32 in that shape, last stride 1, on the device of q."""
    if x.dtype != torch.int32:
        raise ValueError(f"{name} is {x.dtype}: it must be torch.int32")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(x.shape)}")
    _check_place(name, x, q)


def softmax_scale(scale: float | None, d: int) -> float:
    """`scale`, or 1/sqrt(d) if it is None. Raises ValueError unless it is positive: the kernels take the largest
    score before they scale it.
    """
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} is not supported: it must be positive and finite")
    return scale


def tensor_cores(x: Tensor) -> bool:
    """Whether Triton multiplies elements like those of `x` on tensor cores: 16 bits, and a GPU of compute capability
    8.0 or newer. (It no longer uses Turing's; float32 would be rounded to TF32 on its way in.)
    """
    return x.element_size() == 2 and (INTERPRETED or triton.runtime.driver.active.get_current_target().arch >= 80)


def _check_place(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q is on {q.device}: they must be on one device")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"the last dimension of {name} must have stride 1, got {x.stride(-1)}: use .contiguous()")


def _check_runnable(q: Tensor) -> None:
    if INTERPRETED or q.is_cuda:
        return
    try:
        triton.runtime.driver.active.get_current_target()
    except RuntimeError as e:
        raise ValueError(
            f"q is on {q.device} and Triton finds no GPU: to interpret the kernels on the CPU set TRITON_INTERPRET=1 "
            "before the first import of triton"
        ) from e
