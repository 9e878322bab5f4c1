"""What a trained model learned, as the sections of one page: numbers, examples, capsules, and whether to believe them.

    answers(model, batches, classes)     what the model says of test images
    sections(subject)                    HTML in the words of the library's reports; who asks puts a page around it

Figures are PNGs inside the page: nothing is fetched.
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, Protocol

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.explain import pictures
from torchcaps.explain.attribution import saliency
from torchcaps.explain.coupling import (
    CouplingMaps,
    Fields,
    coupling_maps,
    occlusion,
    parse_tree,
    receptive_fields,
    routing_trace,
    scores_per_round,
)
from torchcaps.explain.poses import (
    DecoderCheck,
    class_poses,
    decoder_check,
    draws,
    pose_map,
    pose_sweep,
    principal_directions,
    reconstructions,
)
from torchcaps.explain.watching import evaluating

__all__ = ["Answers", "Sample", "Subject", "answers", "first_of_each", "sections"]

KEEP = 1000
"""Test images that are kept for pictures."""

MOST_CLASSES = 20
"""Of a confusion matrix that is shown whole."""

SILENT = 0.01
"""A presence that counts as none."""

MOST_GROUPS = 400
"""Places that occlusion tries, a forward pass each; a larger map shows saliency alone."""


class Health(Protocol):
    """The state of a layer, as `training.capsule_health` finds it."""

    @property
    def presence(self) -> Tensor: ...
    @property
    def mean_length(self) -> float: ...
    @property
    def coupling_entropy(self) -> float | None: ...


class Sample(NamedTuple):
    """Images `[N, C, H, W]`, their labels `[N]`, and what the model said `[N]`."""

    images: Tensor
    labels: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class Answers:
    """What a model says of test images.

    confusion  `[K, K]`, how many of the class of the row got the answer of the column.
    kept       the first images.
    wrong      the first that were read wrongly.
    """

    confusion: Tensor
    kept: Sample
    wrong: Sample

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.confusion.trace() / self.confusion.sum())


@dataclass(frozen=True)
class Subject:
    """What a report is about.

    name          of the run.
    class_names   K of them.
    tested        None where there are no test images.
    train_images  `[N, C, H, W]`, which the decoder is measured against; None leaves that out.
    given         images of the reader's own, by name, `[C, H, W]`.
    health        of each layer, by name.
    places        how the children of the class capsules lie, where they are given as a list.
    examples      right and wrong ones that are shown, so many of each.
    """

    name: str
    model: nn.Module
    class_names: Sequence[str]
    tested: Answers | None
    train_images: Tensor | None
    given: Mapping[str, Tensor]
    health: Mapping[str, Health]
    places: tuple[int, int] | None = None
    examples: int = 3


def answers(model: nn.Module, batches: Iterable[Sequence[Tensor]], classes: int) -> Answers:
    """The model's answers to batches of (images `[N, C, H, W]`, labels `[N]`). ValueError where there are none."""
    confusion = torch.zeros(classes, classes, dtype=torch.long)
    kept: list[Sample] = []
    wrong: list[Sample] = []
    for images, labels, *_ in batches:
        with torch.no_grad(), evaluating(model):
            predicted = model(images).argmax(1)
        confusion += torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)
        sample, missed = Sample(images, labels, predicted), predicted != labels
        if sum(len(s.labels) for s in kept) < KEEP:
            kept.append(sample)
        if sum(len(s.labels) for s in wrong) < KEEP and missed.any():
            wrong.append(_take(sample, missed))
    if not kept:
        raise ValueError("there are no test images to look at")
    first = _take(kept[0], torch.zeros(0, dtype=torch.long))
    return Answers(confusion, _joined([first, *kept]), _joined([first, *wrong]))


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """Indices into labels `[N]`: the first of each class, then the others, `count` of them at most."""
    each = labels.tolist()
    first = list({label: i for i, label in reversed(list(enumerate(each)))}.values())
    first.sort()
    return torch.tensor((first + sorted(set(range(len(each))) - set(first)))[:count], dtype=torch.long)


