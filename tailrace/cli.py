"""The command `tailrace`: subcommands that run the processes, and subcommands for operators.

Of other packages only typer is imported here. Each command imports what it needs when it runs. So
`tailrace --help` is quick, and each command needs only its own package extra.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.commands.bench import bench_app
from tailrace.commands.gpu import gpu_app
from tailrace.commands.key import key_app
from tailrace.commands.ledger import ledger_app
from tailrace.commands.model import HeadOption, KvCacheOption, WeightsOption, model_app
from tailrace.commands.options import LOCAL, ConfigOption, JsonOption, api_key, command_group, extra
from tailrace.commands.top import top
from tailrace.commands.usage import usage
from tailrace.commands.warm import warm_app
from tailrace.commands.warm_live import LIVE_COMMANDS
from tailrace.ledger.errors import EXIT_FAILED, EXIT_USAGE, CallerError, ConfigError, TailraceError

if TYPE_CHECKING:
    from tailrace.ledger.process.settings import Settings

EXIT_INTERRUPTED = 130  # 128 + SIGINT, the exit status of shells after Ctrl-C

app = typer.Typer(
    name="tailrace",
    help="Token streams that survive being cut.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Help is plain text: to import rich would take longer than all the rest of `tailrace --help`.
    rich_markup_mode=None,
)
config_app = command_group("Show, check and write settings.")

WranglerOption = Annotated[
    Path | None,
    typer.Option(
        "--wrangler",
        metavar="FILE",
        help="Read settings from a wrangler.toml or wrangler.jsonc instead.",
        dir_okay=False,
    ),
]
MetricsOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Serve Prometheus metrics at this address.")
]
EnvOption = Annotated[
    str | None,
    typer.Option("--env", metavar="NAME", help="Environment of the wrangler file to use."),
]
# `tailrace up` gives this flag to its children, so that they end when it ends (tailrace/child.py).
UntilEofOption = Annotated[bool, typer.Option("--until-eof", hidden=True)]


def main() -> None:
    """Run the command line; show a TailraceError as one line, and exit with its status."""
    try:
        app()
    except TailraceError as error:
        print(f"error: {error}", file=sys.stderr)
        usage = isinstance(error, CallerError | ConfigError)
        sys.exit(EXIT_USAGE if usage else EXIT_FAILED)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tailrace.ledger.process.version import tailrace_version

        typer.echo(f"tailrace {tailrace_version()}")
        raise typer.Exit


@app.callback()
def tailrace(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Token streams that survive being cut."""


@app.command()
def up(
    data: Annotated[
        Path, typer.Option(help="Folder for the ledger, the certificate and logs.", file_okay=False)
    ] = Path(".tailrace"),
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for HTTP. 0: any free port.")
    ] = 8080,
    https_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for HTTPS and HTTP/3. 0: any free port.")
    ] = 8443,
    link_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port for the link from edge to origin. 0: any free port."
        ),
    ] = 8470,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="OpenAI-compatible server to serve, such as http://HOST:8000/v1."
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable that holds the upstream server's API key.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model of the upstream server to serve; repeatable. Default: all.",
        ),
    ] = None,
    sample: Annotated[bool, typer.Option(help="Stream a sample that is cut and resumed.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON when ready.")
    ] = False,
) -> None:
    """Start origin, edge and ledger on this machine.

    They serve the demo model, or stand in front of your model server.

    tailrace up --upstream http://127.0.0.1:8000/v1 makes the streams of vLLM, Ollama, llama.cpp
    or a hosted API resumable.
    """
    import asyncio
    from importlib.util import find_spec

    from tailrace.up import serve
    from tailrace.upstream import find_upstream

    if upstream is None and (api_key_env is not None or model is not None):
        flag = "--api-key-env" if api_key_env is not None else "--model"
        hint = "to serve models on this machine, use tailrace origin"
        raise ConfigError("needs --upstream URL", field=flag, hint=hint)
    if upstream is None and find_spec("torch") is None:
        raise ConfigError(
            "the demo model needs PyTorch",
            hint="pip install 'tailrace[torch]', or name your own model server: --upstream URL",
        )

    async def run() -> None:
        server = upstream and await find_upstream(upstream, api_key_env, model or ())
        await serve(
            data,
            http_port,
            https_port,
            link_port,
            upstream=server or None,
            sample=sample,
            as_json=as_json,
            api_key=api_key(),
        )

    asyncio.run(run())


