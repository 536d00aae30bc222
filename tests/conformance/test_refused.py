"""Wrong arguments raise errors with name and value, and change nothing."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from oracle import DTYPES, OPS
from pairs import K, make_pair
from torch._subclasses.fake_tensor import FakeTensorMode

import pyringar as pr
from pyringar.choices import ALGORITHMS, ORDERS
from pyringar.comm import process_communicator
from pyringar.comm.sum_orders import engine_order
from pyringar.engine import load


@pytest.fixture(params=["threads", "processes"], scope="module")
def pair(request):
    with make_pair(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def comm():
    with pr.Communicator(["cpu"] * 3) as made:
        yield made


def ranks(k=K, shape=(2, 3), dtype=torch.float32):
    return [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) + r for r in range(k)]


def refuse(call, *words, kind=pr.ArgumentError):
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, pr.RingarError)
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"


def read_only(tensor):
    array = tensor.numpy()
    array.flags.writeable = False
    return array


# Each row: a function that makes a tensor invalid, and a pattern of the error message.
WRONG = {
    "number": (lambda t: 7, "an int"),
    "backwards": (lambda t: t.numpy()[::-1], r"(tensors|\]) is a ndarray .*negative"),
    "big-endian": (lambda t: t.numpy().astype(">f4"), "byte order"),
    "structured": (lambda t: np.zeros(3, "u1, f4"), "numpy.void"),
    "field": (lambda t: np.zeros(3, "u1, f4")["f1"], "strides not a multiple"),
    "zero strides": (
        lambda t: np.lib.stride_tricks.as_strided(t.numpy(), (4,), (0,)),
        "overlaps itself",
    ),
    "read-only": (read_only, "is a ndarray .* read-only"),
}
UNSUPPORTED = {
    "sparse csr": (lambda t: t.to_sparse_csr(), "sparse_csr"),
    "meta": (lambda t: t.to("meta"), "meta"),
    "fake": (lambda t: FakeTensorMode().from_tensor(t), "memory"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("what", WRONG | UNSUPPORTED)
@pytest.mark.parametrize("entry", ["all_reduce", "direct", "coalesced", "bind", "broadcast"])
def test_wrong_tensors_raise(pair, what, entry):
    make, *words = (WRONG | UNSUPPORTED)[what]
    kind = pr.UnsupportedError if what in UNSUPPORTED else pr.ArgumentError
    tensors = ranks()
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    wrong = [make(tensor) for tensor in tensors]  # on all ranks, or a correct rank would wait
    calls = {
        "all_reduce": lambda: pair.all_reduce(wrong),
        "direct": lambda: pair.all_reduce(wrong, algorithm="direct"),
        "coalesced": lambda: pair.all_reduce_coalesced([[torch.ones(2), t] for t in wrong]),
        "bind": lambda: pair.bind(wrong),
        "broadcast": lambda: pair.broadcast(wrong),
    }
    refuse(calls[entry], *words, kind=kind)
    for tensor, old, version in zip(tensors, before, versions, strict=True):
        assert torch.equal(tensor, old)
        assert tensor._version == version
    pair.all_reduce(tensors)
    assert torch.equal(tensors[1], before[0] + before[1])


BASE, NEGATED = torch.zeros(100), torch._neg_view(torch.zeros(100))
BAND = torch.distributed.ReduceOp.BAND
# Each row: an invalid call of two ranks, and a pattern of the error message.
WRONG_CALLS = [
    (lambda c: c.all_reduce_coalesced([[BASE, BASE[50:]]] * K), "shares memory with"),
    (lambda c: c.bind_coalesced([[NEGATED, torch._neg_view(NEGATED)]] * K), "shares memory with"),
    (lambda c: c.all_gather([BASE] * K, [BASE[:50]] * K), "shares memory with"),
    (lambda c: c.reduce_scatter([BASE[:50]] * K, [BASE] * K), "shares memory with"),
    (lambda c: c.reduce_scatter(ranks(K, (3,)), ranks(K, (7,))), "has 7 .* has 3 .* 2 times"),
    (lambda c: c.all_gather(ranks(K, (7,)), ranks(K, (3,))), "has 7 .* has 3"),
    (lambda c: c.all_gather(ranks(), ranks(K, (3,), torch.float64)), "float64.* float32"),
    (lambda c: c.reduce_scatter(ranks(K, (3,), torch.float64), ranks()), "float64.* float32"),
    (lambda c: c.all_reduce_coalesced([3] * K), "an int.* list"),
    (lambda c: c.bind_coalesced([BASE] * K), "Tensor.* list"),
    (lambda c: c.all_reduce(ranks(), "avg"), "op is 'avg'.* sum, mean"),
    (lambda c: c.all_reduce(ranks(), BAND), "op is .* sum, mean"),
    (lambda c: c.bind(ranks(), BAND), "op is .* sum, mean"),
    (lambda c: c.all_reduce(ranks(), algorithm="nccl"), "'nccl'.* direct"),
    (lambda c: c.all_reduce(ranks(), order="trees"), "order is 'trees'.*mean 'tree'"),
    (lambda c: c.all_reduce(ranks(), "prod", order="exact"), "order is 'exact' and op 'prod'"),
    (lambda c: c.bind(ranks(), "max", order="exact"), "order is 'exact' and op 'max'"),
    (lambda c: c.plan(-1), "nbytes is -1"),
    (lambda c: c.plan(8, np.float32), "dtype is"),
    (lambda c: c.broadcast(ranks(), -1), "root is -1"),
    (lambda c: c.broadcast(ranks(), K), "root is 2"),
    (lambda c: c.broadcast(ranks(), True), "root is True"),
]


@pytest.mark.parametrize(("call", "words"), WRONG_CALLS)
def test_wrong_calls_raise(pair, call, words):
    refuse(lambda: call(pair), words)
    assert not BASE.any()


def test_torch_reduce_op_is_accepted(pair):
    c10d = torch.distributed.ReduceOp
    by_name = {"sum": c10d.SUM, "mean": c10d.AVG, "max": c10d.MAX, "min": c10d.MIN}
    for name, op in (*by_name.items(), ("prod", c10d.PRODUCT)):
        theirs, ours = ranks(), ranks()
        pair.all_reduce(theirs, op)
        pair.all_reduce(ours, name)
        assert torch.equal(theirs[1], ours[1])


@pytest.mark.parametrize("transport", ["threads", "processes"])
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "30", None, True])
def test_wrong_timeout_raises(transport, timeout):
    refuse(lambda: make_pair(transport, timeout=timeout), "timeout is")


@pytest.mark.parametrize("order", ["rank", "tree", "exact"])
def test_unsupported_order_raises(order):
    for algorithm in ("ring", "naive", "sharded"):
        if order == "rank" and algorithm != "ring":
            continue
        words = f"algorithm is '{algorithm}' and order is '{order}'"
        refuse(lambda a=algorithm: make_pair("threads", algorithm=a, order=order), words)
        with make_pair("threads", algorithm=algorithm) as pair:
            tensors = ranks()
            refuse(lambda pair=pair, t=tensors: pair.all_reduce(t, order=order), words)
            assert torch.equal(tensors[0], ranks()[0])


@pytest.mark.parametrize("op", ["prod", "max", "min"])
@pytest.mark.parametrize("transport", ["threads", "processes"])
def test_exact_order_of_other_ops_raises(transport, op):
    with make_pair(transport, order="exact") as pair:
        tensors = ranks()
        refuse(lambda: pair.all_reduce(tensors, op), f"order is 'exact' and op '{op}'")
        assert torch.equal(tensors[0], ranks()[0])


def test_exact_order_on_gpu_raises():
    assert engine_order("direct", "tree", has_gpus=True) == "tree"
    exact = partial(engine_order, "direct", "exact", has_gpus=True)
    refuse(exact, "order is 'exact' and ranks are on GPUs", kind=pr.UnsupportedError)


WRONG_LISTS = {
    "same tensor twice": (lambda t: [t[0], t[1], t[0]], r"\[2\].* shares memory with \w+\[0\]"),
    "overlap": (lambda t: [BASE[:10], BASE[50:60], BASE[5:15]], r"\[2\].* shares .* \w+\[0\]"),
    "shape": (lambda t: [t[0], torch.zeros(3, 2), t[2]], r"\[1\].*\(3, 2\).*\(2, 3\)"),
    "dtype": (lambda t: [t[0], t[1], t[2].double()], r"\[2\].*float64.*float32"),
    "meta": (lambda t: [t[0], t[1], t[2].to("meta")], r"\[2\].*meta"),
    "array twice": (lambda t: [t[0], t[1].numpy(), t[1].numpy()], "shares memory"),
    "generator": (lambda t: (x for x in t), "is a generator, expected a list"),
    "too few": (lambda t: t[:2], "has 2 entries, expected 3"),
    "grad": (lambda t: [t[0], t[1].clone().requires_grad_(), t[2]], r"\[1\].* requires grad"),
}


@pytest.mark.parametrize("what", WRONG_LISTS)
def test_wrong_lists_raise(comm, what):
    make, words = WRONG_LISTS[what]
    tensors = ranks(3)
    calls = [partial(comm.all_reduce, algorithm=name) for name in ("fused", "ring", "naive")]
    for call in calls * 2:  # a refused call must not become a prepared call
        refuse(partial(call, make(tensors)), words, kind=pr.RingarError)
    for call in (comm.all_reduce_coalesced, comm.bind_coalesced, comm.broadcast_coalesced):
        wrong = ([one] for one in make(tensors))
        wrong = wrong if what == "generator" else list(wrong)
        refuse(partial(call, wrong), words, kind=pr.RingarError)
    assert all(map(torch.equal, tensors, ranks(3)))
    assert [tensor._version for tensor in tensors] == [0] * 3


class Hostile:
    __cuda_array_interface__ = 5


def test_malformed_array_raises(comm):
    for call in (pr.allreduce, comm.all_reduce, comm.broadcast):
        refuse(lambda call=call: call([*ranks(2), Hostile()]), "is a Hostile whose memory")


def test_wrong_nested_lists_raise(comm):
    lists = [[torch.zeros(2), torch.zeros(3, 2)] for _ in range(3)]
    tied = [[mine[0], mine[0]] for mine in lists]  # the same tensor would be summed twice
    for call in (comm.all_reduce_coalesced, comm.bind_coalesced, comm.broadcast_coalesced):
        for wrong, words in (
            ([lists[0], lists[1][:1], lists[2]], r"lists\[1\] has 1 entry, expected 2"),
            (tied, r"lists\[(\d)\]\[1\] shares memory with lists\[\1\]\[0\]"),
        ):
            refuse(partial(call, wrong), f"{call.__name__}: {words}")
    assert [tensor._version for mine in lists for tensor in mine] == [0] * 6


def test_wrong_reduce_output_raises(comm):
    shared = torch.zeros(12)
    inputs, output = ranks(3, (6,)), torch.full((6,), 9.0)
    for bad, words in (
        (output[:5], r"reduce: output has shape \(5,\)"),
        (output.double(), "output has dtype float64, but inputs"),
        (output.clone().requires_grad_(), "output requires grad"),
        (torch._neg_view(inputs[0]), r"output shares memory with inputs\[0\]"),
        (shared[:1].expand(6), "output of shape .* overlaps itself"),
        (torch.zeros(6, device="meta"), "output.*meta"),
    ):
        refuse(lambda bad=bad: comm.reduce(bad, inputs), words, kind=pr.RingarError)
    refuse(lambda: comm.reduce(shared[3:9], [shared[:6], *inputs[1:]]), r"memory with inputs\[0\]")
    refuse(lambda: comm.reduce(output, [*inputs[:2], inputs[2][:4]]), r"inputs\[2\] has shape")
    lists, outputs = [[t, t.double()] for t in ranks(3, (6,))], [output, output.double()]
    twice = [[t, t.clone()] for t in ranks(3, (6,))]
    for bad, given, words in (
        (outputs[:1], lists, "outputs has 1 entry, expected 2"),
        (outputs[::-1], lists, r"outputs\[0\] has dtype float64"),
        ([output, output], twice, r"outputs\[1\] shares memory with outputs\[0\]"),
        ([twice[0][1], output], twice, r"outputs\[0\] shares memory with lists\[0\]\[1\]"),
    ):
        refuse(lambda bad=bad, given=given: comm.reduce_coalesced(bad, given), words)
    refuse(lambda: comm.reduce_coalesced(outputs, lists, root=3), "reduce_coalesced: root is")
    assert all(map(torch.equal, inputs, ranks(3, (6,))))
    assert (output == 9).all()
    assert not shared.any()


def test_input_tensors_may_share_memory(comm):
    lists = [[t, t[2:]] for t in ranks(3, (6,))]
    outputs = [torch.zeros(6), torch.zeros(4)]
    comm.reduce_coalesced(outputs, lists)
    assert torch.equal(outputs[0], sum(ranks(3, (6,))))
    assert torch.equal(outputs[1], outputs[0][2:])
    copies = [[t.clone() for t in lists[1]] for _ in range(2)]
    comm.broadcast_coalesced([copies[0], lists[1], copies[1]], 1)
    assert all(torch.equal(t, s) for mine in copies for t, s in zip(mine, lists[1], strict=True))
    inputs = [torch.full((5,), 2.0**rank, requires_grad=True) for rank in range(3)]
    comm.reduce(inputs[1].detach(), inputs, root=1)  # the output shares memory with inputs[1]
    assert [t.tolist() for t in inputs] == [[1] * 5, [7] * 5, [4] * 5]


@pytest.mark.parametrize("algorithm", ["ring", "naive", "sharded"])
def test_unsupported_method_of_algorithm_raises(algorithm):
    output, inputs = torch.zeros(6), ranks(3, (6,))
    with pr.Communicator(["cpu"] * 3, algorithm=algorithm) as comm:
        calls = {
            "reduce": lambda: comm.reduce(output, inputs),
            "reduce_coalesced": lambda: comm.reduce_coalesced([output], [[t] for t in inputs]),
        }
        if algorithm != "ring":
            calls["bind"] = lambda: comm.bind(inputs)
            calls["bind_coalesced"] = lambda: comm.bind_coalesced([[t] for t in inputs])
            calls["all_gather"] = lambda: comm.all_gather(inputs, ranks(3, (2,)))
            calls["reduce_scatter"] = lambda: comm.reduce_scatter(ranks(3, (2,)), inputs)
        for name, call in calls.items():
            refuse(call, f"{name}: algorithm '{algorithm}'", kind=pr.UnsupportedError)
    assert not output.any()
    assert all(map(torch.equal, inputs, ranks(3, (6,))))


def test_error_names_missing_device():
    missing = f"cuda:{torch.cuda.device_count()}"
    refuse(lambda: pr.Communicator(["cpu", missing]), r"devices\[1\]", missing, "cpu")
    refuse(lambda: pr.Communicator(["mps"]), r"devices\[0\]", "mps", "cpu")


def test_python_names_match_engine_names():
    """Python repeats the engine's lists of names: `import pyringar` must not load the engine."""
    names = load.engine().names()
    assert [str(dtype) for dtype in DTYPES] == [f"torch.{name}" for name in names["dtypes"]]
    assert list(OPS) == names["ops"]
    assert list(ORDERS) == ["any", *names["orders"]]
    assert set(names["algorithms"]) == {*ALGORITHMS} - {"auto", "sharded", "naive"}
    assert {*process_communicator.ALGORITHMS} - {"auto"} < set(names["process_algorithms"])
