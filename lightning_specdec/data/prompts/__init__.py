"""Prompts by domain: one type, files of them, and those that ship."""

from lightning_specdec.data.prompts.domains import by_domain as by_domain
from lightning_specdec.data.prompts.domains import shipped_prompts as shipped_prompts
from lightning_specdec.data.prompts.prompt import Prompt as Prompt
from lightning_specdec.data.prompts.prompt import read_prompts as read_prompts
