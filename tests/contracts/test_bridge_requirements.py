"""The bridge's own requirement set is enough for it, and holds no JAX."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT_OF = {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "grpcio-reflection": "grpc_reflection"}
IMPORT_OF |= {"protobuf": "google", "ml-dtypes": "ml_dtypes"}


def test_the_bridge_imports_exactly_what_its_requirements_bring():
    lines = (ROOT / "requirements" / "bridge.txt").read_text().splitlines()
    names = [re.split(r"[><=!~]", line)[0] for line in lines if line and not line.startswith("#")]
    brought = {IMPORT_OF.get(name, name) for name in names}
    imported = set()
    for path in (ROOT / "rollout_bridge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"rollout_bridge"} == brought
