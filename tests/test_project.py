"""The project's own rules: who imports whom, what is declared, what a committed file may not hold."""

import ast
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "kvsparse_jax", "train", "serve")

# What each part may import of the others: kernels <- kvsparse_jax <- train, serve <- notebooks, benchmarks.
BELOW = {
    "kernels": {"kernels"},
    "kvsparse_jax": {"kernels", "kvsparse_jax"},
    "train": {"kernels", "kvsparse_jax", "train"},
    "serve": {"kernels", "kvsparse_jax", "serve"},
    "benchmarks": {*PACKAGES, "benchmarks"},
    "tests": {*PACKAGES, "benchmarks", "tests"},
}


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module of a file, at whatever depth, with its line; relative imports made absolute."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *([node.module] if node.module else [])]), node.lineno


def _tracked() -> list[Path]:
    """The files that git has or would add; all files where there is no git, as in an unpacked archive."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode == 0 and listing.stdout:
        paths = [ROOT / name.decode() for name in listing.stdout.split(b"\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if "/." not in f"/{path.relative_to(ROOT)}"]
    return [path for path in paths if path.is_file()]


def _name(requirement: str) -> str:
    """The normalised name of a distribution, without version and extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("part", BELOW)
def test_layers(part):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources(part)
        for module, line in _imports(path)
        if (top := module.split(".")[0]) in BELOW and top not in BELOW[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_import_jax_only():
    allowed = {"jax", "jaxlib", "kernels"} | sys.stdlib_module_names
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources("kernels")
        for module, line in _imports(path)
        if module.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


EXTRAS = {
    "serve/server.py": "serve",
    "kvsparse_jax/evaluate/harness.py": "harness",
    "kvsparse_jax/hyperscale/vote.py": "maths",
}
"""Modules that need an extra, which is then theirs alone."""


def test_imported_packages_are_declared():
    """What is imported is a dependency of its own, not something that happens to come with another package."""
    providers = importlib.metadata.packages_distributions()
    required = {_name(requirement) for requirement in _project()["dependencies"]}
    wrong = []
    for path in _sources(*PACKAGES):
        extra = EXTRAS.get(path.relative_to(ROOT).as_posix())
        optional = [] if extra is None else _project()["optional-dependencies"][extra]
        declared = required | {_name(requirement) for requirement in optional}
        for module, line in _imports(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES or top == "jaxlib":
                continue
            if not {_name(distribution) for distribution in providers.get(top, [top])} & declared:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}, which pyproject.toml does not require")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_docstring():
    trees = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in _sources(*BELOW)}
    bare = [str(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert not bare, f"no docstring: {', '.join(bare)}"


def test_every_package_has_an_init():
    """A folder without __init__.py would be left out of `pkgutil` walks and shadowed by any installed namesake."""
    missing = [
        str(folder.relative_to(ROOT))
        for folder in sorted({path.parent for path in _sources(*PACKAGES)})
        if not (folder / "__init__.py").is_file()
    ]
    assert not missing, f"no __init__.py: {', '.join(missing)}"


def test_importing_everything_imports_no_torch():
    """Nor does anything try to: torch seems to be installed here, and loading it is recorded."""
    modules = [
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages([str(ROOT / package)], prefix=f"{package}.", onerror=lambda name: None)
        if not module.name.endswith(".__main__") and f"{module.name.replace('.', '/')}.py" not in EXTRAS
    ]
    program = f"""
import importlib, importlib.abc, importlib.machinery, sys, traceback

class Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "torch" else None
    def create_module(self, spec):
        print("torch was imported by:", file=sys.stderr)
        traceback.print_stack(limit=12)
        sys.stderr.flush()
        import os
        os._exit(3)

sys.meta_path.insert(0, Torch())
for name in {modules!r}:
    importlib.import_module(name)
assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
print("imported", len({modules!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == str(len(modules))


def test_another_package_named_kernels_is_named(tmp_path):
    """Hugging Face has a package of that name; which of the two is imported depends on the path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import kvsparse_jax"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "another package named `kernels`" in done.stderr.splitlines()[-1]
    required = [(d.name, r) for d in importlib.metadata.distributions() for r in d.requires or ()]
    assert not [r for r in required if _name(r[1]) == "kernels" and "extra ==" not in r[1]]


def test_no_registry_hosts_or_home_paths():
    # Spelled in pieces, or this file would hold them.
    hosts = ["pypi" + r"\.org", "files" + r"\.pythonhosted", "registry" + r"\.npmjs", "deb" + r"\.debian"]
    homes = ["/" + "root/", "/" + r"(?:home|Users)/(?!someone\b|user\b|you\b)\w", "/" + "work/"]
    pattern = re.compile("|".join([*hosts, *(r"(?<![\w.])" + home for home in homes)]))
    wrong = []
    for path in _tracked():
        data = path.read_bytes()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if found := pattern.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number} has {found.group()}")
    assert not wrong, "\n".join(wrong)


def test_no_large_files():
    large = [
        f"{path.relative_to(ROOT)}: {path.stat().st_size >> 10} KiB"
        for path in _tracked()
        if path.stat().st_size > 1500 * 1024
    ]
    assert not large, "\n".join(large)


def test_package_data_is_in_the_wheel_list():
    """All four packages are built, whole: the build takes every file below them."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert sorted(build["targets"]["wheel"]["packages"]) == sorted(PACKAGES)


@pytest.mark.parametrize("setting", ["PYTHON", "PATH"])
def test_too_old_python_is_named(setting, tmp_path):
    """One line says that the Python is too old and which it is."""
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho old 3.9.1 /opt/python3.9\n")
    old.chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    if setting == "PYTHON":
        env["PYTHON"] = str(old)
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find_python.sh")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "3.12 or newer" in done.stderr and "3.9.1 at /opt/python3.9" in done.stderr


def test_finder_passes_over_a_python_that_does_not_run(tmp_path):
    """A version manager's wrapper for a version that is not selected exists, but starts nothing."""
    for name, does in {"python3": "exit 127", "python3.12": f'exec {sys.executable} "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find_python.sh")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()
