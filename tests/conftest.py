"""Every test runs on CPU with 8 faked devices; set before JAX is imported."""

import os
import signal

import pytest
from corpora import Counting

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)

# A shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def packed_folder(tmp_path_factory):
    """Folder of a prepared data set of byte tokens for T = 32."""
    from looped.data import corpus  # imports JAX, so not before the settings above
    from looped.data.loader import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(corpus.SOURCES, "counting", Counting)
        patch.setenv("LOOPED_DATA", str(tmp_path_factory.mktemp("data")))
        return str(prepare("counting", 32).directory)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """gs://bucket, for this process and those it starts; it lies under `tmp_path`."""
    import fake_bucket
    from etils import epath

    monkeypatch.setenv(fake_bucket.VARIABLE, str(tmp_path / "gs"))
    monkeypatch.setattr(fake_bucket.backend.fsspec_backend, "_get_filesystem", None)
    fake_bucket.install()
    return epath.Path("gs://bucket")
