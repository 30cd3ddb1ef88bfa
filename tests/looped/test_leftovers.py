"""What would keep a TPU from starting is named before anything is trained."""

import fcntl
import os
import subprocess
import sys

import pytest

from looped.errors import UserError
from looped.leftovers import check_lock, check_machine, check_multi_slice

ADDRESS, SLICES, SLICE = "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"
COMPLETE = {ADDRESS: "10.0.0.2:8080", SLICES: "2", SLICE: "1"}


def test_a_lock_file_that_nobody_holds_is_no_obstacle(tmp_path):
    check_lock(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()
    check_lock(tmp_path / "lock")


def test_the_process_that_holds_the_lock_is_named(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    code = f"import fcntl; f = open({str(lock)!r}, 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match=r"TPU of this machine is in use by (another )?process"):
            check_lock(lock)
    finally:
        holder.communicate("\n")
    check_lock(lock)


def test_a_file_of_another_user_that_nobody_holds_is_to_be_removed(tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    lock.touch()

    def refuse(path, flags, mode):
        assert flags & os.O_CREAT, (
            "as libtpu opens it: the kernel refuses others' files in /tmp even to root then"
        )
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=f"sudo rm {lock}"):
        check_lock(lock)


def test_checking_leaves_a_lock_free_for_others(tmp_path):
    (tmp_path / "lock").touch()
    check_lock(tmp_path / "lock")
    with open(tmp_path / "lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("environment", [{}, {SLICES: "1"}, {SLICES: "1", SLICE: "0", ADDRESS: "h:1"}])
def test_one_slice_is_one_slice(joined, environment):
    check_multi_slice(joined, environment)


@pytest.mark.parametrize(
    ("environment", "joined", "expected"),
    [
        (COMPLETE, False, f"wait for the other slices.*--distributed.*unset {ADDRESS} {SLICES} {SLICE}"),
        ({ADDRESS: "h:1"}, True, f"{ADDRESS}=h:1 is set and {SLICES} and {SLICE} is not.*unset {ADDRESS}"),
        ({SLICES: "2", SLICE: "0"}, True, f"{ADDRESS} is not"),
        (COMPLETE | {SLICE: "2"}, True, "no slice of 2 slices"),
        (COMPLETE | {SLICE: "first"}, True, "no slice of 2 slices"),
    ],
)
def test_stale_or_contradictory_slices_are_named_with_the_remedy(environment, joined, expected):
    with pytest.raises(UserError, match=expected):
        check_multi_slice(joined, environment)


def test_complete_variables_are_right_for_processes_that_join():
    check_multi_slice(True, COMPLETE)


def test_the_machine_check_reads_the_environment_and_leaves_the_lock_alone_on_a_cpu(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("JAX_PLATFORMS=cpu uses no TPU")

    monkeypatch.setattr("looped.leftovers.check_lock", never)
    check_machine(False, tmp_path)
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="to train alone"):
        check_machine(False, tmp_path)
