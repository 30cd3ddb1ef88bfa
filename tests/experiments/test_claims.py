"""One holder a share, in a local folder by the kernel's lock, on gs:// by a lease that ends with its signs of life."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments import claims
from experiments.claims import FOLDER, hold, holders, was_claimed
from experiments.shares import WHOLE, Share
from looped.errors import UserError


@pytest.fixture(params=["local", "remote"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "local":
        return tmp_path / "sweep"
    quick(monkeypatch)
    return request.getfixturevalue("bucket") / "sweep"


@pytest.fixture
def remote(bucket, monkeypatch):
    quick(monkeypatch)
    return bucket / "sweep"


def quick(monkeypatch):
    for name, seconds in (("BEAT_SECONDS", 0.1), ("SILENCE_SECONDS", 2.0), ("SETTLE_SECONDS", 0.15)):
        monkeypatch.setattr(claims, name, seconds)


def test_shares_are_held_side_by_side_and_given_back(folder):
    assert not was_claimed(folder)
    with hold(folder, Share(1, 3), "runs"), hold(folder, Share(3, 3), "runs"):
        found = holders(folder)
        assert [str(holder.share) for holder in found] == ["1/3", "3/3"]
        assert {holder.pid for holder in found} == {os.getpid()}
    assert holders(folder) == []
    assert was_claimed(folder)
    with hold(folder, Share(1, 3), "runs"):
        pass


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (WHOLE, WHOLE, "is at work since"),
        (Share(1, 2), Share(1, 2), "is at work on share 1/2 since"),
        (WHOLE, Share(1, 2), "is at work since .*share 1/2 would train its runs a second time"),
        (Share(2, 2), WHOLE, "on share 2/2 since .*the whole sweep would train"),
        (Share(2, 2), Share(1, 3), "on share 2/2 since .*share 1/3 would train"),
    ],
)
def test_what_would_train_a_run_twice_is_refused_with_who_and_what_to_do(folder, first, second, expected):
    with hold(folder, first, "runs"):
        with pytest.raises(UserError, match=expected) as refused, hold(folder, second, "runs"):
            pass
        said = str(refused.value)
        assert f"process {os.getpid()} on " in said
        assert "wait for it or end it" in said
        assert [holder.share for holder in holders(folder)] == [first], "the holder is left as it was"
    with hold(folder, second, "runs"):
        pass


def test_shares_of_other_runs_are_refused(folder):
    with (
        hold(folder, Share(1, 2), "runs"),
        pytest.raises(UserError, match="of other runs than these"),
        hold(folder, Share(2, 2), "more runs"),
    ):
        pass


PROCESS = """
import sys, time
from experiments import claims
claims.BEAT_SECONDS, claims.SETTLE_SECONDS = 0.1, 0.05
from experiments.shares import Share
if sys.argv[1].startswith("gs:"):
    import fake_bucket
with claims.hold(sys.argv[1], Share(1, 2), "runs"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_claim_of_a_killed_process_is_taken_over(folder):
    path = os.pathsep.join(p for p in sys.path if p)
    other = subprocess.Popen(
        [sys.executable, "-c", PROCESS, os.fspath(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {other.pid} on"), hold(folder, Share(1, 2), "runs"):
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    with hold(folder, Share(1, 2), "runs"):
        (holder,) = holders(folder)
        assert holder.pid == os.getpid()


def test_of_two_that_begin_at_once_one_holds_it(remote, monkeypatch):
    """Both find the share free, and both write before either looks again."""
    monkeypatch.setattr(claims, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(claims, "BEAT_SECONDS", 60.0)
    together = threading.Barrier(2, timeout=60)

    def in_step(name):
        real = getattr(claims, name)

        def call(*given):
            real(*given)
            together.wait()

        monkeypatch.setattr(claims, name, call)

    in_step("_wait_until_silent")
    in_step("_beat")
    held, refused, over = [], [], threading.Event()

    def begin():
        try:
            with hold(remote, WHOLE, "runs"):
                held.append(1)
                over.wait(60)  # the claim stands until the other has looked
        except UserError as error:
            refused.append(str(error))
            over.set()

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 1)
    assert holders(remote) == []


def test_a_holder_whose_claim_was_taken_over_stops(remote):
    def take_over():
        path = remote / FOLDER / "1-of-1"
        while not path.exists():
            time.sleep(0.05)
        time.sleep(0.3)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"owner": "another", "host": "elsewhere"}))

    thread = threading.Thread(target=take_over)
    expected = r"on elsewhere is at work since .* instead of this one"
    thread.start()
    with pytest.raises(UserError, match=expected), hold(remote, WHOLE, "runs"):
        time.sleep(30)  # interrupted
    thread.join()
    left = json.loads((remote / FOLDER / "1-of-1").read_text())
    assert left["owner"] == "another", "it is not the first one's to remove"


def test_an_outage_between_two_signs_is_outlived(remote, monkeypatch):
    real, failures = claims.write_whole, []

    def flaky(path, text):
        if len(failures) < 3 and time.monotonic() > begun + 0.3:
            failures.append(1)
            raise OSError("503 backend error")
        real(path, text)

    begun = time.monotonic()
    monkeypatch.setattr(claims, "write_whole", flaky)
    with hold(remote, WHOLE, "runs"):
        time.sleep(1.0)
        assert len(failures) == 3
        assert holders(remote)[0].silent_seconds < 0.5


def test_a_bucket_that_cannot_be_written_is_named(remote, monkeypatch):
    def refuse(path, text):
        raise OSError("Forbidden: storage.objects.create")

    monkeypatch.setattr(claims, "write_whole", refuse)
    expected = r"gs://bucket/sweep, which cannot be written .*objects.create"
    with pytest.raises(UserError, match=expected), hold(remote, WHOLE, "runs"):
        pass


def test_a_half_written_claim_is_no_holder(folder):
    with hold(folder, WHOLE, "runs"):
        pass
    (folder / FOLDER / "1-of-1").write_text('{"owner": ')
    assert holders(folder) == []
    with hold(folder, WHOLE, "runs"):
        assert len(holders(folder)) == 1
