"""Define LeNet from scratch, as in the book: a list of eight tensors and a function.

Two convolutions and two fully connected layers with ReLU and average pooling; 129,068 parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError
from pyringar.train.config import INITS

# W3 and W4, the fully connected layers, have shape (inputs, outputs).
PARAM_NAMES = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")
_SHAPES = ((20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,))
_BOOK_STD = 0.01
BOOK_PLATEAU_STEPS = 350  # steps at chance: measured 320 to 400 at learning rate 0.2


def lenet_params(
    init: str = "he",
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return initial parameters of LeNet: normal weights, zero biases.

    Args:
        init: Standard deviation of the weights. ``"he"``: ``sqrt(2 / inputs)``, which learns from
            the first step. ``"book"``: 0.01 for all, with which the accuracy stays at chance for
            the first 350 steps or so: 1.5 epochs of 60,000 images at batch size 256.
        generator: Random generator on the CPU. Default: torch's global generator.
        dtype: Dtype of the result. A seed gives the same numbers in all dtypes, up to rounding.

    Returns:
        ``[W1, b1, W2, b2, W3, b3, W4, b4]`` on the CPU, without ``requires_grad``.
        `pyringar.parallel.shards.get_params` makes replicas with gradients.

    Raises:
        ArgumentError: ``init`` is unknown.
    """
    check_choice("init", init, INITS["lenet"])
    params = []
    for shape in _SHAPES:
        if len(shape) == 1:
            params.append(torch.zeros(shape, dtype=dtype))
            continue
        inputs = shape[0] if len(shape) == 2 else math.prod(shape[1:])
        std = _BOOK_STD if init == "book" else math.sqrt(2 / inputs)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        params.append((weights * std).to(dtype))
    return params


def lenet(X: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Compute scores: images ``(n, 1, 28, 28)`` to ``(n, 10)``, one per class, no softmax.

    Args:
        X: Images; ``n`` may be 0.
        params: The eight tensors of `lenet_params`, with the dtype and device of the images.
    """
    if len(params) != len(_SHAPES):
        raise ArgumentError(f"params has {len(params)} tensors, expected {len(_SHAPES)}")
    if X.ndim != 4 or X.shape[1:] != (1, 28, 28):
        raise ArgumentError(
            f"X has shape {tuple(X.shape)}, expected (n, 1, 28, 28): the first fully connected "
            "layer takes 800 = 50 * 4 * 4 inputs, which 28 x 28 pixels give"
        )
    if X.dtype != params[0].dtype:
        raise ArgumentError(f"X is {X.dtype}, but params[0] is {params[0].dtype}")
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)  # (n, 20, 13, 13)
    h = F.avg_pool2d(F.relu(F.conv2d(h, W2, b2)), 2)  # (n, 50, 4, 4), drops a row and a column
    h = F.relu(h.flatten(1) @ W3 + b3)  # (n, 128)
    return h @ W4 + b4


class LeNet(nn.Module):
    """LeNet as a module, which loads the file of ``pyringar train lenet --out FILE``.

    For example:

        net = LeNet()
        net.load_state_dict(torch.load(FILE, weights_only=True))

    See `lenet_params` for the arguments.
    """

    def __init__(
        self,
        init: str = "he",
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        initial = lenet_params(init, generator=generator, dtype=dtype)
        for name, param in zip(PARAM_NAMES, initial, strict=True):
            self.register_parameter(name, nn.Parameter(param))

    def forward(self, X: Tensor) -> Tensor:
        """Score images. See `lenet`."""
        return lenet(X, [getattr(self, name) for name in PARAM_NAMES])
