"""The other side of `sat-jax bench policy`: transformers' model, in a process and an environment of its own.

Run by path, so it imports nothing of this repository. Standard input: a line of JSON that says what to load, then a
line with the name of a task for every turn. Standard output: a line of JSON for each.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answers until standard input ends."""
    request = json.loads(sys.stdin.readline())
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(request["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(request["folder"], dtype=getattr(torch, request["dtype"]))
    tasks = _tasks(torch, model, request)
    clock = getattr(time, request["clock"])
    _tell({"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        start = clock()
        value = tasks[line.strip()]()
        _tell({"seconds": clock() - start, "value": value})


def _tasks(torch: Any, model: Any, request: dict[str, Any]) -> dict[str, Callable[[], float]]:
    input_BT, target_BT = (torch.tensor(request[name]) for name in ("input", "target"))
    prompt_BT, new = torch.tensor(request["prompt"]), request["new"]

    def mean_logp() -> Any:
        logits_BTV = model(input_ids=input_BT, use_cache=False).logits.float()
        return torch.gather(torch.log_softmax(logits_BTV, -1), -1, target_BT[..., None]).mean()

    def train() -> float:
        model.zero_grad(set_to_none=True)
        loss = -mean_logp()
        loss.backward()
        return -loss.item()

    def score() -> float:
        with torch.no_grad():
            return mean_logp().item()

    def decode() -> float:
        with torch.no_grad():
            sampled = model.generate(
                prompt_BT,
                attention_mask=torch.ones_like(prompt_BT),
                do_sample=True,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
            )
        return float(sampled.shape[1] - prompt_BT.shape[1])

    return {"train": train, "score": score, "decode": decode}


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
