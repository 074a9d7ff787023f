"""Weights on disk: what comes back, and what is said of a file that does not fit."""

import pytest
import torch
from equality import assert_close
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import minillm
from minillm.generate import run
from minillm.model.checkpoint import WEIGHTS, load_checkpoint, save_checkpoint
from minillm.naive_attention import NoCache


@pytest.fixture
def saved(small, tmp_path):
    path = tmp_path / "small.safetensors"
    save_checkpoint(small, path, torch.float64)
    return path


def rewrite(path, change):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def test_a_saved_model_comes_back(small, saved):
    again = load_checkpoint(saved, "cpu", torch.float64)
    assert again.config == small.config
    assert_close(run(again, [1, 2, 3], NoCache()), run(small, [1, 2, 3], NoCache()), "the model that came back")


def test_the_file_has_the_names_and_shapes_of_a_llama_checkpoint(saved):
    shapes = {name: tuple(x.shape) for name, x in load_file(saved).items()}
    layer = {
        "input_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    expected = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert shapes == expected | {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}


def test_missing_and_unknown_tensors_are_named(saved):
    def change(tensors):
        tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")

    rewrite(saved, change)
    with pytest.raises(
        ValueError, match=r"missing.*layers\.0\.mlp\.gate_proj\.weight.*unknown.*layers\.0\.mlp\.gate\.w"
    ):
        load_checkpoint(saved, "cpu", torch.float32)


def test_a_misshapen_tensor_is_named_with_both_shapes(saved):
    rewrite(saved, lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(8, 32)}))
    with pytest.raises(
        ValueError, match=r"1\.self_attn\.k_proj\.weight has shape \(8, 32\), the config asks for \(16, 32\)"
    ):
        load_checkpoint(saved, "cpu", torch.float32)


def test_a_transposed_tensor_of_the_same_size_is_refused(saved):
    rewrite(saved, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(32, 48)}))
    with pytest.raises(ValueError, match=r"up_proj\.weight has shape \(32, 48\)"):
        load_checkpoint(saved, "cpu", torch.float32)


def test_only_safetensors_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_checkpoint(path, "cpu", torch.float32)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        minillm.load(path)


def test_a_file_without_a_config_is_refused(saved):
    save_file(load_file(saved), saved)
    with pytest.raises(ValueError, match="holds no usable 'config'"):
        load_checkpoint(saved, "cpu", torch.float32)


def test_load_knows_the_shipped_models_and_names_them():
    with pytest.raises(ValueError, match=r"no model 'huge'.*draft, tiny"):
        minillm.load("huge")
    with pytest.raises(ValueError, match=r"floating-point type, got torch\.int8"):
        minillm.load("tiny", dtype=torch.int8)
    with pytest.raises(ValueError, match="device 'nonsense' is not supported"):
        minillm.load("tiny", device="nonsense")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_load_converts_to_the_dtype_asked_for(tiny, dtype):
    model, _ = minillm.load("tiny", device="cpu", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    logits = run(model, list(b"Once upon a"), NoCache())
    expected = run(tiny, list(b"Once upon a"), NoCache())
    difference = (logits.softmax(-1).double() - expected.softmax(-1).double()).abs().max()
    assert difference < (1e-4 if dtype == torch.float64 else 0.1), f"{dtype}: probabilities differ by {difference}"


def test_the_shipped_weights_are_small_and_16_bit():
    files = list(WEIGHTS.glob("*.safetensors"))
    assert {"tiny", "draft"} <= {f.stem for f in files}
    assert sum(f.stat().st_size for f in files) < 24e6
    assert {x.dtype for f in files for x in load_file(f).values()} == {torch.bfloat16}


def test_weights_need_no_gradient(tiny):
    assert not any(p.requires_grad for p in tiny.parameters())
    assert_close(run(tiny, [65], NoCache()), run(tiny, [65, 66], NoCache())[:1], "a causal model")