def sections(subject: Subject) -> str:
    """The body of the page. Raises ValueError where there is nothing to show: neither test images nor given ones."""
    if subject.tested is None and not subject.given:
        raise ValueError("there is nothing to explain: neither test images nor images of your own")
    check = None
    if subject.tested is not None and subject.train_images is not None and draws(subject.model):
        check = decoder_check(subject.model, subject.tested.kept.images, subject.train_images)
    parts = [_head(subject, check)]
    if subject.tested is not None:
        parts.append(_confusion(subject.tested.confusion, subject.class_names))
    parts.append(_examples(subject))
    if subject.tested is not None:
        parts += [_decoder(subject, subject.tested, check), _poses(subject, subject.tested)]
    parts.append(_health(subject))
    return "".join(parts)


def _head(subject: Subject, check: DecoderCheck | None) -> str:
    count = sum(p.numel() for p in subject.model.parameters())
    facts = f"{type(subject.model).__name__}, {count:,} parameters, {len(subject.class_names)} classes."
    said = ""
    if subject.tested is not None:
        total = int(subject.tested.confusion.sum())
        right = int(subject.tested.confusion.trace())
        said = (
            f"{100 * subject.tested.accuracy:.1f} % of {total:,} test images are read right: {total - right} are not."
        )
        if check is not None:
            said += " Its drawings can be believed." if check.believed else " Its drawings are not to be believed."
    verdict = f"<p class='verdict'>{_typeset(said)}</p>" if said else ""
    return (
        f"<header><p class='kicker'>{escape(subject.name)}</p><h1>What did this model learn?</h1>{verdict}"
        f"<p class='note'>{escape(facts)}</p></header>\n"
    )


def _confusion(confusion: Tensor, names: Sequence[str]) -> str:
    off = confusion.clone().fill_diagonal_(0)
    worst = [
        f"{escape(names[k // len(names)])} taken for {escape(names[k % len(names)])} ({n})"
        for n, k in zip(*(x.tolist() for x in off.flatten().topk(min(5, off.numel()))), strict=True)
        if n
    ]
    said = f"Most often: {', '.join(worst)}." if worst else "Nothing is taken for anything else."
    table = ""
    if len(names) <= MOST_CLASSES:
        head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in names)
        rows = "".join(
            f"<tr><th scope='row'>{escape(name)}</th>{''.join(_count(n, i == k) for k, n in enumerate(row))}</tr>"
            for i, (name, row) in enumerate(zip(names, confusion.tolist(), strict=True))
        )
        table = (
            f"<div class='scroll confusion' tabindex='0'><table><thead><tr><td></td>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    return (
        f"<section><h2>Right and wrong</h2><p>Each row is a class, each column what the model said of it. {said}</p>"
        f"{table}</section>\n"
    )


def _count(n: int, diagonal: bool) -> str:
    kind = "none" if n == 0 else "right" if diagonal else "wrong"
    return f"<td class='{kind}'>{n or '·'}</td>"


def _examples(subject: Subject) -> str:
    """A block of pictures for each image: those of the reader, then right and wrong ones of the test images."""
    C, H, W = (next(iter(subject.given.values())) if subject.tested is None else subject.tested.kept.images[0]).shape
    fields = receptive_fields(subject.model, (C, H, W)) if subject.places is None else None
    blocks = [_block(subject, name, image, None, fields) for name, image in subject.given.items()]
    if subject.tested is not None:
        kept, wrong = subject.tested.kept, subject.tested.wrong
        right = _take(kept, kept.labels == kept.predicted)
        right = _take(right, first_of_each(right.labels, subject.examples))
        for sample in (right, _take(wrong, torch.arange(len(wrong.labels))[: subject.examples])):
            for image, label, said in zip(
                sample.images, sample.labels.tolist(), sample.predicted.tolist(), strict=True
            ):
                name = subject.class_names[label]
                title = f"{name}, read right" if label == said else f"{name}, taken for {subject.class_names[said]}"
                blocks.append(_block(subject, title, image, label, fields))
    note = (
        "For each image: the scores after each round of routing, the last of which are the model's answer; where on "
        "the image each class gets its votes from (a capsule's share for the class times how much the capsule is "
        "there); the strongest capsules behind the answer; and what the answer would lose without each place."
    )
    return f"<section><h2>Examples</h2><p>{note}</p></section>\n{''.join(blocks)}"


