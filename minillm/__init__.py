"""minillm: how language models are made fast at inference, built from scratch in eight small modules.

`load()` gives the course's model, `generate()` is the loop that every chapter's cache runs under.
"""

import importlib.util
from pathlib import Path

import torch

from minillm.device import pick_device
from minillm.generate import generate
from minillm.model.checkpoint import WEIGHTS, load_checkpoint
from minillm.model.tokenizer import ByteTokenizer
from minillm.model.transformer import Transformer

__all__ = ["generate", "held_out_text", "load"]


def load(
    name_or_path: str | Path = "tiny", device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, ByteTokenizer]:
    """A trained model, ready for inference, and its tokenizer.

    `name_or_path` is a shipped model ("tiny", "draft") or the path of a safetensors file. `device=None` means the
    best one present, `dtype=None` float32. Raises ValueError for an unknown name, a dtype without fractions, a
    device that is not here, or a file that does not hold such a model.
    """
    dtype = torch.float32 if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    path = WEIGHTS / f"{name_or_path}.safetensors"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in WEIGHTS.glob("*.safetensors")))
        raise ValueError(f"no model {str(name_or_path)!r}: give a path to a safetensors file or one of {names}")
    return load_checkpoint(path, pick_device(device), dtype), ByteTokenizer()


def held_out_text() -> list[str]:
    """Four fairy tales written for this project: no model has been trained on them. One string a tale."""
    return (WEIGHTS.parent / "held_out.txt").read_text("utf-8").strip().split("\n\n")


def _check_kernels_package() -> None:
    """The Triton kernels are a top-level package, and its name is taken on PyPI too: say so instead of using that."""
    spec = importlib.util.find_spec("kernels")
    found = Path(spec.origin).parent if spec and spec.origin else None
    if found != Path(__file__).parents[1] / "kernels":
        where = f"a foreign package in {found}" if found else "missing"
        raise ImportError(
            f"minillm needs its own package 'kernels', but the one found here is {where}. "
            "Run from the repository's folder, or uninstall the other one: pip uninstall kernels"
        )


_check_kernels_package()
