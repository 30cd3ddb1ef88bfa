"""The published field rules of the Kubernetes objects that are made here, as a table, and a reader of it.

A rule is a set of allowed values, a pattern, a type, a list `[rule]`, or a table of fields, in which a name with `!` is
required and one that is not listed is an error (as `kubectl --validate=strict` has it).  Sources, by kind:

- JobSet: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go and pkg/webhooks/jobset_webhook.go
- ResourceFlavor, ClusterQueue, LocalQueue: kubernetes-sigs/kueue, apis/kueue/v1beta2/*_types.go
- Job and Pod: Kubernetes API reference, batch/v1 JobSpec and core/v1 PodSpec, and "Pod failure policy"
- names and labels: Kubernetes, "Object Names and IDs" (RFC 1035 and 1123), "Labels and Selectors"
"""

import re

DNS_1123_SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
DNS_1123_LABEL = re.compile(r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
DNS_1035_LABEL = re.compile(r"(?=.{1,63}$)[a-z]([-a-z0-9]*[a-z0-9])?")
KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL = re.compile(r"(?=.{0,63}$)([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
RULE_NAME = re.compile(r"(?=.{1,128}$)[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


class Keyed:
    """An object with any keys of a pattern, all values under one rule."""

    def __init__(self, rule, most=None):
        self.rule, self.most = rule, most


LABELS, ANNOTATIONS = Keyed(LABEL), Keyed(str)
TOLERATION = {
    "key": KEY,
    "operator": {"Equal", "Exists"},
    "value": LABEL,
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
}
QUANTITIES = Keyed(int)
CONTAINER = {
    "name!": DNS_1123_LABEL,
    "image!": str,
    "command": [str],
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
    "env": [
        {
            "name!": re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*"),
            "valueFrom!": {
                "secretKeyRef!": {"name!": DNS_1123_SUBDOMAIN, "key!": re.compile(r"[-._a-zA-Z0-9]+")}
            },
        }
    ],
}
POD = {
    "restartPolicy": {"Never"},  # a Job with a podFailurePolicy takes no other
    "terminationGracePeriodSeconds": int,
    "serviceAccountName": DNS_1123_SUBDOMAIN,
    "nodeSelector": LABELS,
    "containers!": [CONTAINER],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": {"FailJob", "FailIndex", "Ignore", "Count"},
                "onExitCodes": {
                    "containerName": DNS_1123_LABEL,
                    "operator!": {"In", "NotIn"},
                    "values!": [int],
                },
                "onPodConditions": [{"type!": str, "status!": {"True", "False", "Unknown"}}],
            }
        ]
    },
    "template!": {"metadata": {"labels": LABELS}, "spec!": POD},
}
RULES = {
    "JobSet": {
        "apiVersion!": {"jobset.x-k8s.io/v1alpha2"},
        "kind!": {"JobSet"},
        "metadata!": {
            "name!": DNS_1035_LABEL,
            "namespace": DNS_1123_LABEL,
            "labels": LABELS,
            "annotations": ANNOTATIONS,
        },
        "spec!": {
            "failurePolicy": {
                "maxRestarts": int,
                "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
                "rules": [
                    {
                        "name!": RULE_NAME,
                        "action!": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                        "onJobFailureReasons": [
                            {
                                "BackoffLimitExceeded",
                                "DeadlineExceeded",
                                "FailedIndexes",
                                "MaxFailedIndexesExceeded",
                                "PodFailurePolicy",
                            }
                        ],
                        "targetReplicatedJobs": [str],
                    }
                ],
            },
            "replicatedJobs!": [{"name!": DNS_1035_LABEL, "replicas": int, "template!": {"spec!": JOB}}],
        },
    },
    "ResourceFlavor": {
        "apiVersion!": {"kueue.x-k8s.io/v1beta2"},
        "kind!": {"ResourceFlavor"},
        "metadata!": {"name!": DNS_1123_SUBDOMAIN, "labels": LABELS},
        "spec": {"nodeLabels": Keyed(LABEL, most=8), "tolerations": [TOLERATION]},
    },
    "ClusterQueue": {
        "apiVersion!": {"kueue.x-k8s.io/v1beta2"},
        "kind!": {"ClusterQueue"},
        "metadata!": {"name!": DNS_1123_SUBDOMAIN, "labels": LABELS},
        "spec!": {
            "namespaceSelector": {"matchLabels": LABELS},
            "queueingStrategy": {"StrictFIFO", "BestEffortFIFO"},
            "resourceGroups": [
                {
                    "coveredResources!": [KEY],
                    "flavors!": [
                        {"name!": DNS_1123_SUBDOMAIN, "resources!": [{"name!": KEY, "nominalQuota!": int}]}
                    ],
                }
            ],
        },
    },
    "LocalQueue": {
        "apiVersion!": {"kueue.x-k8s.io/v1beta2"},
        "kind!": {"LocalQueue"},
        "metadata!": {"name!": DNS_1123_SUBDOMAIN, "namespace!": DNS_1123_LABEL, "labels": LABELS},
        "spec!": {"clusterQueue": DNS_1123_SUBDOMAIN},
    },
}


