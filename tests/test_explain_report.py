"""The page on what a run learned: its numbers are the model's, it stands alone, and it reads on a phone and a desk."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import DESK, PHONE, Looked, browser  # noqa: F401  (a fixture)
from explained_models import capsnet, model_and_images
from PIL import Image
from torch import nn

from torchcaps import create_model
from torchcaps.cli import main
from torchcaps.cli.loading import data_of, load
from torchcaps.explain import decoder_check
from torchcaps.explain.report import Answers, Subject, answers, sections
from torchcaps.routing import Dynamic
from torchcaps.training import capsule_health

FIGURES = {"capsnet": (6, 5), "su_capsnet": (4, 2), "sequential": (4, 2), "concurrent": (6, 2), "em_capsnet": (6, 2)}
"""Pictures of each example, and of decoder and poses. A list of children has no maps, for it lies nowhere."""


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    main(["fit", "--config", "digits_capsnet_dynamic", "--run", str(run), "--trainer.max_epochs", "3",
          "--data.init_args.limit", "200"])  # fmt: skip
    pixels = np.kron(np.eye(4), np.full((7, 7), 250)).astype("uint8")
    Image.fromarray(pixels).save(run / "a<b>.png")
    main(["explain", str(run), "--images", str(run / "a<b>.png"), "--examples", "2"])
    return run


def numbers_of(model: nn.Module, run: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batches = list(data_of(str(run)).test_dataloader())
    images, labels = (torch.cat([batch[k] for batch in batches]) for k in (0, 1))
    with torch.no_grad():
        return images, labels, model(images).argmax(1)


def test_the_numbers_of_the_page_are_the_models(a_run: Path) -> None:
    html = (a_run / "explanation.html").read_text("utf-8")
    model = load(str(a_run)).model
    images, labels, predicted = numbers_of(model, a_run)
    right = int((labels == predicted).sum())
    accuracy = f"{100 * right / len(labels):.1f}\N{NO-BREAK SPACE}% of {len(labels)} test images are read right"
    assert f"{accuracy}: {len(labels) - right} are not" in html
    cells = re.findall(r"<td class='(none|right|wrong)'>(\d+|·)</td>", html)
    confusion = torch.tensor([0 if n == "·" else int(n) for _, n in cells]).view(10, 10)
    for truth, answer in zip(labels.tolist(), predicted.tolist(), strict=True):
        confusion[truth, answer] -= 1
    assert not confusion.any()
    data = data_of(str(a_run))
    data.augment = None
    train = torch.cat([batch[0] for batch in data.train_dataloader()])
    check = decoder_check(model, images, train)
    assert not check.believed  # after three epochs
    assert "too weak to believe" in html
    assert f"{check.decoder:.4f} a pixel; 16 principal components" in html
    assert f"leave {check.components:.4f}, and the mean image alone {check.mean_image:.4f}" in html
    health = capsule_health(model, lambda: model(images[:128]))["class_caps"]
    assert f"<td>{health.mean_length:.2f}</td><td>{health.coupling_entropy:.2f}</td>" in html


def test_the_page_stands_alone_and_shows_the_images_it_was_given(a_run: Path) -> None:
    html = (a_run / "explanation.html").read_text("utf-8")
    assert "a&lt;b&gt;.png</h3>" in html
    assert "a<b>" not in html
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r"src='([^']*)'", html))
    words = re.sub("base64,[^']*", "", html).replace('href="data:,"', "")
    assert re.findall(r"href|url\(|@import|<script|https?:", words) == []
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert len(titles) == 1 + 2 + 2
    assert sum("read right" in title for title in titles) == 2
    assert sum("taken for" in title for title in titles) == 2
    assert html.count("<img") == html.count("alt='") == 5 * 6 + 3 + 2


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_reads_on_a_phone_and_on_a_desk(a_run: Path, browser: Any, width: int, dark: bool) -> None:  # noqa: F811
    looked = Looked(browser, (a_run / "explanation.html").resolve().as_uri(), width, dark=dark)
    assert looked.complaints == []
    assert [url for url in looked.asked if not url.startswith(("file:", "data:"))] == []
    assert not looked.wider_than_its_window
    sizes = looked.page.eval_on_selector_all(
        "img", "all => all.map(e => [e.naturalWidth, e.getBoundingClientRect().width, e.getBoundingClientRect().right])"
    )
    assert len(sizes) == 35
    assert all(natural > 100 and shown > 200 and right <= width for natural, shown, right in sizes)
    small = looked.page.eval_on_selector_all(
        "p, td, th, li, h3", "all => all.filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length"
    )
    assert small == 0
    paper = looked.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 23, 26)" if dark else "rgb(251, 250, 247)")


def some_answers(model: Any, images: torch.Tensor, classes: int) -> Answers:
    labels = torch.arange(len(images)) % classes
    return answers(model, zip(images.split(4), labels.split(4), strict=True), classes)


@pytest.mark.parametrize("name", FIGURES)
def test_every_kind_of_model_has_a_page(name: str) -> None:
    model: Any
    model, images = model_and_images(name, 8)
    K = model.num_classes
    tested = some_answers(model, images, K)
    health = capsule_health(model, lambda: model(images))
    html = sections(Subject(name, model, [f"<{k}>" for k in range(K)], tested, images, {}, health, examples=1))
    assert all(f"<th scope='row'>{layer}</th>" in html for layer in health)
    each, others = FIGURES[name]
    assert html.count("<img") == html.count("<h3>") * each + others
    assert "<0>" not in html


def test_children_in_a_list_are_laid_out_where_the_reader_says_they_lie() -> None:
    model, images = model_and_images("su_capsnet", 1)
    subject = Subject("su", model, list("0123456789"), None, None, {"x": images[0]}, {}, places=(2, 3))
    assert "Where the votes come from" in sections(subject)


def test_a_decoder_that_draws_as_well_as_components_is_believed() -> None:
    model = capsnet(Dynamic.sabour()).eval()
    model.decoder = Grey()
    images = torch.full((6, 1, 13, 11), 0.5)
    html = sections(Subject("grey", model, list("abcd"), some_answers(model, images, 4), images, {}, {}, examples=0))
    assert "draws as well as a linear one or better" in html
    assert "Its drawings can be believed" in html


class Grey(nn.Module):
    """The same picture whatever there is."""

    def forward(self, poses: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return torch.full((len(poses), 1, 13, 11), 0.5)


def test_answers_are_counted_over_all_batches() -> None:
    model, images = model_and_images("capsnet", 11)
    labels = torch.arange(11) % 4
    found = answers(model, zip(images.split(3), labels.split(3), strict=True), 4)
    with torch.no_grad():
        predicted = model(images).argmax(1)
    assert int(found.confusion.sum()) == 11
    assert found.accuracy == pytest.approx(float((predicted == labels).float().mean()))
    assert torch.equal(found.wrong.images, images[predicted != labels])
    assert torch.equal(found.kept.predicted, predicted)


def test_what_cannot_be_explained_is_said_in_one_line(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", str(a_run / "checkpoints" / "best.ckpt")])
    assert "is a checkpoint, without data of its own: give a run's folder, or --images" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", str(a_run), "--images", "not/there.png"])
    assert "there is no file not/there.png" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no test images"):
        answers(create_model("capsule_head"), [], 10)
    with pytest.raises(ValueError, match="nothing to explain: neither test images nor images of your own"):
        sections(Subject("x", create_model("capsule_head"), [*"0123456789"], None, None, {}, {}))


def test_a_checkpoint_and_an_image_are_enough(a_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.html"
    main(["explain", str(a_run / "checkpoints" / "last.ckpt"), "--images", str(a_run / "a<b>.png"), "--out", str(out)])
    html = out.read_text("utf-8")
    assert html.count("<h3>") == 1
    assert "Right and wrong" not in html
