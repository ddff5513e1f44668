"""The `triptych` command. Thin: each command parses its arguments and calls the part that does the work."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from triptych import __version__, client
from triptych.commands import bench, cache, status, trace
from triptych.config import GatewaySettings, RouterSettings, TritonSettings, WorkerSettings
from triptych.errors import TriptychError
from triptych.telemetry.logs import setup_logging
from triptych.visual_kv import VisualKvPolicy

app = typer.Typer(
    name="triptych",
    help="Serves vision-language models: encode, prefill and decode as stages of their own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Address = Annotated[str, typer.Option(help="the router's host:port", envvar="TRIPTYCH_ADDRESS")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


def main() -> NoReturn:
    """Runs the command line; every expected failure is one line on stderr and exit code 1, a wrong argument 2."""
    try:
        app()
    except TriptychError as error:
        fail(f"{error.message} [{error.reason}]")
    except ValidationError as error:
        prefix = {cls.__name__: cls.model_config.get("env_prefix", "") for cls in SETTINGS}.get(error.title, "")
        fail(
            "\n".join(
                f"{prefix}{'_'.join(map(str, e['loc']))}".upper() + f": {e['msg']} (got {e['input']!r})"
                for e in error.errors()
            ),
            code=2,
        )
    except OSError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


SETTINGS = (TritonSettings, WorkerSettings, RouterSettings, GatewaySettings)


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints `message` as an error and ends the process."""
    Console(stderr=True).print(f"[bold red]error:[/] {_escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


@app.command()
def up(
    model: Annotated[Path | None, typer.Option(help="checkpoint folder for the worker")] = None,
    repository: Annotated[Path | None, typer.Option(help="Triton model repository with its encoder")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="the router's port")] = None,
    http_port: Annotated[int | None, typer.Option(min=1, max=65535, help="the gateway's port [8080]")] = None,
    traces: Annotated[
        bool, typer.Option(envvar="TRIPTYCH_TRACES", help="keep the newest requests' spans for `triptych trace`")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="once ready, print one JSON object with the addresses; logs go to stderr")
    ] = False,
) -> None:
    """Runs Triton, worker, router and gateway on this machine until Ctrl-C, or until one of them dies."""
    from triptych.commands.up import run
    from triptych.telemetry.span_keeper import kept_spans

    _set_environment("TRIPTYCH_WORKER_MODEL_DIR", model)
    _set_environment("TRIPTYCH_TRITON_MODEL_REPOSITORY", repository)
    _set_environment("TRIPTYCH_ROUTER_PORT", port)
    _set_environment("TRIPTYCH_GATEWAY_PORT", http_port)
    with kept_spans(traces):
        code = asyncio.run(run(as_json))
    sys.exit(code)


@app.command()
def ask(
    arguments: Annotated[list[str], typer.Argument(metavar='[IMAGE]... "QUESTION"', help="image files, question last")],
    address: Address = client.DEFAULT_ADDRESS,
    max_tokens: Annotated[int, typer.Option(min=0, help="0: the worker's default")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    detail: Annotated[Literal["high", "medium", "low", "thumbnail"], typer.Option(help="how closely to look")] = "high",
    reduce: Annotated[
        str | None, typer.Option(help="keep fewer visual tokens: kmeans:N or merge:N; none: all", show_default=False)
    ] = None,
    draft: Annotated[
        bool | None, typer.Option("--draft/--no-draft", help="begin with a draft encoder's features, checked later")
    ] = None,
    visual_kv: Annotated[
        VisualKvPolicy | None,
        typer.Option(help="where the pictures' KV lives meanwhile; unset: as the worker is set up"),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="give up after this many seconds")] = 120.0,
    as_json: Json = False,
) -> None:
    """Asks a running stack about pictures and streams the answer."""
    from triptych.commands.ask import run

    *images, question = arguments
    options = client.Options(
        max_tokens=max_tokens,
        temperature=temperature,
        reduce=reduce,
        draft=draft,
        visual_kv=visual_kv,
        timeout_s=timeout_s,
    )
    run(address, [Path(image) for image in images], question, detail, options, as_json)


@app.command()
def demo(as_json: Json = False) -> None:
    """Starts a stack on free ports, asks about a bundled picture, prints answer, timings and trace, and stops."""
    from triptych.commands.demo import run

    sys.exit(asyncio.run(run(as_json)))


@app.command()
def evaluate(
    count: Annotated[int, typer.Option(min=1, help="held-out scenes")] = 500,
    address: Annotated[str | None, typer.Option(help="a running router; unset: a stack of its own")] = None,
    reduce: Annotated[
        list[str] | None,
        typer.Option(help="kmeans:N or merge:N, beside all tokens, with times; may be repeated; unset: resolutions"),
    ] = None,
    draft: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="draft encoding, kept from this similarity on, with times; may be repeated"),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="writes the table to this Markdown file")] = None,
    as_json: Json = False,
) -> None:
    """Measures the demo model's exact answers on held-out scenes through a running stack."""
    if reduce or draft:
        from triptych.commands import evaluate_ways

        evaluate_ways.run(count, address, reduce or [], draft or [], report, as_json)
        return
    from triptych.commands.evaluate import run

    run(count, address, report, as_json)


