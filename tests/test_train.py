"""Training: windows, the split, a run that can stop and go on."""

import pytest
import torch
from equality import assert_close
from safetensors.torch import load_file

from minillm.generate import run
from minillm.model.config import ModelConfig
from minillm.model.train import Trainer, TrainSettings, WindowAttention, bits_per_byte, split_corpus, train
from minillm.naive_attention import NoCache

CONFIG = ModelConfig(256, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=32, max_seq_len=64)
SETTINGS = TrainSettings(steps=30, tokens_per_step=256, lr=1e-2, warmup=3, schedule=((0.5, 32), (0.5, 64)))
CORPUS = "\n\n".join(f"The cat number {i} sat on the mat and sang a song of {i} mice." for i in range(60))


def test_windows_attend_within_themselves(small):
    """Training's one pass over many windows gives the logits of running each of them alone."""
    windows = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = small(windows.reshape(-1), torch.arange(20).repeat(3), WindowAttention(20))
    expected = torch.cat([run(small, row.tolist(), NoCache()) for row in windows])
    assert_close(logits, expected, "three windows of 20")


@pytest.mark.parametrize(("length", "kv_heads"), [(20, 2), (600, 2), (20, 1)])
def test_short_and_long_windows_use_the_same_attention(length, kv_heads):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2 * length, h, 8, dtype=torch.float64, generator=g) for h in (2, kv_heads, kv_heads))
    expected = torch.cat([NoCache().attend(0, *(x[s : s + length] for x in (q, k, v))) for s in (0, length)])
    assert_close(WindowAttention(length).attend(0, q, k, v), expected, f"two windows of {length}")


def test_the_split_falls_between_stories():
    text = "\n\n".join(c * 9 for c in "abcdefghij")  # ten stories of 9 bytes and an end-of-text
    train_ids, held_out = split_corpus(text, 0.27)
    assert bytes(train_ids.tolist()) == b"".join(c.encode() * 9 + b"\0" for c in "abcdefg")
    assert bytes(held_out.tolist()) == b"".join(c.encode() * 9 + b"\0" for c in "hij")


def test_a_corpus_of_one_story_is_refused():
    with pytest.raises(ValueError, match="two texts or more"):
        split_corpus("only one", 0.1)


def test_a_corpus_too_short_for_its_windows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="40 bytes to train on and 40 held out: too few for windows of 64 bytes"):
        Trainer(CONFIG, SETTINGS, torch.zeros(40).long(), torch.zeros(40).long(), tmp_path)
    long_windows = TrainSettings(schedule=((1.0, 128),))
    with pytest.raises(ValueError, match="windows of 128 tokens do not fit a model of max_seq_len=64"):
        Trainer(CONFIG, long_windows, torch.zeros(400).long(), torch.zeros(40).long(), tmp_path)


def test_the_schedule_lengthens_windows_and_ends_at_zero():
    assert [SETTINGS.window(step) for step in (0, 14, 15, 29)] == [32, 32, 64, 64]
    rates = [SETTINGS.lr_at(step) for step in range(30)]
    assert rates[2] == max(rates) == 1e-2
    assert rates[0] == pytest.approx(1e-2 / 3)
    assert 0 < rates[-1] < 1e-2 / 20


def test_bits_per_byte_of_a_model_that_knows_nothing_is_eight():
    trainer = Trainer(CONFIG, SETTINGS, *split_corpus(CORPUS, 0.1), None)
    with torch.no_grad():
        trainer.model.embedding.weight.zero_()
    assert bits_per_byte(trainer.model, trainer.held_out) == pytest.approx(8.0)


def test_training_learns_and_is_reproducible(tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(CORPUS)
    paths = [train(corpus, CONFIG, SETTINGS, tmp_path / name, held_out=0.1, resume=False) for name in "ab"]
    first, second = (load_file(path) for path in paths)
    for name, weights in first.items():
        assert torch.equal(weights, second[name]), f"same seed, same text, other weights: {name}"
    report = capsys.readouterr().out
    held_out = float(report.rsplit("held out ", 1)[1].split(";")[0])
    assert held_out < 5.0, f"an untrained model has 8 bits per byte, 30 steps left it at {held_out}"


def test_a_run_that_stopped_goes_on_to_the_same_weights(tmp_path):
    parts = split_corpus(CORPUS, 0.1)
    straight, first = (Trainer(CONFIG, SETTINGS, *parts, tmp_path) for _ in range(2))
    for _ in range(8):
        straight.run_step()
    for _ in range(5):
        first.run_step()
    first.save()
    second = Trainer(CONFIG, SETTINGS, *parts, tmp_path)
    second.resume()
    for _ in range(3):
        second.run_step()
    assert second.step == straight.step
    for (name, a), b in zip(straight.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_state_of_another_run_is_refused(tmp_path):
    parts = split_corpus(CORPUS, 0.1)
    with pytest.raises(ValueError, match="nothing to resume"):
        Trainer(CONFIG, SETTINGS, *parts, tmp_path).resume()
    Trainer(CONFIG, SETTINGS, *parts, tmp_path).save()
    other = TrainSettings(**(SETTINGS.__dict__ | {"seed": 1}))
    with pytest.raises(ValueError, match=r"made with other settings: seed=0 \(now 1\)"):
        Trainer(CONFIG, other, *parts, tmp_path).resume()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "state.safetensors").write_bytes(b"not a state")
    with pytest.raises(ValueError, match="is damaged"):
        Trainer(CONFIG, SETTINGS, *parts, tmp_path / "damaged").resume()
    wider = ModelConfig(**(CONFIG.__dict__ | {"dim": 24}))
    with pytest.raises(ValueError, match="holds a model of another shape"):
        Trainer(wider, SETTINGS, *parts, tmp_path).resume()