def _block(subject: Subject, title: str, image: Tensor, label: int | None, fields: Fields | None) -> str:
    model, names, one = subject.model, subject.class_names, image[None]
    scores = scores_per_round(model, one)[:, 0]
    said = int(scores[-1].argmax())
    if len(names) > MOST_CLASSES:
        first = scores[-1].topk(MOST_CLASSES).indices.sort().values
        bars = pictures.draw_scores(scores[:, first], [names[int(k)] for k in first])
    else:
        bars = pictures.draw_scores(scores, names, label)
    found = [_figure(bars, "Scores, round by round", f"scores of {title} after each round of routing")]
    maps = coupling_maps(model, one, places=subject.places)
    if _lie_on_an_image(maps):
        drawn = pictures.draw_coupling(maps, one, names=names, fields=fields)
        found.append(_figure(drawn, "Where the votes come from", f"coupling maps of {title}"))
    tree = parse_tree(model, image, top=4)
    if any(part.parts for part in tree.parts):  # of several layers: fewer branches on each
        tree = parse_tree(model, image, top=2)
    caption = f"Behind “{names[said]}”" + (f": the strongest {tree.covered:.0%}" if tree.covered else "")
    legend = (
        "On a line: the share of its votes that the child gives to this class. In a box: how present the capsule is."
    )
    found.append(_figure(pictures.draw_tree(tree, names), caption, f"parse tree of {title}", legend))
    drawn = pictures.draw_trace(routing_trace(model, one), names=names, parent=said)
    found.append(_figure(drawn, "How routing goes", f"entropy and agreement per round of {title}"))
    if _lie_on_an_image(maps) and subject.places is None and maps.shares[0, 0, 0, 0].numel() <= MOST_GROUPS:
        drawn = pictures.draw_occlusion(occlusion(model, image), image, said, names=names, fields=fields)
        found.append(_figure(drawn, "Without each place", f"occlusion of {title}"))
    drawn = pictures.draw_over_image(
        saliency(model, one)[0], image, f"slope of the score of {pictures.plain(names[said])}"
    )
    found.append(_figure(drawn, "Pixels that matter", f"saliency of {title}"))
    return f"<section><h3>{escape(title)}</h3><div class='grid3'>{''.join(found)}</div></section>\n"


def _decoder(subject: Subject, tested: Answers, check: DecoderCheck | None) -> str:
    if not draws(subject.model):
        note = (
            "The model has no decoder: it does not draw what its capsules hold. One that does: torchcaps fit with "
            "--model.name capsnet --model.reconstruction_weight 0.0005."
        )
        return f"<section><h2>What the decoder shows</h2><p>{note}</p></section>\n"
    kept, wrong = tested.kept, tested.wrong
    few = _joined(
        [_take(wrong, torch.arange(min(4, len(wrong.labels)))), _take(kept, torch.arange(min(6, len(kept.labels))))]
    )
    found = reconstructions(subject.model, few.images, few.labels)
    drawn = pictures.draw_reconstructions(found, subject.class_names)
    told = _figure(drawn, "Images, and below each what its capsule draws", "images and their reconstructions")
    image = kept.images[0]
    sweep = pose_sweep(subject.model, image)
    strongest = sweep.effect.topk(min(8, len(sweep.effect))).indices.sort().values.tolist()
    name = subject.class_names[sweep.capsule]
    told += _figure(
        pictures.draw_sweep(sweep, strongest), f"A {name}: one number of its pose moved", "the effect of pose numbers",
        "The eight numbers that change most, from \N{MINUS SIGN}0.25 to +0.25.",
    )  # fmt: skip
    of_class = kept.images[kept.labels == sweep.capsule]
    if len(of_class) > 1:
        labels = torch.full((len(of_class),), sweep.capsule)
        directions, deviations = principal_directions(class_poses(subject.model, of_class, labels), 4)
        widest = pose_sweep(subject.model, image, sweep.capsule, directions=directions)
        told += _figure(
            pictures.draw_sweep(widest), f"A {name}: along what its poses differ in", "principal directions of poses",
            f"The directions in which poses of this class vary most; standard deviations "
            f"{', '.join(f'{d:.2f}' for d in deviations.tolist())}.",
        )  # fmt: skip
    return f"<section><h2>What the decoder shows</h2>{_verdict(check)}<div class='grid2'>{told}</div></section>\n"


