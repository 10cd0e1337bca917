"""The `meshrl` command: subcommands are imported when they are called."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points

import click
from click.exceptions import NoArgsIsHelpError

from meshrl.cli.command import UsageLineError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "call": ("call", "Call one RPC, with JSON for the request and the answers."),
    "doctor": ("doctor", "Examine this machine and the run for what commonly goes wrong."),
    "envs": ("environments", "List the environments that rollout services host."),
    "join": ("members", "Join a run on another host, by a token."),
    "logs": ("logs", "Print the logs of all programs together, and follow them."),
    "report": ("report", "Write a run in one HTML file: curves, outcome, cost, what is wrong."),
    "rollouts": ("rollouts", "Look up rollouts, and read the best and the worst of a step."),
    "run": ("trainer", "List, create, suspend and delete the runs of a trainer; make the authority of a run."),
    "status": ("status", "Show every service, its version, and how far behind it is."),
    "token": ("members", "Make and revoke the tokens by which hosts join a run."),
    "trace": ("traces", "Show a step, the slowest spans, or export all for Perfetto."),
    "trainer": ("trainer", "Save a checkpoint now; drain the trainer."),
    "ui": ("ui.command", "Show runs in a browser: curves, rollouts, timeline, versions, ledger."),
    "watch": ("watch", "Show curves, rates, waits and programs in the terminal, again and again."),
    "weights": ("versions", "List weight versions and the engines that serve them."),
}
"""Module in meshrl.cli, and line in `meshrl --help`."""

OTHER_COMMANDS = "meshrl.commands"
"""Entry points by which other distributions add commands."""


class LazyCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *entry_points(group=OTHER_COMMANDS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            (*added,) = entry_points(group=OTHER_COMMANDS, name=cmd_name)
            if not added and cmd_name == "conformance":
                raise click.UsageError("conformance is a distribution of its own: pip install meshrl-conformance")
            other: click.Command | None = added[0].load() if added else None
            return other
        module = importlib.import_module(f"meshrl.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, "run_group" if cmd_name == "run" else cmd_name)
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        with _in_one_line(info_name or "meshrl"):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with _in_one_line(ctx.command_path):
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            lines = {name: line for name, (_, line) in COMMANDS.items()}
            for added in entry_points(group=OTHER_COMMANDS):
                lines[added.name] = added.load().get_short_help_str(limit=100)
            formatter.write_dl(sorted(lines.items()))


@contextmanager
def _in_one_line(command_path: str) -> Iterator[None]:
    try:
        yield
    except NoArgsIsHelpError:  # not an error: what prints the help
        raise
    except click.UsageError as error:
        raise UsageLineError(error, command_path) from error


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="meshrl-client")
def main() -> None:
    """Look into a run of meshrl and drive its services.

    A command finds the services in the run's output folder (-o, or MESHRL_OUTPUT_DIR); --address names one anywhere.

    \b
    Exit codes: 0 all is well, 1 something is missing or unhealthy, 2 the command line is wrong.
    Completion: eval "$(_MESHRL_COMPLETE=bash_source meshrl)", or zsh_source, fish_source.
    """


if __name__ == "__main__":
    main()
