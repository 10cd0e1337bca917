"""The same training in one process and on ranks that divide rows and experts, for families of every kind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from layouts import CASES, FAMILIES, LAYOUTS, PAIRS, WITHOUT_EXPERTS, cases_of, make_models, saved_family
from layouts import __file__ as program

pytestmark = pytest.mark.timeout(1000)  # all of it runs before the first test
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("layouts")
    make_models(folder)
    done = subprocess.run(
        [sys.executable, program, str(folder), str(folder / "found.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    numbers: Found = json.loads((folder / "found.json").read_text())
    return numbers


@pytest.mark.parametrize(
    ("family", "case", "layout"),
    [(family, case, layout) for family in FAMILIES for layout in LAYOUTS for case in cases_of(family, layout)],
)
def test_a_layout_trains_as_one_process(family: str, case: str, layout: str, found: Found) -> None:
    alone, here = found[f"{family} / {case} / one process"], found[f"{family} / {case} / {layout}"]
    if (sentence := refusal(family, layout)) is not None:
        assert here["refused"].endswith(sentence)
        return
    assert here["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert here["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    if "ep" in LAYOUTS[layout].sizes:
        assert here["one_sided"] == pytest.approx(alone["one_sided"], rel=1e-4, abs=1e-5)
    assert here["probe"] == pytest.approx(alone["probe"], abs=1e-4)
    given, made = here["replayed"]
    assert given == made
    assert (given > 0) == (family != "qwen3" and case != "gspo")
    assert here["zero_grad_ratio"] == pytest.approx(alone["zero_grad_ratio"], abs=1e-5)
    for own, others in zip(here["logprobs"], alone["logprobs"], strict=True):  # each token of the batch, once
        assert own == pytest.approx(others, abs=1e-4)
    for own, others in zip(here["metrics"], alone["metrics"], strict=True):
        assert own == pytest.approx(others, abs=1e-5)
    for own, others in zip(here["routing"], alone["routing"], strict=True):
        same_rows = here["row_tokens"] == alone["row_tokens"]  # else prefixes are repeated in more rows
        assert own == pytest.approx(others, abs=1e-5 if same_rows else 0.2)


def refusal(family: str, layout: str) -> str | None:
    """How the sentence ends with which a layout is refused; None where it is taken."""
    sizes = LAYOUTS[layout].sizes
    if family == "qwen3" and "ep" in sizes:
        return "it has no experts; set model.ep = 1"
    if family == "gpt_oss" and "tp" in sizes:
        return "transformers has no plan that divides its layers; set model.tp = 1"
    if family != "qwen3" and layout in WITHOUT_EXPERTS:
        return "ranks that share products divide its experts as well; set model.ep to a multiple of 2"
    return None


@pytest.mark.parametrize(
    ("family", "layout"), [pair for pair in itertools.product(FAMILIES, LAYOUTS) if cases_of(*pair)]
)
def test_the_ranks_of_a_layout_publish_the_state_bit_for_bit(family: str, layout: str, found: Found) -> None:
    case, *_ = cases_of(family, layout)
    here, sizes = found[f"{family} / {case} / {layout}"], LAYOUTS[layout].sizes
    if here.get("refused"):
        return
    published, senders = here["published"], LAYOUTS[layout].ranks // sizes.get("dp_replicate", 1)
    assert published["equal"]
    assert sum(published["sent"]) == published["bytes"]
    assert max(published["sent"]) < 1.1 * published["bytes"] / senders  # no tensor of any size goes whole
    assert bool(published["reordered"]) == (1 < sizes.get("ep", 1) < senders)


@pytest.mark.parametrize(("earlier", "layout"), PAIRS)
def test_a_checkpoint_of_one_layout_goes_on_in_another(earlier: str, layout: str, found: Found) -> None:
    straight = found[f"{saved_family(earlier, layout)} / gspo / one process"]
    here = found[f"{earlier} -> {layout}"]
    for key in ("loss", "grad_norm"):
        assert here[key] == pytest.approx(straight[key][1], rel=1e-5)


def test_a_divided_vocabulary_gives_the_logprobs_and_gradients_of_the_whole(found: Found) -> None:
    assert found["vocabulary apart"] < 1e-4


def test_the_numbers_are_those_of_trainings_that_differ(found: Found) -> None:
    alone = [found[f"{family} / {case} / one process"] for family in FAMILIES for case in CASES]
    assert len({loss for one in alone for loss in one["loss"]}) == 2 * len(alone)
    assert {family for family in FAMILIES if found[f"{family} / gspo / one process"]["shares_prefixes"]} == {
        "qwen3", "qwen3_moe"
    }  # fmt: skip
    assert all(one["routing"][0] for one, family in zip(alone[::2], FAMILIES, strict=True) if family != "qwen3")
