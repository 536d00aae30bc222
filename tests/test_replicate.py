"""Copies of a module: equal bits, no shared memory, attributes kept, wrong copies refused."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.parallel.replicate import copy_buffers


class Tied(nn.Module):
    """Encoder and decoder share a weight, two heads a buffer; one parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, 5)
        self.decoder = nn.Linear(5, 5)
        self.decoder.weight = self.encoder.weight
        self.decoder.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        scale = torch.rand(5)
        self.encoder.register_buffer("scale", scale)
        self.decoder.register_buffer("scale", scale)

    def forward(self, x):
        return self.norm(self.decoder(self.encoder(x) * self.encoder.scale))


@pytest.mark.parametrize("num_ranks", [1, 5])
def test_copies_share_no_memory(num_ranks):
    module = Tied()
    module(torch.rand(4, 5)).sum().backward()  # changes the running statistics
    before = copy.deepcopy(module.state_dict())
    replicas = pr.replicate(module, ["cpu"] * num_ranks)
    assert len(replicas) == num_ranks
    places = [
        {tensor.data_ptr() for tensor in (*part.parameters(), *part.buffers())}
        for part in (module, *replicas)
    ]
    assert len(set.union(*places)) == sum(map(len, places))
    for replica in replicas:
        assert type(replica) is Tied
        assert all(param.grad is None for param in replica.parameters())
        for name, tensor in replica.state_dict().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name]), name


def test_tied_tensors_stay_tied():
    module = Tied()
    (replica,) = pr.replicate(module, ["cpu"])
    assert replica.decoder.weight is replica.encoder.weight
    assert replica.decoder.scale is replica.encoder.scale
    assert len(list(replica.parameters())) == len(list(module.parameters()))


def test_modes_and_formats_are_kept():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout())
    module = module.to(memory_format=torch.channels_last).eval()
    module[2].train()
    module[0].bias.requires_grad_(False)
    (replica,) = pr.replicate(module, ["cpu"])
    assert [part.training for part in replica.modules()] == [False, False, False, True]
    assert [p.requires_grad for p in replica.parameters()] == [True, False, True, True]
    assert replica[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_lazy_parameters_are_refused():
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(
        pr.ArgumentError, match=r"lazy parameter '0\.weight'.* call the module once"
    ):
        pr.replicate(module, ["cpu"])
    module(torch.rand(1, 3))
    assert len(pr.replicate(module, ["cpu"])) == 1


def test_wrong_arguments_are_named():
    with pytest.raises(pr.ArgumentError, match=r"module is a list, expected a torch\.nn.Module"):
        pr.replicate([torch.rand(3)], ["cpu"])
    with pytest.raises(pr.ArgumentError, match=r"devices\[1\] is 'cuda:93'.*there are: cpu"):
        pr.replicate(nn.Linear(2, 2), ["cpu", "cuda:93"])
    with pytest.raises(pr.ArgumentError, match="'weight' on the meta device"):
        pr.replicate(nn.Linear(2, 2, device="meta"), ["cpu"])


def test_failed_deepcopy_is_named():
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(pr.UnsupportedError, match=r"a Linear, cannot be copied .*lock"):
        pr.replicate(module, ["cpu"])


class Tagged(nn.Parameter):
    """A parameter whose constructor has another signature."""

    def __new__(cls, data, tag=None, requires_grad=True):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.tag = tag
        return made


def test_parameter_attributes_are_kept():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].bias.no_weight_decay = True
    module[0].bias.partner = module[1].bias
    module[1].weight = Tagged(module[1].weight.data, tag=[1])
    if hasattr(module[0].weight, "grad_dtype"):
        module[0].weight.grad_dtype = torch.float64
    for replica in pr.replicate(module, ["cpu"] * 2):
        assert replica[0].bias.no_weight_decay
        assert replica[0].bias.partner is replica[1].bias
        assert not hasattr(replica[1].bias, "no_weight_decay")
        assert type(replica[1].weight) is Tagged
        assert replica[1].weight.tag == [1]
        assert replica[1].weight.tag is not module[1].weight.tag
        grad_dtype = getattr(module[0].weight, "grad_dtype", None)
        assert getattr(replica[0].weight, "grad_dtype", None) == grad_dtype


class Fixed(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class Detached(nn.Linear):
    def __deepcopy__(self, memo):
        made = nn.Linear(2, 2)
        made.weight = nn.Parameter(self.weight * 1, requires_grad=False)
        return made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), "in a RecursiveScriptModule.*not a leaf"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "it is not a leaf"),
        (lambda: Fixed(2, 2), "in a Fixed, .* it shares the memory of the original"),
        (lambda: Detached(2, 2), "in a Detached, .* its requires_grad is False"),
        (lambda: nn.utils.weight_norm(nn.Linear(2, 2)), "cannot be copied"),
    ],
    ids=["scripted", "traced", "same", "frozen", "weight_norm"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_wrong_copies_are_refused(make, words):
    module = nn.Sequential(nn.Linear(2, 2), make())
    with pytest.raises(pr.UnsupportedError, match=words) as caught:
        pr.replicate(module, ["cpu"])
    assert "cannot be copied" in words or "'1.weight'" in str(caught.value)
    with pytest.raises(pr.UnsupportedError, match=words):
        pr.replicate(module[1], ["cpu"])


def test_buffers_come_from_rank_0():
    replicas = [nn.BatchNorm1d(3) for _ in range(3)]
    for rank, replica in enumerate(replicas):
        replica(torch.rand(4, 3) + rank)
    copy_buffers(replicas)
    assert torch.equal(replicas[0].running_mean, replicas[2].running_mean)
    assert 0 < replicas[2].running_mean.mean() * 10 < 1
