"""What a step costs in FLOPs and bytes, and the least time hardware needs for them: the prediction before the clock.

Counting is enough to know which resource a step waits for: `time = max(flops / rate, bytes / bandwidth)`, the
roofline. Every chapter predicts with this file, then measures. What it leaves out, and so where it is too
optimistic: activations written between layers, element-wise arithmetic, the fixed price of a call or a kernel
launch, caches of the processor, and that no real kernel reaches both limits.

Units: bytes, FLOPs (2 per multiply-add), seconds; FLOP/s, B/s. Letters: n new tokens of a sequence that then holds
m, H query heads, K key/value heads, d head size, L layers, D width, F hidden width, V vocabulary.
Williams et al. 2009, "Roofline"; Shazeer 2019, section 2.4.1 (memory access against arithmetic in decoding).
"""

import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minillm.model.config import KVShape, ModelConfig

GB = 10**9  # data sheets count in powers of ten

# --- hardware


@dataclass(frozen=True)
class Hardware:
    """A machine as two rates and a size: `bandwidth` in B/s, `flops` in FLOP/s, `memory` in bytes."""

    name: str
    bandwidth: float
    flops: float
    memory: int

    @property
    def ridge(self) -> float:
        """`flops / bandwidth`, FLOP/B: with fewer FLOPs per byte than this a step waits for memory."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """`min(flops, intensity * bandwidth)`: the most FLOP/s at `intensity` FLOP/B."""
        return min(self.flops, intensity * self.bandwidth)

    def time(self, flops: float, nbytes: float) -> float:
        """`max(flops / rate, nbytes / bandwidth)`, seconds: the least time, computing and moving fully overlapped."""
        return max(flops / self.flops, nbytes / self.bandwidth)


# Data sheets: HBM bandwidth, dense 16-bit matrix rate with float32 accumulation (T4: fp16 only), memory.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("T4", 320e9, 65e12, 16 * GB),
        Hardware("RTX 4090", 1008e9, 165.2e12, 24 * GB),
        Hardware("A100 40GB", 1555e9, 312e12, 40 * GB),
        Hardware("A100 80GB", 2039e9, 312e12, 80 * GB),
        Hardware("H100", 3350e9, 989.4e12, 80 * GB),
        Hardware("H200", 4800e9, 989.4e12, 141 * GB),
    )
}


@dataclass(frozen=True)
class Cost:
    """What one step computes (`flops`, FLOPs) and moves (`nbytes`, bytes)."""

    flops: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """`flops / nbytes`, FLOP/B."""
        return self.flops / self.nbytes

    def time(self, hardware: Hardware) -> float:
        """The least time of this step on `hardware`, seconds."""
        return hardware.time(self.flops, self.nbytes)


# --- models


@dataclass(frozen=True)
class PublicModel:
    """A published model as memory sees it: its number of parameters and the row it leaves in each layer's cache."""

    name: str
    n_layers: int
    kv_shape: KVShape
    parameters: int


Model = ModelConfig | PublicModel

# MLA caches one row [c_kv, k_rope] of 512 + 64 elements for all heads; its value is a prefix of it and costs nothing.
_MLA = KVShape(heads=1, key_dim=512 + 64, value_dim=0)
PUBLIC_MODELS = {
    model.name: model
    for model in (
        PublicModel("OPT-13B", 40, KVShape(40, 128, 128), 13 * 10**9),
        PublicModel("OPT-175B", 96, KVShape(96, 128, 128), 175 * 10**9),
        PublicModel("Llama-2-7B", 32, KVShape(32, 128, 128), 6_738_415_616),
        PublicModel("Llama-2-13B", 40, KVShape(40, 128, 128), 13_015_864_320),
        PublicModel("Llama-3-8B", 32, KVShape(8, 128, 128), 8_030_261_248),
        PublicModel("Llama-3-70B", 80, KVShape(8, 128, 128), 70_553_706_496),
        PublicModel("Llama-3.1-405B", 126, KVShape(8, 128, 128), 405_853_388_800),
        PublicModel("Qwen2.5-72B", 80, KVShape(8, 128, 128), 727 * 10**8),
        PublicModel("DeepSeek-67B", 95, KVShape(8, 128, 128), 67 * 10**9),
        PublicModel("DeepSeek-V2", 60, _MLA, 236 * 10**9),
        PublicModel("DeepSeek-V3", 61, _MLA, 671 * 10**9),
    )
}


