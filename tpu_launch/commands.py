"""Sub-commands on machines: launching sweeps, watching over them, seeing and ending what costs money."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from looped.errors import UserError

if TYPE_CHECKING:
    from tpu_launch.engine import Machine
    from tpu_launch.launch import Launch

_ENGINE_OPTIONS = {
    "project": ("queued", "ssh"),
    "zone": ("queued", "ssh"),
    "spot": ("queued", "gke"),
    "reserved": ("queued",),
    "service_account": ("queued", "gke"),
    "network": ("queued",),
    "subnetwork": ("queued",),
    "context": ("gke",),
    "namespace": ("gke",),
    "queue": ("gke",),
    "image": ("gke",),
    "hosts": ("ssh",),
    "tpu_vms": ("ssh",),
}
"""Options that belong to some engines alone."""


@dataclasses.dataclass
class TpuLaunch:
    """Launch a sweep on TPU slices: queued resources, Kubernetes, or machines that are there.

    The runs are dealt out in fixed shares, one to a slice (queued, ssh) or a run each (gke). Launching again
    finds what is there and starts only what is missing. Nothing is uploaded or started with --dry-run.
    """

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET", help_behavior_hint="")]
    """The preset's name; `looped grid` lists them."""
    output: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """The sweep's folder, in a bucket (gs://…); for ssh also a folder that all hosts share."""
    engine: Literal["queued", "gke", "ssh"]
    """queued: Cloud TPU's queued resources, by gcloud. gke: JobSets let in by Kueue, by kubectl. ssh: hosts."""
    slice: Annotated[str | None, tyro.conf.arg(metavar="GENERATION:SHAPE", help_behavior_hint="")] = None
    """The slice that a run is trained on, as v5e:4x4."""
    slices: int = 1
    """Slices that one run is trained on together."""
    pool: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Slices (or groups of --slices) to hold at once; 1 without it. For ssh what the hosts make up."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="SEED ...", help_behavior_hint="")] = ()
    """Train every run once with each of these seeds, in place of the preset's."""
    budgets: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOPS ...", help_behavior_hint="")] = ()
    """Train the runs of these of the preset's budgets alone."""
    source: Annotated[
        str | None, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="(default: this one)")
    ] = None
    """What the machines install: a checkout of looped, a wheel or archive, git+https://….git@REVISION."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of data sets, as LOOPED_DATA on the machines."""
    track: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TRACKER ...", help_behavior_hint="")] = ()
    """Trackers that take the curves as well, as of `looped sweep run`."""
    secrets: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="VARIABLE=SECRET ...", help_behavior_hint="")
    ] = ()
    """Environment variables whose values are secrets: names in Secret Manager, for gke Kubernetes secrets
    with a key of the variable's name. Never the value."""
    project: Annotated[str | None, tyro.conf.arg(metavar="PROJECT", help_behavior_hint="")] = None
    """Google Cloud project (queued; ssh with --tpu-vms)."""
    zone: Annotated[str | None, tyro.conf.arg(metavar="ZONE", help_behavior_hint="")] = None
    """Zone of the slices (queued; ssh with --tpu-vms)."""
    spot: bool = False
    """Take spot machines, which cost less and may be taken away (queued, gke)."""
    reserved: bool = False
    """Take machines of a reservation (queued)."""
    service_account: Annotated[str | None, tyro.conf.arg(metavar="ACCOUNT", help_behavior_hint="")] = None
    """Account that the machines act as (queued: an address; gke: a Kubernetes account)."""
    network: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Network of the machines (queued)."""
    subnetwork: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Subnetwork of the machines (queued)."""
    context: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Cluster, as kubectl names it (gke)."""
    namespace: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: default)")
    ] = None
    """Namespace of the JobSets (gke)."""
    queue: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """A LocalQueue of Kueue that is there; without it one is made for --pool slices (gke)."""
    image: Annotated[
        str | None, tyro.conf.arg(metavar="IMAGE", help_behavior_hint="(default: python:3.11)")
    ] = None
    """Container image with bash and python3 (gke)."""
    hosts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="HOST ...", help_behavior_hint="")] = ()
    """Hosts that ssh reaches, those of one slice next to each other (ssh)."""
    tpu_vms: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """TPU VMs, in place of --hosts: `gcloud compute tpus tpu-vm ssh` reaches all their workers (ssh)."""
    retry_failed: bool = False
    """Start shares again that were given up."""
    dry_run: bool = False
    """Print what would be done as a shell script, with all files and manifests, and do nothing."""

    def run(self) -> int:
        import shlex

        from experiments.presets import preset
        from tpu_launch import operate
        from tpu_launch.store import check_output

        specs = preset(self.preset).specs(self.seeds, self.budgets)
        output = check_output(self.output, shared=self.engine != "ssh")
        self._check_options()
        what = operate.find_source(self.source)
        launch = self._launch(output, len(specs), what.name)
        if self.dry_run:
            print(operate.dry_run(launch, what), end="")
            return 0
        started = operate.launch_sweep(launch, what, specs, print, self.retry_failed)
        print(f"{started} of {launch.shares} shares were started, for {len(specs)} runs in {output}.")
        watch = f"looped tpu watch {shlex.quote(output)}"
        print(f"`{watch}` starts them again when machines are lost, and deletes what is over.")
        return 0

    def _check_options(self) -> None:
        for name, engines in _ENGINE_OPTIONS.items():
            if getattr(self, name) not in (None, False, ()) and self.engine not in engines:
                flag = name.replace("_", "-")
                raise UserError(
                    f"--{flag} is of --engine {' and '.join(engines)}; leave it out for {self.engine}."
                )
        if self.pool is not None and self.pool < 1:
            raise UserError(f"pool is {self.pool}; it must be at least 1.")
        if self.spot and self.reserved:
            raise UserError("--spot and --reserved exclude each other; give one of them.")
        if self.engine in ("queued", "gke") and self.slice is None:
            raise UserError(f"--engine {self.engine} needs --slice, as v5e:4x4.")
        for name in ("project", "zone"):
            if (self.engine == "queued" or self.tpu_vms) and getattr(self, name) is None:
                raise UserError(f"--{name} is needed, so that it is said which machines cost money where.")

    def _launch(self, output: str, runs: int, source: str) -> Launch:
        from tpu_launch.launch import Gke, Launch, Queued, Ssh, parse_secrets

        common: dict[str, Any] = {
            "preset": self.preset,
            "output": output,
            "source": source,
            "slice": self.slice,
            "slices": self.slices,
            "seeds": self.seeds,
            "budgets": self.budgets,
            "data": self.data,
            "track": self.track,
            "secrets": parse_secrets(self.secrets),
        }
        pool = 1 if self.pool is None else self.pool
        if self.engine == "queued":
            assert self.project is not None
            assert self.zone is not None
            place = Queued(
                self.project,
                self.zone,
                self.spot,
                self.reserved,
                self.service_account,
                self.network,
                self.subnetwork,
            )
            return Launch(shares=min(pool, runs), queued=place, **common)
        if self.engine == "gke":
            optional = {
                name: value for name in ("namespace", "image") if (value := getattr(self, name)) is not None
            }
            gke = Gke(
                pool,
                context=self.context,
                queue=self.queue,
                spot=self.spot,
                service_account=self.service_account,
                **optional,
            )
            return Launch(shares=runs, gke=gke, **common)
        ssh = Ssh(self.hosts, self.tpu_vms, self.project, self.zone, self._hosts_per_share())
        shares = len(self.tpu_vms) or len(self.hosts) // ssh.hosts_per_share
        if self.pool not in (None, shares):
            raise UserError(f"pool is {self.pool}, and the hosts make up {shares} shares; leave --pool out.")
        return Launch(shares=min(shares, runs), ssh=ssh, **common)

    def _hosts_per_share(self) -> int:
        if bool(self.hosts) == bool(self.tpu_vms):
            raise UserError("--engine ssh needs either --hosts or --tpu-vms.")
        if self.slice is None or self.tpu_vms:
            return 1
        from looped.slices import slice_of

        machines = slice_of(self.slice, self.slices)
        if len(self.hosts) % machines.hosts:
            raise UserError(
                f"hosts has {len(self.hosts)}, and {machines} have {machines.hosts}; name all hosts of every slice."
            )
        return machines.hosts


@dataclasses.dataclass
class TpuWatch:
    """Watch over a launch until its sweep is done.

    Machines that were taken away are asked for again; finished ones, and requests that failed, are deleted.
    It can be ended and started again at any time: all it knows is in the sweep's folder and in the cloud.
    """

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
    """The sweep's folder."""
    seconds: float = 60.0
    """Between two looks."""

    def run(self) -> int:
        from tpu_launch import operate

        done, shares = operate.watch_sweep(self.directory.rstrip("/"), self.seconds, print)
        print(f"{done} of {shares} shares are done; `looped sweep status {self.directory}` shows the runs.")
        return 0 if done == shares else 1


