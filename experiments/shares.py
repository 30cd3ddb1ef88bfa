"""A sweep's runs dealt out to several machines, each by itself: nobody hands them out."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable

from looped.config import RunSpec
from looped.errors import UserError


@dataclasses.dataclass(frozen=True)
class Share:
    """Part `index` of `count` of a sweep's runs, counted from 1; 1 of 1 is the whole."""

    index: int = 1
    count: int = 1

    def __post_init__(self):
        if not 1 <= self.index <= self.count:
            raise UserError(f"share is {self}; write I/N with I from 1 to N, such as 3/8.")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Share:
        """Reads `3/8`."""
        found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text.strip())
        if found is None:
            raise UserError(f"share is {text!r}; write I/N with I from 1 to N, such as 3/8.")
        return cls(int(found[1]), int(found[2]))

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def run_ids(self, specs: Iterable[RunSpec]) -> frozenset[str]:
        """The runs of `specs` that this share has.

        A function of which runs there are, not of their order nor of what is done: the most expensive run goes to the
        share with the least so far, and so on down; runs of one cost go by run id.  So shares are disjoint, together
        they are the whole, and no two differ by more than the most expensive run.
        """
        by_id = {spec.run_id: spec for spec in specs}
        costs = {run_id: training_flops(spec) for run_id, spec in by_id.items()}
        shares = [(0.0, index) for index in range(1, self.count + 1)]  # a heap from the start
        own = set()
        for run_id in sorted(by_id, key=lambda run_id: (-costs[run_id], run_id)):
            load, index = heapq.heappop(shares)
            heapq.heappush(shares, (load + costs[run_id], index))
            if index == self.index:
                own.add(run_id)
        return frozenset(own)


WHOLE = Share()


def training_flops(spec: RunSpec) -> float:
    """FLOPs of a run, as its spec plans them."""
    if spec.budget_flops is not None:
        return spec.budget_flops
    from looped.counting import flops_per_token, target_tokens

    return target_tokens(spec) * flops_per_token(spec.model)
