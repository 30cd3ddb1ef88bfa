#!/bin/sh
# The Python of a fake machine: the one that runs the tests, with buckets in a folder and trainings that only count.
export PYTHONPATH="@HERE@/site:@HERE@/../../.."
export JAX_PLATFORMS=cpu FAKE_PYTHON="$(realpath "$0")"
if [ "$1 $2" = "-m looped" ]; then
  shift 2
  exec "@PYTHON@" -S -E "@HERE@/sweep.py" "$@"
fi
exec "@PYTHON@" "$@"
