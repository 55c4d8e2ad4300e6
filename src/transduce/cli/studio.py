"""Command that opens the studio, a web application over trained runs: studio."""

from __future__ import annotations

import socket
import webbrowser
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import typer

from transduce.cli.options import LOADING, Device, TrustUserCode, open_console
from transduce.errors import InputError


def studio(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run directories, bundles or Hub models to show side by side.")
    ],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default can be reached from this machine only.")
    ] = ("127.0.0.1"),
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    example: Annotated[
        list[str] | None,
        typer.Option(help="A source to offer as an example; may be repeated.", rich_help_panel=LOADING),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(help="Pairs with gold alignments, for the view of word alignment.")
    ] = None,
    gold: Annotated[
        Path | None, typer.Option(help="Gold alignments of --pairs, one line per pair: 0-0 1-2, and 1?3 if possible.")
    ] = None,
    device: Device = "auto",
    trust_user_code: TrustUserCode = False,
) -> None:
    """Open a web application that shows models at work.

    It runs on this machine, sends nothing elsewhere and needs no network.

    Examples:

        transduce studio runs/demo

        transduce studio runs/bottleneck runs/attention runs/transformer --port 9000
    """
    if (pairs is None) != (gold is None):
        raise InputError("pairs and gold alignments belong together", where="--gold", remedy="give --pairs and --gold")
    uvicorn, application = _application()
    listener = _listen(host, port)  # before the models are loaded: a port that is taken is known at once
    from transduce.studio.runs import GoldFiles, Studio, open_runs

    loaded = open_runs(runs, device=device, trust_user_code=trust_user_code, examples=example or ())
    files = None if pairs is None else GoldFiles(pairs, str(gold))
    hosts = application.LOOPBACK if application.is_loopback(host) else ()
    app = application.create_app(Studio(loaded, files), hosts)
    address = f"http://{'[' + host + ']' if ':' in host else host}:{listener.getsockname()[1]}/"
    console = open_console()
    console.print(f"studio: {address}", highlight=False)
    if not hosts:
        console.print("anyone who reaches this address can use the models", highlight=False)
    if open_browser:
        Timer(1.0, webbrowser.open, (address,)).start()
    uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning")).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"the studio cannot listen on {host}:{port}: {error}", remedy="another --port; 0 takes a free one"
        ) from None


def _application() -> tuple[Any, Any]:
    """uvicorn and the application, which the extra `studio` installs."""
    try:
        import uvicorn

        from transduce.studio import app
    except ImportError as error:
        raise InputError(
            f"the studio needs a package that is not installed: {error.name}", remedy="pip install 'transduce[studio]'"
        ) from None
    return uvicorn, app
