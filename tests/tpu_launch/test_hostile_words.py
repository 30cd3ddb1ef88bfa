"""Whatever a launch's words are, a shell, gcloud, kubectl and ssh take them for words, or the launch is refused."""

import importlib.util
import io
import json
import pathlib
import subprocess
import sys
import tarfile

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from looped import __main__ as command_line
from looped.errors import UserError
from looped.jsonable import from_json, to_json
from tpu_launch import manifests, operate, source, startup, store
from tpu_launch.engine import Machine, engine_of
from tpu_launch.launch import Gke, Launch, Queued, Ssh
from tpu_launch.machine import Machine as OnMachine
from tpu_launch.names import machine_name, sweep_key
from tpu_launch.outside import outside, script

GIT = "git+https://example.org/looped.git@v1"
PLACES = {
    "queued": {"queued": Queued("p", "z"), "slice": "v5e:2x4"},
    "gke": {"gke": Gke(pool=1), "slice": "v5e:2x4"},
    "ssh": {"ssh": Ssh(("h1", "h2"))},
}
HOSTILE = (
    "$(touch ran)", "`touch ran`", "'; touch ran; '", '"; touch ran; "', "$HOME", "${PATH}", "$$", "$(HF_TOKEN)", "a b",
    "*", "?", "~", "\\", "\\'", "!!", "#x", "&", "|touch ran", ">ran", "%s", "{a,b}", "END", "é🙂", "^:^a", "@file",
    "=",
)  # fmt: skip


def launched(engine, **fields):
    return Launch(
        **(
            {"preset": "quickstart", "output": "gs://b/s", "shares": 2, "source": GIT}
            | PLACES[engine]
            | fields
        )
    )


LETTERS = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"))
WORDS = st.lists(st.sampled_from(HOSTILE) | st.text(LETTERS, max_size=5), min_size=1, max_size=3).map("".join)

# Stands in for everything that the start-up script calls; `exec` prints the words that the machine's program gets.
PRELUDE = """
exec() { if [ "$#" -gt 0 ]; then builtin printf '%s\\0' "$@"; builtin exit 0; fi; }
flock() { :; }; uv() { :; }; sleep() { :; }; gcloud() { echo value; }; python3() { :; }
"""


def words_of(text, folder):
    """The words with which a start-up script starts the sweep, and the data's folder that it sets."""
    text = text.replace("exec > >(trap '' TERM; exec tee -a log) 2>&1\n", "").replace(
        "\nexec venv", '\nprintf "%s\\0" "$LOOPED_DATA"; exec venv'
    )
    done = subprocess.run(
        ["bash", "-c", PRELUDE + text],
        capture_output=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LOOPED_HOME": str(folder / "home")},
        check=True,
    )
    data, *words = done.stdout.decode().split("\0")[:-1]
    return data, words


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(PLACES)), WORDS, WORDS, WORDS)
@example("gke", "$(HF_TOKEN)$$", "a", "b")
@example("ssh", "'\"`$(touch ran)", "x\\", "END")
def test_a_machine_gets_the_very_words(tmp_path_factory, engine, output, preset, data):
    folder = tmp_path_factory.mktemp("machine")
    launch = launched(engine, output=f"gs://b/{output}", preset=f"p{preset}.json", data=f"gs://d/{data}")
    if engine == "gke":
        (pod,) = manifests.jobset(launch, launch.gke, 2)["spec"]["replicatedJobs"]
        (container,) = pod["template"]["spec"]["template"]["spec"]["containers"]
        (container,) = yaml.safe_load_all(manifests.to_yaml([container]))
        text = kubelet()(container["command"][2], {"HF_TOKEN": "'; touch ran; '"})
    else:
        text = startup.script(launch, 2, home='"$LOOPED_HOME"')
    given_data, words = words_of(text, folder)
    assert given_data == launch.data
    assert words[:3] == ["venv/bin/python", "-m", "tpu_launch.machine"]
    assert words[words.index("--folder") + 1] == launch.folder
    assert words[words.index("--") + 1 :] == list(launch.sweep_arguments(2))
    assert not list(folder.rglob("ran"))


