"""What the watch decides, from anything it may see."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_launch.engine import Machine
from tpu_launch.marks import Mark
from tpu_launch.names import machine_name
from tpu_launch.watch import REFUSALS, Seen, decide

OUTPUT = "gs://b/s"
STATES = ("waiting", "running", "lost", "refused", "deleting", "done", "failed", "unknown")


@st.composite
def seen(draw):
    shares = draw(st.integers(1, 5))
    there = draw(st.dictionaries(st.integers(1, shares), st.sampled_from(STATES)))
    machines = [Machine(machine_name(OUTPUT, i, shares), s, s, i) for i, s in there.items()]
    for _ in range(draw(st.integers(0, 2))):
        machines.append(Machine(machine_name(OUTPUT, 1, 99), draw(st.sampled_from(STATES[:5])), "", None))
    told = draw(
        st.dictionaries(st.integers(1, shares), st.sampled_from(["running", "stopped", "done", "failed"]))
    )
    marks = {i: Mark(i, shares, state) for i, state in told.items()}
    refusals = draw(st.dictionaries(st.integers(1, shares), st.integers(0, 2 * REFUSALS)))
    return Seen(shares, tuple(machines), marks, refusals)


@settings(deadline=None)
@given(seen())
def test_no_share_gets_machines_twice_or_after_its_end(now):
    actions = decide(now, OUTPUT)
    created = [action.share for action in actions if action.kind == "create"]
    assert len(created) == len(set(created))
    for share in created:
        assert now.machine(share) is None
        mark = now.marks.get(share)
        assert mark is None or not mark.over


@settings(deadline=None)
@given(seen())
def test_whatever_is_at_work_for_a_share_that_goes_on_is_left_alone(now):
    for action in decide(now, OUTPUT):
        machine = next((m for m in now.machines if m.name == action.name), None)
        if action.kind == "delete":
            assert machine is not None
            alive = machine.state in ("waiting", "running", "unknown")
            assert not (alive and machine.share is not None and now.ending(machine.share) is None)


@settings(deadline=None)
@given(seen())
def test_what_is_over_is_over(now):
    if now.over:
        assert not [action for action in decide(now, OUTPUT) if action.kind == "create"]
        assert not any(machine.costs for machine in now.machines)


def deliver(now, action, machines, refusals, kinder):
    """The cloud's answer to one action; `kinder` says whether machines come or are refused."""
    if action.kind == "delete":
        return [m for m in machines if m.name != action.name]
    return [*machines, Machine(action.name, "running" if kinder else "refused", "", action.share)]


@settings(deadline=None)
@given(seen(), st.randoms())
def test_every_launch_comes_to_an_end_with_no_machine_left(now, random):
    """Machines that run finish sooner or later; deleted ones go; the watch ends."""
    machines, marks, refusals = list(now.machines), dict(now.marks), collections.Counter(now.refusals)
    for _ in range(60):
        now = Seen(now.shares, tuple(machines), marks, dict(refusals))
        if now.over:
            break
        for action in decide(now, OUTPUT):
            if action.kind == "delete" and any(
                m.name == action.name and m.state == "refused" for m in machines
            ):
                refusals[action.share] += 1
            machines = deliver(now, action, machines, refusals, random.random() < 0.7)
        moved = []
        for machine in machines:
            if machine.state == "deleting":
                continue
            if machine.state in ("waiting", "unknown"):
                machine = Machine(machine.name, "running", "", machine.share)
            elif machine.state == "running" and machine.share is not None and random.random() < 0.5:
                marks[machine.share] = Mark(machine.share, now.shares, "done")
            moved.append(machine)
        machines = moved
    assert now.over, (machines, marks)
    assert all(machine.state in ("done", "failed") for machine in machines)
