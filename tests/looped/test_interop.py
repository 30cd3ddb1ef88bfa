"""The published arrays and checkpoints, in and out."""

import json
import math
import sys

import jax
import ml_dtypes
import numpy as np
import published
import pytest
from flax import nnx

from looped.__main__ import main
from looped.checkpoint import Checkpoints
from looped.config import DataConfig, ModelConfig, RunSpec
from looped.convert import import_published, meta_path
from looped.errors import UserError
from looped.interop import from_reference, to_reference
from looped.model import LoopedLM
from looped.record import read_record
from looped.restore import load_run
from looped.tensors import read_arrays, write_arrays
from looped.train import train


@pytest.fixture(scope="module", params=published.FILES)
def golden(request):
    return published.Golden(request.param)


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and one[n].tobytes() == other[n].tobytes()
        for n in one
    )


def test_arrays_there_and_back_keep_their_bits(golden):
    model = from_reference(ModelConfig.from_reference(golden.fields), golden.param)
    assert same_bits(to_reference(model), golden.param)
    assert same_bits(to_reference(nnx.state(model, nnx.Param)), golden.param)


def test_any_tree_of_the_models_shape_is_named(golden):
    model = from_reference(ModelConfig.from_reference(golden.fields), golden.param)
    halved = jax.tree.map(lambda x: (x / 2).astype(ml_dtypes.bfloat16), nnx.state(model, nnx.Param))
    expected = {name: (a / 2).astype(ml_dtypes.bfloat16) for name, a in golden.param.items()}
    assert same_bits(to_reference(halved), expected)
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert same_bits(to_reference(pure), golden.param)


def test_arrays_of_a_compiled_pytorch_model_are_read():
    golden = published.Golden("additive")
    config = ModelConfig.from_reference(golden.fields)
    model = from_reference(config, {f"_orig_mod.{name}": a for name, a in golden.param.items()})
    assert same_bits(to_reference(model), golden.param)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("transformer.coda.0.n1.weight"), r"transformer\.coda\.0\.n1\.weight: missing"),
        (
            lambda a: a.update({"transformer.coda.1.n1.weight": a["norm_emb.weight"]}),
            r"coda\.1\.n1.* not a parameter",
        ),
        (
            lambda a: a.update({"lm_head.weight": a["lm_head.weight"][:97]}),
            r"lm_head.* shape \(97, 32\).*\(128, 32\)",
        ),
        (lambda a: a.update({"inject.weight": a["inject.weight"].T}), r"inject.* wants \(32, 64\)"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message):
    golden = published.Golden("looped_full")
    arrays = dict(golden.param)
    change(arrays)
    with pytest.raises(UserError, match=message):
        from_reference(ModelConfig.from_reference(golden.fields), arrays)


def test_parameters_without_a_published_name_are_named():
    config = ModelConfig(d_model=8, n_heads=1, injection="pass-embedding")
    model = LoopedLM(config, nnx.Rngs(0))
    with pytest.raises(UserError, match="injection is 'pass-embedding'"):
        to_reference(model)
    with pytest.raises(UserError, match=r"injection\.embedding has no counterpart"):
        to_reference(nnx.state(model, nnx.Param))


# --- Files -------------------------------------------------------------------------------------------------


def written_by_hand(arrays, metadata=None):
    """A .safetensors file as its format says: length, JSON, bytes."""
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1.5, -0.0, np.nan, np.inf], ml_dtypes.bfloat16),
    "scalar": np.array(3.0, np.float64),
    "empty": np.zeros((0, 4), np.float16),
}


