"""The table of chapters, the tour, and what the README says of both."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minillm.course import tour
from minillm.course.chapters import CHAPTERS
from minillm.generate import run
from minillm.measure.metrics import Timeline
from minillm.naive_attention import NoCache

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.stem)
def test_every_chapter_has_its_module_notebook_test_and_readme_row(chapter):
    package = (ROOT / "minillm" / chapter.name).is_dir()
    module = f"minillm/{chapter.name}/" if package else f"minillm/{chapter.name}.py"
    for path in (module, f"notebooks/{chapter.stem}.ipynb", f"tests/test_{chapter.stem}.py"):
        assert (ROOT / path).exists(), f"chapter {chapter.number} lacks {path}"
    row = next((x for x in (ROOT / "README.md").read_text().splitlines() if f"notebooks/{chapter.stem}.ipynb" in x), "")
    for part in (chapter.title, chapter.bottleneck, module, f"tests/test_{chapter.stem}.py"):
        assert part in row, f"the README's row of chapter {chapter.number} does not say {part!r}: {row!r}"


def test_every_package_is_in_an_installation_too():
    named = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    for init in [*(ROOT / "minillm").rglob("__init__.py"), ROOT / "kernels" / "__init__.py"]:
        package = ".".join(init.parent.relative_to(ROOT).parts)
        assert f'"{package}"' in named, f"pyproject.toml does not name {package}"


def test_chapters_are_numbered_in_order():
    assert [c.number for c in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))


def test_notebooks_are_committed_with_their_outputs():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert all(c["execution_count"] == i for i, c in enumerate(cells, 1)), f"{path.name}: run it from the top"
        outputs = [o for c in cells for o in c["outputs"]]
        assert not any(o["output_type"] == "error" or o.get("name") == "stderr" for o in outputs), path.name
        assert any("image/png" in o.get("data", {}) for o in outputs), f"{path.name} shows no figure"


def test_a_stage_reports_its_tokens_times_and_counted_flops(small):
    result = tour.run_stage(CHAPTERS[0], small, [1, 2, 3, 4], 5)
    assert len(result.token_ids) == len(result.timeline.token_times) == 5
    assert result.kv_bytes == 0, "chapter 1 keeps nothing"
    with FlopCounterMode(display=False) as counter:
        for n in range(4, 9):
            run(small, list(range(n)), NoCache())
    assert result.flops_per_token == counter.get_total_flops() / 5


def test_stages_that_differ_are_found_out_and_near_ties_are_excused(small):
    prompt = [1, 2, 3]
    right = tour.run_stage(CHAPTERS[0], small, prompt, 6).token_ids
    assert tour.disagreement(small, prompt, right, right) is None
    assert tour.disagreement(small, prompt, right, right[:4]) == 4, "a missing token is a difference"
    wrong = [*right[:2], (right[2] + 1) % 64, *right[3:]]
    assert tour.disagreement(small, prompt, right, wrong) == 2

    class Undecided(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, tokens, positions, cache):
            return torch.tensor([[1.0, 1.00005, 0.0]])

    assert tour.disagreement(Undecided(), prompt, [1, 0], [0, 2]) is None, "two best logits within 1e-4"


def test_the_table_compares_with_the_stage_before_and_with_stage_one(small):
    first = tour.run_stage(CHAPTERS[0], small, [1, 2, 3], 4)
    half = Timeline(0.0, tuple(t / 2 for t in [x - first.timeline.submitted for x in first.timeline.token_times]))
    second = dataclasses.replace(
        first,
        timeline=half,
        cache=SimpleNamespace(nbytes=2**20),
        token_ids=[0] * 4,
        tokens_per_second=half.tokens_per_second,
    )
    rows = [tour.row(first, [], small, [1, 2, 3]), tour.row(second, [first], small, [1, 2, 3])]
    assert "as stage 1" in rows[0]
    assert "1.00 MiB" in rows[1]
    assert "2.00x over 1" in rows[1], "twice the tokens per second is a gain of 2"
    assert "differ at 0" in rows[1]
