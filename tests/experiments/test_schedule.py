"""The order in which workers are handed runs."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.board import Run
from experiments.schedule import Schedule, program
from looped.config import ModelConfig, RunSpec

MODELS = [ModelConfig(d_model=width, n_heads=1) for width in (16, 32, 48, 64)]


def make(model, budget, seed=0):
    return Run(RunSpec(model=MODELS[model], budget_flops=budget, seed=seed), "")


def test_one_worker_stays_with_a_program_and_takes_long_runs_first():
    runs = [make(model, budget) for budget in (1e9, 3e9, 2e9) for model in (0, 1)]
    schedule, order, held = Schedule(runs), [], None
    while (run := schedule.take(held)) is not None:
        held = program(run)
        order.append((run.spec.model, run.cost))
    models = [model for model, _ in order]
    assert models == sorted(models, key=models.index)  # each model's runs together
    assert [cost for _, cost in order] == [3e9, 2e9, 1e9] * 2


def test_a_second_worker_gets_another_program_and_at_the_end_helps_out():
    schedule = Schedule([make(0, 5e9), make(0, 4e9), make(0, 3e9), make(1, 6e9)])
    first, second = schedule.take(), schedule.take()
    assert first.spec.model == MODELS[0]  # most work in all
    assert second.spec.model == MODELS[1]
    assert schedule.take(program(second)).spec == make(0, 4e9).spec


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 50)), unique=True),
    st.lists(st.integers(0, 2)),
)
def test_every_run_is_handed_out_exactly_once_whoever_asks(items, askers):
    runs = [make(model, budget * 1e9, seed) for model, budget, seed in items]
    schedule, held, handed = Schedule(runs), {}, []
    for asker in [*askers, *([0] * (len(runs) + 1))]:
        run = schedule.take(held.get(asker))
        if run is not None:
            held[asker] = program(run)
            handed.append(run)
    assert sorted(run.run_id for run in handed) == sorted(run.run_id for run in runs)
    assert len(schedule) == 0
