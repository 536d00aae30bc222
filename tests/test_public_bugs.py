"""Do wrappers over several ranks hold what public bug reports found broken elsewhere?

The oracle is the plain module, or an error that names the argument. Ids are the reports.
"""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import pyringar as pr

CPUS = ["cpu"] * 2


def parallel(module, **options):
    return pr.DataParallel(module, CPUS, **options)


def assert_same_grads(found, wanted, atol=1e-6):
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=atol)


# -- 01 mmdetection#2303, pytorch#27046: outputs that do not fit together ---


class Builds(nn.Module):
    """Returns what ``build`` makes of the layer, the input, and whether it has positive samples."""

    def __init__(self, build):
        super().__init__()
        self.layer, self.build = nn.Linear(2, 2), build

    def forward(self, x):
        return self.build(self.layer, x, bool((x[:, 0] > 0).any()))


OUTPUTS = {
    "other keys": lambda f, x, has: {"y": f(x), **({"aux": f(x)} if has else {})},
    "None": lambda f, x, has: (f(x), f(x).sum() if has else None),
    "other lengths": lambda f, x, has: [f(x)] * (1 + has),
    "other trailing shapes": lambda f, x, has: f(x).unsqueeze(1).repeat(1, 1 + has, 1),
    "other numbers of dimensions": lambda f, x, has: f(x).sum() if has else f(x).sum(1),
    "other classes": lambda f, x, has: (f(x),) if has else [f(x)],
    "nested keys": lambda f, x, has: {"a": [{"b" if has else "c": f(x)}]},
}


@pytest.mark.parametrize("build", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_outputs_of_other_structure_raise(build, odd_rank):
    batch = torch.tensor([[-1.0, 1], [-1, 2], [1, 1], [1, 2]])
    net = parallel(Builds(build))
    with pytest.raises(pr.ArgumentError, match=r"output.* on rank 0 and .* on rank 1"):
        net(batch if odd_rank else batch.flip(0))


# -- 02 pytorch#31422, #2312: PackedSequence ---


class Packs(nn.Module):
    def __init__(self, unpacks):
        super().__init__()
        self.lstm, self.unpacks = nn.LSTM(3, 4, batch_first=True), unpacks

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found = self.lstm(packed)[0]
        return (
            pad_packed_sequence(found, batch_first=True, total_length=5)[0]
            if self.unpacks
            else found
        )


@pytest.mark.parametrize("lengths", [[6], [6, 4]], ids=str)
def test_packed_input_raises(lengths):
    packed = pack_sequence([torch.randn(n, 3) for n in lengths])
    with pytest.raises(pr.ArgumentError, match="PackedSequence"):
        parallel(nn.LSTM(3, 4))(packed)


def test_packed_output_raises():
    with pytest.raises(pr.ArgumentError, match="PackedSequence"):
        parallel(Packs(unpacks=False))(torch.randn(4, 5, 3), torch.tensor([5, 3, 2, 4]))


def test_packing_inside_is_right():
    net, x, lengths = Packs(unpacks=True), torch.randn(4, 5, 3), torch.tensor([5, 3, 2, 4])
    torch.testing.assert_close(parallel(net)(x, lengths), net(x, lengths))


# -- 03 pytorch#46242: modules that write into their input ---


class PutsToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.token = nn.Linear(3, 2), nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x):
        x[0] = self.token
        return self.layer(x)


class Normalises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x.sub_(0.5).div_(2))


def relu_first():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))


def run_module(net, batch):
    parallel_net = parallel(net)
    parallel_net(batch).sum().backward()


def run_replicas(net, batch):
    replicas = pr.replicate(net, CPUS)
    shards, _ = pr.split_batch(batch, torch.zeros(4), CPUS)
    outputs = [replica(shard) for replica, shard in zip(replicas, shards, strict=True)]
    with pr.GradientBucketer(replicas) as bucketer:
        torch.autograd.backward([out.sum() for out in outputs])
        bucketer.wait()
    for param, other in zip(net.parameters(), replicas[1].parameters(), strict=True):
        param.grad = other.grad


@pytest.mark.parametrize("run", [run_module, run_replicas])
@pytest.mark.parametrize("make", [PutsToken, Normalises, relu_first])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_writes_into_input_are_right(make, run, requires_grad):
    net, batch = make(), torch.randn(4, 3)
    wanted = copy.deepcopy(net)
    for shard in batch.clone().chunk(2):
        wanted(shard.clone()).sum().backward()
    batch = batch.clone().requires_grad_(requires_grad)
    run(net, batch * 1 if requires_grad else batch)
    assert_same_grads(net, wanted)


# -- 04 pytorch#47562, learn2learn#128: autograd.grad ---