def violations(item):
    """Every rule that the object breaks, as `path: why`."""
    found = list(_read(RULES[item["kind"]], item, item["kind"]))
    if not found:
        found += {"JobSet": _jobset, "ClusterQueue": _cluster_queue}.get(item["kind"], lambda item: [])(item)
    return found


def _read(rule, value, path):
    if isinstance(rule, dict):
        if not isinstance(value, dict):
            yield f"{path}: not an object"
            return
        for name in rule:
            if name.endswith("!") and name[:-1] not in value:
                yield f"{path}.{name[:-1]}: required"
        for name, part in value.items():
            known = rule.get(name, rule.get(f"{name}!"))
            if known is None:
                yield f"{path}.{name}: unknown field"
            else:
                yield from _read(known, part, f"{path}.{name}")
    elif isinstance(rule, Keyed):
        if rule.most is not None and len(value) > rule.most:
            yield f"{path}: more than {rule.most}"
        for name, part in value.items():
            if not KEY.fullmatch(name):
                yield f"{path}.{name}: no key"
            yield from _read(rule.rule, part, f"{path}.{name}")
    elif isinstance(rule, list):
        if not isinstance(value, list) or not value:
            yield f"{path}: not a list with something in it"
        else:
            for index, part in enumerate(value):
                yield from _read(rule[0], part, f"{path}[{index}]")
    elif isinstance(rule, set):
        if value not in rule:
            yield f"{path}: {value!r} is none of {sorted(rule)}"
    elif isinstance(rule, re.Pattern):
        if not isinstance(value, str) or not rule.fullmatch(value):
            yield f"{path}: {value!r} does not match"
    elif type(value) is not rule or (rule is int and value < 0):
        yield f"{path}: {value!r} is no {rule.__name__}"


def _jobset(item):
    """Rules across fields: of the webhook, of a Job's pod failure policy, and of extended resources."""
    name, spec = item["metadata"]["name"], item["spec"]
    rules = spec["failurePolicy"]["rules"]
    if len({rule["name"] for rule in rules}) < len(rules):
        yield "rule names are not unique"
    for own in spec["replicatedJobs"]:
        job = own["template"]["spec"]
        pod = f"{name}-{own['name']}-{own['replicas'] - 1}-{job['completions'] - 1}-abcde"
        if not DNS_1035_LABEL.fullmatch(pod):
            yield f"pod name {pod} is too long"
        containers = {container["name"] for container in job["template"]["spec"]["containers"]}
        for rule in job["podFailurePolicy"]["rules"]:
            if ("onExitCodes" in rule) == ("onPodConditions" in rule):
                yield "a rule of a podFailurePolicy has either onExitCodes or onPodConditions"
            codes = rule.get("onExitCodes")
            if codes and (codes.get("containerName") not in containers or 0 in codes["values"]):
                yield "onExitCodes names a container of the pod, and never 0 with In"
            if codes and sorted(set(codes["values"])) != codes["values"]:
                yield "values of onExitCodes are ordered and unique"
        for container in job["template"]["spec"]["containers"]:
            if container["resources"]["requests"] != container["resources"]["limits"]:
                yield "requests and limits of an extended resource are equal"


def _cluster_queue(item):
    for group in item["spec"]["resourceGroups"]:
        for flavor in group["flavors"]:
            if [resource["name"] for resource in flavor["resources"]] != group["coveredResources"]:
                yield "a flavor lists the covered resources, in their order"
