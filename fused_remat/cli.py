"""The command `fused-remat`. Its commands are plain functions elsewhere; here they get their names and options."""

# No `from __future__ import annotations`: typer evaluates annotations, and those below name what is imported late.
import importlib
import sys
from typing import Annotated, Any

_NEEDED = ("typer", "rich")


def main() -> None:
    """Entry point of `fused-remat`. Exits with 1 and one line if an optional package is missing."""
    for package in _NEEDED:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            sys.exit(
                f"fused-remat needs {error.name}, which is not installed: pip install 'fused_remat[cli]' "
                "(the doctor alone needs nothing: python -m fused_remat.doctor)"
            )
    build_app()(prog_name="fused-remat")


def build_app() -> Any:
    """The typer application with every command."""
    import typer

    import fused_remat
    from fused_remat.check.command import check
    from fused_remat.commands.audit import audit
    from fused_remat.commands.batch import batch
    from fused_remat.commands.plan import explain, plan
    from fused_remat.commands.profile import profile
    from fused_remat.compare.command import compare
    from fused_remat.demo.command import demo
    from fused_remat.doctor import report

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(fused_remat.__version__)
            raise typer.Exit()

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Transformer layers that rebuild dropped activations inside backward: profile, plan, check and compare."""

    @app.command()
    def doctor(
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
        build: Annotated[bool, typer.Option("--build", help="Compile the CUDA extension without a GPU too.")] = False,
    ) -> None:
        """Say what is installed and built, and which backend would run on this machine and why not the others."""
        report(as_json=as_json, build=build)

    for command in (profile, plan, explain, batch, audit, check, compare, demo):
        app.command()(command)
    return app


if __name__ == "__main__":
    main()
