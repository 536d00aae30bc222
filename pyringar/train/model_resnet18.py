"""ResNet-18 for small images, as the book has it: its structure, its names, its initial weights.

The first convolution is 3 x 3 without stride and no pooling follows it, because 28 x 28 pixels are
few. 20 convolutions (with biases), 17 batch norms, 76 tensors; 11,175,818 numbers at full width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pyringar.choices import check_choice, check_count
from pyringar.errors import ArgumentError
from pyringar.train.config import INITS

_BOOK_STD = 0.01
_STAGES = (1, 2, 4, 8)  # channels of each, in units of the width


class NormedConv(nn.Conv2d):
    """A convolution before a batch norm; ``skips_bias`` leaves its bias out in training."""

    skips_bias = False

    def forward(self, X: Tensor) -> Tensor:
        bias = None if self.skips_bias and self.training else self.bias
        return F.conv2d(X, self.weight, bias, self.stride, self.padding)


class Residual(nn.Module):
    """Two convolutions whose result is added to the input, fitted by a third if shapes differ."""

    def __init__(self, in_channels: int, out_channels: int, strides: int = 1) -> None:
        super().__init__()
        self.conv1 = NormedConv(in_channels, out_channels, 3, strides, padding=1)
        self.conv2 = NormedConv(out_channels, out_channels, 3, padding=1)
        self.conv3 = None
        if in_channels != out_channels or strides != 1:
            self.conv3 = nn.Conv2d(in_channels, out_channels, 1, strides)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, X: Tensor) -> Tensor:
        """``(n, in, h, w)`` to ``(n, out, h / strides, w / strides)``."""
        Y = F.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        return F.relu(Y + (X if self.conv3 is None else self.conv3(X)))


def resnet18(
    num_classes: int = 10,
    in_channels: int = 1,
    *,
    width: int = 64,
    init: str = "default",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build ResNet-18 on the CPU, with the initial weights of a seed.

    Args:
        num_classes: Scores per image.
        in_channels: 1 for grey images.
        width: Channels of the first stage, which double in each of the other three: 64 in the
            book, 8 for tests (176,634 numbers).
        init: ``"default"``, torch's own, or ``"book"``; see `initialise`.
        seed: Of the initial weights. torch's global generators are left alone.
        dtype: Of parameters and running statistics. One seed gives the same numbers in all, up to
            rounding.

    Returns:
        A module that scores images: ``(n, in_channels, h, w)`` to ``(n, num_classes)``. Its
        ``state_dict`` has the book's names: ``0.weight``, ``1.running_mean``,
        ``resnet_block2.0.conv3.weight``, ``fc.1.bias``.

    Raises:
        ArgumentError: A size is not positive, or ``init`` is unknown.
    """
    check_count("num_classes", num_classes, 1)
    check_count("in_channels", in_channels, 1)
    check_count("width", width, 1)
    with torch.random.fork_rng(devices=[]):  # modules draw weights as they are made
        first = NormedConv(in_channels, width, 3, padding=1)
        net = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU())
        channels = width
        for stage, factor in enumerate(_STAGES, 1):
            before, channels = channels, factor * width
            strides = 1 if stage == 1 else 2  # all others halve height and width
            blocks = Residual(before, channels, strides), Residual(channels, channels)
            net.add_module(f"resnet_block{stage}", nn.Sequential(*blocks))
        net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
        net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(channels, num_classes)))
    initialise(net, init, seed)
    return net.to(dtype)


def fit_tensor_cores(net: nn.Module) -> None:
    """Prepare a ResNet-18 for grey images for tensor cores, in place.

    Weights and activations get their channels last. Training leaves out the biases that batch norms
    subtract again, which take a fifth of a step. Changes results by rounding.
    """
    net.to(memory_format=torch.channels_last)
    for conv in _normed_convs(net):
        conv.skips_bias = True
        conv.bias.requires_grad_(False)
    net.register_forward_pre_hook(_prepare)


def _normed_convs(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, NormedConv)]


def _prepare(net: nn.Module, args: tuple[Tensor]) -> Tensor:
    """Add the skipped biases to the running means; view images with their channel last.

    One channel lies the same first or last, and only strides tell torch which is meant.
    """
    if net.training:
        norms: list[Any] = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        means, biases = [n.running_mean for n in norms], [c.bias for c in _normed_convs(net)]
        share = norms[0].momentum  # of the new value; the old one is multiplied by the rest
        with torch.no_grad():
            torch._foreach_add_(means, biases, alpha=share / (1 - share))
    (X,) = args
    n, _, height, width = X.shape
    return X.reshape(n, height, width, 1).permute(0, 3, 1, 2)


def initialise(net: nn.Module, init: str = "default", seed: int = 0) -> None:
    """Start again from the numbers of a seed: all of them, running statistics included.

    Args:
        net: On the CPU, for numbers that do not depend on the device; changed in place.
        init: ``"default"``: torch's own. ``"book"``: the weights of convolutions and fully
            connected layers normal with a standard deviation of 0.01 instead.
        seed: Where the numbers come from. torch's global generators are left alone.

    Raises:
        ArgumentError: Unknown ``init``, or a layer with parameters of its own that cannot start
            again (it has no ``reset_parameters``).
    """
    check_choice("init", init, INITS["resnet18"])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for name, layer in net.named_modules():
            if not (layer._parameters or layer._buffers):
                continue
            reset = getattr(layer, "reset_parameters", None)
            if reset is None:
                raise ArgumentError(
                    f"net has the layer '{name}', a {type(layer).__name__}, whose parameters "
                    "cannot start again: it has no reset_parameters"
                )
            reset()
            if init == "book" and isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(layer.weight, std=_BOOK_STD)
