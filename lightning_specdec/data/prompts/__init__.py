"""Prompts by domain: one type, files of them, and those that ship."""

from lightning_specdec.data.prompts.domains import by_domain, shipped_prompts
from lightning_specdec.data.prompts.prompt import Prompt, read_prompts

__all__ = ["Prompt", "by_domain", "read_prompts", "shipped_prompts"]
