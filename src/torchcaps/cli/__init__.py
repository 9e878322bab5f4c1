"""The command `torchcaps`: one line for what the rooms do together.

torchcaps fit --config RECIPE             train by a recipe, a name of `torchcaps recipes` or a file of your own
torchcaps validate | test RUN             measure a trained run on its own data
torchcaps predict RUN FILE ...            label images, arrays or folders
torchcaps generate RUN                    images from single capsules of a chain of expert capsules
torchcaps recipes                         the recipes that come with the package
torchcaps compare                         do capsules help on your data?
torchcaps reproduce NAME                  train a published experiment again, ours beside the paper's
torchcaps explain RUN                     a page on what a run learned: pictures of its capsules, its mistakes
torchcaps serve RUN                       a page to draw on and to move poses on, on this machine
torchcaps export RUN OUT                  torch.export or ONNX, checked against the model
torchcaps bench                           time and memory of routing on this machine
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from signal import SIGINT, SIGTERM
from typing import NoReturn

from torchcaps import __version__

__all__ = ["main"]

_COMMANDS = {
    "fit": "torchcaps.cli.training",
    "validate": "torchcaps.cli.training",
    "test": "torchcaps.cli.training",
    "predict": "torchcaps.cli.predicting",
    "generate": "torchcaps.cli.generating",
    "recipes": "torchcaps.cli.recipes",
    "compare": "torchcaps.cli.comparing",
    "reproduce": "torchcaps.reproduce.command",
    "explain": "torchcaps.cli.explaining",
    "serve": "torchcaps.cli.serving",
    "export": "torchcaps.cli.exporting",
    "bench": "torchcaps.cli.bench",
}
"""Each command's module, imported when it is called: `torchcaps bench` needs torch alone."""


_MISTAKES = (ValueError, OSError, FloatingPointError, ModuleNotFoundError)
"""What a caller gets wrong, in words; anything else is ours, and shows where."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. What the user got wrong is said in one line, and the exit status is then 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # closed by whoever started the command
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if not given or given[0] in ("-h", "--help", "help"):
        print(__doc__)
        return
    if given[0] in ("-V", "--version"):
        print(f"torchcaps {__version__}")
        return
    command, rest = given[0], given[1:]
    if command not in _COMMANDS:
        _leave(f"there is no command {command!r}: take one of {', '.join(_COMMANDS)}; torchcaps --help says more")
    try:
        _command(command)(command, rest)
    except BrokenPipeError:  # whoever read the output has had enough
        sys.stdout = None
        print("torchcaps: stopped, for nobody reads its output", file=sys.stderr)
        sys.exit(128 + 13)  # as a program that SIGPIPE stops
    except _MISTAKES as error:
        _leave(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + SIGINT)
    except SystemExit as stop:
        if type(stop).__name__ == "SIGTERMException":  # Lightning's, without a status
            sys.exit(128 + SIGTERM)
        raise


def _command(name: str) -> Callable[[str, list[str]], None]:
    try:
        run: Callable[[str, list[str]], None] = import_module(_COMMANDS[name]).run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "torchcaps":
            raise
        _leave(f"torchcaps {name} needs the package {error.name}: pip install 'torchcaps[all]'")
    return run


def _leave(reason: str) -> NoReturn:
    print(f"torchcaps: {reason}", file=sys.stderr)
    sys.exit(2)