@dataclasses.dataclass
class TpuList:
    """List machines in every state, what they are for and which still cost money.

    With a sweep's folder those of its launch; with a project all queued resources in it, whoever made them.
    """

    directory: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]", help_behavior_hint="")
    ] = None
    """The sweep's folder."""
    project: Annotated[str | None, tyro.conf.arg(metavar="PROJECT", help_behavior_hint="")] = None
    """Google Cloud project."""
    zone: Annotated[str, tyro.conf.arg(metavar="ZONE", help_behavior_hint="(default: all)")] = "-"
    """Zone to look in."""
    json: bool = False
    """Print a JSON array with one object a machine, and nothing else."""

    def run(self) -> int:
        from tpu_launch import operate

        if (self.directory is None) == (self.project is None):
            raise UserError("name either a sweep's folder or --project.")
        lines: list[str] = []
        if self.directory is not None:
            machines, lines = operate.sweep_machines(self.directory.rstrip("/"))
        else:
            assert self.project is not None
            machines = operate.project_machines(self.project, self.zone)
        _print_machines(machines, self.json)
        if not self.json:
            print("\n".join(lines))
        return 0


@dataclasses.dataclass
class TpuDelete:
    """Take a launch's machines away, with all that they hold, and forget the launch.

    Runs, records and logs stay: launched again, the sweep goes on from them.
    """

    directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
    """The sweep's folder."""
    finished: bool = False
    """Only what is over: machines of finished shares, preempted ones and requests that failed."""
    dry_run: bool = False
    """Print what would be done as a shell script, and do nothing."""

    def run(self) -> int:
        from tpu_launch import operate

        output = self.directory.rstrip("/")
        count = operate.delete_sweep(output, self.finished, print, self.dry_run)
        if not self.dry_run:
            print(
                f"{count} machines were deleted; `looped tpu list --project PROJECT` shows what is left in a project."
            )
        return 0


