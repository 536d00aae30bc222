"""What is refused: with a message that names index and value, and with nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracle import DTYPES, OPS
from torch import Tensor

import pyringar as pr
from pyringar.choices import ALGORITHMS, ORDERS
from pyringar.comm import process_communicator
from pyringar.engine import load


def ranks(k: int = 3, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32):
    return [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) + r for r in range(k)]


@pytest.fixture(scope="module")
def comm():
    with pr.Communicator(["cpu"] * 3) as made:
        yield made


def read_only(tensor: Tensor) -> np.ndarray:
    array = tensor.numpy()
    array.flags.writeable = False
    return array


def refuse(
    call: Callable[[], object], *words: str, kind: type[Exception] = pr.ArgumentError
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, pr.RingarError)
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"


def test_python_knows_the_names_of_the_engine():
    """Python has lists of its own: `import pyringar` must not load the engine."""
    names = load.engine().names()
    assert [str(dtype) for dtype in DTYPES] == [f"torch.{name}" for name in names["dtypes"]]
    assert list(OPS) == names["ops"]
    assert list(ORDERS) == ["any", *names["orders"]]
    assert set(names["algorithms"]) == {*ALGORITHMS} - {"auto", "sharded", "naive"}
    assert {*process_communicator.ALGORITHMS} - {"auto"} < set(names["process_algorithms"])


BASE = torch.zeros(100)

WRONG = {
    "same tensor twice": (
        lambda t: [t[0], t[1], t[0]],
        r"tensors\[2\]",
        r"tensors\[0\]",
        "shares memory",
    ),
    "overlapping slices": (
        lambda t: [BASE[:10], BASE[50:60], BASE[5:15]],
        r"tensors\[2\]",
        r"tensors\[0\]",
        "shares memory",
    ),
    "expanded": (
        lambda t: [t[0], t[1], torch.zeros(1, 3).expand(2, 3)],
        r"tensors\[2\]",
        r"\(2, 3\)",
        "overlaps itself",
    ),
    "all expanded": (
        lambda t: [torch.zeros(1, 3).expand(2, 3) for _ in t],
        r"tensors\[0\]",
        r"\(2, 3\)",
        "overlaps itself",
    ),
    "another shape": (
        lambda t: [t[0], torch.zeros(3, 2), t[2]],
        r"tensors\[1\]",
        r"\(3, 2\)",
        r"\(2, 3\)",
    ),
    "another dtype": (lambda t: [t[0], t[1], t[2].double()], r"tensors\[2\]", "float64", "float32"),
    "list of numbers": (
        lambda t: [t[0], t[1].tolist(), t[2]],
        r"tensors\[1\]",
        "list",
        "expected a tensor",
    ),
    "read-only array": (lambda t: [t[0], read_only(t[1]), t[2]], "ndarray", "read-only"),
    "None": (lambda t: [t[0], None, t[2]], r"tensors\[1\]", "None"),
    "number": (lambda t: [t[0], t[1], 7], r"tensors\[2\]", "int"),
    "one tensor": (lambda t: t[0], "tensors", "Tensor", "list"),
    "a generator": (lambda t: (x for x in t), "tensors", "generator", "list"),
    "too few": (lambda t: t[:2], "tensors has 2", "expected 3"),
    "too many": (lambda t: [*t, torch.zeros(2, 3)], "tensors has 4", "expected 3"),
    "requires grad": (
        lambda t: [t[0], t[1].requires_grad_(), t[2]],
        r"tensors\[1\]",
        "requires grad",
        "no_grad",
    ),
}
UNSUPPORTED = {
    "sparse coo": (lambda t: [t[0], t[1].to_sparse(), t[2]], r"tensors\[1\]", "sparse_coo"),
    "sparse csr": (lambda t: [t[0], t[1].to_sparse_csr(), t[2]], r"tensors\[1\]", "sparse_csr"),
    "meta": (lambda t: [t[0], t[1], t[2].to("meta")], r"tensors\[2\]", "meta"),
    "bool": (lambda t: [x > 1 for x in t], r"tensors\[0\]", "torch.bool", "float32"),
    "complex": (lambda t: [x.to(torch.complex64) for x in t], r"tensors\[0\]", "complex64"),
    "float8": (lambda t: [x.to(torch.float8_e4m3fn) for x in t], r"tensors\[0\]", "float8"),
    "int16": (lambda t: [x.short() for x in t], r"tensors\[0\]", "int16"),
}


@pytest.mark.parametrize("what", WRONG | UNSUPPORTED)
@pytest.mark.parametrize("algorithm", ["fused", "ring", "naive"])
def test_wrong_tensors_are_refused_and_left_alone(comm, what, algorithm):
    make, *words = (WRONG | UNSUPPORTED)[what]
    kind = pr.UnsupportedError if what in UNSUPPORTED else pr.ArgumentError
    tensors = ranks()
    before = [t.clone() for t in tensors]
    wrong = make(tensors)
    versions = [t._version for t in tensors]
    refuse(lambda: comm.all_reduce(wrong, algorithm=algorithm), *words, kind=kind)
    for tensor, old, version in zip(tensors, before, versions, strict=True):
        assert torch.equal(tensor.detach(), old)
        assert tensor._version == version


def test_allreduce_refuses_an_empty_list_and_takes_any_number():
    refuse(lambda: pr.allreduce([]), "tensors is empty")
    for k in (1, 2, 5, 33):
        tensors = ranks(k)
        total = torch.stack(tensors).sum(0)
        assert pr.allreduce(tensors) is None
        assert all(torch.equal(t, total) for t in tensors)


def test_fake_tensors(comm):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in ranks()]
    refuse(lambda: comm.all_reduce(fakes), r"tensors\[0\]", kind=pr.UnsupportedError)


def test_grad_is_refused_only_while_autograd_records(comm):
    leaves = [t.requires_grad_() for t in ranks()]
    results = [leaf * 2 for leaf in leaves]
    refuse(lambda: comm.all_reduce(results), r"tensors\[0\]", "requires grad")
    with torch.no_grad():
        comm.all_reduce(leaves)
    assert torch.equal(leaves[0], torch.stack(ranks()).sum(0))
    comm.all_reduce([leaf.detach() for leaf in leaves])


def test_coalesced_names_rank_and_index(comm):
    def lists() -> list[list[Tensor]]:
        return [[torch.zeros(2), torch.zeros(3)] for _ in range(3)]

    wrong = lists()
    wrong[2][1] = torch.zeros(4)
    refuse(lambda: comm.all_reduce_coalesced(wrong), r"lists\[2\]\[1\]", r"\(4\b")
    wrong = lists()
    wrong[1] = wrong[1][:1]
    refuse(lambda: comm.all_reduce_coalesced(wrong), r"lists\[1\]", "expected 2")
    wrong = lists()
    wrong[1][0] = wrong[0][0]
    refuse(lambda: comm.all_reduce_coalesced(wrong), r"lists\[1\]\[0\]", r"lists\[0\]\[0\]")
    shared = torch.zeros(2)  # one rank's tied parameters would be summed twice
    wrong = [[shared, shared], [torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]]
    refuse(lambda: comm.all_reduce_coalesced(wrong), "shares memory")
    refuse(lambda: comm.all_reduce_coalesced(lists()[:2]), "lists has 2")


def test_names_of_ops_algorithms_and_orders(comm):
    t = ranks()
    for op in ("avg", "SUM", "", None, 3, torch.distributed.ReduceOp.BAND):
        refuse(lambda op=op: comm.all_reduce(t, op), "op is", "sum, mean")
        refuse(lambda op=op: pr.allreduce(t, op), "op is", "sum, mean")
    refuse(lambda: comm.all_reduce(t, algorithm="nccl"), "'nccl'", "fused")
    refuse(lambda: comm.all_reduce(t, order="ring"), "order is 'ring'", "rank")
    refuse(lambda: comm.all_reduce(t, algorithm="ring", order="rank"), "own order")
    refuse(lambda: pr.Communicator(["cpu"] * 2, algorithm="ring", order="rank"), "own order")
    assert torch.equal(t[0], ranks()[0])


def test_torch_reduce_ops_are_understood(comm):
    c10d = torch.distributed.ReduceOp
    theirs_and_ours = {"sum": c10d.SUM, "mean": c10d.AVG, "max": c10d.MAX, "min": c10d.MIN}
    for name, op in (*theirs_and_ours.items(), ("prod", c10d.PRODUCT)):
        theirs, ours = ranks(), ranks()
        comm.all_reduce(theirs, op)
        comm.all_reduce(ours, name)
        assert torch.equal(theirs[2], ours[2])


@pytest.mark.parametrize("devices", [[], "cpu", 4, None, ["gpu"], ["cpu", 3.5]])
def test_devices_must_be_a_list_of_devices(devices):
    refuse(lambda: pr.Communicator(devices), "devices")


def test_a_device_that_is_not_there_is_named_with_those_that_are():
    missing = f"cuda:{torch.cuda.device_count() + 7}"
    refuse(lambda: pr.Communicator(["cpu", missing]), r"devices\[1\]", missing, "cpu")
    refuse(lambda: pr.Communicator(["mps"]), r"devices\[0\]", "mps", "cpu")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "30", None, True])
def test_timeout_must_be_positive(timeout):
    refuse(lambda: pr.Communicator(["cpu"], timeout=timeout), "timeout is")


def test_shapes_of_scatter_gather_and_broadcast(comm):
    whole, part = ranks(3, (6,)), ranks(3, (2,))
    refuse(
        lambda: comm.reduce_scatter(part, ranks(3, (7,))),
        r"inputs\[0\] has 7",
        r"outputs\[0\] has 2",
        "3 times",
    )
    refuse(
        lambda: comm.all_gather(ranks(3, (5,)), part), r"outputs\[0\] has 5", r"inputs\[0\] has 2"
    )
    refuse(
        lambda: comm.all_gather(whole, ranks(3, (2,), torch.float64)),
        r"inputs\[0\] has dtype float64, but outputs\[0\] has float32",
    )
    refuse(lambda: comm.all_gather(whole, [whole[0][:2], *part[1:]]), "shares memory")
    refuse(lambda: comm.reduce_scatter(part[:2], whole), "outputs has 2")
    for root in (-1, 3, True, "0", 1.0):
        refuse(lambda root=root: comm.broadcast(whole, root), "root is")
    assert torch.equal(whole[0], ranks(3, (6,))[0])


def test_rooted_calls_refuse_and_change_nothing(comm):
    """Wrong roots, shapes, dtypes, devices, numbers of tensors and memory in common."""
    shared = torch.zeros(12)
    inputs, output = ranks(3, (6,)), torch.full((6,), 9.0)
    lists = [[t, t.double()] for t in ranks(3, (6,))]
    outputs = [torch.full((6,), 9.0), torch.full((6,), 9.0, dtype=torch.float64)]
    for root in (-1, 3, True, "0", 1.0):
        refuse(lambda root=root: comm.reduce(output, inputs, root=root), "reduce: root is")
        refuse(lambda root=root: comm.broadcast_coalesced(lists, root), "coalesced: root is")
        refuse(
            lambda root=root: comm.reduce_coalesced(outputs, lists, root=root),
            "reduce_coalesced: root is",
        )
    refuse(lambda: comm.reduce(output[:5], inputs), r"reduce: output has shape \(5,\)", r"\(6,\)")
    refuse(lambda: comm.reduce(output.double(), inputs), "output has dtype float64, but inputs")
    refuse(lambda: comm.reduce([output], inputs), "output is a list")
    refuse(lambda: comm.reduce(output, [*inputs[:2], inputs[2][:4]]), r"inputs\[2\] has shape")
    refuse(lambda: comm.reduce(output, inputs[:2]), "inputs has 2 entries, expected 3")
    refuse(lambda: comm.reduce(output, inputs, "median"), "op is 'median'")
    refuse(lambda: comm.reduce(output, inputs, algorithm="rings"), "algorithm is 'rings'")
    meta = torch.zeros(6, device="meta")
    refuse(lambda: comm.reduce(meta, inputs), "output", "meta", kind=pr.UnsupportedError)
    grad = output.clone().requires_grad_()
    refuse(lambda: comm.reduce(grad, inputs), "output requires grad")
    refuse(lambda: comm.reduce(inputs[1], inputs), r"output shares memory with inputs\[1\]")
    one = shared[:6]
    refuse(lambda: comm.reduce(shared[3:9], [one, *inputs[1:]]), r"shares memory with inputs\[0\]")
    refuse(lambda: comm.reduce(one.flip(0)[:0].expand(0), inputs), "output has shape")
    refuse(lambda: comm.reduce(shared[:1].expand(6), inputs), "output of shape .* overlaps itself")
    neg = torch._neg_view(inputs[0])
    refuse(lambda: comm.reduce(neg, inputs), r"output shares memory with inputs\[0\]")
    refuse(lambda: comm.reduce_coalesced(outputs[:1], lists), "outputs has 1 entry, expected 2")
    refuse(lambda: comm.reduce_coalesced(output, lists), "outputs is a Tensor, expected a list")
    refuse(lambda: comm.reduce_coalesced(outputs[::-1], lists), r"outputs\[0\] has dtype float64")
    refuse(lambda: comm.reduce_coalesced(outputs, [*lists[:2], lists[2][:1]]), r"lists\[2\] has 1")
    twice = [[t, t.clone()] for t in ranks(3, (6,))]
    for pair, words in (
        ([output, output], r"outputs\[1\] shares memory with outputs\[0\]"),
        ([twice[0][1], output], r"outputs\[0\] shares memory with lists\[0\]\[1\]"),
        ([twice[0][0]] * 2, r"outputs\[1\] shares memory with outputs\[0\]"),
    ):
        refuse(lambda pair=pair: comm.reduce_coalesced(pair, twice), words)
    refuse(lambda: comm.broadcast_coalesced([*lists[:2], lists[2][:1]]), r"lists\[2\] has 1 entry")
    refuse(lambda: comm.broadcast_coalesced([*lists[:2], lists[2][::-1]]), r"lists\[2\]\[0\] has")
    refuse(lambda: comm.broadcast_coalesced([*lists[:2], lists[1]]), "shares memory")
    assert all(map(torch.equal, inputs, ranks(3, (6,))))
    for mine, pair in zip(ranks(3, (6,)), lists, strict=True):
        assert torch.equal(pair[0], mine)
        assert torch.equal(pair[1], mine.double())
    assert (output == 9).all()
    assert all((t == 9).all() for t in outputs)
    assert not shared.any()


def test_sources_may_share_memory(comm):
    lists = [[t, t[2:]] for t in ranks(3, (6,))]
    outputs = [torch.zeros(6), torch.zeros(4)]
    comm.reduce_coalesced(outputs, lists)
    assert torch.equal(outputs[0], sum(ranks(3, (6,))))
    assert torch.equal(outputs[1], outputs[0][2:])
    copies = [[t.clone() for t in lists[1]] for _ in range(2)]
    comm.broadcast_coalesced([copies[0], lists[1], copies[1]], 1)
    assert all(torch.equal(t, s) for mine in copies for t, s in zip(mine, lists[1], strict=True))


@pytest.mark.parametrize("algorithm", ["ring", "naive", "sharded"])
def test_reduce_names_algorithm_it_lacks(comm, algorithm):
    output, inputs = torch.zeros(6), ranks(3, (6,))
    words = f"reduce: algorithm '{algorithm}'"
    with pr.Communicator(["cpu"] * 3, algorithm=algorithm) as other:
        for call in (
            lambda: comm.reduce(output, inputs, algorithm=algorithm),
            lambda: other.reduce(output, inputs),
        ):
            refuse(call, words, kind=pr.UnsupportedError)
        refuse(
            lambda: other.reduce_coalesced([output], [[t] for t in inputs]),
            words.replace("reduce", "reduce_coalesced"),
            kind=pr.UnsupportedError,
        )
        lists = [[t.clone()] for t in inputs]
        other.broadcast_coalesced(lists, 1)  # a copy, whatever the algorithm
        assert all(torch.equal(t, inputs[1]) for (t,) in lists)
    assert not output.any()


def test_python_algorithms_know_all_reduce_only():
    with pr.Communicator(["cpu"] * 2, algorithm="sharded") as comm:
        t = ranks(2, (4,))
        for call in (
            lambda: comm.bind(t),
            lambda: comm.bind_coalesced([[x] for x in t]),
            lambda: comm.all_gather(ranks(2, (4,)), ranks(2, (2,))),
            lambda: comm.reduce_scatter(ranks(2, (2,)), ranks(2, (4,))),
        ):
            refuse(call, "'sharded'", "fused", kind=pr.UnsupportedError)


def test_plan_takes_bytes_and_a_dtype(comm):
    plan = comm.plan(4096)
    assert (plan.algorithm, plan.order, plan.steps) == ("fused", "rank", 0)
    assert plan.traffic_bytes == 2 * 3 * 4096
    assert str(plan).startswith("fused: 0 steps, 24,576 bytes of memory traffic, rank order")
    refuse(lambda: comm.plan(-1), "nbytes is -1")
    refuse(lambda: comm.plan(1.5), "nbytes is 1.5")
    refuse(lambda: comm.plan(8, np.float32), "dtype is")
    with pr.Communicator(["cpu"] * 4, algorithm="ring") as ring:
        assert ring.plan(100).steps == 6
        assert ring.plan(100).order == "ring"
        assert ring.plan(100).traffic_bytes == 5 * 3 * 100