class Quadratic(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w * x.pow(2) + self.b * x / x


def test_gradient_penalty_is_right():
    plain = Quadratic()
    net = parallel(copy.deepcopy(plain))
    for module in (plain, net):
        x = torch.arange(1.0, 7).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (slope - 1).square().sum().backward()
    assert_same_grads(net, plain, atol=1e-5)


@pytest.mark.parametrize("create_graph", [False, True])
def test_grad_of_parameters_is_the_whole_batchs(create_graph):
    plain, x = nn.Linear(2, 1, bias=False), torch.arange(8.0).view(4, 2)
    net = parallel(copy.deepcopy(plain))
    (wanted,) = torch.autograd.grad(plain(x).square().sum(), plain.weight)
    (found,) = torch.autograd.grad(
        net(x).square().sum(), list(net.parameters()), create_graph=create_graph
    )
    torch.testing.assert_close(found, wanted)
    net(x).square().sum().backward(inputs=list(net.parameters()))
    torch.testing.assert_close(net.module.weight.grad, wanted)


# -- 05 pytorch#30439, 11 #37410, 13 #117275 and #136929: optimizers ---


def test_lbfgs_is_the_plain_modules():
    X, y = torch.randn(8, 3), torch.randn(8, 1)  # noqa: N806
    plain = nn.Linear(3, 1)
    net = parallel(copy.deepcopy(plain))
    for module in (plain, net):
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5)

        def closure(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (module(X) - y).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    torch.testing.assert_close(net.module.weight, plain.weight, rtol=1e-4, atol=1e-4)


def test_optimizer_state_can_be_reset():
    net = parallel(nn.Linear(4, 1, bias=False))
    nn.init.zeros_(net.module.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(4, 4)).mean().backward()
        optimizer.step()
        assert [*optimizer.state[net.module.weight]] == ["momentum_buffer"]
        optimizer.state = collections.defaultdict(dict)
    assert torch.equal(net.module.weight, torch.full((1, 4), -2.0))


class Tagged(nn.Parameter):
    pass


def tagged_net():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].bias.no_weight_decay = True
    net[1].weight = Tagged(net[1].weight.data)
    return net


def replica_of(net):
    return pr.replicate(net, ["cpu"])[0]


@pytest.mark.parametrize("wrap", [parallel, replica_of])
def test_parameters_keep_class_and_attributes(wrap):
    net = wrap(tagged_net())
    free = [p for p in net.parameters() if getattr(p, "no_weight_decay", False)]
    assert [p.shape for p in free] == [(2,)]
    assert [type(p) for p in net.parameters()].count(Tagged) == 1


# -- 07 pytorch#65907, #22095, #175024: buffers between forward and backward ---


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x):
        return self.layer(x) * self.mask


def normed():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def call_twice(net, x):
    (net(x).sum() + net(x).sum()).backward()


def evaluate_between(net, x):
    out = net(x)
    net.eval()
    with torch.no_grad():
        net(x)
    net.train()
    out.sum().backward()


def freeze_twice(net, x):
    net.eval()
    out = net(x)
    net.eval()
    out.sum().backward()


@pytest.mark.parametrize("make", [Masked, normed])
@pytest.mark.parametrize("case", [call_twice, evaluate_between, freeze_twice])
def test_calls_between_forward_and_backward_are_allowed(make, case):
    plain, x = make(), torch.randn(4, 2)
    net = parallel(copy.deepcopy(plain))
    case(net, x)
    case(plain, x)
    if make is Masked or case is freeze_twice:  # else the shards' own statistics count
        assert_same_grads(net, plain)


# -- 10 pytorch#54495: synchronised batch norm without weight or bias ---


def without(name):
    norm = nn.BatchNorm1d(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    if name:
        norm.register_parameter(name, None)
    return norm


NORMS = {
    "affine=False": lambda: nn.BatchNorm1d(3, affine=False),
    "no bias": lambda: without("bias"),
    "no weight": lambda: without("weight"),
    "both": lambda: without(""),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_synced_batchnorm_without_weight_or_bias(make):
    plain = make()
    x = torch.randn(7, 3) * 5 + 2
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 3, batchnorm="sync")
    torch.testing.assert_close(net(x), plain(x), rtol=1e-5, atol=1e-5)


# -- 15 pytorch#44951: scripted modules ---


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(1, 2))]
)
@pytest.mark.parametrize("is_inner", [False, True])
def test_scripted_modules_are_refused(make, is_inner):
    net = make(nn.Linear(2, 2))
    net = nn.Sequential(net) if is_inner else net
    with pytest.raises(pr.UnsupportedError, match="module '0'" if is_inner else "module"):
        parallel(net)(torch.ones(4, 2))
    with pytest.raises(pr.UnsupportedError):
        pr.replicate(net, CPUS)


# -- 16 transformers#23138, pytorch#52597: containers ---


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    note: None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Encoding(collections.UserDict):  # as of transformers: takes other arguments, has attributes
    def __init__(self, x, *, note):
        super().__init__({"x": x})
        self.note = note


