"""The page as a program sees it: answers are the model's, nobody gets another's, and what is no image is refused."""

import base64
import io
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from explained_models import model_and_images
from PIL import Image
from torch import Tensor

pytest.importorskip("gradio", reason="pip install 'torchcaps[explain]'")
from served_pages import NAMES, SPEC, TO_TENSOR, Session, served_model, serving

from torchcaps.cli import main
from torchcaps.cli.loading import load
from torchcaps.data import preprocess
from torchcaps.explain import coupling_maps, look, over_image, page, receptive_fields, redraw
from torchcaps.explain.page import LARGEST
from torchcaps.types import Capsules


def a_picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (13, 11), np.uint8))


def as_file(picture: Image.Image, kind: str = "file", name: str = "a.png") -> dict[str, Any]:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return {"kind": kind, "name": name, "data": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}


def lengths_in(html: str) -> list[float]:
    return [float(n) for n in re.findall(r"<td>([\d.]+)</td></tr>", html)]


def pictures_in(html: str) -> list[Tensor]:
    found = re.findall(r"src='data:image/png;base64,([^']*)'", html)
    arrays = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]
    return [torch.from_numpy(array.astype(np.float32) / 255) for array in arrays]


@pytest.fixture(scope="module")
def model() -> Any:
    return served_model()


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with serving() as found:
        yield found


@pytest.fixture
def user(addresses: list[str]) -> Session:
    return Session(addresses[0])


def test_the_page_tells_the_models_own_numbers(user: Session, model: Any) -> None:
    picture = a_picture(0)
    message, lengths, maps, drawing, capsule, kept = user.ask("look", as_file(picture), True)
    assert kept is None  # it stays with the server
    image = TO_TENSOR(picture)[None]
    found = look(model, image)
    assert message == ""
    assert lengths_in(lengths) == pytest.approx(found.scores[0].tolist(), abs=0.006)
    assert capsule == NAMES[int(found.scores[0].argmax())]
    assert "<b>" not in lengths + maps + drawing
    seen, drawn = pictures_in(drawing)
    torch.testing.assert_close(seen, image[0, 0], atol=0.003, rtol=0)
    with torch.no_grad():
        own = model.reconstruct(model.capsules(image))[0, 0]
    torch.testing.assert_close(drawn, own, atol=0.003, rtol=0)
    assert len(pictures_in(maps)) == 3 * 3
    flow = coupling_maps(model, image).by_place()[:, 0]
    strongest = flow[-1].flatten(1).sum(1).argmax()
    assert f"the brightest is {float(flow[:, flow[-1].flatten(1).sum(1).topk(3).indices].max()):.2g}" in maps
    heat = over_image(flow[2, strongest], (13, 11), receptive_fields(model, (1, 13, 11)))
    shown = pictures_in(maps)[2].mean(2)
    there = heat.isfinite()
    order = heat[there].argsort()
    assert shown[there][order[-1]] > shown[there][order[0]]


def test_routing_can_be_switched_off_and_on_again(user: Session, model: Any) -> None:
    picture = a_picture(1)
    user.ask("look", as_file(picture), True)
    off = user.ask("again", None, False)
    image = TO_TENSOR(picture)[None]
    assert lengths_in(off[1]) == pytest.approx(look(model, image, rounds=1).scores[0].tolist(), abs=0.006)
    assert len(pictures_in(off[2])) == 3 * 1
    on = user.ask("again", None, True)
    assert lengths_in(on[1]) == pytest.approx(look(model, image).scores[0].tolist(), abs=0.006)


def test_a_moved_pose_is_drawn(user: Session, model: Any) -> None:
    picture = a_picture(2)
    user.ask("look", as_file(picture), True)
    (html,) = user.ask("move", None, "dog", 0.0, 0.3, 0.0, -0.2, 0.0)
    _, still, moved = pictures_in(html)
    with torch.no_grad():
        capsules: Capsules = model.capsules(TO_TENSOR(picture)[None])
    pose = capsules.poses[0, 3].flatten()
    own = redraw(model, capsules, 3, torch.stack([pose, pose + torch.tensor([0.0, 0.3, 0.0, -0.2, 0.0])]))
    torch.testing.assert_close(still, own[0, 0], atol=0.003, rtol=0)
    torch.testing.assert_close(moved, own[1, 0], atol=0.003, rtol=0)


