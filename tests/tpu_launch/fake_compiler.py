"""A compiler that answers at once."""

from looped.slices import GIB
from tpu_launch import check
from tpu_launch.compile_check import Compiled, Memory, Times, Traffic


def compiled(gib, **fields):
    memory = Memory(int(gib * GIB), 0, 0, 0)
    times = Times(0.5, 0.5, 0.1, 0.1, 0.0, 0.0, "products")
    values = {
        "status": "compiled",
        "mesh": {"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 1},
        "hbm_bytes": memory.total,
        "memory": memory,
        "trace_seconds": 1.0,
        "compile_seconds": 2.0,
        "traffic": (Traffic("all-gather", "bf16", False, True, 3, 3 * 2**20),),
        "flops": 1e12,
        "times": times,
    }
    return Compiled(**(values | fields))


class FakeWorker:
    """Answers what `answer` says of the job, and counts."""

    jobs: list = []  # noqa: RUF012 - one for all of a test's workers
    answer = staticmethod(lambda job: compiled(1))

    def compile(self, job):
        self.jobs.append(job)
        return self.answer(job)

    def kill(self):
        pass


def replace_workers(monkeypatch):
    """Checks are answered by the class that is returned, with or without libtpu."""
    monkeypatch.setattr(check, "Worker", FakeWorker)
    monkeypatch.setattr(check, "require_libtpu", lambda: None)
    monkeypatch.setattr(FakeWorker, "jobs", [])
    return FakeWorker
