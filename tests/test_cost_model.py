"""The cost model against the model it describes, against PyTorch's own FLOP counter, and against published figures."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minillm.measure.cost_model import (
    GB,
    GPUS,
    PUBLIC_MODELS,
    Cost,
    Hardware,
    attention_intensity,
    critical_batch,
    critical_batch_weights_only,
    decode,
    forward_bytes,
    forward_flops,
    kv_bytes_per_token,
    measure_machine,
    parameter_count,
    prefill,
    sequences_that_fit,
    slots,
    step,
    weight_bytes,
    without_cache,
)
from minillm.model.config import CONFIGS, ModelConfig
from minillm.model.transformer import Transformer
from minillm.naive_attention import NoCache, naive_attention

BF16 = 2  # bytes per element
GiB = 2**30
TPU_V5E = Hardware("TPU v5e", bandwidth=820e9, flops=197e12, memory=16 * GB)


def config(dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=24, vocab=32) -> ModelConfig:
    return ModelConfig(vocab, dim, layers, heads, kv_heads, head_dim, hidden, max_seq_len=64)


@st.composite
def configs(draw) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    return config(
        dim=draw(st.integers(1, 20)),
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 30)),
        vocab=draw(st.integers(2, 40)),
    )


# --- the model


@given(configs())
@settings(max_examples=25, deadline=None)
def test_parameters_are_counted_as_the_real_model_has_them(config):
    real = sum(parameter.numel() for parameter in Transformer(config).parameters())
    assert parameter_count(config) == real, f"{config}: the model has {real} parameters"


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_the_shipped_models(name):
    real = sum(parameter.numel() for parameter in Transformer(CONFIGS[name]).parameters())
    assert parameter_count(CONFIGS[name]) == real, name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Llama-2-7B", ModelConfig(32_000, 4096, 32, 32, 32, 128, 11_008, 4096)),
        ("Llama-2-13B", ModelConfig(32_000, 5120, 40, 40, 40, 128, 13_824, 4096)),
        ("Llama-3-8B", ModelConfig(128_256, 4096, 32, 32, 8, 128, 14_336, 8192)),
        ("Llama-3-70B", ModelConfig(128_256, 8192, 80, 64, 8, 128, 28_672, 8192)),
        ("Llama-3.1-405B", ModelConfig(128_256, 16_384, 126, 128, 8, 128, 53_248, 131_072)),
    ],
)
def test_published_sizes_follow_from_the_formula(name, shape):
    untied = parameter_count(shape) + shape.vocab_size * shape.dim  # these models have a second matrix for the logits
    assert untied == parameter_count(PUBLIC_MODELS[name]), f"{name}: {untied:,} parameters from its shape"
    assert kv_bytes_per_token(shape, BF16) == kv_bytes_per_token(PUBLIC_MODELS[name], BF16), f"{name}: cache row"


# --- FLOPs


class RandomPast:
    """A cache that already holds tokens: enough of one for counting what a step computes."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def attend(self, layer, q, k, v, scale=None):
        k, v = (torch.cat([torch.zeros(self.tokens, *x.shape[1:]), x]) for x in (k, v))
        return naive_attention(q, k, v, scale)


def counted_flops(config: ModelConfig, n: int, m: int, cache) -> int:
    model = Transformer(config)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(n, dtype=torch.long), torch.arange(m - n, m), cache)
    return counter.get_total_flops()


