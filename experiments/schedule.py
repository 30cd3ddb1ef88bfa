"""Which run a worker trains next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from experiments.board import Run


def program(run: Run) -> Hashable:
    """What fixes a run's compiled programs: runs of one model at other budgets or seeds share them."""
    return (run.spec.model, run.spec.optimizer, run.spec.batch_size)


class Schedule:
    """Hands out runs so that a worker keeps to one program as long as it lasts, longest runs first."""

    def __init__(self, runs: Iterable[Run]):
        groups: dict[Hashable, list[Run]] = defaultdict(list)
        for run in runs:
            groups[program(run)].append(run)
        for group in groups.values():
            group.sort(key=lambda run: -run.cost)
        self._groups = dict(groups)
        self._held: set[Hashable] = set()

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def take(self, held: Hashable = None) -> Run | None:
        """Returns the next run for a worker that has compiled program `held`, or None when none is left.

        First another run of that program; then the most work that no worker has begun; at the end what
        another worker would come to later, since compiling once more beats waiting.
        """
        if held not in self._groups:
            self._held.discard(held)
            free = [key for key in self._groups if key not in self._held] or list(self._groups)
            if not free:
                return None
            held = max(free, key=lambda key: sum(run.cost for run in self._groups[key]))
        self._held.add(held)
        group = self._groups[held]
        run = group.pop(0)
        if not group:
            del self._groups[held]
        return run

    def clear(self) -> None:
        """Drops everything that has not been handed out."""
        self._groups.clear()
