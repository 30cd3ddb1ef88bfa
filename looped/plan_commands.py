"""The sub-command that says what runs would cost and tell; it joins `experiments` (which runs) and `fit` (what φ)."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from looped.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from experiments.plan import Plan as Costs
    from fit.choose import Choice, Step
    from fit.design import Design, Noise, Predicted

_DEFAULT = "paper-vanilla"


@dataclasses.dataclass
class Plan:
    """Say what runs would cost and how well they would pin φ, before any of them is trained.

    Takes a preset's runs or several presets', with changes made on the spot, and lists parameters, tokens,
    steps, FLOPs and, on a slice, time, chip-hours and money; then the predicted standard deviation of φ of
    each arm and of the differences between arms. It can look for the cheapest such runs that reach a
    standard deviation, or for the best of a cost, and, given losses that are there, say which runs to make
    next. Nothing is trained or written.
    """

    presets: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[PRESET ...]", help_behavior_hint=f"(default: {_DEFAULT})"),
    ] = ()
    """Whose runs; `looped grid` lists the presets."""
    budgets: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOPS ...", help_behavior_hint="")] = ()
    """Budgets in place of the presets'; others than theirs need --widths."""
    recurrences: Annotated[tuple[int, ...], tyro.conf.arg(metavar="R ...", help_behavior_hint="")] = ()
    """Recurrences in place of each arm's; r = 1 is trained once for all arms."""
    widths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="D_MODEL ...", help_behavior_hint="")] = ()
    """Widths to train at every budget."""
    arms: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Arms in place of the presets', such as vanilla truncated."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...", help_behavior_hint="")] = ()
    """Train every run once with each of these seeds."""
    slice: Annotated[str | None, tyro.conf.arg(metavar="SLICE", help_behavior_hint="")] = None
    """The TPU slice for times: generation and shape in chips, as v5e:16x16."""
    mfu: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="(default: 0.4)")] = None
    """Share of the slice's peak that runs reach; an assumption, where --check has nothing."""
    check: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """What `looped tpu check --json FILE` wrote: its slice and its times take the place of the assumption."""
    price: Annotated[float | None, tyro.conf.arg(metavar="MONEY", help_behavior_hint="")] = None
    """Price of a chip-hour, for the cost in money."""
    law: Annotated[
        str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the published law)")
    ] = None
    """A phi.json of `looped fit`, to plan with its laws in place of the published one."""
    row_noise: Annotated[
        float | None, tyro.conf.arg(metavar="SD", help_behavior_hint="(default: 0.0033)")
    ] = None
    """Standard deviation of each run's log loss about the law; the default is that of the published grid."""
    cell_noise: Annotated[
        float | None, tyro.conf.arg(metavar="SD", help_behavior_hint="(default: 0.0018)")
    ] = None
    """The same of what the runs of one budget and r have in common."""
    target_sd: Annotated[float | None, tyro.conf.arg(metavar="SD", help_behavior_hint="")] = None
    """Look for the cheapest of these runs whose predicted standard deviations are all at most this."""
    max_flops: Annotated[float | None, tyro.conf.arg(metavar="FLOPS", help_behavior_hint="")] = None
    """Look for those of these runs that say most for at most this many FLOPs in all."""
    source: Annotated[str | None, tyro.conf.arg(name="from", metavar="RUNS", help_behavior_hint="")] = None
    """Losses that are there, a directory of runs or a CSV file: plan what is missing."""
    next: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """With --from: name the N runs to make next, each the one that says most for its cost, up to --target-sd
    or --max-flops where given."""
    json: bool = False
    """Print one JSON object, and nothing else."""

    def run(self) -> int:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self._validate()
        from experiments.design import Changes, design
        from experiments.plan import machine_of, plan

        changes = Changes(self.budgets, self.recurrences, self.widths, self.arms, self.seeds)
        specs = design(self.presets or (_DEFAULT,), changes)
        costs = plan(specs, machine_of(self.slice, self.mfu, self.check, self.price))
        answer = self._whole(costs) if self.source is None else self._continued(costs, self.source)
        answer.print(self.json)
        return 0

    def _validate(self) -> None:
        if self.next is not None and self.source is None:
            raise UserError(
                f"next is {self.next} and no losses are named; add those that are there, --from RUNS."
            )
        if self.next is not None and self.next < 1:
            raise UserError(f"next is {self.next}; give the number of runs to name, 1 or more.")
        for name in ("target_sd", "max_flops"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} is {value:g}; give a number above 0.")

    def _noise(self) -> Noise:
        from fit.design import Noise

        given = {"row": self.row_noise, "cell": self.cell_noise}
        return dataclasses.replace(Noise(), **{k: v for k, v in given.items() if v is not None})

    def _whole(self, costs: Costs) -> Answer:
        """The plan of all runs, or of those that a search chooses."""
        import numpy as np

        from fit.design import Design, planned_losses
        from fit.prior import PUBLISHED_PRIOR, read_prior

        prior = PUBLISHED_PRIOR if self.law is None else read_prior(self.law)
        table = planned_losses([run.counts for run in costs.runs], prior)
        design = Design(table, prior, self._noise())
        answer = Answer(costs, design, design.predict(), prior.reservations(table))
        if self.target_sd is None and self.max_flops is None:
            return answer
        choice = self._search(design, np.array([run.flops for run in costs.runs]))
        chosen = costs.only(np.flatnonzero(choice.mask))
        share = (
            f"{len(chosen.runs)} of {len(costs.runs)} runs for {chosen.flops / costs.flops:.0%} of the FLOPs"
        )
        found = f"Chosen, the best that the search found: {share}."
        return dataclasses.replace(answer, costs=chosen, predicted=choice.predicted, opening=(found,))

    def _search(self, design: Design, flops: np.ndarray) -> Choice:
        """The choice that was asked for; raises `UserError` where there is none, with what can be had."""
        from fit.choose import cheapest, most_precise

        choice = None
        if self.target_sd is not None:
            choice = cheapest(design, flops, self.target_sd)
            if choice is None:
                raise UserError(
                    f"target_sd is {self.target_sd:g}, which these runs do not reach; all {len(flops)} of them give"
                    f" {_sds(design.predict())}: add budgets, widths or seeds, or ask for more."
                )
            if self.max_flops is None or choice.cost <= self.max_flops:
                return choice
        assert self.max_flops is not None
        best = most_precise(design, flops, self.max_flops)
        if choice is not None:
            raise UserError(
                f"target_sd is {self.target_sd:g}, which takes {choice.cost:.3g} FLOPs, more than max_flops"
                f" {self.max_flops:g}, which give {'no φ' if best is None else _sds(best.predicted)}; raise one of"
                " the two."
            )
        if best is None:
            raise UserError(
                f"max_flops is {self.max_flops:g}, and no choice of these runs at that cost determines φ; raise it, or"
                " add cheaper runs, such as --budgets of less."
            )
        return best

    def _continued(self, costs: Costs, source: str) -> Answer:
        """The plan of what is missing beside the losses at hand, or of the runs that are worth most next."""
        import numpy as np

        from fit.choose import next_runs
        from fit.design import Design, planned_losses, worst
        from fit.prior import PUBLISHED_PRIOR, prior_of, read_prior
        from fit.progress import are_done, joined, read_done, take

        rows = [run.counts for run in costs.runs]
        done = read_done(source, planned_losses(rows, PUBLISHED_PRIOR))
        prior, shown = prior_of(done)
        if self.law is not None:
            prior = read_prior(self.law)
        prior = prior or PUBLISHED_PRIOR
        table = planned_losses(rows, prior)
        missing = ~are_done(table, done)
        costs = costs.only(np.flatnonzero(missing))
        table = joined(done, take(table, missing)) if missing.any() else done
        design = Design(table, prior, self._noise())
        have = np.arange(len(table)) < len(done)
        now = design.predict(have)
        notes = [*prior.reservations(table), *shown]
        hand = AtHand(source, len(done), now)
        if self.next is None and self.target_sd is None and self.max_flops is None:
            return Answer(costs, design, design.predict(), notes, hand=hand)
        flops = np.array([0.0] * len(done) + [run.flops for run in costs.runs])
        count = len(costs.runs) if self.next is None else self.next
        steps = next_runs(design, flops, have, count, self.target_sd, self.max_flops)
        last = steps[-1].predicted if steps else now
        if self.target_sd is not None and not worst(last) <= self.target_sd:
            notes.append(f"target_sd {self.target_sd:g} is not reached: after these runs it is {_sds(last)}")
        chosen = costs.only(step.index - len(done) for step in steps)
        return Answer(chosen, design, last, notes, hand=hand, steps=tuple(steps))


