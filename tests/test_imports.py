"""What an import does, and who imports whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pypto_spmd

PACKAGE = Path(pypto_spmd.__file__).parent
LAYERS = ("mesh", "sharding", "collectives")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_import_starts_a_backend():
    modules = sorted(
        ".".join(("pypto_spmd", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    code = (
        "import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from pypto_spmd.mesh.simulate import backend_is_up\n"
        "print(backend_is_up())"
    )
    assert run(code) == "False"


def test_importing_the_package_names_its_public_surface():
    for name in pypto_spmd.__all__:
        assert hasattr(pypto_spmd, name)


def imported_modules(path: Path) -> set[str]:
    """All modules that a file imports anywhere, those for type checkers included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def layer_of(module: str) -> int | None:
    """0, 1 or 2 for the layers, 3 for what stands on them, None for what anybody may import."""
    parts = module.split(".")
    if parts[0] != "pypto_spmd" or len(parts) == 1:
        return None
    if parts[1] in LAYERS:
        return LAYERS.index(parts[1])
    return None if parts[1] in ("errors", "_jax_internal") else len(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer):
    mine = LAYERS.index(layer)
    against = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for module in sorted(imported_modules(path))
        if module == "pypto_spmd" or (layer_of(module) or 0) > mine
    ]
    # `from pypto_spmd import x` would hide which layer x is of.
    assert against == []


def test_the_top_of_the_package_imports_nothing_of_it():
    modules = imported_modules(PACKAGE / "errors.py")
    assert [module for module in modules if module.startswith("pypto_spmd")] == []


def test_jax_internals_are_used_in_one_file_only():
    users = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(module.startswith(("jax._src", "jaxlib")) for module in imported_modules(path))
    ]
    assert [user for user in users if user != "_jax_internal.py"] == []


def test_the_links_at_the_top_lead_into_the_package():
    top = PACKAGE.parent
    if not (top / "setup.cfg").exists():
        pytest.skip("the package is installed without its repository")
    for layer in LAYERS:
        assert (top / layer).is_symlink()
        assert (top / layer).resolve() == PACKAGE / layer
