"""What can be done without writing a script?

    shardwise train      train a byte-level GPT on text, over ranks that the command starts itself
    shardwise probe      measure this machine and keep the result for the library
    shardwise inspect    show what is inside a checkpoint, whether it is intact, in what two of them differ
    shardwise export     write a checkpoint's parameters as a Hugging Face directory

Public names: `main` (the console script), `app` (the commands).

Invariants: no other room imports this one. `train` uses the library as any user would, through `shard`, `sharded_init` and
`Run`. A bad value ends with a one-line message and exit code 2, before any process is started.
"""

from shardwise.cli.app import app


def main() -> None:
    """Run the command given by the arguments."""
    app()


__all__ = ["app", "main"]
