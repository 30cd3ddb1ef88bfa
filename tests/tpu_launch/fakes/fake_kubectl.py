"""kubectl with JobSet and Kueue, as far as they are used here.

Modelled on the failure policy of kubernetes-sigs/jobset (api/jobset/v1alpha2), on podFailurePolicy of batch/v1 and on
the quota of a ClusterQueue of Kueue; words on stderr as of kubectl 1.32.
"""

import argparse
import datetime
import json
import sys

from cloud import ROOT, Gone, boot, kill, orders, state, status_of, write


def kubectl(argv):
    import yaml

    made = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    for flag in ("--context", "--namespace", "--selector", "--output", "-f", "--wait"):
        made.add_argument(flag)
    made.add_argument("--ignore-not-found", action="store_true")
    made.add_argument("words", nargs="+")
    given = made.parse_args(argv)
    verb, *rest = given.words
    rules = orders()
    if not rules["credentials"]:
        raise Gone("error: You must be logged in to the server (Unauthorized)")
    if verb in ("create", "apply"):
        for item in yaml.safe_load_all(sys.stdin.read()):
            kind, name = item["kind"], item["metadata"]["name"]
            if kind == "JobSet" and not rules["jobset_installed"]:
                raise Gone(
                    'error: resource mapping not found for name: "" namespace: "" from "STDIN": no matches for kind'
                    ' "JobSet" in version "jobset.x-k8s.io/v1alpha2"\nensure CRDs are installed first'
                )
            with state() as value:
                table = value["jobsets" if kind == "JobSet" else "objects"]
                if name in table and verb == "create":
                    raise Gone(
                        f'Error from server (AlreadyExists): error when creating "STDIN": jobsets.jobset.x-k8s.io'
                        f' "{name}" already exists'
                    )
                if kind == "JobSet":
                    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                    item["metadata"]["creationTimestamp"] = now
                    item["spec"]["suspend"] = True  # as Kueue's webhook does
                    item["status"] = {}
                table[name if kind == "JobSet" else f"{kind}/{name}"] = item
            print(f"{kind.lower()}/{name} created")
        return 0
    if verb == "get":
        label, _, wanted = given.selector.partition("=")
        with state() as value:
            for name, item in value["jobsets"].items():
                step(value, name, item, rules)
            found = [i for i in value["jobsets"].values() if i["metadata"]["labels"].get(label) == wanted]
        write(ROOT / "orders.json", rules | {"lose": []})
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": found}))
        return 0
    with state() as value:
        kind, name = rest
        if kind.startswith("jobsets"):
            kill(value, name, 0.5)
            value["jobsets"].pop(name, None)
        else:
            plural = {
                "localqueues": "LocalQueue",
                "clusterqueues": "ClusterQueue",
                "resourceflavors": "ResourceFlavor",
            }
            value["objects"].pop(f"{plural[kind.partition('.')[0]]}/{name}", None)
    return 0


def step(value, name, item, rules):
    """What JobSet and Kueue do with one JobSet at one look."""
    spec, status = item["spec"], item["status"]
    if status.get("terminalState"):
        return
    if spec["suspend"]:
        if admitted(value, item):
            spec["suspend"] = False
            start(value, name, item)
        return
    if name in rules["lose"] and status_of(name) is None:  # the node is taken away
        kill(value, name, rules.get("grace", 1.0))
        again(
            value,
            name,
            item,
            "PodFailurePolicy" if ignores(item, "DisruptionTarget") else "BackoffLimitExceeded",
        )
        return
    code = status_of(name)
    if code is None:
        return
    if code == 0:
        value["processes"].pop(name, None)
        status["terminalState"] = "Completed"
        status["conditions"] = [
            {"type": "Completed", "status": "True", "message": "jobset completed successfully"}
        ]
    else:
        again(value, name, item, "PodFailurePolicy" if ignores(item, code) else "BackoffLimitExceeded")


def template(item):
    return item["spec"]["replicatedJobs"][0]["template"]["spec"]


def ignores(item, what):
    """Whether the Job's podFailurePolicy has a rule FailJob for this exit status or condition."""
    for rule in template(item)["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        by_code = bool(codes) and what in codes["values"]
        hit = by_code or any(c["type"] == what for c in rule.get("onPodConditions", ()))
        if hit:
            return rule["action"] == "FailJob"
    return False


def again(value, name, item, reason):
    policy, status = item["spec"]["failurePolicy"], item["status"]
    rule = next(
        (r for r in policy["rules"] if reason in r["onJobFailureReasons"]), {"action": "RestartJobSet"}
    )
    if rule["action"] != "RestartJobSetAndIgnoreMaxRestarts":
        status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + 1
        if status["restartsCountTowardsMax"] > policy["maxRestarts"]:
            value["processes"].pop(name, None)
            status["terminalState"] = "Failed"
            message = "jobset failed due to reaching max number of restarts"
            status["conditions"] = [{"type": "Failed", "status": "True", "message": message}]
            return
    status["restarts"] = status.get("restarts", 0) + 1
    start(value, name, item)


def admitted(value, item):
    """Whether the ClusterQueue has quota left."""
    queue = item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    local = value["objects"].get(f"LocalQueue/{queue}")
    if local is None:
        return False
    group = value["objects"][f"ClusterQueue/{local['spec']['clusterQueue']}"]["spec"]["resourceGroups"][0]
    quota = int(group["flavors"][0]["resources"][0]["nominalQuota"])
    running = [
        i
        for i in value["jobsets"].values()
        if not i["spec"]["suspend"] and not i["status"].get("terminalState")
    ]
    return sum(map(tpus, [*running, item])) <= quota


def tpus(item):
    pods = item["spec"]["replicatedJobs"][0]["replicas"] * template(item)["parallelism"]
    return pods * int(
        template(item)["template"]["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"]
    )


def expanded(text, environment):
    """What the kubelet makes of a word of `command` (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    out, at = [], 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out.append(text[at])
            at += 1
        elif text[at + 1] == "$":
            out.append("$")
            at += 2
        elif text[at + 1] == "(" and ")" in text[at:]:
            end = text.index(")", at)
            name = text[at + 2 : end]
            out.append(environment.get(name, f"$({name})"))
            at = end + 1
        else:
            out.append(text[at : at + 2])
            at += 2
    return "".join(out)


def start(value, name, item):
    container = template(item)["template"]["spec"]["containers"][0]
    environment = {pair["name"]: "the-secret-value" for pair in container.get("env", ())}
    script = expanded(container["command"][2], environment)
    boot(value, name, script, environment | {"TPU_WORKER_ID": "0"})
    item["status"]["replicatedJobsStatus"] = [{"name": "slice", "ready": 1, "active": 1}]