def _verdict(check: DecoderCheck | None) -> str:
    if check is None:
        return "<p>There are no training images here to measure the decoder against: take its drawings with care.</p>"
    numbers = (
        f"Its squared error on test images is {check.decoder:.4f} a pixel; {check.numbers} principal components of the "
        f"training images, as many numbers as a pose has, leave {check.components:.4f}, and the mean image alone "
        f"{check.mean_image:.4f}."
    )
    if check.believed:
        said = f"The decoder draws as well as a linear one or better. {numbers} What it shows is in the pose."
        return f"<p class='verdict good'>{said}</p>"
    said = (
        f"The decoder is too weak to believe. {numbers} The pictures below show what reaches it, and not all that a "
        "pose holds; what they do not show may still be there. Train longer, or with a larger reconstruction_weight (0 "
        "leaves a decoder as it began)."
    )
    return f"<p class='verdict bad'>{said}</p>"


def _poses(subject: Subject, tested: Answers) -> str:
    images, labels = tested.kept.images[:KEEP], tested.kept.labels[:KEEP]
    try:
        poses = torch.cat([class_poses(subject.model, part) for part in images.split(256)])
    except ValueError:
        return ""
    if len(poses) < 3:
        return ""
    flat = _figure(
        pictures.draw_pose_map(pose_map(poses), labels, subject.class_names), "The two widest directions (PCA)",
        "poses on their two principal directions",
    )  # fmt: skip
    near = _figure(
        pictures.draw_pose_map(pose_map(poses, "tsne"), labels, subject.class_names), "Neighbours (t-SNE)",
        "poses laid out by t-SNE", "Who is near whom; distances between groups, and axes, mean nothing.",
    )  # fmt: skip
    note = (
        f"The pose of the answering capsule for each of {len(poses):,} test images, by the class that the image is of."
    )
    return f"<section><h2>Poses</h2><p>{note}</p><div class='grid2'>{flat}{near}</div></section>\n"


def _health(subject: Subject) -> str:
    rows = []
    for name, health in subject.health.items():
        there, entropy = health.presence, health.coupling_entropy
        numbers = [float(there.min()), float(there.max()), health.mean_length, *([] if entropy is None else [entropy])]
        silent = f"{int((there < SILENT).sum())} of {len(there)}"
        cells = "".join(f"<td>{cell}</td>" for cell in (silent, *(f"{n:.2f}" for n in numbers)))
        rows.append(f"<tr><th scope='row'>{escape(name)}</th>{cells}</tr>")
    heads = "".join(f"<th scope='col'>{head}</th>" for head in ("silent", "least", "most", "length", "entropy"))
    note = (
        f"Of each layer's capsules over the images looked at: how many never come above {SILENT}, the largest presence "
        "of the quietest and of the loudest one, the mean length of poses, and how even the shares of the last round "
        "are: 1 where routing decides nothing, 0 where each child has chosen one parent."
    )
    return (
        f"<section><h2>Capsules</h2><p>{note}</p><div class='scroll' tabindex='0'><table><thead><tr><td></td>{heads}"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>\n"
    )


def _figure(figure: Figure, caption: str, about: str, note: str = "") -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, bbox_inches="tight", pad_inches=0.05)
    data = base64.b64encode(file.getvalue()).decode()
    width = round(96 / 130 * int.from_bytes(file.getvalue()[16:20], "big"))  # of the PNG, at 96 dots an inch
    below = f"<p class='note'>{escape(note)}</p>" if note else ""
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption><img width='{width}' alt='{escape(about, quote=True)}' "
        f"src='data:image/png;base64,{data}'>{below}</figure>"
    )


def _lie_on_an_image(maps: CouplingMaps) -> bool:
    return maps.shares.dim() == 6


def _take(sample: Sample, chosen: Tensor) -> Sample:
    return Sample(*(part[chosen] for part in sample))


def _joined(samples: Sequence[Sample]) -> Sample:
    return Sample(*(torch.cat(parts) for parts in zip(*samples, strict=True)))


def _typeset(said: str) -> str:
    return escape(said).replace(" %", "\N{NO-BREAK SPACE}%")
