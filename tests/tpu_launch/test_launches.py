"""What is launched, and what is refused before anything is asked for."""

import hashlib
import io
import json
import pathlib
import re
import tarfile

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from experiments.commands import SweepRun
from looped import __main__ as command_line
from looped.errors import UserError
from looped.jsonable import from_json, to_json
from looped.slices import GENERATIONS
from tpu_launch import source
from tpu_launch.launch import Gke, Launch, Queued, Ssh
from tpu_launch.names import RUNTIME_VERSIONS, machine_name, parse_machine_name
from tpu_launch.outside import CallError, call, outside, script
from tpu_launch.queued import chips_of
from tpu_launch.store import check_output

GOLDEN = pathlib.Path(__file__).parent / "golden"
GIT = "git+https://example.org/looped.git@v1"


def launched(**options):
    values = {"preset": "quickstart", "output": "gs://b/s", "shares": 3, "source": GIT, "slice": "v5e:2x4"}
    return Launch(**(values | {"queued": Queued("p", "z")} | options))


@given(st.text(min_size=1), st.integers(1, 999), st.integers(1, 999))
def test_a_name_is_a_function_of_folder_and_share_and_a_dns_label(output, share, shares):
    name = machine_name(output, share, shares)
    assert name == machine_name(f"{output}/", share, shares)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert parse_machine_name(name) == (
        hashlib.sha256(output.rstrip("/").encode()).hexdigest()[:10],
        share,
        shares,
    )


@pytest.mark.parametrize(
    "launch",
    [
        launched(seeds=(1, 2), budgets=(8e10,), secrets={"HF_TOKEN": "hub"}, track=("wandb",)),
        launched(queued=None, gke=Gke(pool=2, queue="team")),
        launched(queued=None, ssh=Ssh(("a", "b"), hosts_per_share=2), slice=None, shares=1),
    ],
    ids=lambda launch: launch.engine,
)
def test_a_launch_survives_json(launch):
    assert from_json(Launch, json.loads(json.dumps(to_json(launch)))) == launch


def test_the_sweeps_own_command_line_understands_what_machines_are_told():
    launch = launched(seeds=(1, 2), budgets=(8e10, 2.4e11), track=("wandb",), output="gs://b/my sweep's")
    words = launch.sweep_arguments(2)
    assert words[:2] == ("sweep", "run")
    told = tyro.cli(
        SweepRun, args=list(words[2:]), config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    )
    assert (told.preset, told.output, told.share) == ("quickstart", "gs://b/my sweep's", "2/3")
    assert told.distributed
    assert (told.seeds, told.budgets, told.track) == ((1, 2), (8e10, 2.4e11), ("wandb",))


def test_every_generation_of_cloud_tpu_has_a_runtime_version():
    assert set(RUNTIME_VERSIONS) == {
        name for name, own in GENERATIONS.items() if own.accelerator_type is not None
    }


@pytest.mark.parametrize(
    ("name", "chips"),
    [("v5litepod-16", 16), ("v4-32", 16), ("v5p-8", 4), ("v6e-256", 256), ("v9-8", 0), ("", 0)],
)
def test_chips_of_an_accelerator_type(name, chips):
    assert chips_of(name) == chips


