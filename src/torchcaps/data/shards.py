"""Sets larger than a disk: tar shards in WebDataset's form, local or remote, read as they come.

Shuffled in two steps: the order of the shards is a function of (seed, epoch), and each stream of them goes through a
buffer from which it is drawn by (seed, epoch, stream). Batch q of an epoch, counted over all processes, comes from
stream q mod `streams`. So the batches are the same for any number of workers, and after a restart a stream is run
forward, without decoding, to where it was.
"""

import io
import itertools
import random
import tarfile
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .module import ImageData, Parts
from .parts import Items, Part
from .preprocessing import Preprocessing, decode_image, depth, resize, scale
from .random import bits, permutation

__all__ = ["Shards"]


class Shards(ImageData):
    """Images in tar shards, each `name.jpg` with a label `name.cls`.

    An epoch is `train_samples`, less what does not fill a batch in every process. Where streams are of unequal length
    the shorter ones start again, so that an epoch may show some images twice and others not.

    Args:
        train: Shards, as a list or in WebDataset's notation: `train-{000..099}.tar`; a path, a URL, a `pipe:` command.
        train_samples: Images of a training epoch.
        classes: How many, or their names. A label in the shards is a number from 0, or a name.
        image_size: All images are brought to this size, one number or (height, width).
        channels: 1 reads all images as grey, 3 as colours.
        val: Shards for validation, with val_samples.
        val_samples: How many images they hold.
        test: Shards for test, with test_samples.
        test_samples: How many images they hold.
        image_key: The ending of an image's name, or several: "jpg;png".
        label_key: The ending of a label's name.
        separator: What stands between the labels of an image that may have several.
        shuffle_buffer: So many images, still encoded, are held to be drawn from; each stream has its share.
        streams: Streams to share out the shards among: best a multiple of processes times `num_workers`, as each worker
            reads the streams of its batches.
        **common: The settings of `ImageData`.
    """

    def __init__(
        self,
        train: str | list[str],
        train_samples: int,
        classes: int | list[str],
        image_size: int | tuple[int, int],
        channels: int = 3,
        val: str | list[str] | None = None,
        val_samples: int = 0,
        test: str | list[str] | None = None,
        test_samples: int = 0,
        image_key: str = "jpg;jpeg;png;webp",
        label_key: str = "cls",
        separator: str | None = None,
        shuffle_buffer: int = 2000,
        streams: int = 8,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if self.normalize == "train":
            raise ValueError('Shards: normalize="train" would read all of them: give the means and deviations')
        if shuffle_buffer < 1 or streams < 1:
            raise ValueError(f"Shards: shuffle_buffer={shuffle_buffer} and streams={streams} are 1 or more")
        for name, urls, samples in (
            ("train", train, train_samples),
            ("val", val, val_samples),
            ("test", test, test_samples),
        ):
            if urls is not None and samples < 1:
                raise ValueError(f"Shards: {name}_samples={samples}: say how many images {name} holds")
        self.drop_last, self._shuffle = True, False  # the streams are shuffled, not the numbers of their images
        self._sources = (train, train_samples), (val, val_samples), (test, test_samples)
        size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
        names = [str(k) for k in range(classes)] if isinstance(classes, int) else list(classes)
        settings = Preprocessing("image", channels, size, 0.0, 255.0)
        self._decode = Decode(settings, names, image_key.split(";"), label_key, separator)
        self.shuffle_buffer, self.streams = shuffle_buffer, streams

    def _parts(self) -> Parts:
        from webdataset.shardlists import expand_urls

        parts: list[Part | None] = []
        for urls, samples in self._sources:
            n, given = min(samples, self.limit or samples), [urls] if isinstance(urls, str) else urls or []
            found = [url for each in given for url in expand_urls(each)]
            streams = Streams(self.seed, self.batch_size, min(self.streams, len(found)), self.shuffle_buffer)
            parts.append(StreamPart(found, n, self._decode, None if parts else streams) if found else None)
        if parts[0] is None:
            raise ValueError("Shards: train names no shards")
        decode = self._decode
        return Parts(parts[0], parts[1], parts[2], decode.names, decode.separator is not None, decode.settings)


class Decode(NamedTuple):
    """From what a shard holds to an image in 0..1 and its label."""

    settings: Preprocessing
    names: list[str]
    image_keys: list[str]
    label_key: str
    separator: str | None

    def __call__(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """`[C, H, W]`, and a class or `[K]`. ValueErrors name the shard and the sample."""
        where = f"{sample['__url__']}: {sample['__key__']}"
        key = next((key for key in self.image_keys if key in sample), None)
        if key is None or self.label_key not in sample:
            raise ValueError(
                f"{where} has {', '.join(k for k in sample if k[:2] != '__')}, but an image is one of "
                f"{', '.join(self.image_keys)} and a label {self.label_key}: give image_key= and label_key="
            )
        raw = decode_image(io.BytesIO(sample[key]), f"{where}.{key}", self.settings.channels)
        x = scale(raw if raw.shape[1:] == self.settings.size else resize(raw, self.settings.size), 0.0, depth(raw))
        text = sample[self.label_key].decode().strip()
        if self.separator is None:
            return x, torch.tensor(self._number(text, where))
        y = torch.zeros(len(self.names))
        y[[self._number(label.strip(), where) for label in text.split(self.separator) if label.strip()]] = 1
        return x, y

    def _number(self, label: str, where: str) -> int:
        if label in self.names:
            return self.names.index(label)
        if label.isdecimal() and int(label) < len(self.names):
            return int(label)
        raise ValueError(
            f"{where}: label {label!r} is out of range: a number from 0 to {len(self.names) - 1}, or one of "
            f"{', '.join(self.names)}"
        )


class Streams(NamedTuple):
    """How training shards are shuffled."""

    seed: int
    batch_size: int
    streams: int
    buffer: int


class StreamPart(Part):
    """The images of shards; of training shards in the order of `streams`, of others (None) as they stand."""

    def __init__(self, urls: list[str], samples: int, decode: Decode, streams: Streams | None) -> None:
        self.urls, self.samples, self.decode, self.streams = urls, samples, decode, streams
        self._open: dict[int, tuple[int, int, Iterator[dict[str, Any]]]] = {}

    def __len__(self) -> int:
        return self.samples

    def take(self, epoch: int, items: Items) -> tuple[Tensor, ...]:
        if self.streams is None:
            stream, places = 0, items
        else:  # the items of one batch
            q = int(items[0]) // self.streams.batch_size
            stream, places = q % self.streams.streams, items - items[0] + q // self.streams.streams * len(items)
        decoded = [self.decode(sample) for sample in self._samples(epoch, stream, places)]
        return torch.stack([x for x, _ in decoded]), torch.stack([y for _, y in decoded])

    def _samples(self, epoch: int, stream: int, places: Items) -> Iterator[dict[str, Any]]:
        """What stands at rising `places` of a stream: goes on where it was left, or else starts it again."""
        at, place, samples = self._open.pop(stream, (epoch, 0, None))
        if samples is None or at != epoch or place > places[0]:
            place, samples = 0, self._run(epoch, stream)
        for wanted in places.tolist():
            sample = next(itertools.islice(samples, wanted - place, None), None)
            if sample is None:
                raise ValueError(
                    f"{self.urls[0]} to {self.urls[-1]} end before image {wanted}, but are said to hold "
                    f"{self.samples}: give the right number"
                )
            place = wanted + 1
            yield sample
        self._open[stream] = epoch, place, samples

    def _run(self, epoch: int, stream: int) -> Iterator[dict[str, Any]]:
        if self.streams is None:
            return _read(self.urls)
        seed, _, streams, buffer = self.streams
        mine = [self.urls[i] for i in permutation(len(self.urls), seed, "shards", epoch)[stream::streams]]
        rng = random.Random(int(bits(seed, "shard buffer", epoch, np.array([stream]))[0, 0]))
        return _shuffled(mine, -(-buffer // streams), rng)


def _shuffled(urls: list[str], buffer: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """The samples of shards over and over, all of them before any comes again."""
    from webdataset import shuffle

    while True:
        empty = True
        for sample in shuffle(buffer, initial=buffer, rng=rng)(_read(urls)):
            empty = False
            yield sample
        if empty:
            raise ValueError(f"{', '.join(urls)}: no samples")


def _read(urls: list[str]) -> Iterator[dict[str, Any]]:
    from webdataset import gopen
    from webdataset.tariterators import group_by_keys, tar_file_expander

    for url in urls:
        try:
            with closing(gopen(url)) as file:
                yield from group_by_keys(tar_file_expander([{"url": url, "stream": file}]))
        except (OSError, tarfile.TarError, EOFError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error.args[0]
            raise ValueError(f"shard {url} cannot be read ({why}): fetch it again, or take it out") from error
