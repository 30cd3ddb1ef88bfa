"""Machines that are there already: the start-up script is sent to every one and left running.

A share has one or several hosts, each with one process; the first is the coordinator of the others.  TPU VMs that
gcloud knows are reached by `gcloud compute tpus tpu-vm ssh --worker=all`, and JAX finds their processes by itself.
What is at work is known by the lock that the start-up script holds, so no second start does harm.
"""

from __future__ import annotations

from tpu_launch import startup
from tpu_launch.engine import Machine, State
from tpu_launch.launch import Launch
from tpu_launch.names import machine_name
from tpu_launch.outside import Call, CallError, Outside, call

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
_STOP_SECONDS = 90


class SshEngine:
    """ssh, or gcloud's ssh to the workers of a TPU VM."""

    def __init__(self, launch: Launch):
        assert launch.ssh is not None
        self.launch, self.place = launch, launch.ssh

    def hosts(self, share: int) -> tuple[str, ...]:
        """The share's hosts, the coordinator first."""
        each = self.place.hosts_per_share
        return self.place.hosts[(share - 1) * each : share * each]

    def prepare(self) -> list[Call]:
        return []

    def create(self, share: int) -> list[Call]:
        name = machine_name(self.launch.output, share, self.launch.shares)
        home = f'"$HOME/.looped/{name}"'
        start = f"{{ setsid nohup bash {home}/start.sh > {home}/out 2>&1 < /dev/null & }}"
        if self.place.tpu_vms:
            vm, script = self.place.tpu_vms[share - 1], startup.script(self.launch, share, home=home)
            sent, file = f"{name}.sh", f"{name}.sh"
            place = f"mkdir -p {home} && mv {sent} {home}/start.sh && {start}"
            scp = (
                "gcloud",
                "compute",
                "tpus",
                "tpu-vm",
                "scp",
                file,
                f"{vm}:{sent}",
                *self._at,
                "--worker=all",
            )
            return [call(*scp, files=[(file, script)]), self._gcloud(vm, place)]
        # A new file in the old one's place: a shell that still reads the old one is not disturbed.
        place = f"mkdir -p {home} && cat > {home}/new.sh && mv {home}/new.sh {home}/start.sh && {start}"
        return [
            call(
                *_SSH, "--", host, place, stdin=startup.script(self.launch, share, home=home, exports=exports)
            )
            for host, exports in self._exports(share)
        ]

    def _exports(self, share: int) -> list[tuple[str, dict[str, str]]]:
        """Each host with the variables that tell its process who the others are (`looped.distributed`)."""
        hosts = self.hosts(share)
        if len(hosts) == 1:
            return [(hosts[0], {})]
        coordinator = hosts[0].rpartition("@")[2]
        return [
            (
                host,
                {
                    "JAX_COORDINATOR_ADDRESS": f"{coordinator}:{self.place.port}",
                    "JAX_NUM_PROCESSES": str(len(hosts)),
                    "JAX_PROCESS_ID": str(index),
                },
            )
            for index, host in enumerate(hosts)
        ]

    def machines(self, outside: Outside) -> list[Machine]:
        found = [self._machine(outside, share) for share in range(1, self.launch.shares + 1)]
        return [machine for machine in found if machine is not None]

    def _machine(self, outside: Outside, share: int) -> Machine | None:
        """The share's machines where all are at work or some cannot be asked; None where they can be started."""
        name = machine_name(self.launch.output, share, self.launch.shares)
        lock = f'"$HOME/.looped/{name}/lock"'
        ask = f"if [ -e {lock} ] && ! flock --nonblock {lock} true; then echo at-work; else echo idle; fi"
        where = self.place.tpu_vms[share - 1 : share] or self.hosts(share)
        calls = [self._gcloud(vm, ask) for vm in where] if self.place.tpu_vms else [
            call(*_SSH, "--", host, ask, seconds=60) for host in where
        ]  # fmt: skip
        answers, reasons = [], []
        for each in calls:
            try:
                answers += [word for word in outside.run(each).split() if word in ("at-work", "idle")]
            except CallError as failed:
                if failed.kind == "missing":
                    raise
                reasons.append(str(failed))
        state: State = "unknown" if reasons else "running"
        if not reasons and "idle" in answers:
            return None
        said = "unreachable" if reasons else "at work"
        return Machine(name, state, said, share, where=" ".join(where), reason=" ".join(reasons))

    def delete(self, name: str) -> list[Call]:
        home = f'"$HOME/.looped/{name}"'
        stop = (
            f"if [ -e {home}/lock ] && ! flock --nonblock {home}/lock true; then"
            f' kill -TERM "$(cat {home}/pid)"; flock --timeout {_STOP_SECONDS} {home}/lock true; fi'
        )
        for share in range(1, self.launch.shares + 1):
            if machine_name(self.launch.output, share, self.launch.shares) != name:
                continue
            if self.place.tpu_vms:
                return [self._gcloud(self.place.tpu_vms[share - 1], stop)]
            seconds = _STOP_SECONDS + 60
            return [call(*_SSH, "--", host, stop, seconds=seconds) for host in self.hosts(share)]
        return []

    def clean(self) -> list[Call]:
        return []

    @property
    def _at(self) -> tuple[str, ...]:
        flags = {"project": self.place.project, "zone": self.place.zone}
        return tuple(f"--{name}={value}" for name, value in flags.items() if value is not None)

    def _gcloud(self, vm: str, command: str) -> Call:
        ssh = (
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            "ssh",
            vm,
            *self._at,
            "--worker=all",
            f"--command={command}",
        )
        return call(*ssh, seconds=_STOP_SECONDS + 120)