@pytest.mark.parametrize(
    ("output", "shared", "expected"),
    [
        ("gs://bucket", True, "name a folder in a bucket"),
        ("s3://bucket/x", True, "name a folder in a bucket"),
        ("/home/me/sweep", True, "ends with the machines"),
        ("runs/sweep", False, "give the whole path"),
        ("gs://bucket/a*b", True, "cannot have any of"),
        ("gs://bucket/a\nb", True, "without control characters"),
        ("gs://bucket/a\u2028b", True, "without control characters"),
    ],
)
def test_a_folder_that_machines_cannot_share_is_refused(output, shared, expected):
    with pytest.raises(UserError, match=expected):
        check_output(output, shared)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--slice", "v5e:3x3"), "is no shape of v5e slices"),
        (("--slice", "v5x:2x2"), "is of no known TPU generation"),
        (("--slice", "tpu7x:2x2x1"), "through Kubernetes alone"),
        ((), "needs --slice"),
        (("--slice", "v5e:2x4", "--pool", "0"), "pool is 0"),
        (("--slice", "v5e:2x4", "--slices", "0"), "slices is 0"),
        (("--slice", "v5e:2x4", "--hosts", "h1"), "--hosts is of --engine ssh"),
        (("--slice", "v5e:2x4", "--queue", "q"), "--queue is of --engine gke"),
        (("--slice", "v5e:2x4", "--spot", "--reserved"), "exclude each other"),
        (("--slice", "v5e:2x4", "--source", "nowhere/at/all"), "source is 'nowhere/at/all'"),
        (("--slice", "v5e:2x4", "--source", "git+https://me:token@example.org/x.git"), "would be stored"),
        (("--slice", "v5e:2x4", "--secrets", "WANDB_API_KEY"), "without '='"),
        (("--slice", "v5e:2x4", "--secrets", "A B=c"), "no name of an environment variable"),
        (("--slice", "v5e:2x4", "--budgets", "7"), "budgets has 7"),
    ],
)
def test_bad_options_are_one_sentence_before_anything_is_asked_for(cloud, capsys, options, expected):
    arguments = [
        "tpu",
        "launch",
        "quickstart",
        "--output",
        "gs://b/s",
        "--engine",
        "queued",
        "--project",
        "p",
    ]
    assert command_line.main([*arguments, "--zone", "us-west4-a", *options]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert not cloud.calls()


@pytest.mark.parametrize(
    "secret", ["0123456789abcdef0123456789abcdef01234567", "hf_abcdefghijklmnop", "sk-12345"]
)
def test_a_secret_given_by_value_is_refused_and_not_repeated(cloud, capsys, secret):
    arguments = [
        "tpu",
        "launch",
        "quickstart",
        "--output",
        "gs://b/s",
        "--engine",
        "queued",
        "--slice",
        "v5e:2x4",
    ]
    arguments += ["--project", "p", "--zone", "us-west4-a", "--secrets", f"WANDB_API_KEY={secret}"]
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
    assert "what looks like the secret itself" in captured.err
    assert secret not in captured.err + captured.out


@pytest.mark.parametrize(
    "arguments",
    [["tpu", "list"], ["tpu", "list", "gs://b/s", "--project", "p"]],
)
def test_list_wants_a_folder_or_a_project(capsys, arguments):
    assert command_line.main(arguments) == 2
    assert "either a sweep's folder or --project" in capsys.readouterr().err


def test_the_archive_is_a_function_of_the_files_and_has_all_that_installs():
    root = source.checkout()
    data = source.pack(root)
    assert source.pack(root) == data
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = archive.getnames()
        inner = archive.extractfile("looped-source/pyproject.toml").read()
    assert inner == (root / "pyproject.toml").read_bytes()
    assert {"looped-source/looped/__main__.py", "looped-source/fit/data/paper-vanilla.csv"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("looped-source/tests")]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"which has no pyproject.toml; give --source"):
        source.pack(tmp_path)


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1), min_size=1
    )
)
def test_what_is_printed_gives_the_program_the_very_words(words):
    import subprocess

    text = "\n".join(words).replace("\r", "")
    wanted = call("printf", "%s\\0", *words)
    done = subprocess.run(
        ["sh", "-c", script([wanted, call("cat", stdin=text)])], capture_output=True, check=True
    )
    printed = b"".join(word.encode() + b"\0" for word in words)
    assert done.stdout.startswith(printed)
    assert done.stdout[len(printed) :].decode().rstrip("\n") == text.rstrip("\n")


def test_a_program_that_takes_too_long_is_named():
    with outside() as run, pytest.raises(CallError, match=r"`sleep 5` did not end within 0 s") as caught:
        run.run(call("sleep", "5", seconds=0.2))
    assert caught.value.kind == "timeout"


# What the programs really wrote: gcloud 528 against a server that answered as the API does, kubectl 1.32, OpenSSH 9.
WORDS = [line.split(": ", 1) for line in (GOLDEN / "words.txt").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "stderr"), WORDS)
def test_what_programs_say_is_understood(kind, stderr):
    with outside() as run, pytest.raises(CallError) as caught:
        run.run(call("sh", "-c", "cat >&2; exit 1", stdin=stderr.replace("\\n", "\n")))
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
