"""A page on this machine: draw or open an image, see what the capsules make of it, move a pose and watch the drawing.

    serve(model_page(model, prepare, names))        lengths, coupling maps, sliders for a pose, routing on and off
    serve(experts_page(count, laws, draw))          images drawn from one expert capsule

Nothing is fetched from other machines, and the page writes nothing to disk: an image comes with a request, pictures go
back inside the answer, and what a page needs between two requests is kept in memory, for it alone. Requests are
answered one after the other, in the order in which they come.
"""

import base64
import binascii
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read while Gradio is imported

import gradio as gr
import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from torchcaps.explain.coupling import CouplingMaps, maps_of, over_image, receptive_fields
from torchcaps.explain.pictures import picture
from torchcaps.explain.poses import DecoderCheck, draws, redraw
from torchcaps.explain.watching import look
from torchcaps.types import Capsules

__all__ = ["LARGEST", "experts_page", "model_page", "serve"]

LARGEST = 5 * 2**20
"""Bytes of a file."""

MOST_PIXELS = 40_000_000
"""Of an image."""

LARGEST_SIDE = 1024
"""Pixels of a drawing, along its longer side, that are looked at."""

MOST_SLIDERS = 36
"""Numbers of a pose that can be moved, the first ones of a larger pose."""

MOST_BARS, MAPS = 12, 3
"""Classes whose scores are shown, and those whose maps are: the highest ones."""

ONE_AT_A_TIME: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "hidden"}
"""Of events that use the model: to look into it changes attributes of its layers for that moment."""

HERE = Path(__file__).parent

PAPER = """<div class="paper"><canvas width="280" height="280" aria-label="draw here"></canvas>
<div class="tools"><button class="clear" type="button">Clear</button>
<label>Open an image<input type="file" accept="image/*"></label></div><div class="examples">%s</div></div>"""


@dataclass(frozen=True)
class Shown:
    """What a session keeps between two requests: an image `[1, C, H, W]` and its class capsules."""

    image: Tensor
    capsules: Capsules


