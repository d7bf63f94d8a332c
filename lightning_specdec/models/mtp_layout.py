"""Names and forms of multi-token prediction layers in the checkpoints of different families.

A checkpoint may keep them as further layers of the model, or beside it under other names. Where the
config of a family does not describe them, names and shapes of their weights do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMED_LAYER = re.compile(r"(^|\.)mtp(_\w+)?\.")
"""Names of weights of prediction layers that say so, as mtp.layers.0.eh_proj.weight."""
NUMBERED_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
"""Names of weights of numbered layers: prediction layers follow those of the model."""
BLOCK = "mtp_block"
"""The decoder layer within a prediction layer, as transformers names it."""
_SHARED_WEIGHTS = re.compile(
    r"(^|\.)(embed_tokens|shared_head\.(head|output)|lm_head)\.(weight|weight_scale_inv)$"
)
"""Copies of the target's embeddings and output head, which the layers share with it."""
_MOST_LAYERS = 64
SCALE = "_scale_inv"
"""End of the names of the scales of weights that are quantized in blocks to 8-bit floats."""
_ATTENTION = re.compile(r"(attn|attention)\.")
"""Names of the weights of an attention, which differ between kinds of layers."""


def is_of_prediction_layer(name: str, num_model_layers: int | None) -> bool:
    """Whether a weight in a checkpoint's files is of a multi-token prediction layer.

    Args:
        num_model_layers: of the model's text part, as its config lists them.
    """
    if _NAMED_LAYER.search(name):
        return True
    match = NUMBERED_LAYER.match(name)
    if match is None or num_model_layers is None:
        return False
    return int(match[1]) >= num_model_layers


@dataclass(frozen=True)
class Layout:
    """Names of the weights of prediction layers in a checkpoint.

    Names may contain the `index` of a layer, and the `number` that it would have as a further layer
    of the model.

    Args:
        block: prefix of the weights of the decoder layer.
        modules: names of the modules around the decoder layer.
        shared_norm: name of a norm that all layers share.
        block_names: parts of names within the decoder layer that differ from those in the layers
            of the model, by the latter.
        num_blocks: blocks of the model that make up a decoder layer, if it is not one of the
            model's layers. They are numbered through all prediction layers, as `block_number`.
    """

    block: str
    modules: Mapping[str, str]
    shared_norm: str | None = None
    block_names: Mapping[str, str] = field(default_factory=dict)
    num_blocks: int | None = None

    @property
    def has_post_norm(self) -> bool:
        """Whether each layer has a norm after its decoder layer."""
        return "post_norm" in self.modules

    def prefixes(self, index: int, num_model_layers: int) -> dict[str, str]:
        """Prefixes of the names of one layer's weights, by the path of the module in the layer."""
        num_blocks = self.num_blocks or 1
        values = {
            "index": index,
            "number": num_model_layers + index,
            "first_block": index * num_blocks,
            "last_block": (index + 1) * num_blocks - 1,
        }
        prefixes = {}
        for module, name in self.modules.items():
            prefixes[module] = f"{name.format(**values)}."
        if self.num_blocks is None:
            prefixes[BLOCK] = self.block.format(**values)
        else:
            for number in range(self.num_blocks):
                block_number = index * num_blocks + number
                name = self.block.format(block_number=block_number)
                prefixes[f"{BLOCK}.blocks.{number}"] = name
        return prefixes

    def path(self, name: str, num_layers: int, num_model_layers: int) -> tuple[int, str] | None:
        """The layer that a stored weight belongs to, and the weight's name within that layer.

        None if it belongs to none of these layers.
        """
        longest = 0
        path = None
        for index in range(num_layers):
            for module, prefix in self.prefixes(index, num_model_layers).items():
                # The names of modules may begin with that of the decoder layer.
                if name.startswith(prefix) and len(prefix) > longest:
                    longest = len(prefix)
                    path = (index, f"{module}.{self._to_model(name[longest:], module)}")
        return path

    def stored_name(self, index: int, path: str, num_model_layers: int) -> str:
        """The name of a weight in the checkpoint, from its name within a layer."""
        prefixes = self.prefixes(index, num_model_layers)
        module = max((name for name in prefixes if path.startswith(f"{name}.")), key=len)
        rest = path[len(module) + 1 :]
        if module == BLOCK:
            for model_name, stored_name in self.block_names.items():
                rest = rest.replace(model_name, stored_name)
        return prefixes[module] + rest

    def _to_model(self, name: str, module: str) -> str:
        if module == BLOCK:
            for model_name, stored_name in self.block_names.items():
                name = name.replace(stored_name, model_name)
        return name


_AROUND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
"""Names of DeepSeek-V3 for the modules before a decoder layer, which most families use."""


def _within(prefix: str, **more: str) -> dict[str, str]:
    modules = {**_AROUND, **more}
    return {module: prefix + name for module, name in modules.items()}


def numbered(root: str = "model.", post_norm: str = "shared_head.norm") -> Layout:
    """Further layers of the model, as in DeepSeek-V3 and most others."""
    prefix = root + "layers.{number}."
    return Layout(prefix, _within(prefix, post_norm=post_norm))


def single(root: str = "") -> Layout:
    """The layout of Qwen3-Next, Qwen3.5, EXAONE, and Mellum, which have one layer."""
    modules = {
        "enorm": f"{root}mtp.pre_fc_norm_embedding",
        "hnorm": f"{root}mtp.pre_fc_norm_hidden",
        "eh_proj": f"{root}mtp.fc",
        "post_norm": f"{root}mtp.norm",
    }
    return Layout(root + "mtp.layers.{index}.", modules)


