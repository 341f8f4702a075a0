"""`import locater` is light, and its public names are all there, documented and typed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import locater
from locater import LocaterError, MissingExtraError

ROOT = Path(__file__).parents[1]
LOADED_BY_OTHERS = {
    "lightning",  # control/trainers imports it by name, when it is used
    "tensorboard",  # accelerate writes its logs with it
}
HEAVY = ("torch", "altair", "transformers", "ray", "matplotlib", "pandas")


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import locater; locater.__version__; dir(locater)").isdisjoint(HEAVY)


def test_a_name_loads_what_it_needs_and_no_plotting() -> None:
    modules = loaded_after("from locater import QKForm, propagation")
    assert "torch" in modules
    assert modules.isdisjoint(set(HEAVY) - {"torch"})


@pytest.mark.parametrize("name", locater.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    thing = getattr(locater, name)
    documentation = thing.__doc__ or ""
    assert thing.__name__ == name
    assert documentation.strip() and not documentation.startswith(f"{name}(")
    assert name in dir(locater)


def test_type_checkers_see_the_names_that_users_see() -> None:
    path = Path(locater.__file__)
    guarded = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in guarded for node in block.body]
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    homes = {
        alias.asname: (node.module, alias.name)
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(name for name in homes if name) == sorted(locater.__all__)
    for name, (module, original) in homes.items():
        assert name == original
        assert getattr(import_module(str(module)), original) is getattr(locater, str(name))


def declared_distributions() -> set[str]:
    """The packages that the core or an extra declares, development apart."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [listed for name, listed in project["optional-dependencies"].items() if name != "dev"]
    lines = [line for listed in (project["dependencies"], *extras) for line in listed]
    return {re.split(r"[\[<>=]", line)[0] for line in lines} - {"locater"}


def imported_distributions() -> set[str]:
    """The packages that the source imports, wherever in a module."""
    owners = packages_distributions()
    names = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    outside = names - set(sys.stdlib_module_names) - {"locater"}
    unknown = {name for name in outside if name not in owners}
    assert not unknown, f"not installed, so not checked: {unknown}"
    return {owners[name][0].lower().replace("_", "-") for name in outside}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    declared, imported = declared_distributions(), imported_distributions()
    assert imported - declared == set()
    assert declared - imported == LOADED_BY_OTHERS


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'locater' has no attribute 'nonsense'"):
        _ = locater.nonsense
    assert len(set(locater.__all__)) == len(locater.__all__)


def test_errors_carry_their_hint() -> None:
    error = LocaterError("this was wrong.", hint="do that.")
    assert str(error) == "this was wrong.\nhint: do that."
    assert (error.message, error.hint) == ("this was wrong.", "do that.")
    assert str(LocaterError("this was wrong.")) == "this was wrong."
    missing = MissingExtraError("altair", extra="report")
    assert str(missing) == "altair is not installed.\nhint: run: pip install 'locater[report]'"


def test_only_what_trains_asks_for_accelerate() -> None:
    names = ("audit", "lab", "probe", "reality", "report", "theory", "trial")
    code = "import sys; sys.modules['accelerate'] = None\n" + "\n".join(
        f"import locater.cli.{name}" for name in names
    )
    subprocess.run([sys.executable, "-c", code], check=True)
