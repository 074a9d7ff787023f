"""Models that the tests share."""

import pytest
import torch
from equality import DAMAGES, ListCache, greedy

import minillm
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer, init_weights

SMALL = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, max_seq_len=128
)


@pytest.fixture(scope="session")
def small() -> Transformer:
    """A random model in float64 in which attention matters: the equality tests of every chapter run on it.

    Its weights are large (std 0.3). With the usual 0.02 the blocks hardly change the embedding, and a cache that
    returned nonsense would pass. That this model notices is checked here, before any test relies on it.
    """
    model = Transformer(SMALL).double().requires_grad_(False)
    init_weights(model, std=0.3, generator=torch.Generator().manual_seed(0))
    prompt = [5, 17, 42, 3, 61, 8, 29]
    right = greedy(model, prompt, 12)
    assert greedy(model, prompt, 12, ListCache(SMALL.n_layers)) == right, "an undamaged cache must change nothing"
    for name, damage in DAMAGES.items():
        wrong = greedy(model, prompt, 12, ListCache(SMALL.n_layers, damage))
        assert wrong != right, f"a cache whose keys are {name} went unnoticed"
    return model


@pytest.fixture(scope="session")
def tiny() -> Transformer:
    """The trained model, float32, on the CPU."""
    return minillm.load("tiny", device="cpu")[0]
