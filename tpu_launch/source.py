"""What the machines install: an archive of this project as it stands here, or something named.

The archive's bytes are a function of the files alone, and its name of the bytes, so that the same code is uploaded once
and a launch says exactly which code it runs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pathlib
import sys
import tarfile

from looped.errors import UserError

PACKAGES = ("looped", "experiments", "fit", "tpu_launch")
FILES = ("pyproject.toml", "README.md", "LICENSE")
_ENDINGS = {".py", ".csv", ".md"}
"""Of the files in packages: what else may lie there, as keys or notes, is not for machines."""


def pack(root: pathlib.Path) -> bytes:
    """Returns a source archive (tar.gz) of the project in `root`, as pip and uv install one.

    Raises `UserError` where the project's files are not there, as in an installation from a wheel.
    """
    missing = [name for name in (*FILES, *PACKAGES) if not (root / name).exists()]
    if missing:
        raise UserError(
            f"source is {str(root)!r}, which has no {missing[0]}; give --source a checkout of looped, a wheel or"
            " archive of it, or git+https://….git@REVISION."
        )
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _files(root):
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"looped-source/{path.relative_to(root).as_posix()}")
            entry.size = len(data)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(data))
    outer = io.BytesIO()
    with gzip.GzipFile(fileobj=outer, mode="wb", mtime=0, filename="") as compressed:
        compressed.write(inner.getvalue())
    return outer.getvalue()


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    found = [root / name for name in FILES]
    for package in PACKAGES:
        found += [p for p in (root / package).rglob("*") if p.suffix in _ENDINGS and _is_own(root, p)]
    return sorted(found)


def _is_own(root: pathlib.Path, path: pathlib.Path) -> bool:
    """Whether the file lies here, not behind a link, and is not hidden."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not path.is_symlink() and not hidden


def archive_name(data: bytes) -> str:
    return f"source-{hashlib.sha256(data).hexdigest()[:12]}.tar.gz"


def checkout() -> pathlib.Path:
    """The folder that the running project lies in."""
    return pathlib.Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """`python -m tpu_launch.source ROOT FILE` packs ROOT into FILE."""
    root, target = map(pathlib.Path, argv)
    target.write_bytes(pack(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
