"""Defines `ebbtide certs`: a development authority in a folder and the certificates that it issues."""

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.auth.roles import Role
from ebbtide.cli.cluster_connection import AsJson
from ebbtide.errors import InvalidRequest

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the authority.")]

certs = typer.Typer(help="Manage mTLS certificates and the roles that they grant.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(certs, name="certs", rich_help_panel="Security")


@certs.command()
def init(
    folder: Folder,
    days: Annotated[int, typer.Option(min=1, max=36500, help="Validity of the authority in days.")] = 3650,
) -> None:
    """Create an authority. Give ca.pem to all programs as tls_ca, and keep ca.key here."""
    from ebbtide.cli.credentials import certificates

    typer.echo(certificates.init(folder, days))


@certs.command()
def issue(
    folder: Folder,
    role: Annotated[list[Role], typer.Option(help="Role that the certificate grants. Repeatable.")],
    name: Annotated[str, typer.Option(help="Name of the files NAME.pem and NAME.key.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or IP address at which others reach the program; none for a client. Repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="Validity of the certificate in days.")] = 90,
) -> None:
    """Issue a certificate for one program. Give it NAME.pem as tls_cert and NAME.key as tls_key."""
    from ebbtide.cli.credentials import certificates

    typer.echo(certificates.issue(folder, name, role, host or [], days))


@certs.command()
def hosts(
    folder: Folder,
    host: Annotated[
        list[str], typer.Argument(metavar="HOST=ROLE[,ROLE]", help="Hosts, and the roles of their programs.")
    ],
) -> None:
    """Issue certificates and tokens for all programs of a cluster, and lay them out in a folder for each host.

    Copy DIR/hosts/HOST to /etc/ebbtide/tls on that host.
    Certificates and tokens are valid for 90 days, an operator's token for 12 hours.
    Run it again to add hosts, or to renew what has less than a third of its time left.
    To have a token issued again, remove its file.
    """
    from ebbtide.cli.credentials import host_papers

    for path in host_papers.lay_out(folder, host_papers.parse_hosts(host)):
        typer.echo(path)


@certs.command()
def renew(
    folder: Folder,
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Names of certificates; all that expire soon if none is given (see --within)."
        ),
    ] = None,
    within: Annotated[
        int, typer.Option(min=0, max=36500, help="Without names: renew certificates that expire within this many days.")
    ] = 30,
    days: Annotated[int, typer.Option(min=0, max=36500, help="Days of validity; 0 keeps the former period.")] = 0,
) -> None:
    """Renew certificates with new keys and the same roles and hosts. Running programs reload them."""
    from ebbtide.cli.credentials import certificates

    now = dt.datetime.now(dt.UTC)
    found, faults = ([], []) if name else certificates.read_all(folder)
    ends = now + dt.timedelta(days=within)
    due = [one.name for one in found if one.name != certificates.CA and one.expires <= ends]
    for one in name or due:
        typer.echo(certificates.renew(folder, one, days))
    if not (name or due):
        typer.echo(f"none ends within {within} days", err=True)
    _tell(faults)


@certs.command()
def show(folder: Folder, as_json: AsJson = False) -> None:
    """List the certificates of a folder and when they expire."""
    from rich.table import Table

    from ebbtide.cli.credentials import certificates
    from ebbtide.cli.views.tables import print_table, to_json

    now = dt.datetime.now(dt.UTC)
    table = Table("name", "roles", "hosts", "ends", "in", box=None, header_style="bold")
    found, faults = certificates.read_all(folder)
    if as_json:
        typer.echo(to_json([one._asdict() | {"lifetime": one.lifetime.total_seconds()} for one in found]))
        _tell(faults)
        return
    for one in found:
        left = one.left(now)
        cells = (", ".join(one.roles) or "-", ", ".join(one.hosts) or "-", f"{one.expires:%Y-%m-%d %H:%M} UTC")
        told = f"{left.days} days" if left.days > 0 else "less than a day" if left > dt.timedelta() else "ENDED"
        table.add_row(one.name, *cells, told, style="" if left.days > 0 else "red")
    print_table(table)
    _tell(faults)


def _tell(faults: list[InvalidRequest]) -> None:
    """Prints the faults after all else is done, and exits with status 2 if there are any."""
    for fault in faults:
        typer.echo(f"ebbtide: {fault}", err=True)
    if faults:
        raise typer.Exit(2)
