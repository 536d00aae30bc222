"""docs/promises.md: every row has a test, and refused calls raise."""

import importlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from oracle import same_bits
from promises import BODIES, ELSEWHERE, MATRIX, marks_of
from transports import COLUMNS, TRANSPORTS, device_of

import pyringar as pr

TESTS = Path(__file__).resolve().parents[1]
REFUSED = [cell for cells in MATRIX.values() for cell in cells.values() if cell.error]


def test_each_promise_has_a_test():
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(path.stem)
    said = {row for row, cells in MATRIX.items() if any(c.text == "yes" for c in cells.values())}
    assert said == {*BODIES, *ELSEWHERE}
    for where in ELSEWHERE.values():
        file, test = where.split("::")
        assert f"def {test}" in (TESTS / file).read_text(), where
    assert {cell.row for cell in REFUSED} == set(REFUSALS)


class Refusal(NamedTuple):
    """Pattern of the error, the call, and a function that makes its argument from a tensor."""

    words: str
    call: Callable[[Any, Any], object] = lambda comm, given: comm.all_reduce(given)
    given: Callable[[torch.Tensor], Any] = lambda tensor: tensor


REFUSALS = {
    "dtypes-other": [
        Refusal("bool", given=lambda x: x > 1),
        Refusal("int16", given=lambda x: x.short()),
        Refusal("complex64", given=lambda x: x.to(torch.complex64)),
        Refusal("float8", given=lambda x: x.to(torch.float8_e4m3fn)),
    ],
    "order-rank": [Refusal("order is 'rank'", lambda c, x: c.all_reduce(x, order="rank"))],
    "order-exact": [Refusal("order is 'exact'", lambda c, x: c.all_reduce(x, order="exact"))],
    "broadcast_coalesced": [Refusal("take broadcast", lambda c, x: c.broadcast_coalesced([x]))],
    "reduce": [Refusal("take all_reduce", lambda c, x: c.reduce(x, [x]))],
    "reduce_coalesced": [Refusal("take all_reduce_c", lambda c, x: c.reduce_coalesced([x], [x]))],
    "barrier": [Refusal("barrier: .* it is not needed", lambda c, _: c.barrier())],
    "bind": [
        Refusal("bind: .* take all_reduce", lambda c, x: c.bind(x)),
        Refusal("bind_coalesced: .* take all_reduce", lambda c, x: c.bind_coalesced([x])),
    ],
    "ring": [Refusal("algorithm is 'ring'", lambda c, x: c.all_reduce(x, algorithm="ring"))],
    "arrays": [Refusal("expected a dense tensor", given=lambda x: x.numpy())],
    "overlap": [
        Refusal("overlaps itself", given=lambda x: x[:1].expand(4, 3)),
        Refusal("overlaps itself", given=lambda x: x.as_strided((2, 3), (1, 1))),
        Refusal("overlaps itself", lambda c, x: c.broadcast(x), lambda x: x[:1].expand(4, 3)),
    ],
    "requires-grad": [Refusal("requires grad", given=lambda x: x.requires_grad_().mul(1))],
    "sparse": [Refusal("sparse|dense", given=lambda x: x.to_sparse())],
    "abort": [Refusal("abort: .* no rank is on a GPU", lambda c, _: c.abort())],
}


def errors_on_rank(state: SimpleNamespace, row: str) -> list[tuple[list[str], str, float]]:
    told = []
    for _, call, given in REFUSALS[row]:
        tensor = torch.arange(6.0, device=device_of(state)).view(2, 3) + state.rank
        kept, version = tensor.clone(), tensor._version
        wrong = given(tensor)
        began = time.monotonic()
        with pytest.raises(pr.RingarError) as caught:
            call(state.comm, wrong)
        names = [kind.__name__ for kind in caught.type.__mro__]
        told.append((names, str(caught.value), time.monotonic() - began))
        assert same_bits(tensor.detach(), kept)
        assert tensor._version == version
    tensor = torch.arange(6.0, device=device_of(state)) + state.rank
    state.comm.all_reduce(tensor)  # the group still works
    k = state.world_size
    assert tensor.tolist() == [k * i + sum(range(k)) for i in range(6)]
    return told


@pytest.mark.parametrize(
    ("transport", "cell"),
    [
        pytest.param(name, cell, id=f"{name}-{cell.row}", marks=marks_of(name))
        for name in TRANSPORTS
        for cell in REFUSED
        if cell.column == COLUMNS.get(name, name)
    ],
    indirect=["transport"],
)
def test_refused_call_raises_promised_error(transport, cell):
    for told in transport.on_ranks(2, errors_on_rank, row=cell.row):
        for refusal, (names, text, seconds) in zip(REFUSALS[cell.row], told, strict=True):
            assert cell.error in names, (text, names)
            assert re.search(refusal.words, text), text
            assert seconds < 5, "it waited for other ranks first"
