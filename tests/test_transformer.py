"""The model: shapes, positions, and an independent implementation of the same architecture."""

import json
from pathlib import Path

import pytest
import torch
from equality import assert_close
from torch.nn import functional as F

import minillm
from minillm.generate import run
from minillm.model.config import CONFIGS, ModelConfig
from minillm.model.transformer import rope_factors, rotate
from minillm.naive_attention import NoCache

REFERENCE = Path(__file__).parent / "data" / "llama_reference.json"


def test_logits_of_the_tiny_model_equal_those_of_transformers(tiny):
    """The figures were made by `LlamaForCausalLM` on our checkpoint: tests/data/make_llama_reference.py."""
    reference = json.loads(REFERENCE.read_text())
    logits = run(tiny, list(reference["prompt"].encode()), NoCache())
    assert abs(logits.double().sum().item() - reference["sum"]) < 1e-4 * logits.numel(), "the sum of all logits"
    for position, row in reference["logits"].items():
        assert_close(logits[int(position)], torch.tensor(row), f"position {position} of {len(logits)}")


def plain_forward(state: dict[str, torch.Tensor], config: ModelConfig, ids: list[int]) -> torch.Tensor:
    """Llama once more, in complex numbers, head by head, with PyTorch's attention: no line shared with the model."""
    half = config.head_dim // 2
    angles = torch.outer(torch.arange(len(ids)).double(), config.rope_theta ** (-torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(angles), angles)  # [N, d/2]

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def heads(x, n):
        return x.view(len(ids), n, config.head_dim).transpose(0, 1)  # [heads, N, d]

    def turned(x):
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([z.real, z.imag], -1)

    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    x = state["embedding.weight"][ids]
    for i in range(config.n_layers):
        w = {k.removeprefix(f"blocks.{i}."): v for k, v in state.items() if k.startswith(f"blocks.{i}.")}
        h = norm(x, w["attention_norm.weight"])
        wq, wk, wv = w["attention.qkv.weight"].split([q_rows, kv_rows, kv_rows])
        q, k, v = turned(heads(h @ wq.T, config.n_heads)), turned(heads(h @ wk.T, config.n_kv_heads)), h @ wv.T
        repeat = config.n_heads // config.n_kv_heads
        k, v = (t.repeat_interleave(repeat, 0) for t in (k, heads(v, config.n_kv_heads)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(len(ids), -1)
        x = x + out @ w["attention.out.weight"].T
        gate, up = (norm(x, w["mlp_norm.weight"]) @ w["mlp.gate_up.weight"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down.weight"].T
    return norm(x, state["norm.weight"]) @ state["embedding.weight"].T


def test_logits_equal_a_second_implementation(small):
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    assert_close(run(small, ids, NoCache()), plain_forward(small.state_dict(), small.config, ids), "random, GQA")


def test_rotation_depends_on_the_distance_only():
    def turn(position):
        return rope_factors(torch.tensor([position]), CONFIGS["tiny"], torch.float64)

    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i, j):
        return (rotate(q, turn(i)) * rotate(k, turn(j))).sum()

    assert_close(score(5, 2), score(1005, 1002), "three apart, here and a thousand positions later")
    assert abs(score(5, 2) - score(5, 3)) > 1e-3, "two apart is another score"


def test_positions_are_taken_as_given(small):
    """Two texts in one call would only need a cache that keeps them apart: positions do not come from row numbers."""
    ids = torch.tensor([7, 9])
    with torch.inference_mode():
        same = small(ids, torch.tensor([0, 0]), NoCache())
        next_ = small(ids, torch.tensor([0, 1]), NoCache())
    assert not torch.allclose(same[1], next_[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 4}, "n_heads=6 is not a multiple of n_kv_heads=4"),
        ({"head_dim": 33}, "head_dim=33 must be even"),
        ({"n_layers": 0}, "n_layers must be positive and below .*, got 0"),
        ({"dim": 192.0}, "dim must be a whole number, got 192.0"),
        ({"dim": 2**62}, "dim must be positive and below"),
    ],
)
def test_contradictory_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(CONFIGS["tiny"].__dict__ | change))


def test_head_size_need_not_be_width_over_heads():
    config = ModelConfig(256, dim=24, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=8, max_seq_len=8)
    model = minillm.Transformer(config)
    assert run(model, [1, 2, 3], NoCache()).shape == (3, 256)


def test_the_course_models_have_the_promised_sizes():
    count = {name: sum(p.numel() for p in minillm.load(name)[0].parameters()) for name in CONFIGS}
    assert 3e6 <= count["tiny"] <= 5e6
    assert 20 <= count["tiny"] / count["draft"] <= 40
