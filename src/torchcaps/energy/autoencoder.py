"""A convolutional autoencoder whose way back uses the filters of the way in.

Hauser 2019, "Training products of expert capsules with mixing by dynamic routing" (arXiv 1907.11643), the network
around the capsules, for an image of 28x28:

    encode    convolution 9x9, stride 1, leaky ReLU; convolution 9x9, stride 2, leaky ReLU      Cx28x28 -> 128x6x6
    decode    the same filters transposed, last first; leaky ReLU, then a sigmoid               128x6x6 -> Cx28x28

1,337,728 numbers in the encoder and 129 biases of the way back, for one channel. The filters are tied: the way back has
biases of its own and nothing else.

The source gives neither strides (28 -> 20 -> 6 leaves only 1 then 2), nor the slope of the leaky ReLU (0.2 here), nor
the rate of dropout and its place (0.2 on the code), nor the loss (squared error here; nothing hangs on it).
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.layers._layer import positive
from torchcaps.types import Capsules, whole

__all__ = ["ConvAutoencoder", "caps_from_code", "code_from_caps", "train_autoencoder"]

STRIDES = (1, 2)


class ConvAutoencoder(nn.Module):
    """Images `[N, C, H, W]` in 0..1 to a code `[N, channels, h, w]` and back (the source stands on top of this file).

    in_chans, image_size  of the images: `image_size` is H = W, or `(H, W)`.
    channels              of both convolutions.
    kernel_size           of both.
    slope                 of the leaky ReLU below 0.
    dropout               rate at which numbers of the code are dropped while training.

    `model(x)` is the image again, through the code; `encode` and `decode` are its halves, and `code_shape` is
    `(channels, h, w)`. `encode` has no dropout: it is part of `forward` alone.
    Raises ValueError for images of another size, or too small for the kernels.

    >>> model = ConvAutoencoder(channels=4)
    >>> model.code_shape, model(torch.rand(2, 1, 28, 28)).shape
    ((4, 6, 6), torch.Size([2, 1, 28, 28]))
    """

    def __init__(
        self,
        in_chans: int = 1,
        image_size: int | Sequence[int] = 28,
        *,
        channels: int = 128,
        kernel_size: int = 9,
        slope: float = 0.2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.in_chans = positive(name, "in_chans", in_chans)
        self.channels = positive(name, "channels", channels)
        kernel = positive(name, "kernel_size", kernel_size)
        one = whole(image_size)
        sizes = (one, one) if one is not None else tuple(image_size)  # type: ignore[arg-type]
        if len(sizes) != 2:
            raise ValueError(f"{name}: image_size must be one number, or two, (height, width), not {image_size!r}")
        self.image_size = (positive(name, "image_size", sizes[0]), positive(name, "image_size", sizes[1]))
        if not 0 <= dropout < 1:
            raise ValueError(f"{name}: dropout={dropout} is the share of the code to drop: 0 or more, and below 1")
        self.slope, self.dropout = slope, dropout
        self.sizes = [self.image_size]  # of the maps, from the image to the code
        for stride in STRIDES:
            size = self.sizes[-1]
            if min(size) < kernel:
                least = _least(kernel)
                raise ValueError(
                    f"{name}: images of {self.image_size[0]} x {self.image_size[1]} are too small for two kernels of "
                    f"{kernel} x {kernel}: give images of {least} x {least} or more, or a smaller kernel_size"
                )
            self.sizes.append(((size[0] - kernel) // stride + 1, (size[1] - kernel) // stride + 1))
        # filters [out, in, kernel, kernel], nearest the image first
        self.filters = nn.ParameterList(
            torch.empty(self.channels, chans, kernel, kernel) for chans in (self.in_chans, self.channels)
        )
        self.biases = nn.ParameterList(torch.zeros(self.channels) for _ in STRIDES)
        self.biases_back = nn.ParameterList(torch.zeros(chans) for chans in (self.in_chans, self.channels))
        for weight in self.filters:
            nn.init.xavier_uniform_(weight, nn.init.calculate_gain("leaky_relu", slope))

    @property
    def code_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a code."""
        return (self.channels, *self.sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, C, H, W]` through the code, with dropout while training, and back."""
        return self.decode(F.dropout(self.encode(x), self.dropout, self.training))

    def encode(self, x: Tensor) -> Tensor:
        """Codes `[N, channels, h, w]` of images `[N, C, H, W]`."""
        wanted = (self.in_chans, *self.image_size)
        if x.dim() != 4 or tuple(x.shape[1:]) != wanted or not x.is_floating_point():
            raise ValueError(
                f"ConvAutoencoder was built for floating-point images {['N', *wanted]}, not {list(x.shape)} of "
                f"{x.dtype}: give in_chans and image_size as the images have them, and x / 255 for bytes"
            )
        for weight, bias, stride in zip(self.filters, self.biases, STRIDES, strict=True):
            x = F.leaky_relu(F.conv2d(x, weight, bias, stride), self.slope)
        return x

    def decode(self, code: Tensor) -> Tensor:
        """Images `[N, C, H, W]` in 0..1 of codes `[N, channels, h, w]`."""
        if code.dim() != 4 or tuple(code.shape[1:]) != self.code_shape:
            raise ValueError(f"a code of this autoencoder is {['N', *self.code_shape]}, not {list(code.shape)}")
        x = self._back(code, 1)
        return self._back(F.leaky_relu(x, self.slope), 0).sigmoid()

    def _back(self, x: Tensor, layer: int) -> Tensor:
        """Through a layer's filters from its output to its input, whose size the stride may have cut short."""
        weight, stride = self.filters[layer], STRIDES[layer]
        short = [
            size - ((n - 1) * stride + weight.shape[-1])
            for size, n in zip(self.sizes[layer], x.shape[-2:], strict=True)
        ]
        return F.conv_transpose2d(x, weight, self.biases_back[layer], stride, output_padding=short)


def caps_from_code(code: Tensor, pose: int = 8) -> Capsules:
    """A code `[N, channels, h, w]` as capsules, not yet squashed: poses `[N, h * w * channels / pose, 1, pose]`.

    A capsule is `pose` neighbouring channels of one place; the places come first, row after row, as in the source's
    layout. `torchcaps.squash` takes the poses into the unit ball. Raises ValueError where channels do not divide.
    """
    if code.dim() != 4 or code.shape[1] % pose:
        raise ValueError(
            f"capsules of {pose} numbers are cut from codes [N, channels, h, w] whose channels {pose} divides, "
            f"not from {list(code.shape)}"
        )
    return Capsules(code.permute(0, 2, 3, 1).reshape(len(code), -1, 1, pose))


def code_from_caps(poses: Tensor, code_shape: Sequence[int]) -> Tensor:
    """The inverse of `caps_from_code`: poses `[N, I, 1, P]` as codes `[N, channels, h, w]` of this `code_shape`."""
    channels, height, width = code_shape
    if poses.dim() != 4 or math.prod(poses.shape[1:]) != channels * height * width:
        raise ValueError(f"poses {list(poses.shape)} hold no code {['N', *code_shape]}")
    return poses.reshape(len(poses), height, width, channels).permute(0, 3, 1, 2)


def train_autoencoder(
    model: ConvAutoencoder,
    images: Tensor,
    *,
    epochs: int = 2,
    batch_size: int = 64,
    rate: float = 2e-3,
    precision: torch.dtype = torch.float32,
    seed: int = 0,
    after_epoch: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Adam on the squared error of `images` `[N, C, H, W]` in 0..1; the mean loss of every epoch.

    rate         the highest of a one-cycle schedule over all epochs.
    precision    torch.bfloat16 calculates the convolutions in it (autocast): on processors that have it, twice as fast.
    seed         of the batches' order; the initial weights and dropout are torch's own random numbers.
    after_epoch  told the epoch's number, from 0, and its loss.

    A last batch that is smaller is left out, unless it is the only one.
    """
    batch_size = min(batch_size, len(images))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    steps = epochs * (len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    random = torch.Generator().manual_seed(seed)
    model.train()
    losses = []
    for epoch in range(epochs):
        total, batches = 0.0, torch.randperm(len(images), generator=random).split(batch_size)
        for batch in batches[: len(images) // batch_size]:
            x = images[batch].contiguous(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, precision, enabled=precision != torch.float32):
                again = model(x)
            loss = F.mse_loss(again.float(), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        losses.append(total / (len(images) // batch_size))
        if after_epoch is not None:
            after_epoch(epoch, losses[-1])
    model.eval()
    return losses


def _least(kernel: int) -> int:
    """The smallest image that leaves one place."""
    size = 1
    for stride in reversed(STRIDES):
        size = (size - 1) * stride + kernel
    return size
