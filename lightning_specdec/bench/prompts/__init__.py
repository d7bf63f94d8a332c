"""Prompts by domain: where they come from, as what they are kept, and those that ship."""

from lightning_specdec.bench.prompts.dataset import PromptDataset
from lightning_specdec.bench.prompts.prompt import Prompt

__all__ = ["Prompt", "PromptDataset"]
