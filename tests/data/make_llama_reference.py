"""The logits of the tiny checkpoint by `transformers`, kept for tests/test_transformer.py.

`pip install transformers`, then `python tests/data/make_llama_reference.py`; it is not among the requirements. Run it
again when the weights change.
"""

import json
from pathlib import Path

import torch
import transformers

import minillm
from minillm.measure.against_transformers import llama

PROMPT = "Once upon a time there was a king who could not abide the cold."
POSITIONS = (0, 1, 31, 62)

model, tokenizer = minillm.load("tiny", device="cpu")
with torch.inference_mode():
    logits = llama(model.config)(torch.tensor([tokenizer.encode(PROMPT)])).logits[0]  # [N, vocab]
reference = {
    "made by": f"transformers {transformers.__version__}, LlamaForCausalLM, float32",
    "command": "python tests/data/make_llama_reference.py",
    "prompt": PROMPT,
    "sum": logits.double().sum().item(),
    "logits": {str(p): [round(x, 6) for x in logits[p].tolist()] for p in POSITIONS},
}
path = Path(__file__).parent / "llama_reference.json"
path.write_text(json.dumps(reference, indent=1) + "\n")
print(f"wrote {path}: {len(logits)} rows, sum {reference['sum']:.4f}")
