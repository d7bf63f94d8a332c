"""The sizes of a pretrained target, from which a recipe's arguments follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_specdec.config.hub import is_gguf
from lightning_specdec.models.loading import examine

MAX_TEXT_LENGTH = 512
"""Maximum tokens of a training text."""
NUM_DECODED_TOKENS = 48
"""Maximum tokens that a validation generates for each held-out prompt."""


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a transformers model, read from its config.

    Args:
        directory: the model's directory.
        vocab_size: tokens of the vocabulary.
        num_layers: decoder layers.
        hidden_size: width of the hidden states.
        intermediate_size: width of each layer's MLP.
        num_heads: attention heads that divide the hidden size into even parts; 1 if the model's own
            do not.
        num_key_heads: key and value heads, a divisor of `num_heads`.
        max_positions: maximum length of a text in tokens.
    """

    directory: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    max_positions: int

    @classmethod
    def of(cls, directory: str) -> TargetShape:
        """The shape of the model in a directory.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: the directory contains no model, or one without the sizes that recipes need.
        """
        path = Path(directory).expanduser()
        if not path.is_dir() and not is_gguf(path):
            raise FileNotFoundError(
                f"{directory}: no such model directory; --target takes one that `save_pretrained` "
                "wrote"
            )
        config = examine(directory).config.get_text_config()
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            if not getattr(config, name, 0):
                raise ValueError(
                    f"{directory} is a {config.model_type} without {name}, which recipes need: "
                    "write a config and give it as --config"
                )

        # A head rotates pairs of numbers, so its size must be even.
        num_heads = getattr(config, "num_attention_heads", 1)
        if config.hidden_size % num_heads or config.hidden_size // num_heads % 2:
            num_heads = 1
        num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
        if num_heads % num_key_heads:
            num_key_heads = num_heads

        intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        max_positions = getattr(config, "max_position_embeddings", None)
        return cls(
            directory=directory,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            max_positions=max_positions or MAX_TEXT_LENGTH + NUM_DECODED_TOKENS,
        )

    def require_several_layers(self, reason: str) -> None:
        """Check that the target has layers that a draft can leave out.

        Args:
            reason: why one layer is not enough, for the error.

        Raises:
            ValueError: the target has one layer only.
        """
        if self.num_layers < 2:
            raise ValueError(f"{self.directory} has one layer, and {reason}: use the recipe eagle")

    @property
    def draft_vocabulary(self) -> int | None:
        """Size of a reduced draft vocabulary; None for a target whose vocabulary is small already.

        The most frequent sixth of the tokens covers most of a text.
        """
        return self.vocab_size // 6 // 256 * 256 or None
