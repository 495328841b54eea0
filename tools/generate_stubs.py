"""Generates the protobuf stubs beside rollout.proto, or checks that the committed ones are fresh.

    python tools/generate_stubs.py            writes them (needs the pinned grpcio-tools)
    python tools/generate_stubs.py --check    exit 1 when they differ from what the .proto says (any grpcio-tools)

Generated code refuses to load under an older grpcio or protobuf than its generator's, so the generator is pinned to the
lowest versions that the package supports.
"""

import argparse
import importlib.metadata
import importlib.resources
import pathlib
import re
import sys
import tempfile

PROTO = pathlib.PurePosixPath("rollout_bridge/proto/rollout.proto")
GENERATOR = "1.80.0"
SUFFIXES = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")

# What differs between generators and means nothing: their own version, and two spellings of the same type.
_VERSION_NOISE = (
    (re.compile(r"^# Protobuf Python Version: .*$", re.M), ""),
    (re.compile(r"(Domain\.PUBLIC,)\s*\d+,\s*\d+,\s*\d+,"), r"\1"),
    (re.compile(r"^GRPC_GENERATED_VERSION = .*$", re.M), ""),
    (re.compile(r"^(class \w+)\(object\):", re.M), r"\1:"),
    (re.compile(r"_Optional\[bool\]"), "bool"),
)


def generate(root: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the three stub files under `out`, in the proto's own folder.

    Raises:
      RuntimeError: protoc refused the file; it has printed why.
    """
    from grpc_tools import protoc

    include = importlib.resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{root}", f"-I{include}"]
    arguments += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "pyi")]
    if protoc.main([*arguments, str(root / PROTO)]) != 0:
        raise RuntimeError(f"{PROTO}: expected a valid proto, protoc refused it (its message is above)")


def stale(root: pathlib.Path) -> list[str]:
    """Names the committed stub files that differ from freshly generated ones, generator versions aside."""
    with tempfile.TemporaryDirectory() as folder:
        generate(root, pathlib.Path(folder))
        names = [str(PROTO.with_name(PROTO.stem + suffix)) for suffix in SUFFIXES]
        return [name for name in names if _essence(root / name) != _essence(pathlib.Path(folder) / name)]


def _essence(path: pathlib.Path) -> str:
    text = path.read_text() if path.exists() else ""
    for pattern, replacement in _VERSION_NOISE:
        text = pattern.sub(replacement, text)
    return text


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args(argv)
    root = pathlib.Path(__file__).resolve().parent.parent
    if arguments.check:
        differing = stale(root)
        for name in differing:
            print(f"{name}: expected the stubs of {PROTO}, got others; run tools/generate_stubs.py", file=sys.stderr)
        return 1 if differing else 0
    installed = importlib.metadata.version("grpcio-tools")
    if installed != GENERATOR:
        print(f"grpcio-tools: expected {GENERATOR} (the oldest supported), got {installed}", file=sys.stderr)
        return 2
    generate(root, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
