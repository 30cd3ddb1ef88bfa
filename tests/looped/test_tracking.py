"""A run's curve is complete and in order whatever stopped it, and no tracker can end a training."""

import json
import sys
import types

import pytest
from etils import epath

from looped.errors import UserError
from looped.tracking import FILE, POINTS, TRACKERS, Tracking, check_trackers

CONFIG = {"arm": "full", "model": {"recurrences": 4, "d_model": 64}, "seed": 0}


def track(directory, start=0, steps=20, **options):
    return Tracking(directory, "abc123", start=start, steps=steps, config=CONFIG, **options)


def lines(directory):
    return [json.loads(line) for line in (directory / FILE).read_text().splitlines()]


def train(tracking, first, last):
    for step in range(first, last + 1):
        tracking.point(step, 5.0 - step / 100, None if step == first else 1234.56, 1 - step / 40)


def test_every_point_has_its_fields(tmp_path):
    tracking = track(tmp_path)
    train(tracking, 1, 2)
    tracking.close(validation_loss=3.0)
    first, second = lines(tmp_path)
    assert first == {
        "step": 1,
        "loss": 4.99,
        "tokens_per_second": None,
        "learning_rate_multiplier": 0.975,
        "time": first["time"],
    }
    assert second["tokens_per_second"] == 1234.6


@pytest.mark.parametrize("steps", [1, 999, 1500, 10 * POINTS + 7])
def test_a_long_run_has_about_a_thousand_points_and_the_last_step(tmp_path, steps):
    tracking = track(tmp_path, steps=steps)
    train(tracking, 1, steps)
    tracking.close()
    found = [line["step"] for line in lines(tmp_path)]
    assert found[-1] == steps
    assert min(steps, 0.6 * POINTS) <= len(found) <= 1.6 * POINTS


def test_a_run_that_resumes_drops_what_it_trains_again(tmp_path):
    tracking = track(tmp_path)
    train(tracking, 1, 9)
    tracking.flush()
    with open(tmp_path / FILE, "a") as file:
        file.write('{"step": 10, "lo')  # a kill in the middle of a line
    tracking = track(tmp_path, start=6)
    train(tracking, 7, 20)
    tracking.close()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))


def test_a_step_is_noted_once(tmp_path):
    tracking = track(tmp_path)
    train(tracking, 1, 4)
    tracking.point(4, 4.96, 10.0, 0.9)
    train(tracking, 3, 6)
    tracking.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_points_are_on_disk_once_a_checkpoint_is(tmp_path):
    tracking = track(tmp_path)
    train(tracking, 1, 5)
    tracking.flush()
    assert len(lines(tmp_path)) == 5


def test_a_loss_that_is_not_finite_is_null_and_the_file_stays_json(tmp_path):
    tracking = track(tmp_path)
    tracking.point(1, float("nan"), None, 1.0)
    tracking.close()
    assert "NaN" not in (tmp_path / FILE).read_text()
    assert lines(tmp_path)[0]["loss"] is None


def test_an_object_store_gets_the_file_whole(tmp_path, bucket):
    tracking = track(bucket / "run")
    train(tracking, 1, 4)
    tracking.flush()
    tracking = track(bucket / "run", start=3)
    train(tracking, 4, 6)
    tracking.close()
    steps = [json.loads(line)["step"] for line in (bucket / "run" / FILE).read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_process_that_is_not_the_writer_tracks_nothing(tmp_path):
    tracking = track(tmp_path / "run", names=["tensorboard"], writer=False)
    train(tracking, 1, 3)
    tracking.close(2.0)
    assert not (tmp_path / "run").exists()


class Recorded:
    """Stands in for a tracker's package: notes every call of it and of the run that it returns."""

    def __init__(self, monkeypatch, name):
        self.calls = []
        self.broken = False
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=self.init))

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, values, *, step):
        if self.broken:
            raise ConnectionError("no route to host\nmore")
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_config_the_curve_and_the_final_loss(name, tmp_path, monkeypatch):
    service = Recorded(monkeypatch, name)
    tracking = track(tmp_path, names=[name], steps=2)
    train(tracking, 1, 2)
    tracking.close(validation_loss=3.5)
    (_, options), *logged, end = service.calls
    assert options["resume"] == "allow"
    assert options["project"] == "looped"
    assert options["config"] == CONFIG
    assert options["id" if name == "wandb" else "name"] == "abc123"
    assert [call[1] for call in logged] == [1, 2, 2]
    assert set(logged[0][2]) == {"loss", "learning_rate_multiplier"}, "no speed is known at the first point"
    assert logged[1][2]["tokens_per_second"] == 1234.6
    assert logged[2][2] == {"validation_loss": 3.5}
    assert end == ("finish",)


def test_an_error_in_a_tracker_is_said_once_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    broken, sound = Recorded(monkeypatch, "wandb"), Recorded(monkeypatch, "trackio")
    broken.broken = True
    tracking = track(tmp_path, names=["wandb", "trackio"])
    train(tracking, 1, 20)
    tracking.close(3.0)
    said = capsys.readouterr().err
    assert said.count("wandb is not tracked any further (ConnectionError: no route to host)") == 1
    assert said.count("\n") == 1
    assert len(lines(tmp_path)) == 20
    assert len(sound.calls) == 1 + 20 + 1 + 1


def test_a_tracker_that_cannot_begin_is_left_out(tmp_path, monkeypatch, capsys):
    def refuse(**_):
        raise PermissionError("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    tracking = track(tmp_path, names=["wandb"])
    train(tracking, 1, 3)
    tracking.close()
    assert "wandb is not tracked any further (PermissionError: not logged in)" in capsys.readouterr().err
    assert len(lines(tmp_path)) == 3


def test_a_folder_that_cannot_be_written_does_not_end_the_run_either(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    tracking = track(tmp_path / "file")
    train(tracking, 1, 3)
    tracking.close()
    assert "the curve is not tracked any further" in capsys.readouterr().err


def test_unknown_and_missing_trackers_are_refused_before_training(monkeypatch):
    with pytest.raises(UserError, match=r"track has 'tensorbord'.*Did you mean 'tensorboard'"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'looped\[wandb\]'"):
        check_trackers(["wandb"])
    check_trackers([])


def test_every_tracker_has_an_extra():
    import tomllib

    extras = tomllib.loads((epath.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(TRACKERS) <= set(extras)


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = track(tmp_path, names=["tensorboard"], steps=3)
    train(tracking, 1, 3)
    tracking.close(validation_loss=3.5)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, round(event.tensor_proto.float_val[0], 4)) for event in events.Tensors("loss")]
    assert losses == [(1, 4.99), (2, 4.98), (3, 4.97)]
    assert [event.step for event in events.Tensors("validation_loss")] == [3]
