"""`torchcaps compare`: do capsules help on your data, and does routing?"""

from torchcaps.run.compare import main

__all__ = ["run"]


def run(command: str, arguments: list[str]) -> None:
    """The command."""
    main(arguments)
