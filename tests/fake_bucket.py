"""gs:// without a network: paths there lie in a local folder, for this process and those it starts.

Like the real thing it has no folders of their own and no appending; unlike it, what is written is seen at once by all.
"""

import functools
import os

import fsspec
from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

VARIABLE = "LOOPED_TEST_BUCKET"  # names the local folder


class FakeStore(DirFileSystem):
    protocol = ("gs", "gcs")
    cachable = False

    def __init__(self, **_):
        super().__init__(path=os.environ[VARIABLE], fs=LocalFileSystem(auto_mkdir=True))

    def open(self, path, mode="rb", **options):
        assert "a" not in mode, "an object cannot be appended to"
        return super().open(path, mode, **options)

    def makedirs(self, path, exist_ok=False):
        """Makes nothing: a folder is there once an object is in it."""

    def mkdir(self, path, create_parents=True, **_):
        self.makedirs(path)


def install():
    """Has gs:// mean the folder that the environment variable names."""
    for name in FakeStore.protocol:
        fsspec.register_implementation(name, FakeStore, clobber=True)
    backend.fsspec_backend._get_filesystem = functools.cache(lambda name: fsspec.filesystem(name))


if VARIABLE in os.environ:
    install()
