"""Shares: disjoint, together the whole, even in cost, and a function of the runs alone."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.presets import preset
from experiments.shares import WHOLE, Share, training_flops
from looped.config import ModelConfig, RunSpec
from looped.errors import UserError

MODELS = [ModelConfig(d_model=width, n_heads=1) for width in (16, 32)]
SPECS = st.lists(
    st.builds(
        lambda model, budget, seed: RunSpec(model=MODELS[model], budget_flops=budget * 1e9, seed=seed),
        st.integers(0, 1),
        st.integers(1, 20),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(SPECS, st.integers(1, 9), st.randoms())
def test_shares_are_disjoint_complete_even_and_independent_of_order(specs, count, random):
    shares = [Share(i + 1, count).run_ids(specs) for i in range(count)]
    costs = {spec.run_id: training_flops(spec) for spec in specs}
    assert sum(map(len, shares)) == len(costs)
    assert frozenset().union(*shares) == costs.keys()
    loads = [sum(costs[run_id] for run_id in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs.values(), default=0) * (1 + 1e-9)
    again = [*specs, *specs[:3]]  # some of them twice
    random.shuffle(again)
    assert [Share(i + 1, count).run_ids(again) for i in range(count)] == shares


def test_the_whole_has_every_run():
    specs = preset("quickstart").specs()
    assert WHOLE.run_ids(specs) == {spec.run_id for spec in specs}


def test_another_process_deals_alike():
    """Neither hashing, which Python seeds anew in every process, nor anything else of the machine plays a part."""
    code = (
        "from experiments.presets import preset; from experiments.shares import Share;"
        "print(*sorted(Share(3, 8).run_ids(preset('paper-vanilla').specs())))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == sorted(Share(3, 8).run_ids(preset("paper-vanilla").specs()))


def test_the_published_grid_divides_evenly():
    specs = preset("paper-vanilla").specs()
    costs = {spec.run_id: training_flops(spec) for spec in specs}
    loads = [sum(costs[i] for i in Share(n, 8).run_ids(specs)) for n in range(1, 9)]
    assert max(loads) / (sum(loads) / 8) < 1.02


@pytest.mark.parametrize("text", ["3", "0/8", "9/8", "3/0", "a/b", "-1/2", "3/8/9", ""])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UserError, match=r"share is .*such as 3/8"):
        Share.parse(text)


def test_a_share_reads_as_it_is_written():
    assert Share.parse(" 3/8 ") == Share(3, 8)
    assert str(Share(3, 8)) == "3/8"