def kubelet():
    """What Kubernetes makes of a command, as the stand-in for kubectl has it."""
    path = pathlib.Path(__file__).parent / "fakes" / "fake_kubectl.py"
    text = path.read_text().partition("def expanded(")[2].partition("\n\n\ndef ")[0]
    spec = importlib.util.spec_from_loader("kubelet", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec("def expanded(" + text, module.__dict__)
    return module.expanded


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(PLACES)), WORDS)
def test_no_word_of_a_call_is_made_of_two(engine, output):
    """Of each call all words but those that hold the folder are the same as for a harmless folder."""
    calls = engine_of(launched(engine, output=f"gs://b/{output}")).create(1)
    plain = engine_of(launched(engine, output="gs://b/plain")).create(1)
    names = machine_name(f"gs://b/{output}", 1, 2), machine_name("gs://b/plain", 1, 2)
    keys = sweep_key(f"gs://b/{output}"), sweep_key("gs://b/plain")
    for one, other in zip(calls, plain, strict=True):
        words = [word.replace(names[0], names[1]).replace(*keys) for word in one.argv]
        expected = [word.replace("gs://b/plain", f"gs://b/{output}") for word in other.argv]
        assert words == expected


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("queued", {"output": "gs://b/a\nb"}),
        ("queued", {"output": "gs://b/a\x00b"}),
        ("queued", {"preset": "x\ntouch ran\n.json"}),
        ("queued", {"preset": "--help"}),
        ("queued", {"track": ("$(touch ran)",)}),
        ("queued", {"track": ('wandb] @ https://evil.example/"; touch ran; "',)}),
        ("queued", {"source": "--index-url=https://evil.example/simple"}),
        ("queued", {"source": "../../evil.whl"}),
        ("queued", {"source": "a b.whl"}),
        ("queued", {"source": "looped==1; touch ran"}),
        ("queued", {"source": "https://me:secret@example.org/looped.whl"}),
        ("queued", {"source": "git+https://secret@example.org/looped.git"}),
        ("queued", {"data": "https://me:secret@example.org/"}),
        ("queued", {"data": "-x"}),
        ("queued", {"slice": None}),
        ("queued", {"shares": 10**12}),
        ("queued", {"queued": {"project": "--flags-file=x", "zone": "z"}}),
        ("queued", {"queued": {"project": "p", "zone": "z --quiet"}}),
        ("queued", {"queued": {"project": "p", "zone": "z", "service_account": "a\nb"}}),
        ("queued", {"queued": {"project": "p", "zone": "z", "network": "^:^a"}}),
        ("gke", {"gke": {"pool": 1, "context": "a;b"}}),
        ("gke", {"gke": {"pool": 1, "namespace": "$(x)"}}),
        ("gke", {"gke": {"pool": 1, "image": "x y"}}),
        ("gke", {"gke": {"pool": 0}}),
        ("ssh", {"ssh": {"hosts": ["-oProxyCommand=touch ran", "h2"]}}),
        ("ssh", {"ssh": {"hosts": ["h1; touch ran", "h2"]}}),
        ("ssh", {"ssh": {"hosts": ["h1"]}}),
        ("ssh", {"ssh": {"hosts": ["h1", "h2"], "hosts_per_share": 0}}),
        ("ssh", {"ssh": {"hosts": ["h1", "h2"], "port": 10**9}}),
        ("ssh", {"ssh": {"tpu_vms": ["--zone=x", "vm"], "project": "p", "zone": "z"}}),
        ("queued", {"secrets": {"X; touch ran": "wandb"}}),
        ("queued", {"secrets": {"WANDB_API_KEY": "x'; touch ran; '"}}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_launch_in_a_bucket_that_is_not_what_we_write_is_refused(engine, fields):
    data = json.loads(json.dumps(to_json(launched(engine)) | fields))
    with pytest.raises(UserError) as caught:
        from_json(Launch, data)
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["ghp_0123456789abcdef0123456789abcdef0123", "AKIAIOSFODNN7EXAMPLE", "wandb_v1_abcdefghijklmnopqrstuvwxyz",
     "github_pat_11ABCDEFG0abcdefghijkl", "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZmdoaWprbG1ub3A", "glpat-abcdefghij"],
)  # fmt: skip
def test_what_looks_like_a_secret_is_no_name_of_one(value):
    with pytest.raises(UserError, match="looks like the secret itself") as caught:
        launched("queued", secrets={"KEY": value})
    assert value not in str(caught.value)


