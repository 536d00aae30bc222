"""all_reduce under torch.compile: bits, errors and gradients."""

import gc
from functools import partial

import pytest
import torch
from case_marks import mostly_slow
from oracle import bits
from programs import run_fresh
from rank_processes import on_ranks
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import pyringar as pr
from pyringar.comm import operators

K = 3
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]  # inductor compiles C++


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.fixture
def comm():
    with pr.Communicator(["cpu"] * K) as comm:
        yield comm


def ranks(k: int = K, shape=(5,), dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator) * 99).to(dtype) for _ in range(k)]


class Graphs:
    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
        self.graphs.append(graph)
        return graph.forward

    def calls(self) -> list[str]:
        names = [str(node.target) for graph in self.graphs for node in graph.graph.nodes]
        return [name for name in names if name.startswith("pyringar.")]


def assert_alike(function, *, backend, inputs=ranks) -> None:
    mine, theirs = inputs(), inputs()
    wanted = function(*theirs)
    found = torch.compile(function, fullgraph=True, backend=backend)(*mine)
    flat = torch.utils._pytree.tree_leaves
    assert len(flat(found)) == len(flat(wanted))
    for a, b in zip([*flat(found), *mine], [*flat(wanted), *theirs], strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", mostly_slow(["sum", "mean", "max", "prod"], "sum", "mean"))
def test_compiled_calls_match_eager(comm, op, dtype, backend):
    def function(x, y, z):
        doubled = [x * 2, y * 2, z * 2]
        comm.all_reduce(doubled, op)
        y.mul_(3)
        comm.all_reduce([y, z, x], op, algorithm="ring")
        comm.all_reduce_coalesced([[x, doubled[0]], (y, doubled[1]), [z, doubled[2]]], op=op)
        pr.allreduce([x, y], op)
        return doubled[0] + 1, doubled[2]

    assert_alike(function, backend=backend, inputs=lambda: ranks(dtype=dtype))


class Seen:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        monkeypatch.setattr(operators, "communicator_of", lambda handle: self)

    def all_reduce(self, tensors: list[Tensor], *_: object, **__: object) -> None:
        self.sizes.append(tensors[0].numel())


@pytest.mark.slow  # inductor compiles C++; no other backend changes the order of calls
@pytest.mark.parametrize("how", ["in place", "new tensors", "both", "backward"])
def test_graph_keeps_call_order(monkeypatch, how):
    """Inductor could reorder calls to save memory, but ranks match calls by order."""
    one = pr.Communicator(["cpu"])

    def reduced(x, i):
        if how == "in place" or (how == "both" and i % 2):
            one.all_reduce([x])
            return x
        return pr.ops.all_reduce(one, [x])[0]

    def function(x):
        parts = [reduced(x.repeat(7 - i) * i, i).sum() for i in range(4)]
        return sum(parts[::-1])

    seen = Seen(monkeypatch)
    x = torch.ones(1000, requires_grad=how == "backward")
    found = torch.compile(function, fullgraph=True)(x)
    if how == "backward":
        found.backward()
        assert seen.sizes[4:] == [4000, 5000, 6000, 7000]
    assert seen.sizes[:4] == [7000, 6000, 5000, 4000]


def test_one_graph_holds_all_calls(comm):
    def function(x, y, z):
        comm.all_reduce([x, y, z])
        comm.all_reduce_coalesced([[x], [y], [z]])
        pr.allreduce([x, y])
        return pr.ops.all_reduce(comm, [x, y, z])

    graphs = Graphs()
    torch.compile(function, fullgraph=True, backend=graphs)(*ranks())
    assert len(graphs.graphs) == 1
    assert graphs.calls() == ["pyringar.all_reduce_"] * 3 + ["pyringar.all_reduce"]


@pytest.mark.parametrize("dynamic", [True, None])
def test_new_sizes_reuse_graph(comm, dynamic):
    def function(x, y, z):
        comm.all_reduce([x, y, z])
        return pr.ops.all_reduce(comm, [x + 1, y, z], "max")[0] * 2

    graphs = Graphs()
    compiled = torch.compile(function, fullgraph=True, backend=graphs, dynamic=dynamic)
    for n in (7, 8, 100, 3):
        mine, theirs = ranks(shape=(n, 2)), ranks(shape=(n, 2))
        assert torch.equal(compiled(*mine), function(*theirs))
        assert all(map(torch.equal, mine, theirs))
    assert len(graphs.graphs) == (1 if dynamic else 2)


TRACED_ERRORS = [
    (lambda c, x: c.all_reduce([x, x + 1, x[:2] + 1]), r"tensors\[2\] has shape \(2,\)"),
    (lambda c, x: c.all_reduce([x, x + 1, x + 2], order="trees"), "order is 'trees'"),
    (lambda c, x: c.all_reduce_coalesced([[x], [x + 1]]), "lists has 2 entries, expected 3"),
    (lambda c, x: pr.ops.all_reduce(c, [x, x[:2], x]), r"tensors\[1\] has shape \(2,\)"),
]
UNTRACED_ERRORS = [
    lambda c, x: c.all_reduce(x),  # one tensor instead of one per rank
    lambda c, x: c.all_reduce_coalesced([[x], [x + 1, x + 2], [x + 3]]),
    lambda c, x: c.all_reduce([x, x + 1, x + 2], "plus"),
    lambda c, x: pr.allreduce(x),
    lambda c, x: pr.ops.all_reduce_coalesced(c, [[x], [x, x], [x]]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("call", "words"), [*TRACED_ERRORS, *((call, None) for call in UNTRACED_ERRORS)]
)
def test_compiled_errors_match_eager(comm, call, words, backend):
    x = torch.ones(K, 2) if words is None else torch.ones(4)
    compiled = torch.compile(lambda x: call(comm, x), fullgraph=bool(words), backend=backend)
    for run in (lambda x: call(comm, x), compiled):
        with pytest.raises(pr.ArgumentError, match=words):
            run(x)
    assert x.eq(1).all()


def test_closed_communicator_raises_in_graph():
    comm = pr.Communicator(["cpu"] * 2)
    graphs, tensors = Graphs(), ranks(2)
    compiled = torch.compile(comm.all_reduce, fullgraph=True, backend=graphs)
    compiled(ranks(2))
    comm.close()
    for call in (compiled, partial(pr.ops.all_reduce, comm)):
        with pytest.raises(pr.RingarError, match="closed"):
            call(tensors)
    assert all(map(torch.equal, tensors, ranks(2)))
    torch._dynamo.reset()  # Dynamo's guards hold the communicator
    del comm, compiled, call
    gc.collect()
    with pytest.raises(pr.RingarError, match=r"communicator \d+ \(host: .*\) is not there"):
        graphs.graphs[0](*tensors)


REFUSED_WRITES = {
    "leaf": (lambda c, x: c.all_reduce([x, x + 1, x + 2]), "requires grad"),
    "result": (lambda c, x: c.all_reduce([x * 2, x * 3, x * 4]), "requires grad"),
    "twice": (lambda c, x: c.all_reduce([x, x.clone(), x]), r"tensors\[2\] shares memory"),
    "base": (lambda c, x: c.all_reduce_coalesced([[x[:2]], [x[2:]], [x[:2]]]), r"\[0\] shares"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", REFUSED_WRITES)
def test_compiled_in_place_errors_match_eager(comm, what, backend):
    call, words = REFUSED_WRITES[what]
    x = torch.arange(4.0).requires_grad_("grad" in words)
    with pytest.raises(pr.ArgumentError, match=words):
        call(comm, x)
    compiled = torch.compile(partial(call, comm), fullgraph=True, backend=backend)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=words):
        compiled(x)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_write_clones_and_leaves(comm, backend):
    def copied(x):
        comm.all_reduce([x, x.clone(), x.clone()])
        comm.all_reduce([x[:2], x[2:], x.new_ones(2)])
        return x

    assert_alike(copied, backend=backend, inputs=lambda: [torch.arange(4.0)])
    with torch.no_grad():
        leaves = lambda: [torch.arange(4.0).requires_grad_()]  # noqa: E731
        assert_alike(copied, backend=backend, inputs=leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_with_unused_results_run(comm, backend):
    def function(x):
        pr.ops.all_reduce(comm, [x, x + 1, x + 2])
        comm.all_reduce([x.clone(), x + 1, x + 2])
        return x * 2

    torch.compile(function, fullgraph=True, backend=backend)(torch.ones(3))
    assert comm.stats()["fused"]["calls"] == 2


@pytest.mark.parametrize("algorithm", [None, "ring", "naive"])
def test_functional_results_are_new_tensors(comm, algorithm):
    lists, kept, wanted = ([[t, t[:2] + 1] for t in ranks()] for _ in range(3))
    comm.all_reduce_coalesced(wanted, "max", algorithm=algorithm)
    found = pr.ops.all_reduce_coalesced(comm, lists, "max", algorithm=algorithm)
    for given, before, mine, theirs in zip(lists, kept, found, wanted, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, given, before))
    assert pr.ops.all_reduce_coalesced(comm, [[], [], []]) == [[], [], []]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gradients_match_torch(comm, op, backend):
    def function(x, y, z):
        a, b, c = pr.ops.all_reduce(comm, [x * x, y, z], op)
        (a1, a2), *_ = pr.ops.all_reduce_coalesced(comm, [[a, b], [b, c], [c, a]], op)
        return (a * 2).sum() + (b * b).sum() + (c * a1).sum() + a2.sum()

    def by_torch(x, y, z):
        share = 1 if op == "sum" else K
        s = (x * x + y + z) / share
        t = (s + s + s) / share
        return (s * 2).sum() + (s * s).sum() + (s * t).sum() + t.sum()

    mine, theirs = ([t.double().requires_grad_() for t in ranks()] for _ in range(2))
    compiled = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    compiled(*mine).backward()
    by_torch(*theirs).backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_second_derivatives_match_numeric(comm):
    inputs = [t.double().requires_grad_() for t in ranks(shape=(2,))]
    assert torch.autograd.gradcheck(lambda *t: pr.ops.all_reduce(comm, t, "mean"), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: pr.ops.all_reduce(comm, t)[1] ** 3, inputs)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_gradient_of_max_min_prod_raises(comm, op):
    tensors = [t.requires_grad_() for t in ranks()]
    found = pr.ops.all_reduce(comm, tensors, op)
    with pytest.raises(pr.UnsupportedError, match=f"op is '{op}'"):
        found[0].sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch.func.jvp warns
def test_forward_mode_ad_raises(comm):
    x, y, z = ranks()
    with pytest.raises(pr.UnsupportedError, match="forward mode"):
        torch.func.jvp(lambda x: pr.ops.all_reduce(comm, [x, y, z])[0], (x,), (y,))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(pr.ops.all_reduce(comm, [x, y, z])[0], x + y + z)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, x: pr.ops.all_reduce(None, [x, x, x]), "comm is None, expected a Communicator"),
        (lambda c, x: pr.ops.all_reduce(c, [x, x, x.numpy()]), r"tensors\[2\] is a .*ndarray"),
        (lambda c, x: pr.ops.all_reduce_coalesced(c, [[x], 3, [x]]), r"lists\[1\] is an int"),
    ],
)
def test_wrong_argument_is_named(comm, call, words):
    with pytest.raises(pr.ArgumentError, match=words):
        call(comm, torch.ones(2))


