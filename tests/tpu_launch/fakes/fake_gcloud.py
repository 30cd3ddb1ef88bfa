"""gcloud, as far as it is used here.

Modelled on the SDK 528.0.0 run against a local server in place of the TPU and Storage APIs (endpoint overrides): that
gave the words on stderr, the exit statuses (1 from the service, 2 for arguments) and the JSON of `list`.  The fields
are those of projects.locations.queuedResources, version 2; the life of a request is that of
https://cloud.google.com/tpu/docs/queued-resources; refusals are worded as users report them (quota: issues 87 and 1612
of marin-community/marin).
"""

import datetime
import json
import os
import pathlib
import sys

from cloud import ROOT, Gone, boot, countdown, kill, orders, parser, state, write
from fake_hosts import tpu_vm


def gcloud(argv):
    group = ".".join(word for word in argv if not word.startswith("-"))
    if argv[:1] == ["storage"]:
        check_credentials(f"gcloud.storage.{argv[1]}")
        return storage(argv[1], argv[2:])
    if argv[:3] == ["compute", "tpus", "queued-resources"]:
        command = f"gcloud.compute.tpus.queued-resources.{argv[3]}"
        check_credentials(command)
        return {"create": create, "list": listing, "delete": delete}[argv[3]](argv[4:], command)
    if argv[:3] == ["compute", "tpus", "tpu-vm"]:
        return tpu_vm(argv[3], argv[4:])
    if argv[:3] == ["secrets", "versions", "access"]:
        print("the-secret-value")
        return 0
    raise Gone(f"ERROR: (gcloud) Invalid choice: '{group}'.", 2)


def check_credentials(command):
    if not orders()["credentials"]:
        raise Gone(
            f"ERROR: ({command}) You do not currently have an active account selected.\nPlease run:\n\n"
            "  $ gcloud auth login\n\nto obtain new credentials.\n"
        )


def create(argv, command):
    flags = (
        "project",
        "zone",
        "accelerator-type",
        "runtime-version",
        "node-id",
        "node-count",
        "node-prefix",
        "labels",
    )
    more = ("description", "metadata-from-file", "scopes", "service-account", "network", "subnetwork")
    made = parser(command, flags + more, ("spot", "reserved"))
    made.add_argument("name")
    given = made.parse_args(argv)
    rules = orders()
    prefix = f"ERROR: ({command}) "
    if given.zone not in rules["zones"]:
        words = f'Cloud TPU received a bad request. The requested zone "{given.zone}" is not supported. [EID: 0x1994f2]'
        raise Gone(f"{prefix}INVALID_ARGUMENT: {words}")
    if given.accelerator_type not in rules["accelerators"]:
        raise Gone(
            f"{prefix}INVALID_ARGUMENT: Cloud TPU received a bad request. The requested accelerator configuration"
            f' for accelerator type, "{given.accelerator_type}", could not be found in the zonal accelerator'
            f' configurations for "{given.zone}".; the accelerator {given.accelerator_type} was not found in zone'
            f" {given.zone} [EID: 0x362c]"
        )
    key, _, file = given.metadata_from_file.partition("=")
    node = {
        "acceleratorType": given.accelerator_type,
        "runtimeVersion": given.runtime_version,
        "description": given.description or "",
        "labels": dict(pair.split("=") for pair in given.labels.split(",")),
        "metadata": {key: pathlib.Path(file).read_text()},
    }
    spec = {"parent": f"projects/1/locations/{given.zone}", "node": node}
    if (given.node_id is None) == (given.node_count is None):
        raise Gone(f"{prefix}Exactly one of (--node-id | --node-count) must be specified.", 2)
    if given.node_id:
        spec["nodeId"] = given.node_id
    else:
        spec["multisliceParams"] = {"nodeCount": int(given.node_count), "nodeIdPrefix": given.node_prefix}
    path = f"projects/{given.project}/locations/{given.zone}/queuedResources/{given.name}"
    with state() as value:
        if given.name in value["resources"]:
            raise Gone(f"{prefix}ALREADY_EXISTS: Resource '{path}' already exists")
        over = used(value) + chips(spec) > rules["quota_chips"]
        if over and rules["refuse_at_once"]:
            limit = f"Limit: {rules['quota_chips']} in region us-west4."
            words = f"Quota limit 'TPUV5sLitepodPerProjectPerRegionForTPUAPI' has been exceeded. {limit}"
            raise Gone(f"{prefix}RESOURCE_EXHAUSTED: {words}")
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "123Z")
        item = {
            "name": path,
            "createTime": now,
            "tpu": {"nodeSpec": [spec]},
            "state": {"state": "WAITING_FOR_RESOURCES"},
        }
        item |= {"spot": {}} if given.spot else {}
        value["resources"][given.name] = item
    if countdown("drop_create"):
        words = "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"
        raise Gone(f"ERROR: gcloud crashed (ConnectionError): {words}")
    print(f"Create request issued for: [{given.name}]", file=sys.stderr)
    return 0