def test_what_one_user_looked_at_is_not_there_for_another(addresses: list[str]) -> None:
    one, other = Session(addresses[0]), Session(addresses[0])
    one.ask("look", as_file(a_picture(3)), True)
    assert other.ask("move", None, "ant", *[0.1] * 5) == [""]
    assert other.ask("again", None, True)[1] == ""
    assert pictures_in(one.ask("move", None, "ant", *[0.1] * 5)[0])


def test_twenty_at_once_are_all_answered_each_with_its_own(addresses: list[str], model: Any) -> None:
    users = [Session(addresses[0]) for _ in range(20)]
    together = threading.Barrier(20)

    def ask(i: int) -> tuple[Any, str]:
        together.wait()
        looked = users[i].ask("look", as_file(a_picture(100 + i)), i % 2 == 0)
        return looked, users[i].ask("move", None, NAMES[i % 4], *[0.02 * i] * 5)[0]

    with ThreadPoolExecutor(20) as pool:
        answered = list(pool.map(ask, range(20)))
    for i, (looked, moved) in enumerate(answered):
        image = TO_TENSOR(a_picture(100 + i))[None]
        found = look(model, image, rounds=None if i % 2 == 0 else 1)
        assert lengths_in(looked[1]) == pytest.approx(found.scores[0].tolist(), abs=0.006)
        torch.testing.assert_close(pictures_in(looked[3])[0], image[0, 0], atol=0.003, rtol=0)
        capsules = found.of()[-1].routed.capsules
        own = redraw(model, capsules, i % 4, capsules.poses[0, i % 4].flatten()[None] + 0.02 * i)
        torch.testing.assert_close(pictures_in(moved)[-1], own[0, 0], atol=0.003, rtol=0)
    assert len({looked[1] for looked, _ in answered}) > 10


