"""`python -m torchcaps`: the command `torchcaps`."""

from torchcaps.cli import main

if __name__ == "__main__":
    main()
