"""`python -m torchcaps.bench`: the same as `torchcaps bench`, where only torch is installed."""

from torchcaps.bench.command import main

if __name__ == "__main__":
    main()
