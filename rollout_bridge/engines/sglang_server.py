"""What the bridge must know of a running SGLang server before it trusts it with anything."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_bridge.engines.hf_model import model_info, read_config
from rollout_bridge.engines.sglang_files import CONFIG
from rollout_bridge.engines.sglang_http import SglangHttp
from rollout_bridge.errors import Fatal
from rollout_bridge.messages import ModelInfo

TESTED = "0.5.23"
_DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """A server as it stands.

    Attributes:
      version: of SGLang.
      tag: the server's name of its weights, and where it read them: of the last update, or of its start.
      model: what it holds.
      config: its `config.json`.
      parallel: its tensor-parallel and pipeline-parallel sizes.
    """

    version: str
    tag: tuple[str, str]
    model: ModelInfo
    config: Mapping[str, Any]
    parallel: tuple[int, int]


def read_tag(http: SglangHttp, seconds: float) -> tuple[str, str]:
    """The server's name of its weights, and where it read them: an update by others may leave the name as it was.

    Raises:
      Retryable: it does not answer.
      Fatal: it does not tell.
    """
    info = http.get("/model_info", seconds)
    tag, path = info.get("weight_version"), info.get("model_path")
    if not (isinstance(tag, str) and isinstance(path, str)):
        raise Fatal(
            f"SGLang at {http.url}: expected /model_info to tell weight_version and model_path, got the keys "
            f"{sorted(info)}; SGLang {TESTED} is what was tested"
        )
    return tag, path


def read_facts(http: SglangHttp, folder: Path | None, seconds: float) -> ServerFacts:
    """Asks the server what it is, and refuses one that cannot do what a rollout needs.

    Args:
      http: the server.
      folder: of its `config.json`; None = the folder that the server itself names.
      seconds: deadline of each call.

    Raises:
      Retryable: it does not answer.
      Fatal: it was started without a flag that is needed, or its model is not supported; says what to change.
    """
    tag = read_tag(http, seconds)
    info = http.get("/server_info", seconds)
    version = str(info.get("version", "unknown"))
    _check_flags(info, http.url)
    named = folder or Path(str(info.get("model_path", "")))
    try:
        config = read_config(named)
        model = model_info(config, dtype=_dtype(info, config), max_tokens=_max_tokens(info))
    except ValueError as error:
        raise Fatal(f"SGLang at {http.url}: {error} (model {named / CONFIG})") from error
    parallel = int(info.get("tp_size", 1)), int(info.get("pp_size", 1))
    return ServerFacts(version=version, tag=tag, model=model, config=config, parallel=parallel)


def _check_flags(info: Mapping[str, Any], url: str) -> None:
    wanted = {
        "enable_return_routed_experts": (True, "start it with --enable-return-routed-experts"),
        "dp_size": (1, "start one server, with a bridge beside it, for each replica"),
        "speculative_algorithm": (None, "start it without speculative decoding"),
        "quantization": (None, "start it without quantization: a push replaces its weights as they are"),
    }
    for name, (value, remedy) in wanted.items():
        if info.get(name) != value:
            raise Fatal(f"SGLang at {url}: expected a server with {name} = {value}, got {info.get(name)!r}; {remedy}")


def _dtype(info: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """In which the server holds its weights."""
    asked = str(info.get("dtype", "auto"))
    if asked == "auto":
        asked = str(config.get("dtype") or config.get("torch_dtype") or "none")
    if asked not in _DTYPES:
        raise ValueError(f"dtype: expected {' or '.join(_DTYPES)}, got {asked!r}; start SGLang with --dtype bfloat16")
    return _DTYPES[asked]


def _max_tokens(info: Mapping[str, Any]) -> int:
    """Longest prompt + completion: a little below context and cache, which SGLang keeps some room in."""
    longest = info.get("max_req_input_len")
    if not isinstance(longest, int):
        raise ValueError(
            f"longest sequence: expected /server_info to tell max_req_input_len, got {longest!r}; SGLang {TESTED} is "
            "what was tested"
        )
    return longest
