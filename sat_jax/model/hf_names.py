"""Which leaf of the policy is which Hugging Face tensor: names, shapes, places. Knows neither files nor arrays.

Hugging Face stores a linear map as [out, in], one tensor a layer and expert; the policy stacks layers of a kind and
experts, as [in, out]. Shapes follow from the axes in the leaves' names. On disk the experts have two layouts:
`per-expert`, a tensor each, which is what transformers itself writes and what is pushed over the wire; and `fused`,
transformers' own parameters, all experts of a layer in two tensors: `gate_up_proj` [E, 2F, D] (gate first, then up) and
`down_proj` [E, D, F], each expert's part [out, in].
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from sat_jax.model.config import PolicyConfig

Layout = Literal["per-expert", "fused"]
LAYOUTS: tuple[Layout, ...] = ("per-expert", "fused")

_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
_FUSED_UP, _FUSED_DOWN = _LAYER + "mlp.experts.gate_up_proj", _LAYER + "mlp.experts.down_proj"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the policy and its tensors.

    Attributes:
      path: where it is in the policy's parameters.
      name: of its tensors, with {layer} and {expert}.
      inward: how many leading axes are the input of a linear map; 0 = stored as is.
    """

    path: tuple[str, ...]
    name: str
    inward: int

    @property
    def stacked(self) -> str:
        """The letters that number tensors (layer, expert) rather than elements."""
        return ("L" if "{layer}" in self.name else "") + ("E" if "{expert}" in self.name else "")

    @property
    def axes(self) -> str:
        """The letters of one tensor, in the policy's order."""
        letters = self.path[-1].rsplit("_", 1)[-1]
        return letters.removeprefix("E") if "E" in self.stacked else letters


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the model is found: a whole stored tensor, or (expert, first row) of a fused one."""

    stored: str
    expert: int | None = None
    first_row: int = 0


def leaves(config: PolicyConfig) -> tuple[Leaf, ...]:
    """The leaves of a policy, in the order in which their tensors are exported."""
    every = (
        Leaf(("query_DHC",), _LAYER + "self_attn.q_proj.weight", 1),
        Leaf(("key_DGC",), _LAYER + "self_attn.k_proj.weight", 1),
        Leaf(("value_DGC",), _LAYER + "self_attn.v_proj.weight", 1),
        Leaf(("output_HCD",), _LAYER + "self_attn.o_proj.weight", 2),
        Leaf(("query_norm_C",), _LAYER + "self_attn.q_norm.weight", 0),
        Leaf(("key_norm_C",), _LAYER + "self_attn.k_norm.weight", 0),
    )
    sparse = (
        Leaf(("router_DE",), _LAYER + "mlp.gate.weight", 1),
        Leaf(("gate_EDF",), _EXPERT + "gate_proj.weight", 1),
        Leaf(("up_EDF",), _EXPERT + "up_proj.weight", 1),
        Leaf(("down_EFD",), _EXPERT + "down_proj.weight", 1),
    )
    dense = (
        Leaf(("gate_DF",), _LAYER + "mlp.gate_proj.weight", 1),
        Leaf(("up_DF",), _LAYER + "mlp.up_proj.weight", 1),
        Leaf(("down_FD",), _LAYER + "mlp.down_proj.weight", 1),
    )
    norms = (
        Leaf(("attention_norm_D",), _LAYER + "input_layernorm.weight", 0),
        Leaf(("feed_norm_D",), _LAYER + "post_attention_layernorm.weight", 0),
    )
    stacks = {
        "layers": (*every, *sparse, *norms) if config.moe_layers else (),
        "dense_layers": (*every, *dense, *norms) if config.dense_layers else (),
    }
    head = () if config.tie_embeddings else (Leaf(("unembedding_DV",), "lm_head.weight", 1),)
    return (
        Leaf(("embedding_VD",), "model.embed_tokens.weight", 0),
        *(dataclasses.replace(leaf, path=(stack, *leaf.path)) for stack, own in stacks.items() for leaf in own),
        Leaf(("final_norm_D",), "model.norm.weight", 0),
        *head,
    )


def layer_numbers(leaf: Leaf, config: PolicyConfig) -> tuple[int, ...]:
    """The layers of the leaf's stack, by their numbers in forward order."""
    dense = leaf.path[0] == "dense_layers"
    return tuple(layer for layer in range(config.layers) if (layer in config.dense_layers) == dense)


def tensor_shape(leaf: Leaf, config: PolicyConfig) -> tuple[int, ...]:
    """Shape of each tensor of a leaf, as Hugging Face stores it."""
    sizes = {
        "V": config.vocab_size,
        "D": config.width,
        "H": config.query_heads,
        "G": config.kv_heads,
        "C": config.head_dim,
        "E": config.experts,
        "F": config.dense_hidden if leaf.path[0] == "dense_layers" else config.expert_hidden,
    }
    shape = [sizes[letter] for letter in leaf.axes]
    if not leaf.inward:
        return tuple(shape)
    return math.prod(shape[leaf.inward :]), math.prod(shape[: leaf.inward])


