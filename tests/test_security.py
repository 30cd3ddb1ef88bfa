"""Nothing that is read is run; no credential is stored or shown; what the packages need is named, and nothing else."""

import ast
import json
import pathlib
import re
import shutil
import sys
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from looped import __main__ as command_line
from looped.config import RunSpec
from looped.credentials import check_address, hidden, without
from looped.data.loader import PackedData
from looped.data.shards import PackState
from looped.data.sources import make_source
from looped.errors import UserError, first_line
from looped.files import whole
from looped.jsonable import to_json

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("looped", "experiments", "fit", "tpu_launch")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# --- What the sources may not do ----------------------------------------------------------------------------

UNPICKLING = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
}
REFUSED_CALLS = {
    "eval", "exec", "compile", "__import__", "execfile", "runpy.run_path", "runpy.run_module", "code.interact",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp",
    "shutil.unpack_archive", "ssl._create_unverified_context",
}  # fmt: skip
REFUSED_METHODS = {"extractall", "read_pickle", "load_all", "full_load", "unsafe_load", "unsafe_load_all"}
IMPORTERS = {"looped/__main__.py", "looped/recurrence.py", "experiments/worker.py"}
"""Files that import by name: commands of the table, a mechanism that the user has named, a function of ours."""


def faults(source, file="x.py"):
    """What of a source's text runs what it reads or a shell's words, as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{node.lineno}: {m}" for m in modules if m.split(".")[0] in UNPICKLING)
        if not isinstance(node, ast.Call):
            continue
        name, options = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        method = name.rpartition(".")[2]
        says = {key: getattr(value, "value", value) for key, value in options.items()}
        bad = (
            name in REFUSED_CALLS
            or method in REFUSED_METHODS
            or (name.startswith("yaml.") and method == "load")
            or (method == "import_module" and file not in IMPORTERS)
            or (method == "load" and name.split(".")[0] == "torch" and says.get("weights_only") is not True)
            or says.get("allow_pickle", False) is not False
            or says.get("shell", False) is not False
            or says.get("verify", True) is not True
            or "trust_remote_code" in says
            or (None in options and name.startswith(("subprocess.", "np.load", "torch.load")))
        )
        if bad:
            yield f"{node.lineno}: {ast.unparse(node)[:80]}"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_source_unpickles_evaluates_or_calls_a_shell(path):
    assert list(faults((ROOT / path).read_text(encoding="utf-8"), path.as_posix())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from dill import loads", "import a, marshal", "eval(x)", "exec(x)", "compile(x, 'f', 'exec')",
        "yaml.load(f)", "yaml.load(f, Loader=yaml.Loader)", "yaml.unsafe_load(f)", "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)", "torch.load(f)", "torch.load(f, weights_only=False)", "os.system(x)",
        "subprocess.run(x, shell=True)", "subprocess.run(x, **rest)", "tar.extractall(d)", "pd.read_pickle(f)",
        "importlib.import_module(name)", "load_dataset(x, trust_remote_code=True)", "tempfile.mktemp()",
        "requests.get(u, verify=False)",
    ],
)  # fmt: skip
def test_what_is_refused_is_found(text):
    assert len(list(faults(text))) == 1


@pytest.mark.parametrize(
    "text", ["np.load(f)", "torch.load(f, weights_only=True)", "re.compile(x)", "json.loads(x)"]
)
def test_what_is_sound_is_left_alone(text):
    assert list(faults(text)) == []


# --- What the packages need ---------------------------------------------------------------------------------

IMPORT_NAMES = {
    "array-record": "array_record", "huggingface-hub": "huggingface_hub", "ml-dtypes": "ml_dtypes", "pyyaml": "yaml",
    "orbax-checkpoint": "orbax", "tensorflow-datasets": "tensorflow_datasets",
}  # fmt: skip
NOT_IMPORTED = {"tensorflow", "gcsfs", "looped"}  # used by TFDS and fsspec on our behalf; extras of our own
NOT_REQUIRED = {"torch"}  # for .pt files alone, said where it is missing


def requirements(*extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return [Requirement(text) for group in groups for text in group]


def test_every_package_that_is_imported_is_required_and_the_other_way_round():
    wanted = requirements("text", "datasets", "gcs", "tpu", "tensorflow", "tensorboard", "wandb", "trackio")
    names = {canonicalize_name(requirement.name) for requirement in wanted} - NOT_IMPORTED
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
    others = imported - sys.stdlib_module_names - set(PACKAGES) - NOT_REQUIRED
    assert others == {IMPORT_NAMES.get(name, name) for name in names}


def test_every_requirement_has_a_lowest_version():
    wanted = requirements("text", "datasets", "gcs", "tensorflow", "tensorboard", "wandb", "trackio")
    assert [str(r) for r in wanted if not any(s.operator == ">=" for s in r.specifier)] == []


# --- Files that name code -----------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module in the working directory that leaves a file when it is imported; returns that file."""
    (tmp_path / "evil_mechanism.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path / "ran"
    sys.modules.pop("evil_mechanism", None)


def naming_evil():
    spec = to_json(RunSpec(steps=1))
    spec["model"]["injection"] = "evil_mechanism:Evil"
    return spec


def leave_files(folder, spec):
    (folder / "plan.json").write_text(json.dumps({"runs": [{"spec": spec}]}))
    sweep = folder / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text(json.dumps({"preset": "p", "specs": [spec], "schema_version": 1}))


@pytest.mark.parametrize(
    "line",
    [
        "grid plan.json",
        "sweep run plan.json --output out",
        "sweep status sweep",
        "tpu check --preset plan.json",
    ],
)
def test_code_that_a_file_names_is_not_imported(line, evil, tmp_path, capsys):
    leave_files(tmp_path, naming_evil())
    more = ["--topology", "v5e:2x2"] if line.startswith("tpu") else []
    assert command_line.main([*line.split(), *more]) == 2
    assert "LOOPED_INJECTIONS=evil_mechanism:Evil" in capsys.readouterr().err
    assert not evil.exists()


def test_code_that_the_user_names_as_well_is_imported(evil, tmp_path, monkeypatch, capsys):
    leave_files(tmp_path, naming_evil())
    monkeypatch.setenv("LOOPED_INJECTIONS", "other:Other, evil_mechanism:Evil")
    assert command_line.main(["grid", "plan.json"]) == 2
    assert "is not a subclass of looped.recurrence.Injection" in capsys.readouterr().err
    assert evil.exists()


def test_a_command_does_not_look_for_packages_in_the_working_directory(evil):
    assert command_line.main(["grid"]) == 0
    assert str(evil.parent) not in sys.path


# --- Data sets and arrays of others' making -----------------------------------------------------------------


class Payload:
    """Runs `open(path, "w")` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_in_an_unfinished_pack_is_not_read(tmp_path):
    np.savez(tmp_path / "unfinished.npz", state=np.array([Payload(tmp_path / "ran")], dtype=object))
    with pytest.raises(UserError, match="cannot be read"):
        PackState.load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def folder(packed_folder, tmp_path):
    """A copy of a data set, to be changed."""
    return pathlib.Path(shutil.copytree(packed_folder, tmp_path / "data"))


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_feature_whose_class_is_not_of_tfds_is_not_imported(folder, evil):
    change(
        folder / "features.json",
        "tensorflow_datasets.core.features.tensor_feature.Tensor",
        "evil_mechanism.Evil",
    )
    with pytest.raises(UserError, match=r"class 'evil_mechanism.Evil', which is not TFDS's own"):
        next(PackedData(folder).train_batches(0, 0, 1))
    with pytest.raises(UserError, match="is not TFDS's own"):
        make_source(f"tfds:{folder}")
    assert not evil.exists()


def test_shards_outside_the_folder_are_not_opened(folder):
    change(folder / "dataset_info.json", "{DATASET}-{SPLIT}", "../elsewhere/{DATASET}-{SPLIT}")
    with pytest.raises(UserError, match="outside its folder"):
        next(PackedData(folder).train_batches(0, 0, 1))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../tokenizer.json", "tokenizer.json\0", ""])
def test_a_tokenizers_file_is_not_looked_for_elsewhere(folder, name):
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["tokenizer_file"] = {"name": name}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(
        UserError, match=r"tokenizer_file.name is .*; it is tokenizer.json or tokenizer.model"
    ):
        PackedData(folder)


def test_data_sets_whose_code_would_be_fetched_are_refused():
    with pytest.raises(UserError, match="whose code TFDS would fetch and run"):
        make_source("tfds:kaggle:some_data")


# --- Credentials --------------------------------------------------------------------------------------------

SECRET = "s3cr3t-v4lue-0f-ours"
ADDRESSES = [
    f"https://me:{SECRET}@example.org/x.jsonl",
    f"https://{SECRET}@example.org/x.jsonl",
    f"https://me:p@{SECRET}@example.org/x.jsonl",
    f"simplecache::https://me:{SECRET}@example.org/x.jsonl",
    f"git+ssh://me:{SECRET}@example.org/x.git",
    f"https://example.org/x.jsonl?X-Goog-Signature={SECRET}&b=1",
    f"https://example.org/x.jsonl?a=1&access_token={SECRET}",
    f"https://example.org/x.jsonl?key={SECRET}",
]
PLAIN = ["gs://bucket/a@b", "git+ssh://git@example.org/a.git", "git+https://example.org/a.git@v1", "C4", "a:b@c/d",
         "hf://datasets/a/b@main/*.parquet", "https://example.org/?page=2#key"]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_credentials_is_refused_and_not_repeated(address):
    with pytest.raises(UserError, match="which would be stored") as caught:
        make_source(address)
    assert SECRET not in str(caught.value)
    assert SECRET not in without(f"while reading {address!r}, HTTP 403", {})


@pytest.mark.parametrize("text", PLAIN)
def test_an_address_without_credentials_is_left_alone(text):
    check_address("source", text)
    assert without(text, {}) == text


LETTERS = st.characters(categories=("L", "N"))


@given(st.text(LETTERS), st.text(LETTERS, min_size=8))
def test_no_secret_of_the_environment_is_left_in_a_text(text, secret):
    assert secret not in without(text + secret + text, {"HF_TOKEN": secret})


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"])
def test_errors_of_others_lose_the_secrets_of_the_environment(name, monkeypatch):
    monkeypatch.setenv(name, SECRET)
    assert first_line(OSError(f"401 for {SECRET}")) == "OSError: 401 for ***"


def test_every_line_of_a_secret_is_hidden():
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----\n"
    for line in key.splitlines():
        assert hidden(f"log: {line}", key) == "log: ***"
    assert hidden("abc", "b") == "a***c"
    assert hidden("abc", "") == "abc"


# --- Files in shared folders --------------------------------------------------------------------------------


def test_a_file_in_the_making_has_a_name_that_nobody_knows(tmp_path):
    from etils import epath

    names = set()
    for _ in range(20):
        with whole(epath.Path(tmp_path) / "a.json") as partial:
            names.add(partial.name)
            partial.write_text("{}")
    assert len(names) == 20
    assert all(re.search(r"[0-9a-f]{16}", name) for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