@app.command()
def edge(
    context: typer.Context,
    config: ConfigOption = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address for HTTP/1.1 and HTTP/2.")
    ] = None,
    https: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address for HTTPS; needs a certificate."),
    ] = None,
    http3: Annotated[
        bool | None, typer.Option(help="Also serve HTTP/3, over QUIC at the address of HTTPS.")
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="Address where the origin listens for edges; separate several by commas.",
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="Certificate chain for HTTPS and HTTP/3.", dir_okay=False),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="Private key of the certificate.", dir_okay=False),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of API keys; see tailrace key.")
    ] = None,
    allow_public_without_keys: Annotated[
        bool | None,
        typer.Option(
            "--allow-public-without-keys", help="Allow a public address without API keys."
        ),
    ] = None,
    operator_without_key: Annotated[
        bool | None,
        typer.Option(
            "--operator-without-key", help="Without API keys, allow /v1/admin from this machine."
        ),
    ] = None,
    metrics: MetricsOption = None,
    wrangler: WranglerOption = None,
    env: EnvOption = None,
    until_eof: UntilEofOption = False,
) -> None:
    """Run an edge: the relay between clients and origins."""
    _check_wrangler(wrangler, env, config)
    from tailrace.edge.config import EdgeConfig
    from tailrace.edge.serve import run

    flags, deployment = _said(context, EdgeConfig), None
    if wrangler is not None:
        from tailrace.config_file import load, settings_of

        reading = load(wrangler, env)
        settings, deployment = settings_of(reading, **flags), reading.deployment
    else:
        settings = EdgeConfig.load(config, **flags)
    _watch_parent(until_eof)
    run(settings, deployment)


@app.command()
def origin(
    context: typer.Context,
    config: ConfigOption = None,
    link: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address on which to listen for edges.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder for the ledger and signing keys.", file_okay=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER|NAME", help="Checkpoint folder, or NAME of [models.NAME]; repeatable."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help="Device that runs the model.")
    ] = None,
    weights: WeightsOption = None,
    kv_cache: KvCacheOption = None,
    head: HeadOption = None,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes.")] = None,
    metrics: MetricsOption = None,
    producer: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="Serve a Python producer instead of a model."),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Serve an OpenAI-compatible server: its URL with /v1."),
    ] = None,
    upstream_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the model at the upstream server. Default: the only one."
        ),
    ] = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable that holds the upstream server's API key.",
        ),
    ] = None,
    upstream_lost: Annotated[
        str | None,
        typer.Option(
            metavar="continue|end",
            help="Continue or end a stream whose upstream server fails in the middle of it.",
        ),
    ] = None,
    until_eof: UntilEofOption = False,
) -> None:
    """Run an origin: admission, ledger and workers."""
    with extra("torch"):
        from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig
        from tailrace.origin.pool.model_table import chosen, load_tables
        from tailrace.origin.start import run

    tables = {} if producer or upstream else load_tables(config)
    folder = model[0] if model is not None and len(model) == 1 else None
    is_alone = folder is not None and folder not in tables
    said = _said(context, OriginConfig) | {"model": folder if is_alone else None}
    settings = OriginConfig.load(config, **said)
    models = {} if is_alone else chosen(tables, model or (), settings)
    retention, streams = LedgerConfig.load(config), StreamsConfig.load(config)
    _watch_parent(until_eof)
    with extra("torch"):  # `run` imports most modules, so a missing package may show only now
        run(settings, retention, streams, models)


