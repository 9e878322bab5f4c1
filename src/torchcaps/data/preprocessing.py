"""How raw input becomes a tensor: written down as plain JSON by a set, done again from a checkpoint by anybody.

file, picture or array  ->  channels  ->  size  ->  (raw - low) / (high - low), so 0 .. 1  ->  central crop
                        ->  (x - mean) / std, where that was asked for
"""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from .augment import centre

__all__ = ["IMAGES", "preprocess"]

IMAGES = (*IMG_EXTENSIONS, ".gif")
"""Endings of image files that folders are searched for."""

Kind = Literal["signal", "image", "volume"]
DIMS: dict[str, int] = {"signal": 1, "image": 2, "volume": 3}
AXES = {"signal": "L", "image": "H, W", "volume": "D, H, W"}
VERSION = 1


class Preprocessing(NamedTuple):
    """The settings behind `preprocess`. `low` and `high` are the raw values that become 0 and 1."""

    kind: Kind
    channels: int
    size: tuple[int, ...]
    low: float
    high: float
    crop: tuple[int, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    any_length: bool = False

    @property
    def window(self) -> tuple[int, ...]:
        """The size that a model sees."""
        return self.size if self.crop is None else self.crop

    def spec(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "version": VERSION, "kind": self.kind, "channels": self.channels, "size": list(self.size),
            "range": [self.low, self.high], "crop": None if self.crop is None else list(self.crop),
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
            "any_length": self.any_length,
        }  # fmt: skip

    def scaled(self, raw: Tensor) -> Tensor:
        """Raw values as float32 in 0..1."""
        return scale(raw, self.low, self.high)

    def finish(self, x: Tensor) -> Tensor:
        """The last step, of a batch `[N, C, *window]` in 0..1."""
        if self.mean is None or self.std is None:
            return x
        shape = (1, -1, *(1,) * (x.dim() - 2))
        return (x - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)


def preprocess(spec: dict[str, Any]) -> Callable[[Any], Tensor]:
    """The function from raw input to `[C, *size]`, from the `preprocessing` of a set.

    It takes the path of an image file, a PIL picture, or an array or tensor in the raw values that the set was made of
    (bytes, for images of bytes): `[H, W]`, `[H, W, C]` or `[C, H, W]`; signals `[L]` or `[C, L]`. Of two readings of an
    array's axes the one with the channels last is taken for NumPy, with the channels first for tensors. Files and
    pictures are scaled by their own depth of 8 or 16 bits.

    Raises ValueError for a spec of another version, and for input of another size (images are resized), other channels,
    or numbers of another scale: see `check_scale`.

    >>> import numpy as np
    >>> to_tensor = preprocess({"version": 1, "kind": "image", "channels": 1, "size": [8, 8], "range": [0, 255],
    ...                         "crop": None, "mean": None, "std": None, "any_length": False})
    >>> to_tensor(np.full((16, 16), 255, np.uint8)).mean()
    tensor(1.)
    """
    if spec.get("version") != VERSION:
        raise ValueError(
            f"preprocessing of version {spec.get('version')!r}: this torchcaps reads version {VERSION}; "
            "take the torchcaps that wrote it"
        )
    low, high = spec["range"]
    crop, mean, std = (None if spec[key] is None else tuple(spec[key]) for key in ("crop", "mean", "std"))
    size, any_length = tuple(spec["size"]), spec["any_length"]
    return _Preprocess(Preprocessing(spec["kind"], spec["channels"], size, low, high, crop, mean, std, any_length))


class _Preprocess:
    """What `preprocess` returns: unlike a function inside it, it can be sent to another process."""

    def __init__(self, settings: Preprocessing) -> None:
        self.settings = settings

    def __call__(self, raw: Any) -> Tensor:
        s = self.settings
        if isinstance(raw, str | PathLike | Image.Image):
            if s.kind != "image":
                raise ValueError(f"preprocess: the model was made for a {s.kind}, not for pictures")
            x = _picture(raw, s.channels) if isinstance(raw, Image.Image) else read_image(Path(raw), s.channels)
            low, high = 0.0, depth(x)
        else:
            x, low, high = self._array(raw), s.low, s.high
        if x.shape[1:] != s.size and not s.any_length:
            if s.kind != "image":
                raise ValueError(
                    f"preprocess: a {s.kind} of {list(x.shape[1:])}, but the model was made for {list(s.size)}: "
                    "cut it, or fill it up"
                )
            x = resize(x, s.size)
        x = scale(x, low, high)
        x = x if s.crop is None else centre(x, s.crop)
        return s.finish(x[None])[0]

    def _array(self, raw: Any) -> Tensor:
        s, dims = self.settings, DIMS[self.settings.kind]
        x = _numbers(raw, "preprocess: it")
        if not x.isfinite().all():
            raise ValueError("preprocess: it holds NaN or infinity")
        first = x.dim() == dims + 1 and x.shape[0] == s.channels
        last = x.dim() == dims + 1 and x.shape[-1] == s.channels
        if x.dim() == dims and s.channels == 1:
            x = x[None]
        elif last and not (first and isinstance(raw, Tensor)):
            x = x.movedim(-1, 0)
        elif not first:
            axes = AXES[s.kind]
            raise ValueError(
                f"preprocess: {list(x.shape)}, but the model was made for {s.channels} channels: give "
                f"[{s.channels}, {axes}]" + (f" or [{axes}]" if s.channels == 1 else "")
            )
        if x.numel():
            check_scale(raw, x, s, "preprocess", "the model was made of")
        return x


def full_scale(raw: Any, x: Tensor) -> float | None:
    """The largest value of bytes and words, `x` being raw as a tensor; other numbers have none."""
    if x.dtype == torch.uint8:
        return 255.0
    return 65535.0 if isinstance(raw, np.ndarray | Tensor) and str(raw.dtype).endswith("uint16") else None


def check_scale(raw: Any, x: Tensor, settings: Preprocessing, name: str, made_of: str) -> None:
    """ValueError where numbers cannot be of the scale that `settings` take for 0..1; `x` is raw as a tensor.

    Of bytes and words nothing lies outside; fractional ones may be beyond by a twentieth, as resizing makes them.
    Numbers from 0 to 1 may be beyond by a half, others by ten times what their smallest and largest are apart: what is
    new may be more than all that was seen, and is seldom so much more.
    """
    low, high, own = settings.low, settings.high, full_scale(raw, x)
    least, top = x.min().item(), x.max().item()
    scales = {255.0: "bytes", 65535.0: "words of 16 bits"}
    wanted = scales.get(high, "numbers") if low == 0 else "numbers"
    held = scales.get(own or 0.0, "numbers")
    said = f"{name}: {held} from {least:g} to {top:g}, but {made_of} {wanted} from {low:g} to {high:g}"
    if wanted != "numbers":
        if own not in (None, high):
            raise ValueError(f"{said}: give them in that type")
        if own is None and 0 < top <= 1 and bool((x != x.round()).any()):
            raise ValueError(f"{said}: give the numbers as they were before division by {high:g}")
        room = high / 20 if x.is_floating_point() else 0.0
    else:
        room = 0.5 if (low, high) == (0, 1) else 10 * (high - low)
    if least < low - room or top > high + room:
        full = own or (255.0 if top <= 255 else 0.0)
        divided = (low, high) == (0, 1) and least >= 0 and full
        raise ValueError(f"{said}: {f'divide by {full:g}' if divided else 'bring them to that scale'}")


def scale(raw: Tensor, low: float, high: float) -> Tensor:
    """float32, `low` becoming 0 and `high` 1."""
    x = raw.to(torch.float32)
    return (x - low).div_(high - low) if low else x / high


def depth(raw: Tensor) -> float:
    """The largest value of a file read by `read_image`."""
    return 65535.0 if raw.is_floating_point() else 255.0


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """Images `[..., H, W]` of another size, bilinear, with smoothing where they shrink."""
    return v2.functional.resize(x, list(size), antialias=True)


def as_tensor(raw: Any, name: str) -> Tensor:
    """Numbers as bytes, where they are bytes, or else as float32; ValueError where they are none, or not finite."""
    tensor = _numbers(raw, name)
    bad = ~(tensor.isfinite().flatten(1).all(1) if tensor.dim() > 1 else torch.atleast_1d(tensor.isfinite()))
    if bad.any():
        i = int(bad.nonzero()[0])
        raise ValueError(f"{name}[{i}] holds NaN or infinity ({int(bad.sum())} of {len(bad)} do): leave these out")
    return tensor


def _numbers(raw: Any, name: str) -> Tensor:
    array = raw.detach().cpu().numpy() if isinstance(raw, Tensor) else np.asarray(raw)
    if array.dtype.kind not in "buif":
        raise ValueError(f"{name} holds {array.dtype}: real numbers are needed")
    if array.dtype == np.uint8:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))


