"""Stands in for `looped sweep run` on a fake machine: the documented command line, shares and statuses, no training.

A run is a file that counts its steps; being told to stop ends with status 75 and what was counted so far.  Which runs
there are is in `runs.json`, since expanding presets takes longer than all the rest.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

STEPS = 10
ROOT = pathlib.Path(os.environ["FAKE_CLOUD"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs=2)
    parser.add_argument("preset")
    parser.add_argument("--output", required=True)
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--budgets", nargs="*", type=float, default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    given = parser.parse_args()
    assert given.words == ["sweep", "run"]
    signal.signal(signal.SIGTERM, stop)
    runs = json.loads((ROOT / "runs.json").read_text())
    index, count = map(int, given.share.split("/"))
    output = given.output
    folder = (
        ROOT / "buckets" / output.removeprefix("gs://")
        if output.startswith("gs://")
        else pathlib.Path(output)
    )
    own = runs[index - 1 :: count]
    for run in own:
        train(folder / run)
    print(f"{len(own)} of {len(runs)} runs are done in {output}.")


def stop(number, frame):
    sys.exit(75)


def train(run):
    run.mkdir(parents=True, exist_ok=True)
    steps = run / "steps"
    done = len(steps.read_text().split()) if steps.exists() else 0
    with open(run / "starts", "a") as starts:
        if done < STEPS:
            starts.write(f"{done}\n")
    if os.environ.get("FAKE_FAILS") in (run.name, "all"):
        print(f"looped: the loss of {run.name} is a secret: {os.environ.get('WANDB_API_KEY')}")
        sys.exit(1)
    for step in range(done, STEPS):
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0")))
        with open(steps, "a") as file:
            file.write(f"{step}\n")


if __name__ == "__main__":
    main()
