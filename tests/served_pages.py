"""Pages served by a process of its own, and a way to ask them: what Gradio leaves open is then none of the tests'."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import torch
from explained_models import capsnet
from torch import Tensor

from torchcaps.data import preprocess
from torchcaps.models import CapsNet
from torchcaps.routing import Dynamic

NAMES = ["ant", "bee", "<b>cat</b>", "dog"]

SPEC: dict[str, Any] = {"version": 1, "kind": "image", "channels": 1, "size": [13, 11], "range": [0, 255],
                        "crop": None, "mean": None, "std": None, "any_length": False}  # fmt: skip

TO_TENSOR = preprocess(SPEC)


def served_model() -> CapsNet:
    """The same here and there."""
    torch.manual_seed(0)
    model = capsnet(Dynamic.sabour()).eval()
    with torch.no_grad():
        model.class_caps.weight.mul_(4.0)
    return model


def served_draw(capsule: int, law: str, seed: int) -> Tensor:
    """A grey of its own for each capsule."""
    return torch.full((1, 4, 6), capsule / 10 + (law == "fitted") * seed / 100)


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[list[str]]:
    """The addresses of pages: of the model and of the experts above, or of `torchcaps serve` with these arguments."""
    with subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()  # it keeps nothing


class Session:
    """One user of a page."""

    def __init__(self, address: str) -> None:
        self.calls, self.session = f"{address}gradio_api/call", uuid.uuid4().hex

    def ask(self, name: str, *data: Any) -> Any:
        """What the page answers; None in `data` stands for the session."""
        with httpx.Client(trust_env=False, timeout=60) as http:
            asked = http.post(f"{self.calls}/{name}", json={"data": data, "session_hash": self.session})
            answer = http.get(f"{self.calls}/{name}/{asked.json()['event_id']}").text
        event, _, found = answer.strip().rpartition("\ndata: ")
        assert event.endswith("event: complete"), answer
        return json.loads(found)


def main() -> None:
    """The other process."""
    from torchcaps.explain import page

    addresses = []
    if len(sys.argv) > 1:
        import torchcaps.cli.serving as command

        command.serve = lambda made, host, port: addresses.append(page.serve(made, host, port, wait=False))
        command.run("serve", sys.argv[1:])
    else:
        model = page.model_page(served_model(), TO_TENSOR, NAMES)
        experts = page.experts_page(9, ["half", "fitted"], served_draw)
        addresses += [page.serve(model, wait=False), page.serve(experts, wait=False)]
    print(json.dumps(addresses), flush=True)
    sys.stdin.read()  # until there is nobody left who asks
    os._exit(0)  # Gradio's threads are not waited for


if __name__ == "__main__":
    main()
