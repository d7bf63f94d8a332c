"""The settings of the server. Imports no torch, so that `--help` is instant."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_specdec.config.checks import environment_key
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.settings import Settings, setting

DEFAULT_MAX_LENGTH = 4096
"""Tokens that a request has room for if nobody chooses, or the models' context if that is less."""

DEFAULT_PROMPT_TOKENS = 128
"""Most tokens of prompts that a round reads while other requests wait for their next tokens."""

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings):
    """Where the server listens, and how much it accepts."""

    host: str = setting("127.0.0.1", "address to listen on; the default is this machine only")
    port: int = setting(8000, "port to listen on; 0 chooses a free one", minimum=0, maximum=65535)
    api_key_env: str | None = setting(
        None, "environment variable with a key that every request must send", metavar="NAME"
    )
    model_name: str | None = setting(
        None, "the model's name in requests and answers; default: that of its directory or pair"
    )
    max_batch_size: int = setting(
        8, "requests that are decoded together", minimum=1, maximum=MAX_TOKENS
    )
    max_queue: int = setting(
        64, "requests that wait; more are refused", minimum=0, maximum=MAX_TOKENS
    )
    max_length: int | None = setting(
        None,
        "most tokens of a request, prompt and answer together; "
        f"default: the models' context, at most {DEFAULT_MAX_LENGTH}",
        minimum=2,
        maximum=MAX_TOKENS,
    )
    prompt_tokens_per_round: int = setting(
        DEFAULT_PROMPT_TOKENS,
        "most prompt tokens to read between two rounds of running requests; fewer shorten their "
        "pauses, more shorten the time to the first token of a long prompt",
        minimum=1,
        maximum=MAX_TOKENS,
    )
    max_body_megabytes: int = setting(4, "largest request body", minimum=1, maximum=1024)
    prefix_cache_megabytes: int = setting(
        512,
        "memory for the states of earlier requests, whose prefixes are not read again; 0 for none",
        minimum=0,
        maximum=MAX_TOKENS,
    )
    record: str | None = setting(
        None,
        "directory to record the tokens of requests and answers in, for `fit --text`; requests "
        "with `store: false` are left out",
        metavar="DIR",
    )
    record_megabytes: int = setting(
        256, "size of the records; new ones replace the oldest", minimum=1, maximum=MAX_TOKENS
    )
    reload_seconds: float = setting(
        5.0,
        "how often to look whether the file of the draft has changed, to swap the new draft in "
        "while requests run; 0 looks on SIGHUP only",
        minimum=0,
        maximum=86400,
    )

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        return self.host not in LOOPBACK_HOSTS

    def api_key(self) -> str | None:
        """The key that requests must send; None if they need none.

        Raises:
            ValueError: the environment variable is not set, or is empty.
        """
        return environment_key(self.api_key_env)
