"""Kubernetes on Google's clouds: JobSets, let in by Kueue, started again by JobSet."""

from __future__ import annotations

from typing import Any

from tpu_launch import manifests
from tpu_launch.engine import Machine, State, parse_list, parse_time
from tpu_launch.launch import Launch
from tpu_launch.names import SWEEP_LABEL, parse_machine_name, sweep_key
from tpu_launch.outside import Call, Outside, call


class GkeEngine:
    """JobSets through kubectl."""

    def __init__(self, launch: Launch):
        assert launch.gke is not None
        assert launch.machines is not None
        self.launch, self.place, self.slice = launch, launch.gke, launch.machines

    def _kubectl(self, *words: str, stdin: str = "") -> Call:
        context = (f"--context={self.place.context}",) if self.place.context else ()
        return call("kubectl", *context, *words, stdin=stdin)

    def prepare(self) -> list[Call]:
        objects = manifests.queue(self.launch, self.place)
        return [self._kubectl("apply", "-f", "-", stdin=manifests.to_yaml(objects))] if objects else []

    def create(self, share: int) -> list[Call]:
        manifest = manifests.to_yaml([manifests.jobset(self.launch, self.place, share)])
        return [self._kubectl("create", "-f", "-", stdin=manifest)]

    def machines(self, outside: Outside) -> list[Machine]:
        key = sweep_key(self.launch.output)
        selector = f"--selector={SWEEP_LABEL}={key}"
        at = f"--namespace={self.place.namespace}"
        answer = outside.run(self._kubectl("get", "jobsets.jobset.x-k8s.io", at, selector, "--output=json"))
        found = [self._machine(item) for item in parse_list(answer, "`kubectl get jobsets`")]
        return [machine for machine in found if (parse_machine_name(machine.name) or ("",))[0] == key]

    def delete(self, name: str) -> list[Call]:
        at = f"--namespace={self.place.namespace}"
        return [
            self._kubectl("delete", "jobsets.jobset.x-k8s.io", name, at, "--ignore-not-found", "--wait=false")
        ]

    def clean(self) -> list[Call]:
        if self.place.queue is not None:
            return []
        name, at = manifests.queue_name(self.launch), f"--namespace={self.place.namespace}"
        kinds = (("localqueues", (at,)), ("clusterqueues", ()), ("resourceflavors", ()))
        return [
            self._kubectl(
                "delete", f"{kind}.kueue.x-k8s.io", name, *more, "--ignore-not-found", "--wait=false"
            )
            for kind, more in kinds
        ]

    def _machine(self, item: dict[str, Any]) -> Machine:
        metadata, spec, status = (item.get(key) or {} for key in ("metadata", "spec", "status"))
        name = str(metadata.get("name", ""))
        parsed = parse_machine_name(name)
        state, said, reason = _state(metadata, spec, status)
        return Machine(
            name=name,
            state=state,
            said=said,
            share=parsed[1] if parsed and parsed[2] == self.launch.shares else None,
            where=str(metadata.get("namespace", "")),
            accelerator=self.slice.name
            if self.slice.slices == 1
            else f"{self.slice.slices} × {self.slice.name}",
            chips=self.slice.chips,
            spot=self.place.spot,
            created_at=parse_time(metadata.get("creationTimestamp")),
            sweep=str((metadata.get("annotations") or {}).get("looped/sweep", "")),
            reason=reason,
            ends_itself=True,
        )


def _state(metadata: dict, spec: dict, status: dict) -> tuple[State, str, str]:
    """(state, JobSet's word for it, why) from a JobSet's conditions."""
    if metadata.get("deletionTimestamp"):
        return "deleting", "Deleting", ""
    conditions = {c.get("type"): c for c in status.get("conditions") or [] if c.get("status") == "True"}
    for kind, state in (("Completed", "done"), ("Failed", "failed")):
        if kind in conditions or status.get("terminalState") == kind:
            return state, kind, str(conditions.get(kind, {}).get("message", ""))  # type: ignore[return-value]
    if "Suspended" in conditions or spec.get("suspend"):
        return "waiting", "Suspended", ""
    jobs = status.get("replicatedJobsStatus") or []
    if jobs and all(job.get("ready", 0) == 0 for job in jobs):
        return "waiting", "Pending", ""
    restarts = int(status.get("restarts") or 0)
    return "running", "Running" if not restarts else f"Running after {restarts} restarts", ""
