"""Which device a model or a cache lives on when nobody says, and which implementation its tensors get."""

import torch
from torch import Tensor


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for; None means the best one present: an NVIDIA GPU if there is one, else the CPU. The exact one
    is returned, "cuda:0" where "cuda" was asked for, so that it can be compared with a tensor's.

    Raises ValueError for a device that does not exist here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device).split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: cpu or cuda")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None


def use_kernels(q: Tensor, value_dim: int, block_size: int = 1) -> bool:
    """Whether the Triton kernels take q `[N, H, d]` with values of `value_dim` elements, in blocks of `block_size`: on
    a GPU, and of element types, head sizes and block sizes (powers of two) that they support. Everything else takes
    the PyTorch path.
    """
    if not q.is_cuda or block_size & (block_size - 1):
        return False
    try:
        from kernels.checks import DTYPES, HEAD_SIZES
    except ImportError:  # no Triton on this platform
        return False
    return q.dtype in DTYPES and q.shape[-1] in HEAD_SIZES and value_dim in HEAD_SIZES