def _layer_elements(config: ModelConfig) -> int:
    """`D (H + 2K) d + H d D + 3 D F`: elements of one layer's matrices (qkv, out, gate_up, down)."""
    heads = 2 * config.n_heads + 2 * config.n_kv_heads
    return config.dim * (heads * config.head_dim + 3 * config.hidden_dim)


def parameter_count(model: Model) -> int:
    """`V D + L (matrices + 2 D) + D`: embedding (tied, counted once), layers with two norms each, last norm.

    Holds for the standard attention layer. A PublicModel gives the published number.
    """
    if isinstance(model, PublicModel):
        return model.parameters
    layer = _layer_elements(model) + 2 * model.dim
    return model.vocab_size * model.dim + model.n_layers * layer + model.dim


def weight_bytes(model: Model, bytes_per_element: float) -> float:
    """`parameters * bytes_per_element`, bytes."""
    return parameter_count(model) * bytes_per_element


def kv_bytes_per_token(model: Model, bytes_per_element: float) -> float:
    """`L * K * (d_k + d_v) * bytes_per_element`, bytes that one token leaves in the cache.

    MLA: `L * (d_c + d_rope) * bytes_per_element`. `bytes_per_element` may be a fraction: 4-bit elements take 0.5, and
    more with their scales.
    """
    return model.n_layers * model.kv_shape.elements * bytes_per_element


# --- steps


def forward_flops(config: ModelConfig, n: int, m: int, logits_rows: int | None = None) -> int:
    """`L (2 n matrices + 2 n m H 2d) + 2 rows D V`: FLOPs of n new tokens of a sequence that then holds m.

    Matrix products only: linear layers, scores and weighted values over the full n x m rectangle (the naive path
    computes what the causal mask then hides), logits of `logits_rows` rows (all n when None).
    """
    rows = n if logits_rows is None else logits_rows
    linear = 2 * n * _layer_elements(config)
    attention = 2 * n * m * config.n_heads * 2 * config.head_dim
    return config.n_layers * (linear + attention) + 2 * rows * config.dim * config.vocab_size


def step(
    config: ModelConfig,
    sequences: Sequence[tuple[int, int]],
    bytes_per_element: float,
    kv_bytes_per_element: float | None = None,
) -> Cost:
    """One forward pass over a ragged batch: `sequences` lists (n, m), n new tokens of a sequence that then holds m.

    FLOPs add up. Bytes: the weights once for all sequences, and of each sequence its own cache, m tokens read and n
    written. That sharing is all that batching gains. Elements of the cache are as wide as the weights' when
    `kv_bytes_per_element` is None. Activations are ignored.
    """
    kv_bytes = bytes_per_element if kv_bytes_per_element is None else kv_bytes_per_element
    flops = sum(forward_flops(config, n, m) for n, m in sequences)
    tokens_moved = sum(n + m for n, m in sequences)
    return Cost(flops, weight_bytes(config, bytes_per_element) + tokens_moved * kv_bytes_per_token(config, kv_bytes))


def forward_bytes(config: ModelConfig, n: int, m: int, bytes_per_element: float) -> float:
    """`weights + (m + n) * kv_bytes_per_token`, bytes that n new tokens of a sequence that then holds m move."""
    return step(config, [(n, m)], bytes_per_element).nbytes


def prefill(config: ModelConfig, n: int, bytes_per_element: float, kv_bytes_per_element: float | None = None) -> Cost:
    """A prompt of n tokens into an empty cache."""
    return step(config, [(n, n)], bytes_per_element, kv_bytes_per_element)


def decode(
    config: ModelConfig, m: int, bytes_per_element: float, batch: int = 1, kv_bytes_per_element: float | None = None
) -> Cost:
    """One more token for each of `batch` sequences, which then hold m tokens each."""
    return step(config, [(1, m)] * batch, bytes_per_element, kv_bytes_per_element)


