"""Every command in tpu_launch/README.md is one: `looped` understands its own, gcloud its."""

import importlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
import tyro

from looped import __main__ as command_line

README = (pathlib.Path(__file__).parents[2] / "tpu_launch/README.md").read_text()
LINES = [line.strip() for line in README.splitlines() if line.startswith("    ")]
FILLED = {
    "PROJECT": "my-project",
    "BUCKET": "bucket",
    "REGION": "us-west4",
    "ZONE": "us-west4-a",
    "PRICE": "1.5",
    "CLUSTER": "c",
}


def filled(line):
    return [re.sub("|".join(FILLED), lambda found: FILLED[found[0]], word) for word in shlex.split(line)]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("looped ")])
def test_looped_understands_its_commands(line):
    words = filled(line)[1:]
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in command_line._BY_NAME)
    module, attribute = command_line._BY_NAME[name]
    tyro.cli(
        getattr(importlib.import_module(module), attribute),
        args=words[len(name.split()) :],
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def test_its_launches_can_be_printed(capsys):
    launches = [line for line in LINES if line.startswith("looped tpu launch")]
    assert len(launches) == 4
    for line in launches:
        arguments = [word for word in filled(line)[1:] if word != "--dry-run"]
        assert (
            command_line.main([*arguments, "--source", "git+https://example.org/looped.git@v1", "--dry-run"])
            == 0
        )
        assert "launch.json" in capsys.readouterr().out


@pytest.mark.slow
def test_gcloud_takes_its_commands(tmp_path):
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    environment = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    lines = [line for line in LINES if line.startswith("gcloud ") and "auth login" not in line]
    assert len(lines) > 8
    for line in lines:
        done = subprocess.run(
            filled(line), input="", text=True, capture_output=True, env=environment, cwd=tmp_path
        )
        assert "active account selected" in done.stderr, (line, done.stderr)
