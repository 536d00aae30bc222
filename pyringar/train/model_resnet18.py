"""Define ResNet-18 for small images, with the structure and the names of the book.

The first convolution is 3 x 3 without stride, and no pooling follows it, because images have only
28 x 28 pixels. 20 convolutions with biases, 17 batch norms, 76 parameter tensors; 11,175,818
parameters at full width.
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
_STAGES = (1, 2, 4, 8)  # channels of each stage, in multiples of the width


class NormedConv(nn.Conv2d):
    """A convolution before a batch norm; ``skips_bias`` omits its bias in training."""

    skips_bias = False

    def forward(self, X: Tensor) -> Tensor:
        bias = None if self.skips_bias and self.training else self.bias
        return F.conv2d(X, self.weight, bias, self.stride, self.padding)


class Residual(nn.Module):
    """A residual block of two convolutions; a third adapts the input if shapes differ."""

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
        """Map ``(n, in, h, w)`` to ``(n, out, h / strides, w / strides)``."""
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
    """Build ResNet-18 on the CPU, with initial weights from a seed.

    Args:
        num_classes: Number of scores per image.
        in_channels: Channels of the images; 1 for grey images.
        width: Channels of the first stage; each later stage has twice as many as the one before.
            64 in the book, 8 for tests (176,634 parameters).
        init: ``"default"`` (torch's initial weights) or ``"book"``; see `initialise`.
        seed: Seed of the initial weights. torch's global generators do not change.
        dtype: Dtype of parameters and running statistics. A seed gives the same numbers in all
            dtypes, up to rounding.

    Returns:
        A module that maps images ``(n, in_channels, h, w)`` to scores ``(n, num_classes)``. Its
        ``state_dict`` has the names of the book: ``0.weight``, ``1.running_mean``,
        ``resnet_block2.0.conv3.weight``, ``fc.1.bias``.

    Raises:
        ArgumentError: A size is not positive, or ``init`` is unknown.
    """
    check_count("num_classes", num_classes, 1)
    check_count("in_channels", in_channels, 1)
    check_count("width", width, 1)
    with torch.random.fork_rng(devices=[]):  # keep the global generators: constructors draw weights
        first = NormedConv(in_channels, width, 3, padding=1)
        net = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU())
        channels = width
        for stage, factor in enumerate(_STAGES, 1):
            before, channels = channels, factor * width
            strides = 1 if stage == 1 else 2  # stages 2 to 4 halve height and width
            blocks = Residual(before, channels, strides), Residual(channels, channels)
            net.add_module(f"resnet_block{stage}", nn.Sequential(*blocks))
        net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
        net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(channels, num_classes)))
    initialise(net, init, seed)
    return net.to(dtype)


def fit_tensor_cores(net: nn.Module) -> None:
    """Prepare a ResNet-18 for grey images for tensor cores, in place.

    Weights and activations get the channels-last layout. Training omits the biases that batch norms
    cancel, which saves a fifth of a step. Changes results by rounding.
    """
    net.to(memory_format=torch.channels_last)
    for conv in _normed_convs(net):
        conv.skips_bias = True
        conv.bias.requires_grad_(False)
    net.register_forward_pre_hook(_prepare)


def _normed_convs(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, NormedConv)]


def _prepare(net: nn.Module, args: tuple[Tensor]) -> Tensor:
    """Add the skipped biases to the running means, and give images channels-last strides.

    Images with one channel have the same memory order in both layouts; only the strides differ.
    """
    if net.training:
        norms: list[Any] = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        means, biases = [n.running_mean for n in norms], [c.bias for c in _normed_convs(net)]
        # Batch norm then multiplies means by 1 - momentum; the net change is momentum * bias.
        momentum = norms[0].momentum
        with torch.no_grad():
            torch._foreach_add_(means, biases, alpha=momentum / (1 - momentum))
    (X,) = args
    n, _, height, width = X.shape
    return X.reshape(n, height, width, 1).permute(0, 3, 1, 2)


def initialise(net: nn.Module, init: str = "default", seed: int = 0) -> None:
    """Reset all parameters and running statistics to initial values from a seed.

    Args:
        net: Module to change in place. On the CPU the values do not depend on the device.
        init: ``"default"``: torch's initial weights. ``"book"``: weights of convolutions and fully
            connected layers are normal with a standard deviation of 0.01.
        seed: Seed of the values. torch's global generators do not change.

    Raises:
        ArgumentError: ``init`` is unknown, or a layer has parameters but no
            ``reset_parameters``.
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
                    "cannot be reset: expected a method reset_parameters"
                )
            reset()
            if init == "book" and isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(layer.weight, std=_BOOK_STD)
