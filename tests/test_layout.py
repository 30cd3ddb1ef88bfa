"""The four packages import downwards only."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = {"looped", "experiments", "fit", "tpu_launch"}
ALLOWED = {
    "looped": {"looped"},
    "experiments": {"experiments", "looped"},
    "tpu_launch": {"tpu_launch", "experiments", "looped"},
    "fit": {"fit", "looped.record", "looped.errors", "looped.jsonable", "looped.text"},
}
JOINTS = {pathlib.Path("looped/__main__.py"), pathlib.Path("looped/plan_commands.py")}
"""The command line joins the packages, each imported only when it is asked for."""
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(path):
    """Every module that the file imports, in full: `looped.record` for `from looped import record`."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            yield from names if is_package else [node.module]


def is_allowed(module, allowed):
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def test_there_are_sources_of_every_package():
    assert {path.parts[0] for path in SOURCES} == PACKAGES


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_imports_no_package_above_its_own(path):
    if path in JOINTS:
        return
    allowed = ALLOWED[path.parts[0]]
    own = [module for module in imported(path) if module.split(".")[0] in PACKAGES]
    assert not [module for module in own if not is_allowed(module, allowed)]


@pytest.mark.parametrize("path", sorted(JOINTS), ids=str)
def test_the_command_line_imports_the_other_packages_only_when_asked(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in at_once if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in at_once if isinstance(node, ast.ImportFrom)}
    ours = {name for name in names if name.split(".")[0] in PACKAGES}
    assert ours == {"looped.errors"}


def test_nothing_imports_the_tests():
    assert not [path for path in SOURCES for module in imported(path) if module.split(".")[0] == "tests"]
