"""Which device a model or a cache lives on when nobody says."""

import torch


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for; None means the best one present: an NVIDIA GPU if there is one, else the CPU.

    Raises ValueError for a device that does not exist here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
