"""The verb `serve`: an OpenAI-compatible server over one pair of models."""

from __future__ import annotations

import logging
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_specdec.cli.common import load_decoder
from lightning_specdec.cli.options import (
    MeasureSettings,
    Parser,
    chosen,
    decoding,
    pair_source,
)
from lightning_specdec.config.activity import show_activity
from lightning_specdec.serve.settings import ServeSettings

if TYPE_CHECKING:
    from lightning_specdec.config.models import PairSource

SUMMARY = "serve a model by OpenAI's API, decoding speculatively"
EXAMPLES = """\
lightning_specdec serve --pair smollm2
lightning_specdec serve checkpoints/smollm2 --draft checkpoints/smollm2_eagle.safetensors
lightning_specdec serve ./llama --host 0.0.0.0 --api_key_env MY_KEY --max_batch_size 16"""
PACKAGES = ("starlette", "uvicorn", "prometheus_client")

log = logging.getLogger("lightning_specdec")


def add_arguments(parser: Parser) -> None:
    parser.add_models()
    parser.add_settings("Server", ServeSettings)
    # Requests name the rest. These are the defaults of those that do not.
    parser.add_decoding(skip=("max_new_tokens", "eos", "stop", "seed", "logprobs"), temperature=1.0)
    parser.add_settings("Measure", MeasureSettings, skip=("repeats", "batch_size", "ignore_eos"))


def run(options: Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. SIGHUP loads the draft again."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}: pip install '.[serve]'")
    settings = chosen(options, ServeSettings)
    settings.api_key()
    config = decoding(options)
    source = pair_source(options)

    # Imported here because they take a second.
    from lightning_specdec.serve.server import bind, hangups_ignored, make_server

    # The port is checked before the models are loaded, which may take minutes.
    with bind(settings) as bound, hangups_ignored():
        # The file of the draft may be replaced or written to while it is in use.
        decoder = load_decoder(options, source, mapped=False)
        model_name = settings.model_name or _name_of(source)
        server = make_server(decoder, config, settings, model_name=model_name)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{host}:{bound.getsockname()[1]}"
        # From here on, connections wait until they are accepted.
        bound.listen()
        if settings.is_public and settings.api_key_env is None:
            log.warning("anyone who reaches %s can use it: consider --api_key_env", address)
        log.info("serving %s at %s/v1, with a chat at %s/", model_name, address, address)
        # The models are loaded, and what is done from here on has no end to wait for.
        show_activity("")
        server.run(bound)
    return 0


def _name_of(source: PairSource) -> str:
    """The model's name without the directories of this machine."""
    if source.pair is not None:
        return source.pair
    return Path(source.ckpt or source.name).expanduser().resolve().name.removesuffix(".safetensors")
