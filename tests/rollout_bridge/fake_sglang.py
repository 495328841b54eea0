"""SGLang's HTTP as the bridge meets it, over the hash model: answers, and the traps that the real one was seen to set.

It takes any name and any number of tensors for success, changes weights and says 400 when told to, forgets everything
when it restarts, and says 503 to a health probe while it is paused. A process group is a connection to `fake_sender`.
"""

import base64
import http.server
import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from rollout_bridge.engines.fake_model import fake_logp, fake_routes, fake_token, fingerprint
from rollout_bridge.engines.hf_model import model_info
from rollout_bridge.messages import Sampling

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
MODEL = model_info(CONFIG, dtype="float32", max_tokens=500)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # a probe's sequences come all at once


class FakeSglang:
    """A server on a port of its own; `close` it."""

    def __init__(self, folder: Path, *, key: str | None = None, **info) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.folder = folder
        self.info = {
            "version": "0.5.23",
            "dtype": "float32",
            "enable_return_routed_experts": True,
            "dp_size": 1,
            "speculative_algorithm": None,
            "quantization": None,
            "max_req_input_len": 500,
            "tp_size": 1,
            "pp_size": 1,
        } | info
        self.key = key
        self.seconds_per_token = 0.0
        self.gates: dict[int, threading.Event] = {}  # before a completion's token of this number: it waits there
        self.reached = -1  # the last such number that a completion has come to
        self.calls: list[str] = []
        self.say_400 = False  # the next update changes the weights and says 400
        self.hang_up = ""  # the next call of this path gets no answer
        self.spoil = lambda meta: meta  # what becomes of an answer's meta_info
        self.changed = threading.Condition()
        self.running = 0
        self.buckets = 0
        self.groups: dict[str, socket.socket] = {}
        self.restart()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def restart(self):
        """Base weights again, and nobody told."""
        with self.changed:
            self.weights, self.tag, self.path = 12345, "base", str(self.folder)
            self.paused, self.mode, self.retracts, self.aborts = False, "", 0, 0
            self.aborted: set[str] = set()
            self.session: dict[str, np.ndarray] | None = None
            self._hang_up_groups()
            self.changed.notify_all()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._hang_up_groups()

    def _hang_up_groups(self):
        for group in self.groups.values():
            group.close()
        self.groups.clear()

    # ------------------------------------------------------------------------------------------------ calls

    def model_info(self, _body):
        return {"weight_version": self.tag, "model_path": self.path}

    def server_info(self, _body):
        return self.info | {"model_path": self.path}

    def health(self, _body):
        return 503 if self.paused else {}

    def flush_cache(self, _body):
        return 400 if self.running and not self.paused else {}

    def pause_generation(self, body):
        with self.changed:
            self.paused = True
            self.aborts += body["mode"] == "abort"
            self.retracts += body["mode"] == "retract"
            self.changed.notify_all()
        return {}

    def continue_generation(self, _body):
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return {}

    def abort_request(self, body):
        with self.changed:
            self.aborted.add(body["rid"])
            self.changed.notify_all()
        return {}

    def update_weights_from_disk(self, body):
        files = list(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return 400
        loaded = {name: array for file in files for name, array in load_file(file).items()}
        known = {spec.name for spec in MODEL.tensors}
        with self.changed:
            if known & loaded.keys():  # every other name is ignored, and that is success
                self.weights = fingerprint({name: loaded[name] for name in known & loaded.keys()})
            self.path = body["model_path"]
            if self.say_400:
                self.say_400 = False
                return 400
            self.tag = body.get("weight_version", self.tag)
        return {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    def update_weight_version(self, body):
        self.tag = body["new_version"]
        return {"success": True}

    def init_weights_update_group(self, body):
        """Meets `fake_sender` at its port: a connection stands for the group."""
        name = body["group_name"]
        if body["world_size"] != 2 or body["rank_offset"] != 1:
            return 400
        self.groups[name] = socket.create_connection((body["master_address"], body["master_port"]), 10.0)
        return {"success": True}

    def destroy_weights_update_group(self, body):
        group = self.groups.pop(body["group_name"], None)
        if group is None:
            return 400
        group.close()
        return {"success": True}

    def begin_weight_update(self, _body):
        if self.session is not None:
            return 400
        self.session = {}
        return {"success": True}

    def end_weight_update(self, _body):
        """As the real one, which has no way back: what came before a broken end stays."""
        if self.session is None:
            return 400
        self.session = None
        return {"success": True}

    def update_weights_from_distributed(self, body):
        """A bucket at once into the weights; a broadcast that breaks off is a 400, as over gloo."""
        assert (body["load_format"], body["flush_cache"], self.paused) == ("flattened_bucket", False, True)
        if self.session is None or body["group_name"] not in self.groups:
            return 400
        self.buckets += 1
        shapes = [tuple(shape) for shape in body["shapes"]]
        sizes = [4 * int(np.prod(shape)) for shape in shapes]
        content = _receive(self.groups[body["group_name"]], sum(sizes))
        if len(content) < sum(sizes):
            return 400
        for name, shape, begin, size in zip(body["names"], shapes, np.cumsum([0, *sizes]), sizes, strict=False):
            self.session[name] = np.frombuffer(content[begin : begin + size], np.float32).reshape(shape)
        with self.changed:
            self.weights = fingerprint(self.session)  # of as many as have come: neither the old nor the new ones
            self.tag = body["weight_version"] or self.tag
        return {"success": True}

    def weights_checker(self, _body):
        return {"success": True, "per_engine_checksum": f"{self.weights:016x}"}

    def generate(self, body):
        tokens, sampling = np.array(body["input_ids"], np.int32), body["sampling_params"]
        if body.get("logprob_start_len") == 0:
            logp = [None, *fake_logp(self.weights, tokens, 1.0).tolist()]
            named = [[value, int(token), None] for value, token in zip(logp, tokens, strict=True)]
            return {"output_ids": [], "meta_info": {"weight_version": self.tag, "input_token_logprobs": named}}
        with self.changed:
            self.running += 1
        try:
            return self._sample(body, tokens, sampling)
        finally:
            with self.changed:
                self.running -= 1

    def _sample(self, body, prompt, asked):
        """Token by token under whatever weights there are; `routed` is as of the last rebuild of the cache."""
        sampling = Sampling(max_new_tokens=asked["max_new_tokens"], stop_ids=(), seed=0, temperature=1.0)
        temperature = asked["temperature"]
        whole, triples, tags, finish = list(prompt), [], [], "length"
        aborts, retracts = self.aborts, self.retracts
        routed, retractions = self.weights, 0
        place = int(body["rid"].rsplit("-", 2)[1])
        while len(triples) < asked["max_new_tokens"]:
            time.sleep(self.seconds_per_token)
            if gate := self.gates.get(len(triples)):
                self.reached = len(triples)
                assert gate.wait(60.0), "nobody opened the gate"
            with self.changed:
                while self.paused and self.aborts == aborts and body["rid"] not in self.aborted:
                    self.changed.wait(0.05)
                if self.aborts != aborts or body["rid"] in self.aborted:
                    finish = "abort"
                    break
                if self.retracts != retracts:
                    retractions, retracts, routed = retractions + 1, self.retracts, self.weights
                weights, tag = self.weights, self.tag
            token = fake_token(weights, int(whole[-1]), (place, len(triples)), sampling, MODEL.vocab_size)
            logp = fake_logp(weights, np.array([whole[-1], token]), temperature)[0]
            whole.append(token)
            triples.append([float(logp), token, None])
            tags.append(tag)
            if token in asked["stop_token_ids"]:
                finish = "stop"
                break
        meta = {
            "finish_reason": {"type": finish},
            "weight_version": tags[-1] if tags else self.tag,
            "weight_versions": _spans(tags),
            "num_retractions": retractions,
            "output_token_logprobs": triples,
        }
        if body.get("return_routed_experts"):
            routes = fake_routes(routed, np.array(whole[:-1], np.int32), MODEL)
            meta["routed_experts"] = base64.b64encode(routes.astype("<i4").tobytes()).decode()
        return {"output_ids": [triple[1] for triple in triples], "meta_info": self.spoil(meta)}

    def _handler(self):
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body go out apart: 40 ms a call otherwise

            def _serve(self):
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
                fake.calls.append(self.path)
                if fake.hang_up == self.path:
                    fake.hang_up = ""
                    self.close_connection = True
                    return
                allowed = fake.key is None or self.headers.get("authorization") == f"Bearer {fake.key}"
                answer = getattr(fake, self.path.strip("/"))(body) if allowed else 401
                status = answer if isinstance(answer, int) else 200
                content = json.dumps({} if isinstance(answer, int) else answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    self.close_connection = True  # the bridge hung up

            do_GET = do_POST = _serve

            def log_message(self, format, *args):
                pass

        return Handler


def _receive(group, size):
    """All of it, or what came before the other side hung up."""
    content = b""
    while len(content) < size and (part := _read(group, size - len(content))):
        content += part
    return content


def _read(group, size):
    try:
        return group.recv(size)
    except OSError:
        return b""


def _spans(tags):
    spans = []
    for position, tag in enumerate(tags):
        if spans and spans[-1]["version"] == tag:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": tag, "start": position, "end": position + 1})
    return spans