@dataclasses.dataclass(frozen=True)
class AtHand:
    """Losses that are there, and what they say by themselves."""

    source: str
    losses: int
    predicted: tuple[Predicted, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the command found out: the runs and their costs, and what φ they give (with those at hand, if any)."""

    costs: Costs
    design: Design
    predicted: tuple[Predicted, ...]
    notes: Sequence[str]
    opening: tuple[str, ...] = ()
    hand: AtHand | None = None
    steps: tuple[Step, ...] = ()

    def print(self, as_json: bool) -> None:
        if as_json:
            from fit.output import to_text

            print(to_text(self.to_json()), end="")
            return
        from experiments.plan_display import costs, runs_table, show
        from fit.design import in_words
        from looped.text import short

        after = {}
        if self.steps:
            after = {"FLOPs so far": [short(step.cost) for step in self.steps]}
            after["sd after it"] = [_sds(step.predicted) for step in self.steps]
        if self.costs.runs:
            title = "next, each after those above it" if self.steps else "runs"
            show(runs_table(self.costs, self.costs.runs, title, after))
        for line in self.opening:
            print(line)
        if self.hand is not None:
            print(f"{self.hand.losses} losses at hand in {self.hand.source}. By themselves:")
            for one in self.hand.predicted:
                print(f"  {in_words(one)}")
        print(costs(self.costs))
        if self.hand is not None and self.costs.runs:
            print("With these runs:")
        if self.hand is None or self.costs.runs:
            for one in self.predicted:
                print(f"{'' if self.hand is None else '  '}{in_words(one)}")
        noise, law = self.design.noise, self.design.prior.source
        print(f"Law: {law}. Noise of log losses: {noise.row:g} a run and {noise.cell:g} a cell (budget × r).")
        for note in self.notes:
            print(f"Note: {note}.")

    def to_json(self) -> dict[str, Any]:
        data = {"schema_version": 1, **self.costs.to_json()}
        for run, step in zip(data["runs"], self.steps, strict=False):
            run["flops_so_far"] = step.cost
            run["predicted"] = [dataclasses.asdict(one) for one in step.predicted]
        hand = None if self.hand is None else dataclasses.asdict(self.hand)
        noise, prior = self.design.noise, self.design.prior
        return data | {
            "at_hand": hand,
            "predicted": [dataclasses.asdict(one) for one in self.predicted],
            "law": {"source": prior.source, "arms": prior.arms},
            "noise": {"row": noise.row, "cell": noise.cell},
            "notes": list(self.notes),
        }


def _sds(predicted: Sequence[Predicted]) -> str:
    return ", ".join("none" if one.sd is None else f"{one.sd:.4f}" for one in predicted)
