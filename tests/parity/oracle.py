"""transformers' own Qwen3-MoE and Qwen3, on the CPU in float32, over NumPy arrays."""

import importlib
from typing import Any

import numpy as np

# By name, so that type checkers need not find them in environments without them.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
torch.set_num_threads(1)  # its sums are then the same on any number of cores, and threads do not wait for busy ones


def make_model(hf_config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """A model of transformers with these parameters, under the names of its own (fused) layout."""
    config = transformers.AutoConfig.for_model(**hf_config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    loaded = model.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.eval()


def run(model: Any, input_BT: np.ndarray, target_BT: np.ndarray, weight_BT: np.ndarray) -> dict[str, Any]:
    """Forward and backward of sum(weight * log-prob): logits_BTV, logp_BT, routes [L, B, T, K], gradients by name."""
    routes: list[np.ndarray] = []

    def catch(_module: Any, _inputs: Any, output: Any) -> None:
        routes.append(output[2].numpy().reshape(*input_BT.shape, -1))

    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [router.register_forward_hook(catch) for router in routers]
    logits_BTV = model(input_ids=torch.from_numpy(input_BT)).logits
    for hook in hooks:
        hook.remove()
    logp_BTV = torch.log_softmax(logits_BTV, -1)
    logp_BT = torch.gather(logp_BTV, -1, torch.from_numpy(target_BT)[..., None])[..., 0]
    model.zero_grad()
    (logp_BT * torch.from_numpy(weight_BT)).sum().backward()
    return {
        "logits": logits_BTV.detach().numpy(),
        "logp": logp_BT.detach().numpy(),
        "routes": routes,
        "gradients": {name: parameter.grad.numpy() for name, parameter in model.named_parameters()},
    }


def load(folder: Any, dtype: str = "float32") -> tuple[Any, dict[str, np.ndarray]]:
    """What transformers reads from a folder: its model, and the parameters in float32; nothing may be left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    left_over = {key: value for key, value in info.items() if value and key.endswith(("keys", "msgs"))}
    assert not left_over, left_over
    return model, {name: tensor.detach().float().numpy() for name, tensor in model.named_parameters()}


def save(model: Any, folder: Any, *, fused: bool) -> None:
    """Writes a folder as transformers does; `fused` keeps its own parameters, else experts get a tensor each."""
    model.save_pretrained(folder, save_original_format=not fused)


def randomise(model: Any, seed: int) -> None:
    """Fresh parameters."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