def test_a_copied_launch_does_not_act_on_the_machines_of_the_first(tmp_path, cloud, capsys):
    first, copy = tmp_path / "first", tmp_path / "copy"
    (first / ".launch").mkdir(parents=True)
    launch = launched("ssh", output=str(first))
    (first / ".launch" / "launch.json").write_text(store.launch_text(launch))
    (copy / ".launch").mkdir(parents=True)
    (copy / ".launch" / "launch.json").write_text(store.launch_text(launch))
    assert command_line.main(["tpu", "delete", str(copy)]) == 2
    assert f"is of the launch in {first}" in capsys.readouterr().err
    assert not cloud.calls()
    with outside() as run:
        assert operate.find_launch(run, str(first)) == launch


def test_a_jobset_that_others_labelled_is_left_alone(cloud):
    launch = launched("gke")
    engine = engine_of(launch)
    with outside() as run:
        for each in [*engine.prepare(), *engine.create(1)]:
            run.run(each)
        state = json.loads((cloud.root / "state.json").read_text())
        (made,) = state["jobsets"].values()
        state["jobsets"]["theirs"] = json.loads(json.dumps(made))
        state["jobsets"]["theirs"]["metadata"]["name"] = "theirs"
        (cloud.root / "state.json").write_text(json.dumps(state))
        assert [machine.name for machine in engine.machines(run)] == [machine_name(launch.output, 1, 2)]


def test_what_a_cloud_says_is_neither_markup_nor_a_terminals_command(capsys):
    from tpu_launch.commands import _print_machines

    _print_machines(
        [Machine("a", "refused", "FAILED", reason="[/red] \x1b]0;x\x07 [link=x]y")], as_json=False
    )
    out = capsys.readouterr().out
    assert "[/red]" in out
    assert "[link=x]y" in out
    assert "\x1b" not in out


def test_only_what_installs_is_packed(tmp_path):
    root = tmp_path / "checkout"
    for name in (*source.PACKAGES, "looped/.hidden"):
        (root / name).mkdir(parents=True)
        (root / name / "code.py").write_text("1")
    for name in source.FILES:
        (root / name).write_text("x")
    for name in (".env", "key.json", "id_rsa", "notes.txt"):
        (root / "looped" / name).write_text("secret")
    (tmp_path / "outside.py").write_text("secret")
    (root / "looped" / "link.py").symlink_to(tmp_path / "outside.py")
    with tarfile.open(fileobj=io.BytesIO(source.pack(root))) as archive:
        names = {name.removeprefix("looped-source/") for name in archive.getnames()}
    assert names == {*source.FILES, *(f"{package}/code.py" for package in source.PACKAGES)}


def test_every_line_of_a_secret_is_kept_out_of_a_machines_log(tmp_path, capfd):
    secret = "first-line-of-it\nsecond-line-of-it"
    machine = OnMachine(str(tmp_path), 1, 1, hide=[secret, "ab"])
    code = f"print({secret!r}); print('cab'); print('https://me:pass@example.org/x')"
    assert machine.work([sys.executable, "-c", code], {}) == 0
    out = capfd.readouterr().out.splitlines()[1:]
    assert out == ["***", "***", "c***", "https://***@example.org/x"]
    log = (tmp_path / "logs" / "1-of-1.log").read_text()
    assert log.splitlines() == out


def test_a_printed_launch_holds_no_value_of_a_secret(capsys, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, f"value-of-{name}-0f-ours")
    for engine in PLACES:
        launch = launched(engine, secrets={"WANDB_API_KEY": "wandb", "HF_TOKEN": "hub"}, track=("wandb",))
        text = operate.dry_run(launch, operate.Source(GIT))
        assert "0f-ours" not in text + store.launch_text(launch)
        assert "wandb" in script(engine_of(launch).create(1))


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "3", "{", '{"time": "now", "patience": "long", "pid": 1}', '{"time": 1e400, "patience": NaN}',
     '{"time": [1], "patience": {}, "pid": "x", "host": 3}', "[" * 10_000],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_a_lease_that_is_none_keeps_nobody_off(tmp_path, text):
    from tpu_launch.watch import LEASE_FILE, _Lease

    launch = launched("ssh", output=str(tmp_path))
    (tmp_path / ".launch").mkdir()
    (tmp_path / ".launch" / LEASE_FILE).write_text(text)
    with outside() as run:
        _Lease(launch, run, 60.0).renew()
    assert json.loads((tmp_path / ".launch" / LEASE_FILE).read_text())["pid"]


def test_a_mark_whose_time_has_no_zone_is_not_silent():
    from tpu_launch.marks import Mark

    assert Mark(1, 1, "running", updated_at="2026-01-01T00:00:00").silent_seconds == 0.0