def nested(root: str = "model.") -> Layout:
    """The layout of Inkling, with a norm that all layers share."""
    prefix = root + "mtp.layers.{index}."
    modules = {
        "enorm": f"{prefix}embed_norm",
        "hnorm": f"{prefix}hidden_norm",
        "eh_proj": f"{prefix}input_proj",
    }
    return Layout(f"{prefix}transformer_block.", modules, f"{root}mtp.chain_norm.weight")


def listed(root: str = "model.") -> Layout:
    """A separate list of layers, as in MiMo-V2-Flash."""
    prefix = root + "mtp.layers.{index}."
    modules = _within(prefix, post_norm="final_layernorm")
    names = {"post_attention_layernorm": "pre_mlp_layernorm"}
    return Layout(prefix, modules, block_names=names)


def in_blocks(root: str, num_blocks: int) -> Layout:
    """The layout of Nemotron-H, where a prediction layer consists of several blocks."""
    first = root + "mtp.layers.{first_block}."
    modules = {module: first + name for module, name in _AROUND.items()}
    modules["post_norm"] = root + "mtp.layers.{last_block}.final_layernorm"
    return Layout(root + "mtp.layers.{block_number}.", modules, num_blocks=num_blocks)


def in_lists(root: str = "model.") -> Layout:
    """The layout of ERNIE 4.5, which has no norm after a decoder layer."""
    modules = {
        "enorm": root + "mtp_emb_norm.{index}",
        "hnorm": root + "mtp_hidden_norm.{index}",
        "eh_proj": root + "mtp_linear_proj.{index}",
    }
    return Layout(root + "mtp_block.{index}.", modules)


def default_layout(model_type: str, ignored: Collection[str], num_blocks: int = 1) -> Layout:
    """The layout that a family's checkpoints have.

    Args:
        ignored: patterns of the names that transformers leaves out when it loads the model.
        num_blocks: see `layout_of`.
    """
    if model_type == "nemotron_h":
        return in_blocks("", num_blocks)
    if model_type == "mimo_v2_flash":
        return listed()
    if model_type == "ernie4_5_moe":
        return in_lists()
    if any("model" in pattern and "mtp" in pattern for pattern in ignored):
        return nested()
    if any("mtp" in pattern for pattern in ignored):
        return single()
    return numbered()


def layout_of(names: Collection[str], num_blocks: int = 1) -> Layout | None:
    """The layout of prediction layers with these weights; None if it is not known.

    Args:
        num_blocks: blocks of a prediction layer in Nemotron-H, as its config lists them.
    """
    for name in names:
        match = re.match(r"((?:.*\.)?)(mtp\.fc|mtp_linear_proj\.\d+)\.weight$", name)
        if match is not None:
            return single(match[1]) if match[2] == "mtp.fc" else in_lists(match[1])

        match = re.match(r"((?:.*?\.)??)(mtp\.)?layers\.\d+\.(input|eh)_proj\.weight$", name)
        if match is None:
            continue
        root = match[1]
        if match[3] == "input":
            return nested(root)
        is_of_list = match[2] is not None
        has_final_norm = any(".final_layernorm." in other for other in names)
        if not is_of_list:
            return numbered(root, "final_layernorm" if has_final_norm else "shared_head.norm")
        if any(".mixer." in other for other in names):
            return in_blocks(root, num_blocks)
        return listed(root)
    return None


def is_shared(name: str) -> bool:
    """Whether a stored weight is a copy of one of the target's, which the layers share with it."""
    return _SHARED_WEIGHTS.search(name) is not None


def num_stored_layers(names: Collection[str], layout: Layout, num_model_layers: int) -> int:
    """How many prediction layers have weights among these names."""
    # A layout with one layer has the same names for each index.
    projections = {
        f"{layout.prefixes(index, num_model_layers)['eh_proj']}weight"
        for index in range(_MOST_LAYERS)
    }
    return len(projections.intersection(names))


def attention_kind(
    config: Any,
    layer: Mapping[str, list[int]],
    others: Mapping[str, list[int]],
) -> str:
    """The kind of a prediction layer's attention: that of the model's layers with equal weights.

    If several kinds have such weights, as with and without a window, it is full attention.

    Args:
        config: of the model, with `layer_types`.
        layer: shapes of the layer's weights by their names within it.
        others: shapes of all weights of the checkpoint.
    """
    kinds: list[str] = list(config.layer_types)
    attention = _of_attention(layer)
    model_layers: dict[int, dict[str, list[int]]] = {}
    for name, shape in others.items():
        match = NUMBERED_LAYER.match(name)
        if match is not None:
            model_layers.setdefault(int(match[1]), {})[name[match.end() :]] = shape

    equal_kinds: set[str] = set()
    for number, kind in enumerate(kinds):
        if _of_attention(model_layers.get(number, {})) == attention:
            equal_kinds.add(kind)
    if len(equal_kinds) == 1:
        return equal_kinds.pop()
    if "full_attention" in kinds:
        return "full_attention"
    return kinds[-1]


def _of_attention(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    attention = {}
    for name, shape in shapes.items():
        # One of two equal layers may be quantized.
        if _ATTENTION.search(name) and not name.endswith(SCALE):
            attention[name] = shape
    return attention