def chips(spec):
    return int(spec["node"]["acceleratorType"].rpartition("-")[2]) * int(
        spec.get("multisliceParams", {}).get("nodeCount", 1)
    )


def used(value):
    return sum(chips(item["tpu"]["nodeSpec"][0]) for item in value["resources"].values())


def listing(argv, command):
    given = parser(command, ("project", "zone", "format"), ()).parse_args(argv)
    rules = orders()
    with state() as value:
        for name, item in list(value["resources"].items()):
            advance(value, name, item, rules)
        found = [
            item for item in value["resources"].values() if given.zone in ("-", item["name"].split("/")[3])
        ]
    write(ROOT / "orders.json", rules | {"lose": []})
    print(json.dumps(found, indent=2))
    return 0


def advance(value, name, item, rules):
    """One step in the life of a queued resource."""
    now = item["state"]["state"]
    spec = item["tpu"]["nodeSpec"][0]
    if now == "DELETING":
        kill(value, name, 0)
        del value["resources"][name]
    elif name in rules["lose"] and now == "ACTIVE":
        item["state"] = {"state": "SUSPENDING", "suspendingData": {}, "stateInitiator": "SERVICE"}
        kill(value, name, rules.get("grace", 1.0))
    elif now == "SUSPENDING":
        item["state"] = {"state": "SUSPENDED", "suspendedData": {}, "stateInitiator": "SERVICE"}
    elif now == "WAITING_FOR_RESOURCES":
        if used(value) > rules["quota_chips"]:
            words = "Quota 'TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI' exhausted. Limit 8 in region us-west4"
            item["state"] = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": words}}}
        else:
            item["state"] = {"state": "PROVISIONING", "provisioningData": {}}
    elif now == "PROVISIONING":
        item["state"] = {"state": "ACTIVE", "activeData": {}}
        boot(value, name, spec["node"]["metadata"]["startup-script"], {})


def delete(argv, command):
    made = parser(command, ("project", "zone"), ("force",))
    made.add_argument("name")
    given = made.parse_args(argv)
    with state() as value:
        item = value["resources"].get(given.name)
        if item is None:
            path = f"projects/{given.project}/locations/{given.zone}/queuedResources/{given.name}"
            raise Gone(f"ERROR: ({command}) NOT_FOUND: Resource '{path}' was not found")
        if item["state"]["state"] == "ACTIVE" and not given.force:
            raise Gone(f"ERROR: ({command}) FAILED_PRECONDITION: the queued resource has nodes")
        item["state"] = {"state": "DELETING"}
    print(f"Delete request issued for: [{given.name}]", file=sys.stderr)
    return 0


def storage(verb, argv):
    command = f"gcloud.storage.{verb}"
    made = parser(command, ("if-generation-match",), ())
    made.add_argument("paths", nargs="+")
    given = made.parse_args(argv)
    rules = orders()
    remote = [path for path in given.paths if path.startswith("gs://")]
    if rules["no_bucket"]:
        raise Gone(f"ERROR: ({command}) {'/'.join(remote[0].split('/')[:3])} not found: 404.")
    files = [ROOT / "buckets" / path.removeprefix("gs://") for path in remote]
    if verb == "cp":
        if rules["read_only"]:
            raise Gone(
                f"ERROR: ({command}) HTTPError 403: a@b.c does not have storage.objects.create access to the Google"
                " Cloud Storage object. Permission 'storage.objects.create' denied on resource (or it may not exist)."
            )
        source = given.paths[0]
        data = sys.stdin.buffer.read() if source == "-" else pathlib.Path(source).read_bytes()
        if given.if_generation_match == "0" and files[0].exists():
            raise Gone(
                f"ERROR: ({command}) HTTPError 412: At least one of the pre-conditions you specified did not hold."
            )
        files[0].parent.mkdir(parents=True, exist_ok=True)
        part = files[0].with_name(f".{files[0].name}.{os.getpid()}")
        part.write_bytes(data)
        part.replace(files[0])
        return 0
    found = [
        match
        for file in files
        for match in sorted(file.parent.glob(file.name))
        if not match.name.startswith(".")
    ]
    if not found:
        raise Gone(
            f"ERROR: ({command}) The following URLs matched no objects or files:\n" + "\n".join(remote)
        )
    for file in found:
        if verb == "cat":
            sys.stdout.write(file.read_text())
        else:
            file.unlink()
    return 0
