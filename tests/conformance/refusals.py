"""Calls that a transport refuses: each raises, names the reason, and changes no tensor."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from oracle import same_bits
from transports import device_of

import pyringar as pr


class Refusal(NamedTuple):
    """A call, a pattern of its error, and a function that makes its argument of a plain tensor."""

    words: str
    call: Callable[[Any, Any], object] = lambda comm, given: comm.all_reduce(given)
    given: Callable[[torch.Tensor], Any] = lambda tensor: tensor


REFUSALS = {
    "dtypes-other": [
        Refusal(r"bool", given=lambda tensor: tensor > 1),
        Refusal(r"int16", given=lambda tensor: tensor.short()),
        Refusal(r"complex64", given=lambda tensor: tensor.to(torch.complex64)),
        Refusal(r"float8", given=lambda tensor: tensor.to(torch.float8_e4m3fn)),
    ],
    "order-rank": [Refusal("order is 'rank'", lambda comm, x: comm.all_reduce(x, order="rank"))],
    "order-exact": [Refusal("order is 'exact'", lambda comm, x: comm.all_reduce(x, order="exact"))],
    "broadcast_coalesced": [
        Refusal("broadcast_coalesced: .* take broadcast", lambda c, x: c.broadcast_coalesced([x]))
    ],
    "reduce": [Refusal("reduce: .* take all_reduce", lambda comm, x: comm.reduce(x, [x]))],
    "reduce_coalesced": [
        Refusal(
            "reduce_coalesced: .* take all_reduce", lambda comm, x: comm.reduce_coalesced([x], [x])
        )
    ],
    "barrier": [Refusal("barrier: .* it is not needed", lambda comm, _: comm.barrier())],
    "bind": [
        Refusal("bind: .* take all_reduce", lambda comm, x: comm.bind(x)),
        Refusal("bind_coalesced: .* take all_reduce", lambda comm, x: comm.bind_coalesced([x])),
    ],
    "ring": [
        Refusal("algorithm is 'ring'", lambda comm, x: comm.all_reduce(x, algorithm="ring")),
    ],
    "arrays": [Refusal(r"expected a dense tensor", given=lambda tensor: tensor.numpy())],
    "overlap": [
        Refusal(r"overlaps itself|expanded", given=lambda tensor: tensor[:1].expand(4, 3)),
    ],
    "requires-grad": [
        Refusal("requires grad", given=lambda tensor: tensor.requires_grad_().mul(1)),
    ],
    "sparse": [Refusal("sparse|dense", given=lambda tensor: tensor.to_sparse())],
    "abort": [Refusal("abort: .* end by themselves", lambda comm, _: comm.abort())],
}


def errors_on_rank(state: SimpleNamespace, row: str) -> list[tuple[list[str], str, float]]:
    told = []
    for words, call, given in REFUSALS[row]:
        tensor = torch.arange(6.0, device=device_of(state)).view(2, 3) + state.rank
        kept, version = tensor.clone(), tensor._version
        wrong = given(tensor)
        began = time.monotonic()
        try:
            call(state.comm, wrong)
            told.append(([], f"no error, expected {words}", 0.0))
            continue
        except pr.RingarError as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            told.append((names, str(error), time.monotonic() - began))
        assert same_bits(tensor.detach(), kept)
        assert tensor._version == version
    tensor = torch.arange(6.0, device=device_of(state)) + state.rank
    state.comm.all_reduce(tensor)  # the group goes on
    assert tensor.tolist() == [
        state.world_size * i + sum(range(state.world_size)) for i in range(6)
    ]
    return told


def check_refused(transport: Any, row: str, error: str) -> None:
    for told in transport.on_ranks(2, errors_on_rank, row=row):
        for refusal, (names, text, seconds) in zip(REFUSALS[row], told, strict=True):
            assert error in names, (text, names)
            assert re.search(refusal.words, text), text
            assert seconds < 5, "it waited for other ranks first"
