"""Puts gs:// into a folder, for every Python on a fake machine."""

import os
import sys

from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import register_implementation

ROOT = os.path.join(os.environ["FAKE_CLOUD"], "buckets")


class Bucket(LocalFileSystem):
    """gs://BUCKET/PATH is the file BUCKET/PATH in the folder of buckets."""

    protocol = ("gs", "gcs")

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        path = os.fspath(path)
        for scheme in ("gs://", "gcs://"):
            if path.startswith(scheme):
                return os.path.join(ROOT, path[len(scheme) :].rstrip("/"))
        return super()._strip_protocol(path)


register_implementation("gs", Bucket, clobber=True)
register_implementation("gcs", Bucket, clobber=True)
sys.executable = os.environ["FAKE_PYTHON"]  # as in a virtual environment
