"""Defines `ebbtide tokens`: signing keys, and the access tokens that they sign."""

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.auth.roles import Role
from ebbtide.cli.cluster_connection import AsJson

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the signing key.")]

tokens_app = typer.Typer(help="Manage access tokens and the keys that sign them.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(tokens_app, name="tokens", rich_help_panel="Security")


@tokens_app.command()
def key(
    folder: Folder,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Create another signing key; the former public keys stay trusted.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Trust only the current key from now on.")] = False,
) -> None:
    """Create a signing key. Keep tokens.key here, and give tokens.pub to servers as token_keys."""
    from ebbtide.cli.credentials import signing_keys

    if rotate and retire:
        raise typer.BadParameter("--rotate first; --retire once no former token is in use")
    act = signing_keys.retire if retire else signing_keys.rotate if rotate else signing_keys.make
    typer.echo(act(folder))


@tokens_app.command()
def issue(
    folder: Folder,
    role: Annotated[Role, typer.Option(help="Role of the bearer.")],
    run: Annotated[
        str, typer.Option(metavar="RUN", help="Bind the token to this run (roles agent, gateway, trainer and user).")
    ] = "",
    ttl: Annotated[str, typer.Option(metavar="DURATION", help="Validity of the token: 30m, 12h or 90d.")] = "12h",
    name: Annotated[
        str, typer.Option(help="Name of the bearer, who owns runs, requests and sessions under it; limits count by it.")
    ] = "",
    session: Annotated[
        str, typer.Option(metavar="SESSION", help="Bind the token to this gateway session (role agent).")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write the token to; running clients reload it. Prints the token by default."),
    ] = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="Maximum requests a minute; 0 sets no limit.")] = 0,
    tokens_per_minute: Annotated[
        int, typer.Option(min=0, help="Maximum tokens a minute, prompts included; 0 sets no limit.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Budget of tokens in total; 0 sets no limit.")] = 0,
    tokens_per_day: Annotated[int, typer.Option(min=0, help="Maximum tokens a day (UTC); 0 sets no limit.")] = 0,
    requests_at_once: Annotated[int, typer.Option(min=0, help="Maximum concurrent requests; 0 sets no limit.")] = 0,
) -> None:
    """Issue a token. Clients read it from EBBTIDE_TOKEN_FILE or EBBTIDE_TOKEN. Limits are for role agent with a run."""
    from ebbtide.cli.cluster_connection import seconds
    from ebbtide.cli.credentials import signing_keys
    from ebbtide.types.session import KeyLimits

    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        tokens=tokens,
        tokens_per_day=tokens_per_day,
        requests_at_once=requests_at_once,
    )
    ttl_s = seconds(ttl, field="--ttl")
    made = signing_keys.issue(folder, role, run_id=run, ttl_s=ttl_s, name=name, limits=limits, session_id=session)
    if out is None:
        typer.echo(made)
    else:
        signing_keys.put_token(out, made)


@tokens_app.command()
def show(file: Annotated[Path, typer.Argument(help="File that holds a token.")], as_json: AsJson = False) -> None:
    """Show a token's role, run, limits and expiry. Only servers can check its signature."""
    import msgspec

    from ebbtide.cli.credentials import signing_keys
    from ebbtide.cli.views.tables import to_json

    claims = signing_keys.read_token(file)
    ends = dt.datetime.fromtimestamp(claims.expires, dt.UTC)
    if as_json:
        typer.echo(to_json(msgspec.structs.asdict(claims) | {"expires": ends}))
        return
    ended = " (ENDED)" if ends < dt.datetime.now(dt.UTC) else ""
    rows = {"role": claims.role, "run": claims.run_id or "any", "name": claims.name or "-"}
    rows |= {"session": claims.session_id} if claims.session_id else {}
    rows |= {name.replace("_", " "): f"{value:,}" for name, value in msgspec.to_builtins(claims.limits).items()}
    for label, value in (rows | {"ends": f"{ends:%Y-%m-%d %H:%M} UTC{ended}"}).items():
        typer.echo(f"{label:<5} {value}")
