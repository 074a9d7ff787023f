"""Speculation against plain greedy decoding, everywhere: `python tests/speculation_sweep.py` (the suite takes a part).

Prompts, γ from 1 to 8, both kinds of draft, alone on every cache and in the engine with pools small enough to preempt.
"""

import itertools
import random
from collections.abc import Iterable

import torch
from equality import greedy

from minillm.continuous_batching import Engine, Request, Scheduler
from minillm.generate import Cache
from minillm.kv_cache import KVCache
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer, init_weights
from minillm.naive_attention import NoCache
from minillm.paged_cache import PagedKVCache
from minillm.speculative_decoding import Draft, DraftModel, NGrams, Rounds, Speculative, speculative_generate


def model(seed: int = 1, vocab_size: int = 64, dim: int = 32, max_seq_len: int = 128) -> Transformer:
    """A small random model in float64 in which attention matters."""
    config = ModelConfig(vocab_size, dim, 2, 4, 2, dim // 4, hidden_dim=48, max_seq_len=max_seq_len)
    made = Transformer(config).double().requires_grad_(False)
    init_weights(made, 0.3, torch.Generator().manual_seed(seed))
    return made


def near(target: Transformer, noise: float = 0.02, seed: int = 9) -> Transformer:
    """A draft that often agrees with the target: its weights with noise."""
    draft = Transformer(target.config).double().requires_grad_(False)
    draft.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return draft


def prompts(n: int, seed: int = 3) -> list[list[int]]:
    """Prompts of 1 to 40 tokens; every other one repeats itself, for n-grams, and every third begins alike."""
    rng = random.Random(seed)
    start = [rng.randrange(64) for _ in range(9)]
    made = []
    for i in range(n):
        ids = [rng.randrange(64) for _ in range(rng.randrange(1, 14))]
        made.append(([] if i % 3 else start) + ((ids * 3)[:31] if i % 2 else ids))
    return made


def drafts(target: Transformer, blocks: int | None = None, block_size: int = 4) -> Iterable[Draft]:
    """One of each kind: a model that agrees often, one that hardly does, n-grams. With a pool of `blocks`, if given."""
    for draft in (near(target), model(seed=5)):
        pool = blocks and PagedKVCache(draft.config, blocks, block_size, "cpu", draft.dtype)
        yield DraftModel(draft, pool or None)
    yield NGrams(6, 1)


def caches(target: Transformer, n: int) -> Iterable[Cache]:
    """Every cache for one sequence of n tokens."""
    yield NoCache()
    yield KVCache(target.config, n, "cpu", target.dtype)
    yield PagedKVCache(target.config, -(-n // 3), 3, "cpu", target.dtype).sequence()


def check_alone(target: Transformer, texts: Iterable[list[int]], gammas: Iterable[int], n: int = 24) -> int:
    """Every prompt, γ, draft and cache: the tokens of plain decoding. How many were compared."""
    count = 0
    for prompt, gamma in itertools.product(texts, gammas):
        expected = greedy(target, prompt, n)
        for draft in drafts(target):
            for cache in caches(target, len(prompt) + n):
                new = list(speculative_generate(target, draft, prompt, n, gamma, cache))
                assert new == expected, f"{prompt}, gamma {gamma}, {type(draft).__name__}, {type(cache).__name__}"
                assert cache.length in (0, len(prompt) + n - 1)
                count += 1
    return count


def check_engine(target: Transformer, texts: list[list[int]], gammas: Iterable[int], n: int = 20) -> tuple[Rounds, int]:
    """The same in the engine, with pools that preempt, small budgets, and a draft's pool that is too small: the rounds,
    and how often a sample was preempted.
    """
    rounds, preemptions = Rounds(), 0
    expected = [greedy(target, prompt, n) for prompt in texts]
    for gamma, (blocks, draft_blocks, budget) in itertools.product(gammas, [(60, 60, 64), (20, 60, 9), (20, 17, 5)]):
        for draft in drafts(target, draft_blocks):
            cache = PagedKVCache(target.config, blocks, 4, "cpu", target.dtype)
            decoding = Speculative(target, draft, gamma)
            results = Engine(target, cache, Scheduler(4, budget), decoding).run([Request(p, n) for p in texts])
            for prompt, result, tokens in zip(texts, results, expected, strict=True):
                where = f"{prompt}, gamma {gamma}, {type(draft).__name__}, {blocks} blocks, budget {budget}"
                assert result.token_ids == tokens, f"{where}: {result.error}"
            rounds += decoding.rounds
            preemptions += sum(r.samples[0].preemptions for r in results)
            assert cache.num_free_blocks == blocks
            if isinstance(draft, DraftModel):
                assert draft.pool.num_free_blocks == draft_blocks, "the draft's pool is whole at the end"
    return rounds, preemptions


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = model()
    print(f"alone: {check_alone(target, prompts(12), range(1, 9))} runs equal plain decoding")
    rounds, preemptions = check_engine(target, prompts(8), range(1, 9))
    kept = f"{rounds.acceptance_rate:.0%} of the guesses kept"
    print(f"engine: {len(rounds)} rounds, {kept}, {preemptions} preemptions, all answers equal")