@pytest.mark.parametrize(
    ("operator", "layout", "requires_grad"),
    [
        ("all_reduce", lambda t: t[:, ::2], True),
        ("all_reduce", lambda t: t[:1].expand(4, -1), True),
        ("all_reduce_", lambda t: t[:, ::2], False),
    ],
)
def test_operators_pass_opcheck(comm, operator, layout, requires_grad):
    tensors = [layout(t.requires_grad_(requires_grad)) for t in ranks(shape=(4, 6))]
    for num_lists in (0, K):
        arguments = (tensors, num_lists, "mean", None, "rank", comm._handle)
        opcheck(getattr(torch.ops.pyringar, operator).default, arguments)


class Summed(torch.nn.Module):
    def __init__(self, pair: pr.Communicator) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        self.pair.all_reduce([z, y + 0])
        return pr.ops.all_reduce(self.pair, [x, y])[0] + z


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_operator(strict):
    with pr.Communicator(["cpu"] * 2) as pair:
        x, y = ranks(2)
        program = torch.export.export(Summed(pair), (x, y), strict=strict)
        assert "pyringar.all_reduce_" in str(program.graph)
        for graph in (program.module(), make_fx(Summed(pair))(x, y)):
            assert torch.equal(graph(x, y), (x + y) + (x * 2 + y))


