"""Runs one of the stand-ins: `program.py gcloud ARGUMENT ...`."""

import json
import sys

from cloud import ROOT
from fake_gcloud import gcloud
from fake_hosts import ssh, uv
from fake_kubectl import kubectl

PROGRAMS = {"gcloud": gcloud, "kubectl": kubectl, "ssh": ssh, "uv": uv}

if __name__ == "__main__":
    with open(ROOT / "calls.jsonl", "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
