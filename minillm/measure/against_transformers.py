"""Our decoding beside that of Hugging Face `transformers`, on the same weights, prompt and threads.

`pip install transformers`, then `python -m minillm.measure.against_transformers`; it is not among the requirements.
The two take turns, so that a busy machine slows both alike, and their tokens are compared.
"""

import argparse
import statistics
import time

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import minillm
from minillm.course.tour import disagreement
from minillm.kv_cache import KVCache
from minillm.measure.metrics import Timeline, environment, record
from minillm.model.checkpoint import WEIGHTS
from minillm.model.config import ModelConfig
from minillm.torch_attention import torch_attention


class Clock(BaseStreamer):
    """Notes when `transformers` hands over the prompt (at once) and then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """One more piece of the text is there."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def llama(config: ModelConfig, name: str = "tiny") -> LlamaForCausalLM:
    """The shipped checkpoint in `transformers`' own implementation: its tensors need no renaming."""
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_seq_len,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=True,
        )
    )
    tensors = {key: x.float() for key, x in load_file(WEIGHTS / f"{name}.safetensors").items()}
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    if unexpected or missing != ["lm_head.weight"]:  # the head is the embedding
        raise ValueError(f"the checkpoint does not fit: missing {missing}, unexpected {unexpected}")
    theirs.tie_weights()
    return theirs.eval()


def generate_theirs(model: LlamaForCausalLM, prompt: list[int], n: int) -> tuple[list[int], Timeline]:
    """Ids and times of greedy generation by `transformers`."""
    clock, submitted = Clock(), time.perf_counter()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=n, streamer=clock, **settings)
    return ids[0, len(prompt) :].tolist(), Timeline(submitted, tuple(clock.times[1:]))


def main() -> None:
    """Let both generate in turn and print TTFT and TPOT (the median gap), their ratios, and whether tokens agree."""
    parser = argparse.ArgumentParser(prog="python -m minillm.measure.against_transformers", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours, tokenizer = minillm.load("tiny", device="cpu")
    theirs = llama(ours.config)
    prompt = tokenizer.encode(minillm.held_out_text()[1])[: args.prompt_tokens]
    times: dict[str, list[Timeline]] = {"minillm": [], "transformers": []}
    for _ in range(args.rounds + 1):
        cache = KVCache(ours.config, len(prompt) + args.new_tokens, "cpu", attention=torch_attention)
        our_ids, timeline = record(minillm.generate(ours, prompt, args.new_tokens, cache))
        times["minillm"].append(timeline)
        their_ids, timeline = generate_theirs(theirs, prompt, args.new_tokens)
        times["transformers"].append(timeline)
    print(f"{len(prompt)} prompt tokens, {args.new_tokens} new ones, {args.rounds} rounds, {environment()}")
    medians = {}
    for name, runs in times.items():
        runs = runs[1:]  # the first round warmed both up
        ttft, tpot = (statistics.median(x) * 1e3 for x in ([r.ttft for r in runs], [g for r in runs for g in r.gaps]))
        medians[name] = ttft, tpot
        print(f"{name:12}  TTFT {ttft:6.1f} ms  TPOT {tpot:5.2f} ms")
    (ttft, tpot), (their_ttft, their_tpot) = medians.values()
    print(f"{'ratio':12}  TTFT {ttft / their_ttft:6.2f}     TPOT {tpot / their_tpot:5.2f}")
    agree = disagreement(ours, prompt, our_ids, their_ids) is None
    print("the tokens agree" if agree else f"the tokens differ: {our_ids} and {their_ids}")


if __name__ == "__main__":
    main()