@pytest.mark.slow
def test_saved_program_needs_its_communicator(tmp_path):
    file = tmp_path / "program.pt2"
    with pr.Communicator(["cpu"] * 2, order="rank") as pair:
        torch.export.save(torch.export.export(Summed(pair), tuple(ranks(2))), file)
    del pair
    gc.collect()
    done = run_fresh(
        f"""
import torch, pyringar as pr
comms = [pr.Communicator(["cpu"] * 2, algorithm="ring") for _ in range(1000)]
assert pr.ops
torch.export.load({str(file)!r}).module()(torch.ones(5), torch.ones(5))
"""
    )
    assert "RingarError: communicator " in done.stderr, done.stderr


@on_ranks(2)
def test_compiled_calls_work_in_processes(state):
    def function(x, y):
        state.comm.all_reduce(x)
        state.comm.all_reduce_coalesced([x, y], "max")
        return pr.ops.all_reduce(state.comm, [y * 2], "mean")[0]

    mine = torch.arange(4.0) + state.rank
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(mine, mine.clone())
    assert mine.tolist() == [1, 3, 5, 7]
    assert found.tolist() == [2, 4, 6, 8]
    for lists in ([mine], [[mine]]):
        with pytest.raises(pr.ArgumentError, match="comm is a ProcessCommunicator"):
            pr.ops.all_reduce_coalesced(state.comm, lists)
    return found.tolist()


def test_other_dispatch_modes_change_nothing(comm):
    arrays = [t.numpy() for t in ranks()]
    wanted = sum(ranks()[1:], ranks()[0])
    with FlopCounterMode(display=False):
        comm.all_reduce(arrays)
        comm.all_reduce_coalesced([[array] for array in arrays], "max")
        with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] is an int"):
            comm.all_reduce([torch.ones(2), 3, torch.ones(2)])
    assert torch.equal(torch.from_numpy(arrays[2]), wanted)