@given(configs(), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_flops_without_a_cache_are_those_pytorch_counts(config, n):
    counted = counted_flops(config, n, n, NoCache())
    assert forward_flops(config, n, n) == counted, f"{n} tokens of {config}"
    assert without_cache(config, n, 4).flops == prefill(config, n, 4).flops == counted, f"{n} tokens of {config}"


@given(configs(), st.integers(1, 6), st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_flops_behind_a_cache_are_those_pytorch_counts(config, n, past):
    counted = counted_flops(config, n, past + n, RandomPast(past))
    assert forward_flops(config, n, past + n) == counted, f"{n} new tokens behind {past} of {config}"
    if n == 1:
        assert decode(config, past + 1, 4).flops == counted, f"decoding behind {past} tokens of {config}"


def test_rows_without_logits_save_the_output_matrix_only():
    shape = config()
    saved = forward_flops(shape, 10, 10) - forward_flops(shape, 10, 10, logits_rows=1)
    assert saved == 9 * 2 * shape.dim * shape.vocab_size, "nine rows less of [D] x [D, V], 2 FLOPs per multiply-add"


def test_a_wide_transformer_needs_24_l_d2_flops_a_token():
    # MLP of 8 d² elements: SwiGLU has 3 d F, and F = 8 d / 3 is no whole number at this width.
    wide = ModelConfig(256, 8192, 64, 64, 64, 128, 8 * 8192 // 3, 4096)
    linear = forward_flops(wide, n=1, m=0, logits_rows=0)
    assert linear == pytest.approx(103_079_215_104, rel=1e-4), "24 L d², the linear layers of one token"
    assert kv_bytes_per_token(wide, BF16) == 2_097_152, "2 * 64 layers * 8,192 elements * 2 bytes"


# --- bytes


PUBLISHED_KV_BYTES = {
    "OPT-13B": 819_200,
    "Llama-2-13B": 819_200,
    "Llama-2-7B": 524_288,
    "Llama-3-8B": 131_072,
    "Llama-3-70B": 327_680,
    "Qwen2.5-72B": 327_680,
    "Llama-3.1-405B": 516_096,
    "DeepSeek-67B": 389_120,
    "DeepSeek-V2": 69_120,
    "DeepSeek-V3": 70_272,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED_KV_BYTES.items())
def test_cache_bytes_per_token_are_the_published_ones(name, published):
    assert kv_bytes_per_token(PUBLIC_MODELS[name], BF16) == published, f"{name}, 16-bit elements"


def test_cache_of_4096_tokens_of_llama_2_7b_is_2_gib():
    assert 4096 * kv_bytes_per_token(PUBLIC_MODELS["Llama-2-7B"], BF16) == 2 * GiB


def test_mla_saves_82_percent_at_equal_precision():
    v2, dense = (kv_bytes_per_token(PUBLIC_MODELS[name], BF16) for name in ("DeepSeek-V2", "DeepSeek-67B"))
    assert round(1 - v2 / dense, 3) == 0.822, "bf16 against bf16; the paper's 93.3 % compares 6-bit elements with bf16"


@pytest.mark.parametrize(("width", "heads", "kv_heads", "head_dim"), [(3072, 16, 16, 256), (1024, 16, 8, 128)])
def test_the_cache_row_follows_head_dim_and_not_the_width(width, heads, kv_heads, head_dim):
    shape = config(dim=width, layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    assert kv_bytes_per_token(shape, BF16) == 2 * kv_heads * head_dim * BF16, f"width {width}, {heads} heads"


def test_a_forward_moves_the_weights_once_and_each_token_of_the_cache_once():
    shape = config()
    row = kv_bytes_per_token(shape, 4)
    assert forward_bytes(shape, 3, 10, 4) == weight_bytes(shape, 4) + 10 * row + 3 * row, "m read and n written"
    assert prefill(shape, 10, 4).nbytes == forward_bytes(shape, 10, 10, 4), "a prefill writes all that it reads"


@given(st.integers(1, 50), st.integers(1, 1000))
def test_a_batch_shares_the_weights_but_not_the_caches(batch, m):
    shape = config()
    one, many, weights = decode(shape, m, 2), decode(shape, m, 2, batch=batch), weight_bytes(shape, 2)
    assert many.flops == batch * one.flops, "FLOPs are nobody's to share"
    assert many.nbytes - weights == batch * (one.nbytes - weights), "every sequence moves its own cache"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6))
def test_a_ragged_step_is_the_sum_of_its_sequences_with_the_weights_once(sequences):
    shape = config()
    pairs = [(n, past + n) for n, past in sequences]
    total, alone = step(shape, pairs, 2), [step(shape, [pair], 2) for pair in pairs]
    assert total.flops == sum(cost.flops for cost in alone)
    assert total.nbytes == sum(cost.nbytes for cost in alone) - (len(pairs) - 1) * weight_bytes(shape, 2)


def test_cache_and_weights_may_have_elements_of_different_width():
    shape = config()
    moved = decode(shape, 100, bytes_per_element=0.5, kv_bytes_per_element=2).nbytes
    assert moved == parameter_count(shape) / 2 + 101 * kv_bytes_per_token(shape, 2), "4-bit weights, 16-bit cache"


def test_a_prompt_in_8_chunks_reads_28_chunks_of_cache_again():
    shape, chunk = config(), 16
    steps = [step(shape, [(chunk, end)], 2) for end in range(chunk, 8 * chunk + 1, chunk)]
    whole = prefill(shape, 8 * chunk, 2)
    again = sum(cost.nbytes for cost in steps) - whole.nbytes - 7 * weight_bytes(shape, 2)
    assert again == 28 * chunk * kv_bytes_per_token(shape, 2), "N (N - 1) / 2 chunks, beside the weights 7 more times"


@given(st.integers(2, 2000))
def test_a_token_without_a_cache_costs_its_position_times_as_much(position):
    shape = CONFIGS["tiny"]
    factor = without_cache(shape, position, 4).flops / decode(shape, position, 4).flops
    assert factor == pytest.approx(position), "the same rows and the same keys, for `position` queries instead of one"


# --- hardware


@pytest.mark.parametrize(
    ("gpu", "ridge"),
    [("T4", 203), ("RTX 4090", 163.9), ("A100 40GB", 200.6), ("A100 80GB", 153.0), ("H100", 295.3), ("H200", 206.1)],
)
def test_ridges_are_the_published_ones(gpu, ridge):
    digits = 0 if gpu == "T4" else 1
    assert round(GPUS[gpu].ridge, digits) == ridge, f"{gpu}, FLOP/B"


def test_adding_two_vectors_on_an_h100_takes_at_least_3_85_ms():
    seconds = Cost(flops=2**30, nbytes=12 * 2**30).time(GPUS["H100"])
    assert round(seconds * 1e3, 2) == 3.85, "two reads and one write of 2^30 float32, bound by memory"


@given(st.floats(1, 1e18), st.floats(1, 1e15))
def test_a_step_runs_at_the_attainable_rate(flops, nbytes):
    cost, gpu = Cost(flops, nbytes), GPUS["A100 80GB"]
    assert flops / cost.time(gpu) == pytest.approx(gpu.attainable(cost.intensity))
    waits_for_memory = cost.time(gpu) > flops / gpu.flops
    assert not waits_for_memory or cost.intensity < gpu.ridge, "memory is the limit only below the ridge"


def test_this_machine_is_measured_in_the_same_units():
    machine = measure_machine(seconds=0.05)
    assert 1e8 < machine.flops < 1e16, f"FLOP/s of {machine}"
    assert 1e8 < machine.bandwidth < 1e14, f"B/s of {machine}"
    assert 1e8 < machine.memory < 1e15, f"bytes of {machine}"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_measured_in_the_same_units():
    gpu = measure_machine(torch.float16, device="cuda", seconds=0.05)
    assert 1e12 < gpu.flops < 1e16, f"FLOP/s of {gpu}"
    assert 1e10 < gpu.bandwidth < 1e14, f"B/s of {gpu}"
    assert gpu.memory == torch.cuda.mem_get_info()[1], f"bytes of {gpu}"


# --- memory


def test_slots_are_the_published_ones():
    opt_13b, opt_175b = (kv_bytes_per_token(PUBLIC_MODELS[name], BF16) for name in ("OPT-13B", "OPT-175B"))
    assert slots(12 * GiB, opt_13b) == 15_728, "OPT-13B with 12 GiB"
    assert slots(264 * GiB, opt_175b) == 60_074, "OPT-175B with 264 GiB"
    assert slots(-1, opt_13b) == 0, "no room"


@given(st.sampled_from(list(GPUS.values())), st.sampled_from(list(PUBLIC_MODELS.values())), st.integers(1, 200_000))
def test_one_more_sequence_would_not_fit(gpu, model, tokens):
    fit = sequences_that_fit(gpu, model, tokens, BF16)
    weights, sequence = weight_bytes(model, BF16), tokens * kv_bytes_per_token(model, BF16)
    assert weights + (fit + 1) * sequence > gpu.memory, f"{fit} sequences of {model.name} leave room for another"
    assert fit == 0 or weights + fit * sequence <= gpu.memory, f"{fit} sequences of {model.name} are too many"


@pytest.mark.parametrize(
    ("gpu", "llama_3_8b", "llama_2_13b"), [("T4", 0, 0), ("RTX 4090", 14, 0), ("A100 40GB", 44, 4), ("H100", 119, 16)]
)
def test_weights_fill_a_small_gpu_and_the_cache_a_large_one(gpu, llama_3_8b, llama_2_13b):
    fit = [sequences_that_fit(GPUS[gpu], PUBLIC_MODELS[name], 4096, BF16) for name in ("Llama-3-8B", "Llama-2-13B")]
    assert fit == [llama_3_8b, llama_2_13b], f"sequences of 4,096 tokens beside 16-bit weights on {gpu}"


# --- intensities


@pytest.mark.parametrize(("bits", "rows"), [(8, 120), (16, 240), (4, 60)])
def test_weight_only_critical_batches_are_the_published_ones(bits, rows):
    assert round(critical_batch_weights_only(TPU_V5E.ridge, bits / 8)) == rows, f"int{bits} weights, bf16 arithmetic"


@pytest.mark.parametrize(("d_in", "d_out", "rows"), [(4096, 4096, 345), (4096, 14_336, 326)])
def test_critical_batches_are_the_published_ones(d_in, d_out, rows):
    assert round(critical_batch(295.5, d_in, d_out)) == rows, f"[B, {d_in}] x [{d_in}, {d_out}] in bf16"


@given(st.integers(16, 20_000), st.integers(16, 20_000), st.sampled_from([0.5, 1, 2]))
def test_at_the_critical_batch_the_intensity_is_the_ridge(d_in, d_out, weight_bytes):
    ridge = GPUS["H100"].ridge
    rows = critical_batch(ridge, d_in, d_out, weight_bytes)
    limit = d_in * d_out / (d_in + d_out)  # FLOP/B of an endless batch: the weights cost nothing any more
    if math.isinf(rows):
        assert limit <= ridge, f"{d_in} x {d_out} does get compute-bound"
    else:
        moved = weight_bytes * d_in * d_out + 2 * rows * (d_in + d_out)
        assert Cost(2 * rows * d_in * d_out, moved).intensity == pytest.approx(ridge), f"{d_in} x {d_out}"
        assert rows >= critical_batch_weights_only(ridge, weight_bytes), "activations only make it later"


def test_attention_of_a_long_prompt_computes_and_of_one_token_reads():
    assert attention_intensity(4096, 4096) == 2048, "prefill: T / 2"
    assert attention_intensity(1, 4096) == pytest.approx(1, rel=1e-3), "decode: about 1 FLOP/B"
    for group in (2, 4, 8):
        assert attention_intensity(1, 4096, group) == pytest.approx(group, rel=1e-2), f"decode, {group} queries a head"


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_attention_intensity_is_flops_over_bytes(queries, keys, group, width):
    d = 64
    cost = Cost(flops=4 * group * queries * keys * d, nbytes=width * (2 * group * queries * d + 2 * keys * d))
    assert attention_intensity(queries, keys, group, width) == pytest.approx(cost.intensity)
