"""What can be done without writing a script?

    shardwise train      train a byte-level GPT on text, over ranks that the command starts itself

Public names: `main` (the console script), `app` (the commands).

Invariants: this room is at the top of the house and nothing imports it. It uses the library as any user would, through
`shard`, `sharded_init` and the handle. A bad value ends with one line and exit code 2, before any process is started.
"""

from shardwise.cli.app import app


def main() -> None:
    """Run the command that the arguments name."""
    app()


__all__ = ["app", "main"]
