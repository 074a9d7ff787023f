"""Weights on disk: one safetensors file, with the names of a Hugging Face Llama checkpoint and the config beside them.

The model keeps q, k, v (and gate, up) as one matrix each; the file keeps them apart, so every tensor of the file is
a tensor of `LlamaForCausalLM` under the same name. Only safetensors are read: a pickle can run code.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

WEIGHTS = Path(__file__).parent / "weights"


def tensor_layout(config: ModelConfig) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """For every parameter of `Transformer`: its name, and the tensors of the file it is made of, with their rows."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "embedding.weight", [("model.embed_tokens.weight", config.vocab_size)]
    for i in range(config.n_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield f"{ours}.attention_norm.weight", [(f"{theirs}.input_layernorm.weight", config.dim)]
        yield (
            f"{ours}.attention.qkv.weight",
            [(f"{theirs}.self_attn.{x}_proj.weight", rows) for x, rows in (("q", q), ("k", kv), ("v", kv))],
        )
        yield f"{ours}.attention.out.weight", [(f"{theirs}.self_attn.o_proj.weight", config.dim)]
        yield f"{ours}.mlp_norm.weight", [(f"{theirs}.post_attention_layernorm.weight", config.dim)]
        yield (
            f"{ours}.mlp.gate_up.weight",
            [(f"{theirs}.mlp.{x}_proj.weight", config.hidden_dim) for x in ("gate", "up")],
        )
        yield f"{ours}.mlp.down.weight", [(f"{theirs}.mlp.down_proj.weight", config.dim)]
    yield "norm.weight", [("model.norm.weight", config.dim)]


def save_checkpoint(model: Transformer, path: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the weights of `model` as `dtype`, its config in the file's metadata."""
    state = model.state_dict()
    tensors = {}
    for name, parts in tensor_layout(model.config):
        pieces = state[name].detach().to("cpu", dtype).split([rows for _, rows in parts])
        tensors.update({part: piece.clone() for (part, _), piece in zip(parts, pieces, strict=True)})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt", "config": json.dumps(asdict(model.config))})


def load_checkpoint(path: Path | str, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """Read a model from `path`. Raises FileNotFoundError, or ValueError that names what is wrong with the file:
    not safetensors, no usable config, a tensor that is missing, unknown or of another shape.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    config = _read_config(metadata, path)
    # Built without memory (meta), then given the loaded tensors: the weights are never held twice.
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(_assemble(config, tensors, path, device, dtype), assign=True)
    return model.requires_grad_(False).eval()


def _read_config(metadata: dict[str, str], path: Path) -> ModelConfig:
    try:
        values = json.loads(metadata["config"])
        return ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig)})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its metadata holds no usable 'config': {error!r}") from None


def _assemble(
    config: ModelConfig, tensors: dict[str, Tensor], path: Path, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The state dict of `Transformer`: names and shapes are checked, then fused matrices joined from their pieces."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}
    wanted = {part: (rows, *shapes[name][1:]) for name, parts in tensor_layout(config) for part, rows in parts}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(f"{path}: missing tensors {missing or 'none'}, unknown tensors {extra or 'none'}")
    for part, shape in wanted.items():
        if tuple(tensors[part].shape) != shape:
            raise ValueError(f"{path}: {part} has shape {tuple(tensors[part].shape)}, the config asks for {shape}")
    state = {
        name: torch.cat([tensors[part] for part, _ in parts]).to(device, dtype) for name, parts in tensor_layout(config)
    }
    if torch.device(device).type == "cpu":
        # One row times Wᵀ walks through W column by column: laid out that way, decoding reads it twice as fast.
        state = {name: x.t().contiguous().t() if x.dim() == 2 else x for name, x in state.items()}
    return state