class _ModelPage:
    """The answers of `model_page`, as HTML."""

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[Image.Image], Tensor],
        names: Sequence[str],
        read: Callable[[Tensor], Tensor],
        examples: Tensor | None,
        places: tuple[int, int] | None,
        check: DecoderCheck | None,
    ) -> None:
        self.model, self.prepare, self.names, self.read = model, prepare, names, read
        self.examples, self.places, self.check = examples, places, check
        blank = prepare(Image.new("L", (64, 64)))
        self.size = tuple(blank.shape[1:])
        self.fill = 0.8 if examples is None else _filled(examples)
        found = look(model, blank[None])  # the first request is then as fast as all others
        self.numbers = min(found.of()[-1].routed.poses[0, 0].numel(), MOST_SLIDERS)
        self.fields = receptive_fields(model, tuple(blank.shape)) if places is None else None

    def look(self, value: Any, routing: bool) -> tuple[Any, ...]:
        """(message, lengths, maps, drawing, the capsule that answers, session) for what the sheet holds."""
        if not isinstance(value, dict) or value.get("kind") == "empty":
            return self.nothing("")
        try:
            image = self.image_of(value)
        except ValueError as error:
            return self.nothing(f"<p class='message' role='alert'>{escape(str(error))}</p>")
        return self.told(image, routing)

    def again(self, shown: Shown | None, routing: bool) -> tuple[Any, ...]:
        """`look` at the same image, with routing switched on or off."""
        return self.nothing("") if shown is None else self.told(shown.image, routing)

    def nothing(self, message: str) -> tuple[Any, ...]:
        """What `look` gives where there is no image."""
        return message, "", "", "", self.names[0], None

    def move(self, shown: Shown | None, capsule: str, *offsets: float) -> str:
        """The drawing of a capsule whose pose is moved by so much."""
        if shown is None or not draws(self.model):
            return ""
        number = list(self.names).index(capsule)
        pose = shown.capsules.poses[0, number].flatten()
        moved = pose.clone()
        moved[: self.numbers] += torch.tensor(offsets, dtype=pose.dtype)
        still, drawn = redraw(self.model, shown.capsules, number, torch.stack([pose, moved]))
        name = escape(capsule)
        parts = [_shown(shown.image[0], "the image"), _shown(still, f"drawn from {name}")]
        if any(offsets):
            parts.append(_shown(drawn, f"{name}, moved"))
        return f"<div class='drawn'>{''.join(parts)}</div>{self.doubt()}"

    def told(self, image: Tensor, routing: bool) -> tuple[Any, ...]:
        """What `look` gives for an image `[1, C, H, W]`."""
        found = look(self.model, image, rounds=None if routing else 1)
        shown, best = Shown(image, found.of()[-1].routed.capsules), self.names[int(found.scores[0].argmax())]
        drawing = self.move(shown, best, *[0.0] * self.numbers)
        drawing = drawing or f"<div class='drawn'>{_shown(image[0], 'the image')}</div>"
        maps = self.maps(image[0], maps_of(found, places=self.places))
        return "", self.lengths(found.scores[0]), maps, drawing, best, shown

    def lengths(self, scores: Tensor) -> str:
        """A bar for each of the highest classes."""
        values = self.read(scores[None])[0]
        chosen = values.topk(min(MOST_BARS, len(values))).indices
        rows = []
        for k in chosen.sort().values.tolist():
            value, kind = float(values[k]), " class='best'" if k == int(chosen[0]) else ""
            bar = f"<span class='bar' style='width:{100 * min(max(value, 0.0), 1.0):.1f}%'></span>"
            rows.append(
                f"<tr{kind}><th scope='row'>{escape(self.names[k])}</th><td>{bar}</td><td>{value:.2f}</td></tr>"
            )
        return f"<table class='lengths'>{''.join(rows)}</table>"

    def maps(self, image: Tensor, maps: CouplingMaps) -> str:
        """A row for each of the classes that get most, a column for each round, over an image `[C, H, W]`."""
        if maps.shares.dim() != 6:
            return "<p class='hint'>The capsules below the classes are a list: they have no places on the image.</p>"
        flow = maps.by_place()[:, 0]
        chosen = flow[-1].flatten(1).sum(1).topk(min(MAPS, flow.shape[1])).indices.tolist()
        most = float(flow[:, chosen].max()) or 1.0
        heads = "".join(f"<th scope='col'>round {t + 1}</th>" for t in range(len(flow)))
        rows = []
        for k in chosen:
            name = escape(self.names[k])
            heat = [_png(self.over(image, each[k] / most)) for each in flow]
            cells = "".join(
                f"<td><img class='pixels' alt='{name}, round {t}' src='{source}'></td>"
                for t, source in enumerate(heat, start=1)
            )
            rows.append(f"<tr><th scope='row'>{name}</th>{cells}</tr>")
        return f"<table class='maps'><tr><td></td>{heads}</tr>{''.join(rows)}</table>" + (
            f"<p class='hint'>Share times presence, summed over types; the brightest is {most:.2g}.</p>"
        )

    def over(self, image: Tensor, values: Tensor) -> NDArray[np.float32]:
        """Values `[h, w]` in 0..1 as heat over an image, `[H, W, 3]`."""
        H, W = image.shape[1:]
        grey = picture(image.mean(0, keepdim=True))[..., None]
        heat = over_image(values, (H, W), self.fields).numpy()
        there = np.isfinite(heat)[..., None]
        colour = colormaps["magma"](np.nan_to_num(heat))[..., :3]
        return np.where(there, 0.25 * grey + 0.75 * colour, grey).astype(np.float32)

    def image_of(self, value: dict[str, Any]) -> Tensor:
        """The image `[1, C, H, W]` that the sheet holds. ValueError, in words for the page, where it holds none."""
        name = str(value.get("name", "the file"))
        data = str(value.get("data", ""))
        if value.get("kind") == "large" or len(data) > LARGEST * 4 / 3 + 100:
            raise ValueError(f"{name} is too large: give a file of {LARGEST // 2**20} MB or less")
        opened = _opened(name, data)
        if value.get("kind") == "drawing":
            opened = _framed(opened, self.fill, self.size)
        return self.prepare(opened)[None]

    def doubt(self) -> str:
        """A word on a decoder that is not to be believed."""
        if self.check is None or self.check.believed:
            return ""
        return (
            f"<p class='hint'>This decoder is too weak to believe: its error is {self.check.decoder:.4f} a pixel, "
            f"that of {self.check.numbers} principal components {self.check.components:.4f}.</p>"
        )

    def blocks(self, title: str) -> gr.Blocks:
        """The page itself: what stands where, and who answers whom."""
        thumbnails = ""
        if self.examples is not None:
            thumbnails = "".join(
                f"<button type='button' title='example {i + 1}'><img class='pixels' alt='example {i + 1}' "
                f"src='{_png(picture(image))}'></button>"
                for i, image in enumerate(self.examples)
            )
        with gr.Blocks(analytics_enabled=False, title=title) as page:
            gr.Markdown(f"# {title}\nDraw, or open an image.")
            session = gr.State(None)
            with gr.Row():
                with gr.Column(scale=1, min_width=300):
                    paper = gr.HTML(
                        None, html_template=PAPER % thumbnails, js_on_load=(HERE / "paper.js").read_text("utf-8"),
                        limit=LARGEST, elem_id="paper",
                    )  # fmt: skip
                    message = gr.HTML("", elem_id="message")
                    routing = gr.Checkbox(True, label="routing", info="off: one round with even shares")
                    lengths = gr.HTML("", elem_id="lengths")
                with gr.Column(scale=2, min_width=320):
                    maps = gr.HTML("", elem_id="maps")
                    drawing = gr.HTML("", elem_id="drawing")
                    with gr.Accordion(
                        "Move the numbers of a pose, by half at most", open=True, visible=draws(self.model)
                    ):
                        capsule = gr.Dropdown(list(self.names), value=self.names[0], label="capsule")
                        with gr.Row(elem_id="poses"):
                            offsets = [
                                gr.Slider(-0.5, 0.5, 0, step=0.01, label=str(i), min_width=140, buttons=[])
                                for i in range(self.numbers)
                            ]
                        still = gr.Button("Back to the pose as it is")
            outputs = [message, lengths, maps, drawing, capsule, session]
            moved: dict[str, Any] = {"fn": self.move, "inputs": [session, capsule, *offsets], "outputs": drawing}
            at_rest: dict[str, Any] = {"fn": lambda: [0.0] * self.numbers, "outputs": offsets, "queue": False,
                                       "show_progress": "hidden", "api_visibility": "private"}  # fmt: skip
            paper.change(self.look, [paper, routing], outputs, api_name="look", **ONE_AT_A_TIME).then(**at_rest)
            routing.input(self.again, [session, routing], outputs, api_name="again", **ONE_AT_A_TIME).then(**at_rest)
            gr.on(
                [capsule.input, *(slider.input for slider in offsets)], **moved, api_name="move",
                trigger_mode="always_last", **ONE_AT_A_TIME,
            )  # fmt: skip
            still.click(**at_rest).then(**moved, api_visibility="private", **ONE_AT_A_TIME)
        return page.queue(max_size=200)