@app.command()
def compress(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="LLaVA-format checkpoint folder")],
    images: Annotated[
        Path | None, typer.Option(help="folder of pictures like those to come; unset: drawn scenes")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="most pictures to look at")] = 200,
    output: Annotated[Path | None, typer.Option(help="file to write; unset: visual_kv.components in MODEL_DIR")] = None,
    as_json: Json = False,
) -> None:
    """Fits what the visual KV policy compress_visual_low_rank needs to pictures that the model is shown."""
    from triptych.commands.compress import run

    run(model_dir, images, count, output, as_json)


@app.command()
def export(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="LLaVA-format checkpoint folder")],
    repository: Annotated[Path, typer.Option(help="model repository to write to")] = Path("model_repository"),
    version: Annotated[int, typer.Option(min=1, help="version folder to write")] = 1,
    draft: Annotated[
        Path | None, typer.Option(help="folder of a CLIPVisionModel that imitates the encoder; written beside it")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes a checkpoint's vision encoder, projector and their ensemble as a Triton model repository."""
    from triptych.vision.export import export as write
    from triptych.vision.export_draft import export_draft

    setup_logging("export")
    write(model_dir, repository, version)
    if draft is not None:
        export_draft(model_dir, draft, repository, version)
    if as_json:
        print(json.dumps({"model": str(model_dir), "repository": str(repository), "version": version}))


@app.command()
def rollback(
    repository: Annotated[Path, typer.Option(help="model repository to change")] = Path("model_repository"),
    version: Annotated[int | None, typer.Option(min=1, help="version to remove; unset: the newest")] = None,
    as_json: Json = False,
) -> None:
    """Removes a version of the vision encoder from a repository; the one before it serves again."""
    from triptych.vision.rollback import rollback as remove

    removed, left = remove(repository, version)
    if as_json:
        print(json.dumps({"repository": str(repository), "removed": removed, "serves": left}))
    else:
        print(f"removed version {removed} from {repository}; version {left} serves")


serve_app = typer.Typer(
    help="Runs one service in the foreground; its knobs are TRIPTYCH_* variables.", no_args_is_help=True
)
app.add_typer(serve_app, name="serve")


@serve_app.command("gateway")
def serve_gateway() -> None:
    """OpenAI's HTTP API and the web page, in front of a router."""
    from triptych.gateway.server import serve

    setup_logging("gateway")
    asyncio.run(serve(GatewaySettings()))


@serve_app.command("router")
def serve_router() -> None:
    """InferenceService: takes requests, prepares images, dispatches."""
    from triptych.router.server import serve

    setup_logging("router")
    asyncio.run(serve(RouterSettings()))


@serve_app.command("worker")
def serve_worker() -> None:
    """WorkerService: prefill, decode and the KV cache."""
    from triptych.worker.server import serve

    setup_logging("worker")
    asyncio.run(serve(WorkerSettings()))


@serve_app.command("triton")
def serve_triton() -> None:
    """NVIDIA Triton with the model repository."""
    from triptych.triton.server import serve

    setup_logging("triton")
    sys.exit(serve(TritonSettings()))


app.add_typer(bench.app, name="bench")
app.command()(status.status)
app.command()(cache.cache)
app.command()(trace.trace)


@app.command()
def kernels(as_json: Json = False) -> None:
    """Builds the C++ engine that computes on CPU, unless it is there; otherwise the first worker does, in a minute."""
    from triptych.worker.cpu.build import KernelsUnavailable, build_folder
    from triptych.worker.cpu.library import best_isa

    try:
        isa = best_isa()
    except KernelsUnavailable as error:
        fail(f"the C++ engine cannot be used here, torch will compute instead: {error}")
    folder = build_folder()
    print(json.dumps({"isa": isa, "folder": str(folder)}) if as_json else f"{isa} kernels are ready in {folder}")


@app.command()
def config(as_json: Json = False) -> None:
    """Prints every knob with its present value and meaning."""
    knobs = [
        {
            "variable": f"{cls.model_config.get('env_prefix', '')}{name}".upper(),
            "value": None if value is None else str(value),
            "meaning": cls.model_fields[name].description or "",
        }
        for cls in SETTINGS
        for name, value in cls()
    ]
    if as_json:
        print(json.dumps(knobs))
        return
    console = Console()
    for knob in knobs:
        value = "unset" if knob["value"] is None else knob["value"]
        console.print(f"[bold]{knob['variable']}[/]={_escape(value or '')}", highlight=False, soft_wrap=True)
        console.print(f"    {_escape(knob['meaning'] or '')}", style="dim", highlight=False, soft_wrap=True)


@app.command()
def health(
    address: Annotated[
        str, typer.Argument(help="a service's host:port, or an http:// URL such as http://127.0.0.1:8080/ready")
    ] = client.DEFAULT_ADDRESS,
    as_json: Json = False,
) -> None:
    """Exits 0 when the service at ADDRESS says it is serving, else 1; for container health checks."""
    from triptych.http_health import answers_ok
    from triptych.rpc.health import is_serving

    serving = asyncio.run(answers_ok(address) if address.startswith("http://") else is_serving(address))
    if as_json:
        print(json.dumps({"address": address, "serving": serving}))
    else:
        print(f"{address} is {'serving' if serving else 'not serving'}")
    sys.exit(0 if serving else 1)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"triptych {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Keeps `--version` beside the commands."""


def _set_environment(name: str, value: object) -> None:
    """Command-line arguments win over the environment, and children inherit them."""
    if value is not None:
        os.environ[name] = str(value)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
