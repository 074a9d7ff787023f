"""The command line as a person meets it: text, numbers, and one clear line when something is wrong."""

import re
import subprocess
import sys

import pytest

import minillm
from minillm.__main__ import main
from minillm.measure import plots


def test_generate_streams_the_prompt_its_continuation_and_the_times(capsys):
    assert main(["generate", "Once upon a time", "--max-new-tokens", "12", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    model, tokenizer = minillm.load("tiny")
    expected = tokenizer.decode(minillm.generate(model, tokenizer.encode("Once upon a time"), 12))
    assert out == f"Once upon a time{expected}\n"
    assert re.search(r"12 tokens: TTFT [\d.]+ ms, TPOT [\d.]+ ms, [\d.]+ tokens/s", err)


def test_every_stage_streams_the_same_greedy_text(capsys):
    texts = set()
    for stage in ("naive_attention", "kv_cache", "paged_cache", "flash_attention", "speculative_decoding"):
        assert main(["generate", "The king", "--max-new-tokens", "10", "--temperature", "0", "--stage", stage]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_one_token_has_no_tpot(capsys):
    assert main(["generate", "Once", "--max-new-tokens", "1"]) == 0
    assert re.search(r"1 tokens: TTFT [\d.]+ ms, TPOT -,", capsys.readouterr().err)


def test_the_tour_prints_every_stage_and_writes_its_picture(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "FIGURES", tmp_path)
    assert main(["tour", "--prompt-tokens", "20", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "1 Naive attention" in out
    assert "as stage 1" in out
    assert (tmp_path / "tour.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "a", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["generate", "a", "--max-new-tokens", "5000"], "exceed max_seq_len=2048"),
        (["generate", "a", "--temperature", "-1"], "temperature must be finite and at least 0, got -1.0"),
        (["generate", "a", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["generate", "a", "--model", "nowhere"], "no model 'nowhere'"),
        (["generate", "a", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["generate", "a", "--device", "abacus"], "device 'abacus' is not supported: cpu or cuda"),
        (["generate", "a\ud800"], "half of a surrogate pair at position 1"),
        (["tour", "--max-new-tokens", "1"], "it needs 2 new ones, got 1"),
        (["tour", "--prompt-tokens", "-5"], "--prompt-tokens must be at least 1, got -5"),
        (["generate", "a", "--max-new-tokens", "-5"], "max_new_tokens must be at least 1, got -5"),
        (["generate", "a", "--max-new-tokens", "1000000000", "--stage", "paged_cache"], "exceed max_seq_len=2048"),
        (["generate", "a", "--device", "meta"], "device 'meta' is not supported: cpu or cuda"),
        (["train", "--corpus", "README.md", "--config", "tiny", "--steps", "0"], "steps must be at least 1, got 0"),
        (
            ["train", "--corpus", "README.md", "--config", "tiny", "--held-out", "nan"],
            "held_out must lie between 0 and 1",
        ),
        (["train", "--corpus", "nowhere.txt", "--config", "tiny"], "nowhere.txt"),
        (["train", "--corpus", "figures/tour.png", "--config", "tiny"], "figures/tour.png is not UTF-8 text"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1, f"one line, not {err!r}"
    assert err.startswith(f"python -m minillm {arguments[0]}: error: ")


@pytest.mark.parametrize(
    "arguments", [["generate", "a", "--stage", "nonsense"], ["dance"], ["train", "--config", "tiny"]]
)
def test_unknown_words_are_explained_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m minillm" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["tour"], ["generate"], ["train"]])
def test_help_everywhere(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: python -m minillm" in capsys.readouterr().out


def test_a_foreign_package_named_kernels_is_named(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import minillm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"a foreign package in {tmp_path / 'kernels'}" in done.stderr
    assert "pip uninstall kernels" in done.stderr


def test_held_out_tales_are_long_enough_and_plain():
    tales = minillm.held_out_text()
    assert len(tales) >= 3
    assert sum(len(t.encode()) for t in tales) >= 20_000
    assert all(t.isascii() for t in tales)