def tensor_names(leaf: Leaf, config: PolicyConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The leaf's tensors with their place along the stacked axes."""
    sizes = {"L": len(layer_numbers(leaf, config)), "E": config.experts}
    for position in itertools.product(*(range(sizes[letter]) for letter in leaf.stacked)):
        yield tensor_name(leaf, config, position), position


def tensor_name(leaf: Leaf, config: PolicyConfig, position: tuple[int, ...]) -> str:
    """Name of the tensor at a place along the leaf's stacked axes."""
    if not leaf.stacked:
        return leaf.name
    layer, *expert = position
    return leaf.name.format(layer=layer_numbers(leaf, config)[layer], expert=expert[0] if expert else None)


def tensor_shapes(config: PolicyConfig, layout: Layout = "per-expert") -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape; per expert, in the order of `hf.export_tensors`.

    Args:
      config: the architecture.
      layout: of the experts.

    Raises:
      ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected {' or '.join(LAYOUTS)}, got {layout!r}")
    shapes = {
        name: tensor_shape(leaf, config)
        for leaf in leaves(config)
        if layout == "per-expert" or "E" not in leaf.stacked
        for name, _ in tensor_names(leaf, config)
    }
    return shapes if layout == "per-expert" else shapes | _fused_shapes(config)


def tensor_parts(config: PolicyConfig, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Of every tensor of a layout: the per-expert tensors whose rows it is made of, in order."""
    parts: dict[str, tuple[str, ...]] = {name: (name,) for name in tensor_shapes(config, layout)}
    if layout == "fused":
        for name, place in sorted(fused_parts(config).items(), key=lambda part: (part[1].expert, part[1].first_row)):
            parts[place.stored] = (*(parts[place.stored] if parts[place.stored] != (place.stored,) else ()), name)
    return parts


def fused_parts(config: PolicyConfig) -> dict[str, Place]:
    """Of every tensor that has an expert of its own: where it is in the fused layout."""
    parts = {}
    for leaf in leaves(config):
        if "E" not in leaf.stacked:
            continue
        fused = _FUSED_DOWN if leaf.path[-1] == "down_EFD" else _FUSED_UP
        first_row = config.expert_hidden if leaf.path[-1] == "up_EDF" else 0
        numbers = layer_numbers(leaf, config)
        for name, (layer, expert) in tensor_names(leaf, config):
            parts[name] = Place(fused.format(layer=numbers[layer]), expert, first_row)
    return parts


def find_tensors(config: PolicyConfig, stored: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Place]:
    """Finds every tensor of the model among stored ones, whichever layout they have.

    Args:
      config: the architecture.
      stored: shapes by name.
      where: whose they are, for the error.

    Returns:
      By name in the per-expert layout.

    Raises:
      ValueError: tensors are missing, unexpected, given in both layouts, or misshapen; the first ones are named.
    """
    shapes, parts = tensor_shapes(config), fused_parts(config)
    twice = [name for name, part in parts.items() if name in stored and part.stored in stored]
    if twice:
        raise ValueError(
            f"tensors: expected each expert in one layout, got {some(twice)} both under their own names and in "
            f"{parts[twice[0]].stored} ({where}); remove the copy that is not the model's"
        )
    found = {name: parts[name] if name in parts and parts[name].stored in stored else Place(name) for name in shapes}
    used = dict.fromkeys(place.stored for place in found.values())
    check_names(used, stored, config, where)
    wanted = shapes | _fused_shapes(config)
    for name in used:
        check_shape(name, wanted[name], stored[name])
    return found


def check_names(wanted: Collection[str], names: Collection[str], config: PolicyConfig, where: str) -> None:
    """Checks that the names are exactly the wanted ones.

    Raises:
      ValueError: names the first that are missing and unexpected, and both layer counts where these differ.
    """
    missing = [name for name in wanted if name not in names]
    unexpected = [name for name in names if name not in wanted]
    if not missing and not unexpected:
        return
    found = [
        f"{len(few)} {what} ({some(few)})" for few, what in ((missing, "missing"), (unexpected, "unexpected")) if few
    ]
    layers = _layer_count(names)
    remedy = "" if layers == config.layers else f"; the weights have {layers} layers, the config {config.layers}"
    raise ValueError(
        f"tensors: expected exactly the model's {len(wanted)}, got {' and '.join(found)} ({where}){remedy}"
    )


def check_shape(name: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Checks a tensor's shape.

    Raises:
      ValueError: names the tensor; says so where it is the vocabulary that differs.
    """
    if tuple(got) == expected:
        return
    remedy = "load with the model's own config"
    if name in ("model.embed_tokens.weight", "lm_head.weight") and got[1:] == expected[1:]:
        remedy = f"the weights have a vocabulary of {got[0]}, the config one of {expected[0]}"
    raise ValueError(f"tensor {name}: expected shape {expected}, got {tuple(got)}; {remedy}")


def some(names: Collection[str]) -> str:
    """The first three names, and whether there are more."""
    return ", ".join(itertools.islice(names, 3)) + (", ..." if len(names) > 3 else "")


def _fused_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    experts, width, hidden = config.experts, config.width, config.expert_hidden
    return {
        name.format(layer=layer): shape
        for layer in range(config.layers)
        if layer not in config.dense_layers
        for name, shape in ((_FUSED_UP, (experts, 2 * hidden, width)), (_FUSED_DOWN, (experts, width, hidden)))
    }


def _layer_count(names: Collection[str]) -> int:
    begin = _LAYER.split("{", maxsplit=1)[0]
    numbers = (name.removeprefix(begin).split(".", 1)[0] for name in names if name.startswith(begin))
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)