class Holds:
    def __init__(self, x):
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


Named = collections.namedtuple("Named", "x y")
SPLIT = {
    "dict": (lambda x: {"x": x}, lambda b: b["x"]),
    "OrderedDict": (lambda x: collections.OrderedDict(x=x), lambda b: b["x"]),
    "defaultdict": (lambda x: collections.defaultdict(list, x=x), lambda b: b["x"]),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda b: b["x"]),
    "subclass": (lambda x: Encoding(x, note=1), lambda b: b["x"] * b.note),
    "namedtuple": (lambda x: Named(x, None), lambda b: b.x),
    "dataclass": (Batch, lambda b: b.x),
    "frozen dataclass": (Frozen, lambda b: b.x),
    "deque": (lambda x: collections.deque([x], maxlen=1), lambda b: b[0]),
    "nested": (lambda x: [({"a": Batch(x)},)], lambda b: b[0][0]["a"].x),
}
REFUSED = {
    "object": (Holds, lambda b: b.x),
    "slots": (Slots, lambda b: b.x),
    "set": (lambda x: {x}, lambda b: next(iter(b))),
    "object in a list": (lambda x: [Holds(x)], lambda b: b[0].x),
    "list in an object": (lambda x: Holds([x]), lambda b: b.x[0]),
}


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, batch, y):
        return self.read(batch) + 0 * y.sum()


@pytest.mark.parametrize(("make", "read"), SPLIT.values(), ids=SPLIT)
def test_containers_are_split(make, read):
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(parallel(Reads(read))(make(x), x), x)


@pytest.mark.parametrize(("make", "read"), REFUSED.values(), ids=REFUSED)
def test_hidden_batches_are_refused(make, read):
    x = torch.arange(8.0).view(4, 2)
    with pytest.raises(pr.ArgumentError, match=r"args\[0\].* tensor of 4 samples"):
        parallel(Reads(read))(make(x), x)


@pytest.mark.parametrize(("make", "read"), SPLIT.values(), ids=SPLIT)
def test_containers_are_gathered(make, read):
    x = torch.arange(8.0).view(4, 2)
    net = parallel(Builds(lambda layer, x, _: make(x)))
    found = net(x)
    assert type(found) is type(make(x))
    assert torch.equal(read(found), x)


# -- 17 pytorch#188346: load_state_dict(assign=True) of tied weights ---


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.o.weight = self.e.weight

    def forward(self, i):
        return self.o(self.e(i))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_tied_weights_load_and_train(assign, has_prefix):
    source, i = Tied(), torch.tensor([1, 2, 3, 4])
    net = parallel(Tied())
    state = (parallel(source) if has_prefix else source).state_dict()
    assert not net.load_state_dict(state, assign=assign).missing_keys
    assert net.module.o.weight is net.module.e.weight
    for module in (source, net):
        module(i).square().sum().backward()
    assert_same_grads(net, source)


def test_unknown_names_are_refused():
    net = parallel(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r'"module\.weight"'):
        net.load_state_dict({"w": torch.ones(2, 2), "bias": torch.ones(2)})
    assert net.load_state_dict({}, strict=False).missing_keys == ["module.weight", "module.bias"]


def test_versions_of_plain_states_count():
    """Statistics of before version 2 have no count of batches."""
    state = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    net = parallel(nn.BatchNorm1d(2))
    assert not net.load_state_dict(state).missing_keys


# -- 25 pytorch#36035, transformers#3936, pytorch#10537, #102981: modules that keep parameters ---


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ps = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.pd = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})

    def forward(self, x):
        x = x.to(next(self.parameters()).dtype)
        return sum(p * x for p in self.ps) + self.pd["a"]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.l(x.unsqueeze(1).repeat(1, 3, 1))[0]


def spectral(wrap):
    torch.manual_seed(3)
    layer = wrap(nn.Linear(3, 2))
    return layer.eval()  # a power iteration per call would change the weight


KEEP = {
    "parameter lists": Lists,
    "LSTM": Recurrent,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "spectral_norm": lambda: spectral(nn.utils.parametrizations.spectral_norm),
    "old spectral_norm": lambda: spectral(nn.utils.spectral_norm),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 2)),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("cap_mb", [None, 1e-6], ids=["one bucket", "many"])
def test_modules_that_keep_weights_are_right(make, cap_mb):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    net = parallel(make(), bucket_cap_mb=cap_mb)
    net.load_state_dict({f"module.{name}": value for name, value in plain.state_dict().items()})
    x = torch.randn(6, 2, 3) if isinstance(plain, nn.TransformerEncoderLayer) else torch.randn(6, 3)
    for module in (plain, net):
        module(x).square().sum().backward()
    assert_same_grads(net, plain, atol=1e-5)
