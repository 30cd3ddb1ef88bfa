"""Cloud TPU by queued resources: one request a share, filled when there are machines, gone when they are taken away.

The states of a request: https://cloud.google.com/tpu/docs/queued-resources.  A request that was preempted (SUSPENDED)
or failed (FAILED) is never filled again and still counts against the quota until it is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpu_launch import startup
from tpu_launch.engine import Machine, State, parse_list, parse_time
from tpu_launch.launch import Launch
from tpu_launch.names import (
    SHARE_LABEL,
    SWEEP_LABEL,
    cloud_names,
    machine_name,
    parse_machine_name,
    sweep_key,
)
from tpu_launch.outside import Call, Outside, call

HOME = '"${LOOPED_HOME:-/opt/looped}"'
_GROUP = ("gcloud", "compute", "tpus", "queued-resources")
_STATES: dict[str, State] = {
    "CREATING": "waiting",
    "ACCEPTED": "waiting",  # the older name of the next
    "WAITING_FOR_RESOURCES": "waiting",
    "PROVISIONING": "waiting",
    "ACTIVE": "running",
    "SUSPENDING": "lost",
    "SUSPENDED": "lost",
    "FAILED": "refused",
    "DELETING": "deleting",
}
_DESCRIPTION = "looped sweep "


class QueuedEngine:
    """Queued resources through gcloud."""

    def __init__(self, launch: Launch):
        assert launch.queued is not None
        assert launch.machines is not None
        self.launch, self.place, self.slice = launch, launch.queued, launch.machines
        self._at = (f"--project={self.place.project}", f"--zone={self.place.zone}")

    def prepare(self) -> list[Call]:
        return []

    def create(self, share: int) -> list[Call]:
        launch, place = self.launch, self.place
        name = machine_name(launch.output, share, launch.shares)
        accelerator, runtime = cloud_names(self.slice)
        release = (*_GROUP, "delete", name, *self._at, "--force", "--quiet", "--async")
        start = startup.script(launch, share, home=HOME, release=release)
        nodes = (f"--node-id={name}",)
        if launch.slices > 1:
            nodes = (f"--node-count={launch.slices}", f"--node-prefix={name}")
        options = [
            *self._at,
            f"--accelerator-type={accelerator}",
            f"--runtime-version={runtime}",
            *nodes,
            f"--labels={SWEEP_LABEL}={sweep_key(launch.output)},{SHARE_LABEL}={share}-of-{launch.shares}",
            f"--description={_DESCRIPTION}{launch.output}",
            f"--metadata-from-file=startup-script={name}.sh",
            "--scopes=https://www.googleapis.com/auth/cloud-platform",
        ]
        options += ["--spot"] if place.spot else []
        options += ["--reserved"] if place.reserved else []
        for flag in ("service_account", "network", "subnetwork"):
            if getattr(place, flag) is not None:
                options.append(f"--{flag.replace('_', '-')}={getattr(place, flag)}")
        return [call(*_GROUP, "create", name, *options, "--async", files=[(f"{name}.sh", start)])]

    def machines(self, outside: Outside) -> list[Machine]:
        found = list_machines(outside, self.place.project, self.place.zone)
        key, shares = sweep_key(self.launch.output), self.launch.shares
        return [_of_launch(machine, shares) for machine in found if _key(machine.name) == key]

    def delete(self, name: str) -> list[Call]:
        return [call(*_GROUP, "delete", name, *self._at, "--force", "--quiet", "--async")]

    def clean(self) -> list[Call]:
        return []


def list_call(project: str, zone: str) -> Call:
    return call(*_GROUP, "list", f"--project={project}", f"--zone={zone}", "--format=json")


def list_machines(outside: Outside, project: str, zone: str) -> list[Machine]:
    """Every queued resource of the project in the zone (`-`: in all of them), whoever made it."""
    answer = outside.run(list_call(project, zone))
    return [_machine(item) for item in parse_list(answer, "`gcloud compute tpus queued-resources list`")]


def _key(name: str) -> str | None:
    parsed = parse_machine_name(name)
    return parsed and parsed[0]


def _of_launch(machine: Machine, shares: int) -> Machine:
    import dataclasses

    parsed = parse_machine_name(machine.name)
    assert parsed is not None
    return dataclasses.replace(machine, share=parsed[1] if parsed[2] == shares else None)


def _machine(item: dict) -> Machine:
    """One object of `list --format=json`: a QueuedResource of the API, version 2."""
    path = str(item.get("name", "")).split("/")  # projects/P/locations/ZONE/queuedResources/NAME
    state = item.get("state") or {}
    specs: Sequence[dict] = (item.get("tpu") or {}).get("nodeSpec") or [{}]
    node = specs[0].get("node") or {}
    said = str(state.get("state", "STATE_UNSPECIFIED"))
    several = specs[0].get("multisliceParams") or specs[0].get("multiNodeParams") or {}
    count = int(several.get("nodeCount") or len(specs))
    accelerator = str(node.get("acceleratorType", "")).rpartition("/")[2]
    description = str(node.get("description", ""))
    error = (state.get("failedData") or {}).get("error") or {}
    return Machine(
        name=path[-1],
        state=_STATES.get(said, "unknown"),
        said=said,
        where=path[3] if len(path) > 3 else "",
        accelerator=accelerator if count == 1 else f"{count} × {accelerator}",
        chips=count * chips_of(accelerator),
        spot="spot" in item,
        created_at=parse_time(item.get("createTime")),
        sweep=description.removeprefix(_DESCRIPTION) if description.startswith(_DESCRIPTION) else "",
        reason=" ".join(str(error.get("message", "")).split()),
    )


def chips_of(accelerator_type: str) -> int:
    """Chips of a slice named as `v5litepod-16` or `v4-32`; 0 for a name that is not known."""
    from looped.slices import GENERATIONS

    first, _, number = accelerator_type.rpartition("-")
    for generation in GENERATIONS.values():
        if generation.accelerator_type == first and number.isdecimal():
            return int(number) // (generation.cores if generation.counts_cores else 1)
    return 0
