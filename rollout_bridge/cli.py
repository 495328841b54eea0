"""The console script `rollout-bridge`: a bridge beside an engine. Needs no JAX."""

import argparse
import contextlib
import logging
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

from rollout_bridge.engine import Engine
from rollout_bridge.engines.fake import FakeEngine
from rollout_bridge.engines.fake_model import fake_model
from rollout_bridge.errors import BridgeError
from rollout_bridge.server import ServerOptions, serve
from rollout_bridge.transport import MAX_MESSAGE_BYTES, Security, ServerTls

_GRACE_SECONDS = 5.0
_SHARED_MEMORY = pathlib.Path("/dev/shm")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0 after SIGTERM or SIGINT, 2 for a user's mistake."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="rollout-bridge: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for every call otherwise
    try:
        return _serve(arguments, os.environ)
    except (ValueError, OSError, BridgeError) as error:
        sys.stderr.write(f"rollout-bridge: {error}\n")
        return 2


def read_token(environ: Mapping[str, str], variable: str | None, path: pathlib.Path | None) -> str | None:
    """The bearer token, from the environment or a file; None when neither is named.

    Raises:
      ValueError: the variable is not set, or the file is empty.
      OSError: the file cannot be read.
    """
    if variable is not None:
        token, source = environ.get(variable, "").strip(), f"environment variable {variable}"
    elif path is not None:
        token, source = path.read_text().strip(), f"file {path}"
    else:
        return None
    if not token:
        raise ValueError(f"bearer token: expected one in {source}, got nothing")
    return token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollout-bridge", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser("serve", help="serve an engine until SIGTERM")
    engines = "what samples; sglang = a server at --url; fake = a seeded stand-in"
    verb.add_argument("--engine", choices=["sglang", "fake"], required=True, help=engines)
    verb.add_argument("--listen", required=True, metavar="HOST:PORT", help="port 0 takes any free one")
    verb.add_argument(
        "--max-message-bytes", type=int, default=MAX_MESSAGE_BYTES, metavar="N", help="on both sides alike"
    )
    verb.add_argument("--tls-certificate", type=pathlib.Path, metavar="PEM")
    verb.add_argument("--tls-key", type=pathlib.Path, metavar="PEM")
    verb.add_argument("--tls-client-ca", type=pathlib.Path, metavar="PEM", help="ask clients for a certificate of it")
    token = verb.add_mutually_exclusive_group()
    token.add_argument("--token-variable", metavar="NAME", help="environment variable that holds the bearer token")
    token.add_argument("--token-file", type=pathlib.Path, metavar="PATH", help="file that holds the bearer token")
    verb.add_argument(
        "--allow-insecure", action="store_true", help="off loopback without TLS, on a network that you trust; no token"
    )
    verb.add_argument("--fake-version", type=int, metavar="N", help="serve made-up weights of this version at once")
    _sglang_arguments(verb)
    return parser


def _sglang_arguments(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("--engine sglang")
    group.add_argument("--url", metavar="URL", help="http://HOST:PORT of the SGLang server, on this host")
    group.add_argument("--model", type=pathlib.Path, metavar="DIR", help="of its config.json; default: as it says")
    group.add_argument("--api-key-file", type=pathlib.Path, metavar="PATH", help="file that holds its --api-key")
    group.add_argument(
        "--admin-key-file", type=pathlib.Path, metavar="PATH", help="file that holds its --admin-api-key"
    )
    group.add_argument(
        "--stage-folder",
        type=pathlib.Path,
        default=_SHARED_MEMORY,
        metavar="DIR",
        help="where pushes are staged; room for one copy of the weights; the server must see it under the same path",
    )
    group.add_argument(
        "--wait-seconds", type=float, default=1800.0, metavar="S", help="for the server's first answer (default: 1800)"
    )
    group = verb.add_argument_group("--engine sglang --transport distributed")
    ways = "disk (default): the server reads what is staged; distributed: a sender with PyTorch broadcasts it"
    group.add_argument("--transport", choices=["disk", "distributed"], default="disk", help=ways)
    group.add_argument("--group-backend", default="gloo", metavar="NAME", help="gloo (default) or nccl")
    group.add_argument(
        "--group-address", default="127.0.0.1", metavar="HOST", help="of this host, as the server's workers reach it"
    )
    device = "of the sender: cpu (default) or cuda:N; NCCL wants a GPU that the server does not use"
    group.add_argument("--group-device", default="cpu", metavar="NAME", help=device)
    group.add_argument(
        "--sender-python", type=pathlib.Path, metavar="PATH", help="interpreter with PyTorch; default: this one"
    )
    group.add_argument(
        "--bucket-mebibytes", type=int, default=256, metavar="N", help="broadcast at once (default: 256)"
    )


def _serve(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    security = Security(
        tls=_tls(arguments),
        token=read_token(environ, arguments.token_variable, arguments.token_file),
        allow_insecure=arguments.allow_insecure,
    )
    security.check(arguments.listen)  # before a server is waited for
    stopped = threading.Event()
    with contextlib.closing(_engine(arguments)) as engine:
        options = ServerOptions(security=security, max_message_bytes=arguments.max_message_bytes)
        server = serve(engine, arguments.listen, options=options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        sys.stdout.write(f"rollout-bridge: engine {engine.engine_id} listens on {server.address}\n")
        sys.stdout.flush()
        stopped.wait()
        server.stop(_GRACE_SECONDS)
    return 0


def _engine(arguments: argparse.Namespace) -> Engine:
    if arguments.engine == "fake":
        return FakeEngine(fake_model(), version=arguments.fake_version)
    from rollout_bridge.engines.sglang import SglangConfig, SglangEngine
    from rollout_bridge.engines.sglang_group import GroupConfig, require_pytorch

    if not arguments.url:
        raise ValueError("--url: expected http://HOST:PORT of the SGLang server with --engine sglang, got none")
    group = None
    if arguments.transport == "distributed":
        python = arguments.sender_python or pathlib.Path(sys.executable)
        group = GroupConfig.with_python(
            python,
            backend=arguments.group_backend,
            address=arguments.group_address,
            device=arguments.group_device,
            bucket_bytes=arguments.bucket_mebibytes << 20,
        )
        require_pytorch(python)
    engine = SglangEngine(
        SglangConfig(
            url=arguments.url,
            api_key=read_token({}, None, arguments.api_key_file),
            admin_key=read_token({}, None, arguments.admin_key_file),
            model=arguments.model,
            stage_folder=arguments.stage_folder,
            group=group,
        )
    )
    try:
        engine.connect(arguments.wait_seconds)
    except BaseException:
        engine.close()
        raise
    return engine


def _tls(arguments: argparse.Namespace) -> ServerTls | None:
    certificate, key, client_ca = arguments.tls_certificate, arguments.tls_key, arguments.tls_client_ca
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ValueError("TLS: expected both --tls-certificate and --tls-key, got one of them")
    return ServerTls(
        certificate=certificate.read_bytes(),
        key=key.read_bytes(),
        client_ca=None if client_ca is None else client_ca.read_bytes(),
    )


if __name__ == "__main__":
    sys.exit(main())