REFUSED = {
    "text": ({"kind": "file", "name": "notes.txt", "data": "data:text/plain;base64,aGVsbG8="}, "notes.txt is no image"),
    "cut off": ({**as_file(a_picture(0)), "data": as_file(a_picture(0))["data"][:80]}, "a.png is no image"),
    "no base64": ({"kind": "file", "name": "x", "data": "data:image/png;base64,%%%"}, "x is no image that can be read"),
    "an address": ({"kind": "file", "name": "x", "data": "http://127.0.0.1/x.png"}, "x is no image that can be read"),
    "large": ({"kind": "large", "name": "big.png", "size": 10**9}, "big.png is too large: give a file of 5 MB or less"),
    "large after all": ({"kind": "file", "name": "big.png", "data": "A" * (2 * LARGEST)}, "big.png is too large"),
    "too many pixels": (as_file(Image.new("1", (9000, 9000)), name="vast.png"), "vast.png is too large: 9000 x 9000"),
    "nothing drawn": (as_file(Image.new("L", (280, 280)), kind="drawing"), "the sheet is empty"),
    "a name": ({"kind": "file", "name": "<script>", "data": ""}, "&lt;script&gt; is no image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_image_or_too_large_is_refused_with_a_message(case: str, user: Session) -> None:
    value, said = REFUSED[case]
    message, lengths, maps, drawing, *_ = user.ask("look", value, True)
    assert said in message
    assert "role='alert'" in message
    assert (lengths, maps, drawing) == ("", "", "")
    assert user.ask("move", None, "ant", *[0.0] * 5) == [""]


def test_an_empty_sheet_shows_nothing_and_says_nothing(user: Session) -> None:
    assert user.ask("look", {"kind": "empty"}, True)[:4] == ["", "", "", ""]


def test_files_cannot_be_left_on_the_machine(addresses: list[str]) -> None:
    files = {"files": ("a.png", b"0" * 1000)}
    assert httpx.post(f"{addresses[0]}gradio_api/upload", files=files, trust_env=False).status_code == 413


def test_only_this_machine_is_listened_to(addresses: list[str]) -> None:
    for address in addresses:
        assert address.startswith("http://127.0.0.1:")
        port = int(address.rstrip("/").rpartition(":")[2])
        assert listeners(port) == {"0100007F"}  # 127.0.0.1, as the kernel writes it


def listeners(port: int) -> set[str]:
    """Addresses of this machine, in hexadecimal, on which somebody listens to a port."""
    if not Path("/proc/net/tcp").exists():
        pytest.skip("there is no /proc/net/tcp here")
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, at in listening if int(at, 16) == port}


@pytest.mark.parametrize("fill", [0.5, 1.0])
def test_a_drawing_is_framed_as_the_examples_are(model: Any, fill: float) -> None:
    examples = torch.zeros(3, 1, 20, 20)
    edge = round(10 * (1 - fill))
    examples[:, :, edge : 20 - edge, 8:12] = 1.0
    shown = page._ModelPage(model, TO_TENSOR, NAMES, lambda s: s, examples, None, None)
    assert shown.fill == pytest.approx(fill)
    sheet = Image.new("L", (280, 280))
    sheet.paste(255, (200, 30, 230, 130))
    image = shown.image_of(as_file(sheet, kind="drawing"))[0, 0]
    rows = (image.amax(1) > 0.5).nonzero()[:, 0]
    assert rows.float().mean() == pytest.approx(6.0, abs=0.6)  # in the middle
    assert len(rows) == pytest.approx(13 * fill, abs=1.01)
    columns = (image.amax(0) > 0.5).nonzero()[:, 0]
    assert columns.float().mean() == pytest.approx(5.0, abs=0.6)


@pytest.mark.parametrize("name", ["su_capsnet", "concurrent", "em_capsnet", "capsule_head"])
def test_models_without_a_decoder_or_without_places_have_a_page(name: str) -> None:
    made: Any
    made, images = model_and_images(name, 1)
    names = [str(k) for k in range(made.num_classes)]
    to_tensor = preprocess(SPEC | {"channels": made.in_chans, "size": list(images.shape[2:])})
    shown = page._ModelPage(made, to_tensor, names, lambda s: s.softmax(1), None, None, None)
    message, lengths, maps, drawing, _, session = shown.look(as_file(a_picture(5)), True)
    assert message == ""
    assert len(lengths_in(lengths)) == len(names)
    assert ("have no places" in maps) == (name == "su_capsnet")
    assert drawing.count("<img") == 1
    assert shown.move(session, names[0], *[0.1] * shown.numbers) == ""


@pytest.mark.parametrize("size", [(40_000, 1), (1, 40_000)])
def test_a_line_makes_no_huge_frame(size: tuple[int, int]) -> None:
    frame = page._framed(Image.new("L", size, 255), 0.5, (13, 11))
    assert max(frame.size) <= 4 * page.LARGEST_SIDE


def test_a_port_that_is_taken_is_said_to_be(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match="2"):
            main(["serve", str(a_run), "--port", str(port)])
    assert f"port {port} of 127.0.0.1 cannot be had" in capsys.readouterr().err


def test_experts_draw_one_at_a_time(addresses: list[str]) -> None:
    (html,) = Session(addresses[1]).ask("draw", 7, "fitted", 3)
    assert "drawn from capsule 7" in html
    torch.testing.assert_close(pictures_in(html)[0], torch.full((4, 6), 0.73), atol=0.003, rtol=0)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    main(["fit", "--config", "digits_capsnet_dynamic", "--run", str(run), "--trainer.max_epochs", "1",
          "--data.init_args.limit", "100"])  # fmt: skip
    return run


def test_the_command_serves_a_run_with_its_test_images(a_run: Path) -> None:
    with serving(str(a_run)) as addresses:
        config = str(httpx.get(f"{addresses[0]}config", trust_env=False).json())
        assert len(set(re.findall(r"alt='example \d+'|alt=\\'example \d+\\'", config))) == 12
        picture = Image.fromarray(np.random.default_rng(6).integers(0, 256, (8, 8), np.uint8))
        _, lengths, _, drawing, *_ = Session(addresses[0]).ask("look", as_file(picture), True)
    loaded = load(str(a_run))
    assert loaded.preprocessing is not None
    scores = look(loaded.model, preprocess(loaded.preprocessing)(picture)[None]).scores
    assert lengths_in(lengths) == pytest.approx(scores[0].tolist(), abs=0.006)
    assert "This decoder is too weak to believe" in drawing  # after an epoch


def test_a_run_without_pictures_is_refused(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", str(a_run / "nowhere")])
    assert "no checkpoint" in capsys.readouterr().err
