"""Who may import whom: `sat_jax` <- `train` -> `rollout_bridge`; nothing imports tools or tests."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "sat_jax": {"train", "rollout_bridge", "tools", "tests", "grpc", "grain", "orbax", "rich", "logging", "time"},
    "rollout_bridge": {"sat_jax", "train", "tools", "tests", "jax", "flax", "optax", "orbax", "chex", "grain", "torch"},
    "train": {"tools", "tests"},
}
NO_FILES = {"open", "print"}


def imported(path: Path) -> dict[str, int]:
    """Top-level packages that a file imports, anywhere in it, with the line."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0]: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found[node.module.split(".")[0]] = node.lineno
    return found


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no source in {package}"
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_room_imports_only_what_it_may(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for name, line in imported(path).items()
        if name in FORBIDDEN[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_array_package_opens_no_file_but_in_hf():
    wrong = []
    for path in sources("sat_jax"):
        if path.name == "hf.py":
            continue
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NO_FILES
        ]
    assert not wrong, "\n".join(wrong)


def test_only_the_codecs_and_the_service_see_the_stubs():
    allowed = {"codec.py", "codec_push.py", "server.py", "client.py"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("rollout_bridge")
        if "rollout_pb2" in path.read_text() and path.name not in allowed and path.parent.name != "proto"
    ]
    assert not wrong, wrong


def test_no_module_of_train_hides_one_of_pythons_own():
    """The parity benchmark's oracle is run by its path, so that its folder comes before the standard library."""
    assert not {path.stem for path in (ROOT / "train").glob("*.py")} & sys.stdlib_module_names
