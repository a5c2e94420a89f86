"""`kvboost serve`: a model behind an OpenAI-compatible HTTP interface.

Knows flags and what is said on the terminal; the server is kvboost.server's.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvboost.cli.options import GroupedCommand, engine_options_with, flags_of, setting
from kvboost.cli.session import opened_engine
from kvboost.errors import KVBoostError
from kvboost.server.settings import ApiKey, ServerSettings
from kvboost.settings import options_of

_NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
_MEMORY_SHARE = 4  # of the memory that is free, this part for cached text


@click.command(cls=GroupedCommand)
@click.argument("model")
@setting("--host", "127.0.0.1", "Address to listen on.", str)
@setting("--port", 8000, "Port to listen on; 0 takes a free one.", click.IntRange(0, 65535))
@click.option(
    "--served-model-name",
    metavar="NAME",
    show_default="MODEL, of a folder its name",
    help="The name that requests give.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY[:SALT]|@FILE",
    help="A key that requests must send, and the salt of its cached text; or a file with one in each line. "
    "Several times for several keys.",
)
@click.option(
    "--admin-key", metavar="KEY|@FILE", default=None, help="The key for stats, metrics, clear and pin."
)
@flags_of(options_of(ServerSettings), "server_options")
@engine_options_with(max_chunks="no limit", max_cache_bytes="a quarter of the free memory")
def serve(
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    api_keys: tuple[str, ...],
    admin_key: str | None,
    server_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve MODEL: a hub name, a folder, or "builtin", to any OpenAI client.

    A page at / shows what is reused. The cache may take a quarter of the free memory unless
    --max-cache-bytes or --max-chunks say otherwise. Ctrl-C or SIGTERM finishes what runs, then ends.

    \b
    kvboost serve builtin
    kvboost serve ./my-model --port 9000 --disk-cache-dir ./kv --api-key secret
    """
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise KVBoostError(f"kvboost serve needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from kvboost.server.runner import listening_socket, make_server, url_of

    name = served_model_name or _name_of(model)
    settings = ServerSettings(
        model_name=name,
        aliases=(model,) if model != name else (),
        api_keys=tuple(read_keys(api_keys)),
        admin_key=_admin_key(admin_key),
        **server_options,
    )
    with listening_socket(host, port) as sock, logging_to_stderr():
        url = url_of(sock)
        with opened_engine(model, with_memory(engine_options), Console(stderr=True)) as engine:
            server = make_server(
                engine,
                settings,
                lambda: click.echo(f"{name} is served at {url}/v1, the page is {url}/", err=True),
            )
            server.run([sock])
    click.echo("ended", err=True)


def read_keys(given: tuple[str, ...]) -> list[ApiKey]:
    """Keys as they were given, or out of files."""
    texts: list[str] = []
    for text in given:
        texts += _lines(text[1:]) if text.startswith("@") else [text]
    return [ApiKey.parsed(text) for text in texts]


def _admin_key(given: str | None) -> ApiKey | None:
    if given is None:
        return None
    keys = read_keys((given,))
    if len(keys) != 1 or keys[0].salt:
        raise click.BadParameter("expected one key without a salt", param_hint="--admin-key")
    return keys[0]


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise KVBoostError(f"the file of keys {path} cannot be read: {what}") from error
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _name_of(model: str) -> str:
    """The served name of a model: that of its folder, where it is one."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def with_memory(engine_options: dict[str, Any]) -> dict[str, Any]:
    """The engine's options, with a bound that suits a server where none was given."""
    if engine_options.keys() & {"max_chunks", "max_cache_bytes"}:
        return engine_options
    import psutil

    share = psutil.virtual_memory().available // _MEMORY_SHARE
    return {**engine_options, "max_chunks": None, "max_cache_bytes": share}


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """The server's log on stderr, for as long as it runs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    levels = {"kvboost": logging.WARNING, "kvboost.server": logging.INFO, "uvicorn": logging.WARNING}
    with_handler = [logging.getLogger(name) for name in ("kvboost", "uvicorn")]
    for logger in with_handler:
        logger.addHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for logger in with_handler:
            logger.removeHandler(handler)
        for name in levels:
            logging.getLogger(name).setLevel(logging.NOTSET)
