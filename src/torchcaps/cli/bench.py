"""`torchcaps bench`: time and memory of routing on this machine."""

from torchcaps.bench import main

__all__ = ["run"]


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    main(arguments)