def _said(context: typer.Context, part: type[Settings]) -> dict[str, Any]:
    """Return the values of the command's options that are named like a setting in `part`."""
    return {name: value for name, value in context.params.items() if name in part.model_fields}


def _check_wrangler(wrangler: Path | None, env: str | None, config: Path | None) -> None:
    if wrangler is None and env is not None:
        raise ConfigError("--env needs --wrangler FILE")
    if wrangler is not None and config is not None:
        raise ConfigError("give --wrangler FILE or another file of settings, not both")


def _watch_parent(until_eof: bool) -> None:
    if until_eof:
        from tailrace.child import stop_when_orphaned

        stop_when_orphaned()


@app.command()
def chat(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    edges: Annotated[
        list[str] | None,
        typer.Option(
            "--edge",
            metavar="URL",
            help="Edge URL; repeatable: if one edge fails, the next one resumes the stream.",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model name.")] = "demo",
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K most likely tokens; 0: from all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens with this total probability."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed: the same seed gives the same text.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.")
    ] = None,
    cut_after: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Drop the connection after N tokens and resume."),
    ] = None,
    raw_prompt: Annotated[
        bool,
        typer.Option(
            "--raw-prompt", help="Let the model continue PROMPT as text instead of answering it."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end.")
    ] = False,
) -> None:
    """Stream an answer to PROMPT."""
    import asyncio

    from tailrace.chat import chat as answered

    said = {"prompt": prompt} if raw_prompt else {"messages": [{"role": "user", "content": prompt}]}
    request = {
        "model": model,
        **said,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
    }
    work = answered(edges or [LOCAL], request, cut_after=cut_after, as_json=as_json)
    try:
        ended_well = asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not ended_well:
        raise typer.Exit(EXIT_FAILED)


@config_app.command("check")
def config_check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="Settings file. Default: tailrace.toml, if it exists."
        ),
    ] = None,
    config: ConfigOption = None,
    wrangler: WranglerOption = None,
    env: EnvOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every setting, its value and its source.

    With --wrangler, print instead what each key of that file does on an edge.
    """
    if file is not None and config is not None:
        raise ConfigError("give FILE or --config FILE, not both")
    _check_wrangler(wrangler, env, file or config)
    if wrangler is not None:
        from tailrace.config_file import load, report_on, settings_of

        reading = load(wrangler, env)
        typer.echo(report_on(reading, as_json=as_json))
        settings_of(reading)
        return
    from tailrace.config_file import report
    from tailrace.python_build import python_build

    typer.echo(report(_parts(), file or config, as_json=as_json))
    if (warning := python_build().warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr)


@config_app.command("init")
def config_init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]")] = Path("tailrace.toml"),
) -> None:
    """Write a file with every setting, commented out.

    An existing file is not changed.
    """
    from tailrace.config_file import write

    write(file, _parts())
    typer.echo(f"{file} has every setting, commented out")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of tailrace.toml.

    Editors use it to complete and check the file: tailrace config schema > tailrace.schema.json
    """
    import json

    from tailrace.config_schema import config_schema

    typer.echo(json.dumps(config_schema(_parts()), indent=2))


def _parts() -> tuple[type[Settings], ...]:
    """Return the classes of settings, one for each table of `tailrace.toml`."""
    from tailrace.edge.config import EdgeConfig
    from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig

    return EdgeConfig, OriginConfig, LedgerConfig, StreamsConfig


app.add_typer(config_app, name="config")
app.add_typer(gpu_app, name="gpu")
app.add_typer(key_app, name="key")
app.add_typer(ledger_app, name="ledger")
app.add_typer(model_app, name="model")
for live in LIVE_COMMANDS:
    warm_app.command()(live)
app.add_typer(warm_app, name="warm")
app.add_typer(bench_app, name="bench")
app.command()(top)
app.command()(usage)

if __name__ == "__main__":
    main()
