"""Test bugs of other data-parallel wrappers, from public reports, on this library's wrappers.

The expected result is that of the plain module, or an error that names the argument. Section
comments name the reports. test_data_parallel.py tests reports 04 and 05, test_replicate.py 13.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import types

import pytest
import torch
from parallel_nets import Tied, assert_same, tokens
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import pyringar as pr

CPUS = ["cpu"] * 2


def parallel(module, **options):
    return pr.DataParallel(module, CPUS, **options)


# -- 01 mmdetection#2303, pytorch#27046: outputs that differ in structure between ranks ---


class Builds(nn.Module):
    """Forward returns ``build(layer, x, has_positive_samples)``."""

    def __init__(self, build):
        super().__init__()
        self.layer, self.build = nn.Linear(2, 2), build

    def forward(self, x):
        return self.build(self.layer, x, bool((x[:, 0] > 0).any()))


OUTPUTS = {
    "other keys": lambda f, x, has: {"y": f(x), **({"aux": f(x)} if has else {})},
    "None": lambda f, x, has: (f(x), f(x).sum() if has else None),
    "other trailing shapes": lambda f, x, has: f(x).unsqueeze(1).repeat(1, 1 + has, 1),
    "other classes": lambda f, x, has: (f(x),) if has else [f(x)],
    "nested keys": lambda f, x, has: {"a": [{"b" if has else "c": f(x)}]},
}


@pytest.mark.parametrize("build", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_mismatched_output_structures_raise(build, odd_rank):
    batch = torch.tensor([[-1.0, 1], [-1, 2], [1, 1], [1, 2]])
    net = parallel(Builds(build))
    with pytest.raises(pr.ArgumentError, match=r"output.* on rank 0 and .* on rank 1"):
        net(batch if odd_rank else batch.flip(0))


# -- 02 pytorch#31422, #2312: PackedSequence ---


@pytest.mark.parametrize("lengths", [[6], [6, 4]], ids=str)
def test_packed_sequence_raises(lengths):
    packed = pack_sequence([torch.randn(n, 3) for n in lengths])
    with pytest.raises(pr.ArgumentError, match="PackedSequence"):
        parallel(nn.LSTM(3, 4))(packed)


# -- 03 pytorch#46242: modules that write into their input ---


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer, self.token = nn.Linear(3, 2), nn.Parameter(torch.full((3,), 5.0))
        self.write = write

    def forward(self, x):
        self.write(x, self.token)
        return self.layer(x)


WRITES = {
    "token": lambda x, token: x[0].copy_(token),
    "arithmetic": lambda x, token: x.sub_(0.5).div_(2),
    "relu": lambda x, token: x.relu_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_module_may_write_input(write, requires_grad):
    net, batch = Writes(write), torch.randn(4, 3)
    wanted = copy.deepcopy(net)
    for shard in batch.clone().chunk(2):
        wanted(shard.clone()).sum().backward()
    batch = batch.clone().requires_grad_(requires_grad)
    parallel(net)(batch * 1 if requires_grad else batch).sum().backward()
    assert_same(net, wanted, 1e-5)


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


class Encoding(collections.UserDict):  # __init__ needs `note`, as in BatchEncoding
    def __init__(self, x, *, note):
        super().__init__({"x": x})
        self.note = note


def hold(x):
    return types.SimpleNamespace(x=x)


Named = collections.namedtuple("Named", "x y")
SPLIT = {
    "dict": (lambda x: {"x": x}, lambda b: b["x"]),
    "defaultdict": (lambda x: collections.defaultdict(list, x=x), lambda b: b["x"]),
    "subclass": (lambda x: Encoding(x, note=1), lambda b: b["x"] * b.note),
    "namedtuple": (lambda x: Named(x, None), lambda b: b.x),
    "dataclass": (Batch, lambda b: b.x),
    "deque": (lambda x: collections.deque([x], maxlen=1), lambda b: b[0]),
    "nested": (lambda x: [({"a": Batch(x)},)], lambda b: b[0][0]["a"].x),
}
REFUSED = {
    "object": (hold, lambda b: b.x),
    "set": (lambda x: {x}, lambda b: next(iter(b))),
    "object in a list": (lambda x: [hold(x)], lambda b: b[0].x),
    "list in an object": (lambda x: hold([x]), lambda b: b.x[0]),
}


class Repacks(nn.Module):
    def __init__(self, make, read):
        super().__init__()
        self.make, self.read = make, read

    def forward(self, batch, y):
        return self.make(self.read(batch) + 0 * y)


@pytest.mark.parametrize(("make", "read"), SPLIT.values(), ids=SPLIT)
def test_containers_are_split_and_gathered(make, read):
    x = torch.arange(8.0).view(4, 2)
    found = parallel(Repacks(make, read))(make(x), x)
    assert type(found) is type(make(x))
    assert torch.equal(read(found), x)


@pytest.mark.parametrize(("make", "read"), REFUSED.values(), ids=REFUSED)
def test_batch_in_object_raises(make, read):
    x = torch.arange(8.0).view(4, 2)
    with pytest.raises(pr.ArgumentError, match=r"args\[0\].* tensor of 4 samples"):
        parallel(Repacks(make, read))(make(x), x)


# -- 17 pytorch#188346: load_state_dict(assign=True) of tied weights ---


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_tied_weights_load_and_train(assign, has_prefix):
    source, net = Tied(), parallel(Tied())
    state = (parallel(source) if has_prefix else source).state_dict()
    assert not net.load_state_dict(state, assign=assign).missing_keys
    assert net.module.out.weight is net.module.embedding.weight
    for module in (source, net):
        module(tokens(4)[0]).square().sum().backward()
    assert_same(net, source, 1e-5)


def test_missing_state_keys_have_prefix():
    net = parallel(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r'"module\.weight"'):
        net.load_state_dict({"w": torch.ones(2, 2), "bias": torch.ones(2)})
    assert net.load_state_dict({}, strict=False).missing_keys == ["module.weight", "module.bias"]


# -- 25 pytorch#36035, transformers#3936, pytorch#10537, #102981: special parameters ---


class ParameterLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ps = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.pd = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})

    def forward(self, x):
        x = x.to(next(self.parameters()).dtype)
        return sum(p * x for p in self.ps) + self.pd["a"]


KEEP = {
    "parameter lists": ParameterLists,
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("cap_mb", [None, 1e-6], ids=["one bucket", "many"])
def test_special_parameters_match_plain_module(make, cap_mb):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    net = parallel(make(), bucket_cap_mb=cap_mb)
    net.load_state_dict({f"module.{name}": value for name, value in plain.state_dict().items()})
    x = torch.randn(6, 2, 3) if isinstance(plain, nn.TransformerEncoderLayer) else torch.randn(6, 3)
    for module in (plain, net):
        module(x).square().sum().backward()
    assert_same(net, plain, 1e-5)
