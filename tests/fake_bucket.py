"""gs:// without a network: paths there lie in a local folder, for this process and those it starts.

Like the real thing it has no folders of their own and no appending, and an object appears or is replaced when it is
complete; unlike it, what is written is seen at once by all.
"""

import functools
import io
import os
import tempfile

import fsspec
from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

VARIABLE = "LOOPED_TEST_BUCKET"  # names the local folder


class Upload(io.BytesIO):
    """An object in the making: there once it is closed."""

    def __init__(self, path, uploads):
        super().__init__()
        self.path, self.uploads = path, uploads

    def close(self):
        if not self.closed:
            for folder in (os.path.dirname(self.path), self.uploads):
                os.makedirs(folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.uploads, delete=False) as part:
                part.write(self.getvalue())
            os.replace(part.name, self.path)
        super().close()


class FakeStore(DirFileSystem):
    protocol = ("gs", "gcs")
    cachable = False

    def __init__(self, **_):
        super().__init__(path=os.environ[VARIABLE], fs=LocalFileSystem(auto_mkdir=True))

    def open(self, path, mode="rb", **options):
        assert "a" not in mode, "an object cannot be appended to"
        if "w" not in mode:
            return super().open(path, mode, **options)
        upload = Upload(self._join(path), f"{self.path}.uploads")
        return upload if "b" in mode else io.TextIOWrapper(upload, encoding=options.get("encoding", "utf-8"))

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