def test_safetensors_as_the_format_says(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(written_by_hand(ARRAYS, {"format": "pt"}))
    assert same_bits(read_arrays(tmp_path / "x.safetensors"), ARRAYS)
    write_arrays(tmp_path / "y.safetensors", ARRAYS)
    assert same_bits(read_arrays(tmp_path / "y.safetensors"), ARRAYS)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["x.safetensors", "y.safetensors"]


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_a_file_cut_short_is_refused(tmp_path, cut):
    path = tmp_path / "x.safetensors"
    path.write_bytes(written_by_hand(ARRAYS)[:cut])
    with pytest.raises(UserError, match=r"x\.safetensors: damaged"):
        read_arrays(path)


@pytest.mark.parametrize(
    "header",
    ["[]", "{", '{"a": 1}', '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}', '{"a": {}}'],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + b"12345678"
    )
    with pytest.raises(UserError, match="damaged"):
        read_arrays(tmp_path / "x.safetensors")


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.safetensors or \.pt"):
        read_arrays(tmp_path / "model.npz")
    with pytest.raises(UserError, match="no such file"):
        read_arrays(tmp_path / "model.safetensors")


def test_pt_files_keep_their_bits(tmp_path):
    pytest.importorskip("torch")
    write_arrays(tmp_path / "x.pt", ARRAYS)
    assert same_bits(read_arrays(tmp_path / "x.pt"), ARRAYS)
    (tmp_path / "y.pt").write_bytes(b"no such thing")
    with pytest.raises(UserError, match=r"y\.pt: damaged"):
        read_arrays(tmp_path / "y.pt")


def test_pt_files_without_pytorch_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(UserError, match="pip install torch"):
        read_arrays(tmp_path / "x.pt")
    with pytest.raises(UserError, match="pip install torch"):
        write_arrays(tmp_path / "y.pt", ARRAYS)
    assert not (tmp_path / "y.pt").exists()


# --- Checkpoints -------------------------------------------------------------------------------------------


def published_checkpoint(folder, name="hyperconnect", **meta):
    """A checkpoint as the published code leaves it: the embedding in bfloat16, the meta JSON beside it."""
    golden = published.Golden(name)
    arrays = dict(golden.param)
    arrays["transformer.wte.weight"] = arrays["transformer.wte.weight"].astype(ml_dtypes.bfloat16)
    path = folder / "model_000300.safetensors"
    path.write_bytes(written_by_hand(arrays))
    fields = {"step": 300, "tokens": 300 * 8 * 24, "model_config": golden.fields | {"size": 1}} | meta
    meta_path(path).write_text(json.dumps(fields, indent=2))
    return path, arrays


@pytest.mark.slow
def test_a_published_checkpoint_becomes_a_run_and_back_bit_for_bit(tmp_path):
    path, arrays = published_checkpoint(tmp_path, val_loss=5.5, user_config={"run": "x"})
    assert main(["convert", str(path), str(tmp_path / "run")]) == 0

    record = read_record(tmp_path / "run")
    assert record is not None
    assert (record.status, record.loss, record.step, record.tokens) == ("done", 5.5, 300, 300 * 8 * 24)
    assert Checkpoints(tmp_path / "run").latest_step() == 300
    golden = published.Golden("hyperconnect")
    rounded = {name: a.astype(np.float32) for name, a in arrays.items()}
    expected = published.logits(golden.fields, rounded, golden.tokens)
    np.testing.assert_allclose(load_run(tmp_path / "run").model(golden.tokens), expected, atol=5e-5)

    back = tmp_path / "model_000301.safetensors"
    assert main(["convert", str(tmp_path / "run"), str(back)]) == 0
    assert same_bits(read_arrays(back), arrays)
    assert meta_path(back).read_text() == meta_path(path).read_text()


def test_without_a_loss_a_converted_run_is_not_called_done(tmp_path):
    path, _ = published_checkpoint(tmp_path, "non_looped")
    record = import_published(path, meta_path(path), tmp_path / "run")
    assert (record.status, record.loss) == ("running", None)


@pytest.mark.slow
def test_a_run_of_ones_own_is_written_as_the_published_code_would(tmp_path, packed_folder):
    model = ModelConfig(sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1, backprop_recurrences=1)
    spec = RunSpec(
        model=model, data=DataConfig(source=packed_folder), steps=2, batch_size=4, validation_sequences=4
    )
    record = train(spec, tmp_path / "run")
    path = tmp_path / "own.safetensors"
    assert main(["convert", str(tmp_path / "run"), str(path)]) == 0
    meta = json.loads((tmp_path / "own.json").read_text())
    assert (meta["step"], meta["tokens"], meta["val_loss"]) == (2, 2 * 4 * 32, record.loss)
    assert meta["model_config"]["bptt_k"] == 1
    tokens = np.arange(32)[None] % 257
    expected = published.logits(meta["model_config"], read_arrays(path), tokens)
    np.testing.assert_allclose(load_run(tmp_path / "run").model(tokens), expected, atol=5e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "meta_000300.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "meta_000300.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "meta_000300.json").write_text("[]"), "expected an object"),
        (
            lambda folder: (folder / "meta_000300.json").write_text('{"model_config": {}}'),
            "sequence_len: missing",
        ),
        (
            lambda folder: (folder / "run").mkdir() or (folder / "run" / "x").write_text(""),
            "is there already",
        ),
        (lambda folder: (folder / "model_000300.safetensors").unlink(), "no such file"),
    ],
)
def test_bad_checkpoints_are_refused_and_nothing_is_made(tmp_path, capsys, change, message):
    path, _ = published_checkpoint(tmp_path)
    change(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", str(path), str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_values_that_float32_cannot_hold_are_refused(tmp_path):
    path, arrays = published_checkpoint(tmp_path, "additive")
    arrays["norm_emb.weight"] = arrays["norm_emb.weight"].astype(np.float64) + math.pi
    path.write_bytes(written_by_hand(arrays))
    with pytest.raises(UserError, match=r"norm_emb\.weight is float64"):
        import_published(path, meta_path(path), tmp_path / "run")