def model_page(
    model: nn.Module,
    prepare: Callable[[Image.Image], Tensor],
    names: Sequence[str],
    *,
    title: str = "What do the capsules see?",
    read: Callable[[Tensor], Tensor] = lambda scores: scores,
    examples: Tensor | None = None,
    places: tuple[int, int] | None = None,
    check: DecoderCheck | None = None,
) -> gr.Blocks:
    """The page of a model.

    prepare   a picture to what the model takes, `[C, H, W]`.
    names     of the classes.
    read      scores `[N, K]` to numbers in 0..1 to show; lengths are shown as they are.
    examples  images `[N, C, H, W]` in 0..1 to begin with. Drawings are framed as these are.
    places    how the children of the class capsules lie, where they are given as a list.
    check     of the decoder, which is then not shown as better than it is.
    """
    return _ModelPage(model, prepare, names, read, examples, places, check).blocks(title)


def experts_page(
    count: int, laws: Sequence[str], draw: Callable[[int, str, int], Tensor], *, title: str = "One expert at a time"
) -> gr.Blocks:
    """The page of expert capsules: `draw(capsule, law, seed)` gives a picture `[C, height, width]` in 0..1."""

    def picture_of(capsule: float, law: str, seed: float) -> str:
        drawn = draw(int(capsule), law, int(seed)).clamp(0, 1)
        return f"<div class='drawn'>{_shown(drawn, f'drawn from capsule {capsule:.0f}')}</div>"

    with gr.Blocks(analytics_enabled=False, title=title) as page:
        gr.Markdown(f"# {title}\nImages that a single capsule draws, all others being silent.")
        capsule = gr.Slider(0, count - 1, 0, step=1, label="capsule")
        law = gr.Radio(list(laws), value=laws[0], label="poses are drawn from")
        seed = gr.Number(0, precision=0, label="seed")
        shown = gr.HTML("", elem_id="drawing")
        gr.on(
            [page.load, capsule.input, law.input, seed.input], picture_of, [capsule, law, seed], shown,
            api_name="draw", trigger_mode="always_last", **ONE_AT_A_TIME,
        )  # fmt: skip
    return page.queue(max_size=200)


