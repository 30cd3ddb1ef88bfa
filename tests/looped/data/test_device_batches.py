"""The first 200 batches are the same on 1 process and on 2 of 4 devices, with any workers, after any stop."""

import hashlib
import itertools
import os
import pickle
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from looped.data.loader import PackedData, RepeatedDataWarning, process_rows
from looped.errors import UserError

STEPS, BATCH, SEED = 200, 8, 5
pytestmark = pytest.mark.filterwarnings("ignore::looped.data.loader.RepeatedDataWarning")


def digest(batches):
    hashed = hashlib.sha256()
    for _, batch in zip(range(STEPS), batches, strict=False):
        hashed.update(np.ascontiguousarray(batch, np.int32).data)
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def expected(data):
    """Of the batches one by one, by random access."""
    assert 2 * data.train_rows < STEPS * BATCH, "several epochs"
    return digest(data.train_batch(SEED, step, BATCH) for step in range(STEPS))


def over(devices, *shape):
    return NamedSharding(Mesh(np.array(devices).reshape(shape), ("data", "model")), P("data"))


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_whatever_the_number_of_workers(data, expected, workers):
    assert digest(data.train_batches(SEED, 0, BATCH, workers=workers)) == expected
    assert digest(data.device_batches(SEED, 0, BATCH, workers=workers)) == expected


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_whatever_the_mesh(data, expected, shape):
    sharding = over(jax.devices(), *shape)
    batches = data.device_batches(SEED, 0, BATCH, sharding)
    first = next(batches)
    assert first.sharding == sharding
    assert first.addressable_shards[0].data.shape == (BATCH // shape[0], 33)
    assert digest(data.device_batches(SEED, 0, BATCH, sharding)) == expected


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_whatever_the_stops(data, expected, workers):
    edge = data.train_rows // BATCH  # the step within which the second epoch begins
    starts = sorted([0, 1, 57, edge, edge + 1, STEPS])
    hashed = hashlib.sha256()
    for start, stop in itertools.pairwise(starts):
        opened = PackedData(data.directory)  # another process has nothing of the one before
        for _, batch in zip(
            range(start, stop), opened.train_batches(SEED, start, BATCH, workers=workers), strict=False
        ):
            hashed.update(batch.data)
    assert hashed.hexdigest() == expected


PROCESS = """
import sys, warnings
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from looped.data.loader import PackedData, process_rows

warnings.simplefilter("ignore")
address, process, folder, output, steps, batch, seed = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
assert jax.device_count() == 8 and jax.local_device_count() == 4
data, batch, seed = PackedData(folder), int(batch), int(seed)
read = []
take = data._rows("train").take
data._rows("train").take = lambda indices: read.extend(indices) or take(indices)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
batches, parts = data.device_batches(seed, 0, batch, sharding, workers=0), []
for _, array in zip(range(int(steps)), batches):
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    parts.append(np.concatenate([shard.data for shard in shards]))
assert len(read) == int(steps) * batch // 2, "rows of the other process were read"
own = data.train_batches(seed, 0, batch, process_rows(batch))
assert all((next(own) == part).all() for part in parts)
np.save(output, np.stack(parts))
"""


def test_two_processes_of_four_devices(data, expected, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    outputs = [tmp_path / f"{process}.npy" for process in range(2)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROCESS,
                address,
                *map(str, (process, data.directory, output, STEPS, BATCH, SEED)),
            ],
            env=env,
        )
        for process, output in enumerate(outputs)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert digest(np.concatenate([np.load(output) for output in outputs], axis=1)) == expected


def test_grains_own_worker_processes_may_read_too(data):
    """An opened data set travels to another process as its folder, and reads the same there."""
    copy = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(copy.train_batch(SEED, 7, BATCH), data.train_batch(SEED, 7, BATCH))


def test_the_second_epoch_is_warned_of_once(data):
    edge = -(-data.train_rows // BATCH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = data.train_batches(SEED, 0, BATCH, workers=0)
        for _ in range(data.train_rows // BATCH):
            next(batches)
        assert not caught
        for _ in range(3 * edge):
            next(batches)
    assert [w.category for w in caught] == [RepeatedDataWarning]
    assert f"begins at step {data.train_rows // BATCH + 1}" in str(caught[0].message)
    with pytest.warns(RepeatedDataWarning, match=f"{data.train_rows:,} rows are read again"):
        next(data.device_batches(SEED, 5 * edge, BATCH))


def test_processes_read_equal_shares():
    assert [process_rows(8, p, 4) for p in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert process_rows(8) == slice(0, 8)
    with pytest.raises(UserError, match=r"batch_size is 10; 4 processes read equal shares .*multiple"):
        process_rows(10, 0, 4)


def test_workers_below_zero(data):
    with pytest.raises(UserError, match="workers is -1"):
        data.train_batches(0, 0, 8, workers=-1)
