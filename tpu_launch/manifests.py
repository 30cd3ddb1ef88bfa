"""Kubernetes objects of a launch: a JobSet a share, and the Kueue objects that let so many run at once.

Field rules: JobSet v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2), Kueue v1beta2 (kubernetes-sigs/kueue,
apis/kueue/v1beta2), Job batch/v1.  JobSet 0.8 or newer, Kueue 0.15 or newer.

How a share starts again.  A pod ends its Job at once (`backoffLimit: 0`), because the processes of a slice only work
together.  Status 75, and a pod that its node was taken from, end it for the reason PodFailurePolicy, which starts the
JobSet again as often as it takes; any other end counts, and after two more starts the JobSet has failed.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from looped.preemption import REQUEUE
from tpu_launch import startup
from tpu_launch.launch import Gke, Launch
from tpu_launch.machine import FAILURES
from tpu_launch.names import SHARE_LABEL, SWEEP_LABEL, machine_name, sweep_key

GRACE_SECONDS = 60
"""From SIGTERM to SIGKILL.  A node that is taken away gives less, whatever this says."""
_SPOT = "cloud.google.com/gke-spot"
_CONTAINER = "train"
_HOME = '"${LOOPED_HOME:-/tmp/looped}"'


def labels(launch: Launch) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "looped", SWEEP_LABEL: sweep_key(launch.output)}


def queue_name(launch: Launch) -> str:
    return f"looped-{sweep_key(launch.output)}"


def jobset(launch: Launch, place: Gke, share: int) -> dict[str, Any]:
    """The JobSet that trains one share."""
    own = labels(launch) | {SHARE_LABEL: f"{share}-of-{launch.shares}"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": machine_name(launch.output, share, launch.shares),
            "namespace": place.namespace,
            "labels": own | {"kueue.x-k8s.io/queue-name": place.queue or queue_name(launch)},
            "annotations": {
                "looped/sweep": launch.output,
                # One Job has a slice, and so a node pool, for itself.
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool",
            },
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": FAILURES - 1,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "startAgain",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {"name": "slice", "replicas": launch.slices, "template": _job(launch, place, share, own)}
            ],
        },
    }


def _job(launch: Launch, place: Gke, share: int, own: dict[str, str]) -> dict[str, Any]:
    machines = launch.machines
    assert machines is not None
    return {
        "spec": {
            "parallelism": machines.hosts_per_slice,
            "completions": machines.hosts_per_slice,
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [REQUEUE]},
                    },
                    {
                        "action": "FailJob",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"metadata": {"labels": own}, "spec": _pod(launch, place, share)},
        }
    }


def _pod(launch: Launch, place: Gke, share: int) -> dict[str, Any]:
    machines = launch.machines
    assert machines is not None
    start = startup.script(launch, share, home=_HOME, once=True, secrets_by_gcloud=False)
    chips = {"google.com/tpu": machines.chips_per_host}
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": place.image,
        "command": ["bash", "-c", _unexpanded(start)],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
    }
    if launch.secrets:
        container["env"] = [
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": variable}}}
            for variable, secret in launch.secrets.items()
        ]
    pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_SECONDS}
    if place.service_account is not None:
        pod["serviceAccountName"] = place.service_account
    return pod | {"nodeSelector": node_labels(launch, place), "containers": [container]}


def _unexpanded(text: str) -> str:
    """`text` so that a container gets it as it is: Kubernetes puts variables for `$(NAME)` and `$` for `$$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def node_labels(launch: Launch, place: Gke) -> dict[str, str]:
    """Labels of the nodes that the slices are made of."""
    machines = launch.machines
    assert machines is not None
    found = {
        "cloud.google.com/gke-tpu-accelerator": machines.generation.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": machines.topology,
    }
    return found | ({_SPOT: "true"} if place.spot else {})


def queue(launch: Launch, place: Gke) -> list[dict[str, Any]]:
    """Kueue objects that let `place.pool` shares run at once; none where a queue is given."""
    if place.queue is not None:
        return []
    machines = launch.machines
    assert machines is not None
    name, own = queue_name(launch), labels(launch)
    flavor: dict[str, Any] = {"nodeLabels": node_labels(launch, place)}
    if place.spot:
        flavor["tolerations"] = [{"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    quota = {"name": "google.com/tpu", "nominalQuota": place.pool * machines.chips}
    group = {"coveredResources": ["google.com/tpu"], "flavors": [{"name": name, "resources": [quota]}]}
    api = "kueue.x-k8s.io/v1beta2"
    return [
        {
            "apiVersion": api,
            "kind": "ResourceFlavor",
            "metadata": {"name": name, "labels": own},
            "spec": flavor,
        },
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": name, "labels": own},
            "spec": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}},
                "queueingStrategy": "BestEffortFIFO",
                "resourceGroups": [group],
            },
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": place.namespace, "labels": own},
            "spec": {"clusterQueue": name},
        },
    ]


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks of lines, which can be read."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if set("\x85\u2028\u2029") & set(text):  # YAML 1.1 takes them for ends of lines, and folds them away
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