def serve(page: gr.Blocks, host: str = "127.0.0.1", port: int | None = None, *, wait: bool = True) -> str:
    """Open the page to this machine, or with another host to others; the address where it stands.

    port  None is the first free one from 7860 on.
    wait  until it is stopped from the keyboard.

    Raises OSError for a port that is taken.
    """
    theme = gr.themes.Base(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    _, address, _ = page.launch(
        server_name=host, server_port=port, theme=theme, css=(HERE / "page.css").read_text("utf-8"), share=False,
        footer_links=[], run_history=False, ssr_mode=False, quiet=True, prevent_thread_lock=True,
        max_file_size=1,  # Gradio's own way for files, which the page does without
    )  # fmt: skip
    if wait:
        print(f"{address} is open; Ctrl+C closes it", flush=True)
        page.block_thread()
    return str(address)


def _opened(name: str, data: str) -> Image.Image:
    """The picture in a data URL."""
    try:
        raw = base64.b64decode(data.partition("base64,")[2], validate=True)
        with Image.open(io.BytesIO(raw)) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(f"{name} is too large: {opened.width} x {opened.height} pixels")
            opened.load()
            return opened.copy()
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name} is too large: give a picture of fewer pixels") from error
    except (OSError, SyntaxError, UnicodeError, binascii.Error) as error:
        raise ValueError(f"{name} is no image that can be read: give a PNG, JPEG or another picture") from error


def _framed(ink: Image.Image, fill: float, size: tuple[int, ...]) -> Image.Image:
    """A drawing in the middle of a frame of the model's proportions, of which it takes the share `fill`."""
    ink = ink.convert("L")
    box = ink.getbbox()
    if box is None:
        raise ValueError("the sheet is empty: draw something")
    ink = ink.crop(box)
    ink.thumbnail((LARGEST_SIDE, LARGEST_SIDE))  # before a frame is made around it, which a line would make huge
    ratio = size[1] / size[0]
    height = max(ink.height, ink.width / ratio) / fill
    frame = Image.new("L", (round(height * ratio), round(height)))
    frame.paste(ink, ((frame.width - ink.width) // 2, (frame.height - ink.height) // 2))
    return frame


def _filled(examples: Tensor) -> float:
    """The share of an image's height or width that what is on it takes, on average."""
    grey = examples.mean(1)
    there = grey > 0.3 * grey.amax((1, 2), keepdim=True)
    extents = [_extent(there.any(axis)) / there.shape[3 - axis] for axis in (1, 2)]
    return float(torch.stack(extents).amax(0).mean().clamp(0.3, 1.0))


def _extent(there: Tensor) -> Tensor:
    """`[N]`, from the first True to the last of `[N, length]`."""
    steps = torch.arange(there.shape[1])
    first = torch.where(there, steps, there.shape[1]).amin(1)
    last = torch.where(there, steps, -1).amax(1)
    return (last - first + 1).clamp(min=1)


def _shown(image: Tensor, caption: str) -> str:
    return (
        f"<figure><img class='pixels' alt='{caption}' src='{_png(picture(image))}'><figcaption>{caption}</figcaption>"
        "</figure>"
    )


def _png(pixels: NDArray[np.float32]) -> str:
    """`[H, W]` or `[H, W, 3]` in 0..1 as a data URL."""
    file = io.BytesIO()
    Image.fromarray((255 * pixels.clip(0, 1) + 0.5).astype(np.uint8)).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
