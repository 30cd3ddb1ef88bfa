"""Code that files name: a mechanism of somebody's own, given as `module:Class` in a record, a sweep's list or a plan.

Importing a module runs it, so a file's word alone is not enough.  One that the user has named is imported: as
--injection of `looped train`, in the environment variable LOOPED_INJECTIONS, or by an import of their own program.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from looped.errors import UserError

VARIABLE = "LOOPED_INJECTIONS"
"""Names `module:Class` that files may name, apart by commas or spaces."""


def check_named(spec: Any, where: str) -> None:
    """Raises `UserError` where `spec`, a run's as JSON that was read from `where`, names code that the user has not."""
    model = spec.get("model") if isinstance(spec, dict) else None
    name = model.get("injection") if isinstance(model, dict) else None
    if not isinstance(name, str) or ":" not in name:
        return  # one of ours, or no name at all: whoever builds the configuration says so
    if name.partition(":")[0] in sys.modules or name in re.split(r"[,\s]+", os.environ.get(VARIABLE, "")):
        return
    raise UserError(
        f"{where} names the injection {name!r}, whose module would be imported, and so run; if you know that code,"
        f" name it too: {VARIABLE}={name}"
    )
