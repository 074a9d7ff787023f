"""Chapter 2: the KV cache. What is kept so that a token runs once.

The bottleneck: without a memory every new token runs the whole text again, though no row of an old token ever
changes. The idea: of an old token attention needs only its key and its value, so keep these two, for every layer, in
memory that was reserved once. The invariant: rows 0 .. length-1 of every layer hold the keys and values of exactly
the committed tokens; what lies behind them is never read.

It reserves the longest text at once and one after another (chapter 3 stops both), and reads every row for every new
token (chapters 7 and 8 make rows smaller). Pope et al. 2022, "Efficiently scaling transformer inference", section 3.3.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.device import pick_device
from minillm.measure.memory import storage_bytes
from minillm.model.config import ModelConfig
from minillm.naive_attention import naive_attention

Slots = slice | Tensor
AttentionFunction = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


class PlainBuffer:
    """How rows are stored: as they are. `n_slots` rows of `[heads, dim]` for each of `n_layers` layers.

    Where a token's row lies (its slot) is the cache's business: a slice of slots, or a tensor of their numbers.
    Another way to store (chapter 8: in few bits) is another class with these methods.
    """

    def __init__(
        self, n_layers: int, n_slots: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Heads outside, slots inside: all rows of one head are one run of memory, and attention reads head by head.
        self.data = torch.empty(n_layers, heads, n_slots, dim, device=device, dtype=dtype)
        self._layers = self.data.unbind()

    @property
    def nbytes(self) -> int:
        """Bytes of storage, used or not."""
        return storage_bytes(self.data)

    def write(self, layer: int, slots: Slots, x: Tensor) -> None:
        """Put x `[n, heads, dim]` into n slots of a layer."""
        if isinstance(slots, slice):
            self._layers[layer][:, slots] = x.transpose(0, 1)
        else:
            self._layers[layer].index_copy_(1, slots, x.transpose(0, 1))

    def read(self, layer: int, slots: Slots) -> Tensor:
        """The rows `[m, heads, dim]` of m slots of a layer: a view for a slice, a copy for slot numbers."""
        if isinstance(slots, slice):
            return self._layers[layer][:, slots].transpose(0, 1)
        return self._layers[layer].index_select(1, slots).transpose(0, 1)

    def block_rows(self, blocks: Tensor, block_size: int) -> Tensor:
        """Numbers `[heads · n]` by which `read_blocks` finds n blocks of slots, the same in every layer: a block is
        one piece of memory for each head.
        """
        _, heads, n_slots, _ = self.data.shape
        firsts = torch.arange(0, heads * (n_slots // block_size), n_slots // block_size, device=blocks.device)
        return (firsts[:, None] + blocks).flatten()

    def read_blocks(self, layer: int, block_rows: Tensor, block_size: int) -> Tensor:
        """The rows `[n * block_size, heads, dim]` of n whole blocks of slots, in the order given: a copy.

        The same as `read` with every slot number, but piece by piece instead of row by row.
        """
        data = self._layers[layer]  # [heads, slots, dim]
        heads, _, dim = data.shape
        return data.view(-1, block_size * dim).index_select(0, block_rows).view(heads, -1, dim).transpose(0, 1)

    def blocks(self, layer: int, block_size: int) -> Tensor:
        """A view `[n_slots / block_size, block_size, heads, dim]` of a layer, for kernels that read in place."""
        return self._layers[layer].unflatten(1, (-1, block_size)).permute(1, 2, 0, 3)

    def copy(self, source: slice, target: slice) -> None:
        """Copy the rows of some slots to others, in all layers."""
        self.data[:, :, target] = self.data[:, :, source]


def check_kind(dtype: torch.dtype, device: torch.device, k: Tensor) -> None:
    """Raise ValueError if a model's k has another element type or device than a cache."""
    if k.dtype != dtype or k.device != device:
        raise ValueError(f"a cache of {dtype} on {device} met a model of {k.dtype} on {k.device}")


class KVCache:
    """The keys and values of one sequence of at most `max_seq_len` tokens, in contiguous rows.

    Storage for all of them is taken at once, `measure.cost_model.kv_bytes_per_token` bytes each. `attention` is any
    function with the signature of `naive_attention`. Raises ValueError for `max_seq_len` below 1 and for a device
    that is not here.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_seq_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        attention: AttentionFunction = naive_attention,
        buffer: Callable[..., PlainBuffer] = PlainBuffer,
    ) -> None:
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1, got {max_seq_len}")
        heads, key_dim, value_dim = config.kv_shape
        device = pick_device(device)
        self.keys = buffer(config.n_layers, max_seq_len, heads, key_dim, device, dtype)
        self.values = buffer(config.n_layers, max_seq_len, heads, value_dim, device, dtype)
        self.max_seq_len = max_seq_len
        self.attention = attention
        self.length = 0
        self._reserved = 0  # slots length .. _reserved-1 may be written
        self._dtype, self._device = dtype, device  # what the model must hand over

    @property
    def nbytes(self) -> int:
        """Bytes of storage, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, n: int) -> None:
        """Make room for n more tokens. Raises ValueError, and changes nothing, if `max_seq_len` does not allow it."""
        if n < 1:
            raise ValueError(f"a step runs at least one token, not {n}")
        if self.length + n > self.max_seq_len:
            raise ValueError(
                f"the cache holds {self.length} of max_seq_len={self.max_seq_len} tokens: no room for {n} more"
            )
        self._reserved = self.length + n

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Store k, v `[n, K, d]` of the n reserved tokens behind what is held; attend q `[n, H, d]` to all of it."""
        end = self.length + len(k)
        if end > self._reserved:
            raise ValueError(f"{len(k)} tokens attend, {self._reserved - self.length} are reserved: call reserve first")
        check_kind(self._dtype, self._device, k)
        new, all_ = slice(self.length, end), slice(0, end)
        self.keys.write(layer, new, k)
        self.values.write(layer, new, v)
        return self.attention(q, self.keys.read(layer, all_), self.values.read(layer, all_), scale)

    def advance(self, ids: Sequence[int]) -> None:
        """Commit the first `len(ids)` of the reserved tokens; the rest of the reservation is given back."""
        if len(ids) > self._reserved - self.length:
            raise ValueError(f"{len(ids)} tokens to commit, {self._reserved - self.length} are reserved")
        self.length += len(ids)
        self._reserved = self.length

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, and any reservation. Their rows stay and are overwritten later."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}: the cache holds {self.length} tokens")
        self.length = self._reserved = length