def without_cache(config: ModelConfig, position: int, bytes_per_element: float) -> Cost:
    """The token at `position` when nothing is kept: all `position` tokens before it run again.

    With a cache the same token costs `decode(config, position)`.
    """
    return prefill(config, position, bytes_per_element)


# --- memory


def slots(kv_bytes: float, bytes_per_token: float) -> int:
    """`floor(kv_bytes / bytes_per_token)`: tokens (or anything of that size) that fit; 0 when there is no room."""
    return max(0, int(kv_bytes // bytes_per_token))


def sequences_that_fit(hardware: Hardware, model: Model, tokens_per_sequence: int, bytes_per_element: float) -> int:
    """`floor((memory - weights) / (tokens * kv_bytes_per_token))`; 0 when the weights alone do not fit."""
    free = hardware.memory - weight_bytes(model, bytes_per_element)
    return slots(free, tokens_per_sequence * kv_bytes_per_token(model, bytes_per_element))


# --- intensities, FLOP/B


def attention_intensity(queries: int, keys: int, group: int = 1, bytes_per_element: float = 2) -> float:
    """`(2 / bytes) * G S T / (G S + T)`, FLOP/B, for S queries over T keys and G query heads to a key head.

    A key head costs 4 G S T d FLOPs and moves q, out (G S d each), k, v (T d each). Decoding (S = 1) in 16 bits is
    about G whatever T is: no batch helps, since nobody shares these bytes.
    """
    rows = group * queries
    return 2 / bytes_per_element * rows * keys / (rows + keys)


def critical_batch(ridge: float, d_in: int, d_out: int, weight_bytes: float = 2, activation_bytes: float = 2) -> float:
    """Rows above which `[B, D] x [D, F]` waits for arithmetic; infinite where no batch gets there.

    Solves `2 B D F / (w D F + a B (D + F)) = I` for B, with w and a bytes per element of weights and activations and
    I the ridge in FLOP/B: `B = I w D F / (2 D F - I a (D + F))`; in 16 bits `I D F / (D F - I (D + F))`.
    """
    gain = 2 * d_in * d_out - ridge * activation_bytes * (d_in + d_out)
    return ridge * weight_bytes * d_in * d_out / gain if gain > 0 else math.inf


def critical_batch_weights_only(ridge: float, weight_bytes: float) -> float:
    """`I w / 2` rows: `critical_batch` when activations weigh nothing beside the weights; w bytes per weight."""
    return ridge * weight_bytes / 2


# --- this machine


def measure_machine(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seconds: float = 0.5
) -> Hardware:
    """This machine as PyTorch sees it: a product of square matrices for the rate, and for the bandwidth the product of
    a matrix that no cache holds with one vector, which is what decoding does; both in `dtype`.

    Best of the repetitions that fit in about `seconds` for each of the two. A GPU runs ten between two clock
    readings, so that launches and the synchronization weigh little.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    size, large_bytes = (8192, 4 * 256 * 2**20) if on_gpu else (1024, 256 * 2**20)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    flops = 2 * size**3 / _best_seconds(lambda: torch.mm(matrix, matrix, out=product), on_gpu, seconds)
    large = torch.ones(large_bytes // (1024 * dtype.itemsize), 1024, dtype=dtype, device=device)
    vector = torch.ones(1024, dtype=dtype, device=device)
    bandwidth = large_bytes / _best_seconds(lambda: torch.mv(large, vector), on_gpu, seconds)
    where = torch.cuda.get_device_name(device) if on_gpu else f"CPU, threads: {torch.get_num_threads()}"
    return Hardware(f"{where}, {str(dtype).removeprefix('torch.')}", bandwidth, flops, _memory(device))


def _best_seconds(f: Callable[[], object], on_gpu: bool, budget: float) -> float:
    """The fastest repetition of f, at least one after a warm-up, until `budget` seconds are used."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    calls = 10 if on_gpu else 1
    f()
    best, end = math.inf, time.perf_counter() + budget
    while best == math.inf or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        wait()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _memory(device: torch.device) -> int:
    """Bytes of memory of `device`; of the whole machine for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if platform.system() == "Windows":
        kilobytes = ctypes.c_ulonglong()
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
        return kilobytes.value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
