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

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. What the user got wrong is said in one line, and the exit status is then 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
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
        run: Callable[[str, list[str]], None] = import_module(_COMMANDS[command]).run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "torchcaps":
            raise
        _leave(f"torchcaps {command} needs the package {error.name}: pip install 'torchcaps[all]'")
    try:
        run(command, rest)
    except BrokenPipeError:  # whoever read the output has had enough
        sys.stdout = None
    except (ValueError, OSError) as error:  # the caller's mistakes, in words; anything else is ours, and shows where
        _leave(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(reason: str) -> None:
    print(f"torchcaps: {reason}", file=sys.stderr)
    sys.exit(2)
