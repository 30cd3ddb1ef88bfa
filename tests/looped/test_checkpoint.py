"""Checkpoints: whatever happens to the newest, training goes on from a whole one and says so."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from looped.checkpoint import DAMAGED, FOLDER, Checkpoints, all_finite, sums
from looped.errors import UserError

# Orbax leaves coroutines behind when a file turns out to be damaged.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(seed):
    rng = np.random.default_rng(seed)
    return {
        "matrix": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(8,)), jnp.bfloat16),
        "step": jnp.asarray(seed, jnp.int32),
    }


@pytest.fixture
def run_dir(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), notes={"at": step})
    checkpoints.close()
    return tmp_path / "run"


def restored(run_dir, **options):
    checkpoints = Checkpoints(run_dir)
    found = checkpoints.restore(state(0), **options)
    checkpoints.close()
    return found


def assert_is(found, step):
    assert found is not None
    assert found[0] == step
    assert found[2] == {"at": step}
    for got, wanted in zip(jax.tree.leaves(found[1]), jax.tree.leaves(state(step)), strict=True):
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)


def largest_file(folder):
    return max((p for p in pathlib.Path(folder).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    file = largest_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(folder):
    file = largest_file(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def empty(folder):
    for file in [p for p in pathlib.Path(folder).rglob("*") if p.is_file()]:
        file.write_bytes(b"")


def remove_files(folder):
    shutil.rmtree(folder)
    pathlib.Path(folder).mkdir()


def test_the_newest_two_are_kept(run_dir):
    assert sorted(p.name for p in (run_dir / FOLDER).iterdir() if p.name.isdigit()) == ["2", "3"]
    assert_is(restored(run_dir), 3)


@pytest.mark.parametrize("damage", [truncate, flip, empty, remove_files])
def test_a_damaged_newest_one_falls_back_to_the_one_before_and_says_so(run_dir, damage, capfd):
    damage(run_dir / FOLDER / "3")
    assert_is(restored(run_dir, set_aside=True), 2)
    said = capfd.readouterr().err
    assert "looped: the checkpoint of step 3 is damaged (" in said
    assert "going on from step 2" in said
    assert [p.name.split("-")[0] for p in (run_dir / DAMAGED).iterdir()] == ["3"], "nothing is deleted"

    checkpoints = Checkpoints(run_dir)
    checkpoints.save(3, state(3), notes={"at": 3})
    checkpoints.close()
    assert_is(restored(run_dir), 3)


def test_who_only_reads_moves_nothing(run_dir):
    flip(run_dir / FOLDER / "3")
    assert_is(restored(run_dir), 2)
    assert (run_dir / FOLDER / "3").exists()
    assert not (run_dir / DAMAGED).exists()


def test_a_value_that_changed_is_found_even_where_the_file_reads_well(run_dir):
    kept = run_dir / FOLDER / "3" / "kept" / "metadata"
    saved = json.loads(kept.read_text())
    saved["sums"]["['matrix']"] ^= 1
    kept.write_text(json.dumps(saved))
    assert_is(restored(run_dir), 2)


def test_where_all_are_damaged_nothing_is_touched_and_the_error_names_them(run_dir):
    for step in (2, 3):
        truncate(run_dir / FOLDER / str(step))
    with pytest.raises(
        UserError, match=r"no checkpoint can be read \(step 3: .*step 2: .*move the run's folder away"
    ):
        restored(run_dir, set_aside=True)
    assert (run_dir / FOLDER / "3").exists()
    assert not (run_dir / DAMAGED).exists()


def test_a_save_that_was_cut_short_is_not_seen_and_goes_with_the_next_one(run_dir):
    shutil.copytree(run_dir / FOLDER / "3", run_dir / FOLDER / "4.orbax-checkpoint-tmp")
    assert_is(restored(run_dir), 3)
    assert (run_dir / FOLDER / "4.orbax-checkpoint-tmp").exists(), "who only reads removes nothing"
    checkpoints = Checkpoints(run_dir, training=True)
    assert_is(checkpoints.restore(state(0)), 3)
    checkpoints.save(5, state(5), notes={"at": 5})
    checkpoints.close()
    assert sorted(p.name for p in (run_dir / FOLDER).iterdir()) == ["3", "5"]


@pytest.mark.parametrize("saves", [False, True])
def test_what_a_kill_left_of_one_that_was_to_go_goes_in_the_end(run_dir, saves):
    shutil.copytree(run_dir / FOLDER / "2", run_dir / FOLDER / "1")
    (run_dir / FOLDER / "1" / "_CHECKPOINT_METADATA").unlink()
    assert_is(restored(run_dir), 3)
    assert (run_dir / FOLDER / "1").exists(), "who only reads removes nothing"
    checkpoints = Checkpoints(run_dir, training=True)
    assert_is(checkpoints.restore(state(0)), 3)
    if saves:
        checkpoints.save(4, state(4))
    checkpoints.close()
    assert sorted(p.name for p in (run_dir / FOLDER).iterdir()) == (["3", "4"] if saves else ["2", "3"])


def test_what_is_not_finite_is_seen_wherever_it_lies():
    from looped.checkpoint import _finite_on_devices

    assert all_finite(state(1))
    for name in ("matrix", "half"):
        for value in (jnp.nan, jnp.inf):
            bad = state(1)
            bad[name] = bad[name].at[(3,) * bad[name].ndim].set(value)
            assert not all_finite(bad)
            assert not all_finite(jax.tree.map(np.asarray, bad))
            assert not _finite_on_devices(jax.tree.leaves(bad))
    assert _finite_on_devices(jax.tree.leaves(state(1)))


def test_a_copy_elsewhere_restores(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "elsewhere")
    shutil.rmtree(run_dir)
    assert_is(restored(tmp_path / "elsewhere"), 3)


def test_sums_are_those_of_the_words_in_every_sharding():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    by_hand = int(sum(int(w) for w in x.view(np.uint32).ravel()) % 2**32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for spec in (P(), P("a"), P("a", "b"), P(None, "b")):
        assert sums({"x": jax.device_put(x, NamedSharding(mesh, spec))}) == {"['x']": by_hand}
    assert sums({"x": x}) == {"['x']": by_hand}


def test_devices_sum_as_the_host_does():
    from looped.checkpoint import _sums_on_devices

    tree = state(5)
    assert [int(x) for x in _sums_on_devices(jax.tree.leaves(tree))] == list(sums(tree).values())


def test_it_opens_as_numpy(run_dir):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        as_numpy = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state(0))
        found = checkpointer.restore((run_dir / FOLDER / "3" / "state").absolute(), as_numpy)
    assert isinstance(found["matrix"], np.ndarray)
    assert np.array_equal(found["matrix"], state(3)["matrix"])