def _print_machines(machines: list[Machine], as_json: bool) -> None:
    import json
    import sys

    from looped.text import clock, one_line
    from tpu_launch.engine import age_seconds

    rows = []
    for machine in machines:
        age = age_seconds(machine)
        at_most = None if age is None or not machine.costs else round(age / 3600 * machine.chips, 2)
        rows.append(
            {
                "name": machine.name,
                "where": machine.where,
                "accelerator": machine.accelerator,
                "spot": machine.spot,
                "state": machine.said,
                "age_seconds": None if age is None else round(age),
                "costs": machine.costs,
                "chip_hours_at_most": at_most,
                "sweep": machine.sweep,
                "reason": machine.reason,
            }
        )
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        print()
        return
    if not rows:
        print("No machines.")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    result = Table(title="machines", title_justify="left", title_style="bold")
    for header in ("name", "where", "accelerator", "state", "age", "costs", "sweep"):
        result.add_column(header, overflow="fold")
    for row in rows:
        hours = row["chip_hours_at_most"]
        costs = (
            "no" if not row["costs"] else "yes" if not hours else f"yes, at most {hours:g} chip-hours so far"
        )
        kind = f"{row['accelerator']}{' spot' if row['spot'] else ''}"
        said = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        cells = (row["name"], row["where"], kind, said, clock(row["age_seconds"]), costs, row["sweep"])
        result.add_row(*(escape(one_line(cell)) for cell in cells))  # others' words are no markup
    Console(width=None if sys.stdout.isatty() else 200).print(result)
