"""Stands in for `looped.train`: an error that repeats a key of the environment, as a service's client might."""

import os

from fake_training import _write


def train(spec, run_dir, *, progress=None):
    _write(run_dir, spec, status="running", step=0)
    raise RuntimeError(
        f"401 for {os.environ['WANDB_API_KEY']} at https://me:{os.environ['WANDB_API_KEY']}@example.org"
    )