class Header(NamedTuple):
    """What an image file says about itself."""

    channels: int
    deep: bool
    """16 bits each, and not 8."""
    size: tuple[int, int]


def read_header(path: Path) -> Header:
    """Channels, depth and (height, width) of a file, without decoding it."""
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            if picture.getexif().get(_ORIENTATION, 1) >= 5:  # stored on its side
                width, height = height, width
            mode = picture.mode
            if mode == "F":
                raise ValueError(_FRACTIONS)
            return Header(1 if mode in _GREY or mode in _DEEP else 3, mode in _DEEP, (height, width))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(str(path), error) from error


def read_image(path: Path, channels: int) -> Tensor:
    """A file as raw values `[channels, H, W]`, bytes or float32; FileNotFoundError or ValueError that names it."""
    return decode_image(path, str(path), channels)


def decode_image(file: Path | BinaryIO, name: str, channels: int) -> Tensor:
    """`read_image` of a file that is called `name`."""
    if channels not in (1, 3):
        raise ValueError(f"{name}: image files are read with 1 or 3 channels, not {channels}: give arrays instead")
    try:
        with Image.open(file) as picture:
            picture.load()
            return _picture(picture, channels)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(name, error) from error


_ORIENTATION = 0x0112
_GREY = {"1", "L", "LA", "La"}
_DEEP = {"I;16", "I;16L", "I;16B", "I;16N", "I"}
_FRACTIONS = "its pixels are fractions: 8 or 16 bits are read; write it so, or give arrays"


def _picture(picture: Image.Image, channels: int) -> Tensor:
    turned = ImageOps.exif_transpose(picture)
    if turned.mode == "F":
        raise ValueError(_FRACTIONS)
    if turned.mode in _DEEP:
        words = torch.from_numpy(np.asarray(turned).astype(np.float32))
        if words.min() < 0 or words.max() > 65535:
            raise ValueError(f"its pixels go from {words.min():g} to {words.max():g}: 8 or 16 bits are read")
        return words.expand(channels, -1, -1)
    pixels: NDArray[np.uint8] = np.array(turned.convert("L" if channels == 1 else "RGB"))
    return torch.from_numpy(pixels)[None] if channels == 1 else torch.from_numpy(pixels).movedim(-1, 0).contiguous()


def _unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path} does not exist")
    why = "it is no image, or of an unknown kind" if isinstance(error, UnidentifiedImageError) else str(error)
    return ValueError(f"{path} cannot be read as an image ({why}): mend it or take it out")
