"""The distribution that is sampled, and draws that are a function of seed and position."""

import math

import pytest
import torch
from equality import assert_close
from hypothesis import given
from hypothesis import strategies as st

from minillm.generate import generate
from minillm.model.sampling import SamplingParams, draw, probabilities, sample, uniform

GOLDEN = [0.5213453336981362, 0.12342168484904592]
LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))


def test_without_filters_it_is_the_softmax():
    assert_close(probabilities(LOGITS, SamplingParams()), torch.tensor([0.1, 0.4, 0.2, 0.3]), "", torch.float32)


def test_temperature_raises_probabilities_to_its_inverse():
    expected = torch.tensor([0.1, 0.4, 0.2, 0.3]) ** 2
    actual = probabilities(LOGITS, SamplingParams(temperature=0.5))
    assert_close(actual, expected / expected.sum(), "temperature 0.5 squares", torch.float32)


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5])
@pytest.mark.parametrize("size", [1.0, 1e4, 3e38])
def test_tiny_temperatures_are_arg_max_without_overflow(temperature, size):
    p = probabilities(torch.tensor([-1.0, 1.0, 0.999]) * size, SamplingParams(temperature))
    assert p.tolist() == [0, 1, 0]


def test_small_temperatures_above_that_do_not_overflow_either():
    p = probabilities(torch.tensor([-3e38, 3e38, 0.0]), SamplingParams(1.1e-5))
    assert p.tolist() == [0, 1, 0]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 99])
def test_top_k_keeps_the_k_most_likely(k):
    p = probabilities(LOGITS, SamplingParams(top_k=k))
    kept = [1, 3, 2, 0][:k]
    expected = torch.zeros(4).index_copy(0, torch.tensor(kept), LOGITS.exp()[kept])
    assert_close(p, expected / expected.sum(), f"top_k={k}", torch.float32)


def test_top_k_of_equal_logits_keeps_k_of_them():
    assert probabilities(torch.zeros(5), SamplingParams(top_k=2)).tolist() == [0.5, 0.5, 0, 0, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-8, [1]), (0.39, [1]), (0.41, [1, 3]), (0.71, [1, 2, 3]), (0.91, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    p = probabilities(LOGITS, SamplingParams(top_p=top_p))
    assert p.nonzero().flatten().tolist() == kept
    assert_close(p.sum(), torch.tensor(1.0), "what is kept is a distribution", torch.float32)


def test_top_p_is_taken_from_what_top_k_left():
    # After top-2 the probabilities are 4/7 and 3/7: 0.5 is reached by the first alone, in the full list it is not.
    p = probabilities(LOGITS, SamplingParams(top_k=2, top_p=0.5))
    assert p.tolist() == [0, 1, 0, 0]


logit_rows = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=12)


@given(
    logit_rows,
    st.floats(0, 100),
    st.none() | st.integers(1, 15),
    st.none() | st.floats(1e-9, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_any_setting_gives_a_distribution_and_draws_inside_it(row, temperature, top_k, top_p, u):
    p = probabilities(torch.tensor(row), SamplingParams(temperature, top_k, top_p))
    assert abs(p.sum().item() - 1) < 1e-9
    assert (p >= 0).all()
    assert p[torch.tensor(row).argmax()] > 0, "the most likely token always stays"
    assert p[draw(p, u)] > 0, f"u={u} drew a token of probability 0 from {p.tolist()}"


def test_rows_are_treated_alike():
    rows = torch.stack([LOGITS, LOGITS.flip(0)])
    params = SamplingParams(0.7, top_k=3, top_p=0.8)
    assert_close(probabilities(rows, params), torch.stack([probabilities(r, params) for r in rows]), "a batch of two")


@pytest.mark.parametrize("row", [[1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(0.0)], ids=str)
def test_broken_logits_are_an_error(row, params):
    with pytest.raises(ValueError, match="the largest logit of a row is not a finite number"):
        sample(torch.tensor(row), params, position=0)


def test_a_token_at_minus_infinity_is_never_drawn():
    p = probabilities(torch.tensor([0.0, -math.inf, 0.0]), SamplingParams(0.7, top_k=3, top_p=0.9))
    assert p.tolist() == [0.5, 0.0, 0.5]


def test_of_equal_logits_the_lower_id_comes_first():
    assert sample(torch.zeros(40), None, 0) == 0
    assert probabilities(torch.zeros(40), SamplingParams(top_k=20)).nonzero().flatten().tolist() == list(range(20))


def test_uniforms_stay_what_they_are():
    assert [uniform(0, 0), uniform(1, 2, 3)] == GOLDEN, "a text must not change with a new version of this project"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite and at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be finite and at least 0, got inf"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_draw_inverts_the_cumulative_distribution():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    assert [draw(p, u) for u in (0.0, 0.2499, 0.25, 0.5, 1 - 2**-53)] == [1, 1, 3, 3, 3]


def test_uniforms_are_uniform_and_tell_seeds_positions_and_streams_apart():
    n, cells = 20_000, 50
    for name, values in {
        "positions": [uniform(7, i) for i in range(n)],
        "seeds": [uniform(i, 7) for i in range(n)],
        "streams": [uniform(7, 7, i) for i in range(n)],
    }.items():
        counts = torch.bincount((torch.tensor(values) * cells).long(), minlength=cells).double()
        chi2 = ((counts - n / cells) ** 2 / (n / cells)).sum().item()
        assert 20 < chi2 < 95, f"{name}: chi-square {chi2:.1f} with 49 degrees of freedom (p about 1e-4 at 95)"
        assert len(set(values)) == n
    assert uniform(1, 23) != uniform(12, 3), "the digits of seed and position must not run together"


def test_samples_follow_the_distribution():
    params = SamplingParams(0.8, top_k=3, seed=5)
    p = probabilities(LOGITS, params)
    n = 20_000
    counts = torch.bincount(torch.tensor([sample(LOGITS, params, i) for i in range(n)]), minlength=4).double()
    kept = p > 0
    assert counts[~kept].sum() == 0
    chi2 = ((counts - n * p)[kept] ** 2 / (n * p)[kept]).sum().item()
    assert chi2 < 18.4, f"chi-square {chi2:.1f} with 2 degrees of freedom (p = 1e-4 at 18.4)"


def test_a_text_depends_on_its_seed_alone(small):
    def text(seed):
        return list(generate(small, [1, 2, 3], 20, sampling=SamplingParams(temperature=2.0, seed=seed)))

    assert text(0) == text(0)
    assert text(0) != text(1)


def test_temperature_zero_is_greedy(small):
    assert list(generate(small, [1, 2, 3], 10, sampling=SamplingParams(0.0))) == list(generate(small, [1, 2, 3], 10))
