"""Copies of a module: equal in bits, nothing shared, everything else kept."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.parallel.replicate import copy_buffers, copy_parameters


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


def memory(module):
    """Addresses of all parameters and buffers."""
    return {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.stride() == theirs[name].stride()
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_copies_hold_the_same_bits_and_share_no_memory(num_ranks):
    module = Tied()
    module(torch.rand(4, 5)).sum().backward()  # running statistics that are not the initial ones
    before = copy.deepcopy(module.state_dict())
    replicas = pr.replicate(module, ["cpu"] * num_ranks)
    assert len(replicas) == num_ranks
    everything = [memory(part) for part in (module, *replicas)]
    assert len(set.union(*everything)) == sum(map(len, everything))
    for replica in replicas:
        assert type(replica) is Tied
        assert_equal_bits(replica.state_dict(), before)
        assert all(param.grad is None for param in replica.parameters())
    with torch.no_grad():
        replicas[0].encoder.weight.zero_()
    for other in (module, *replicas[1:]):
        assert_equal_bits(other.state_dict(), before)


def test_what_is_shared_inside_stays_shared_and_gradients_meet_there():
    module = Tied()
    (replica,) = pr.replicate(module, ["cpu"])
    assert replica.decoder.weight is replica.encoder.weight
    assert replica.decoder.scale is replica.encoder.scale
    assert len(list(replica.parameters())) == len(list(module.parameters()))
    x = torch.rand(4, 5)
    for net in (module, replica):
        net(x).square().sum().backward()
    assert torch.equal(replica.encoder.weight.grad, module.encoder.weight.grad)


def test_modes_formats_and_frozen_parameters_are_kept():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout())
    module = module.to(memory_format=torch.channels_last).eval()
    module[2].train()
    module[0].bias.requires_grad_(False)
    replica = pr.replicate(module, ["cpu", "cpu"])[1]
    assert [part.training for part in replica.modules()] == [False, False, False, True]
    assert [p.requires_grad for p in replica.parameters()] == [True, False, True, True]
    assert replica[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_lazy_parameters_are_refused_by_name_until_they_have_values():
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


def test_a_module_that_cannot_be_copied_says_why():
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(pr.UnsupportedError, match=r"a Linear, cannot be copied .*lock"):
        pr.replicate(module, ["cpu"])


def test_one_ranks_tensors_are_given_to_all():
    replicas = [nn.BatchNorm1d(3) for _ in range(3)]
    for rank, replica in enumerate(replicas):
        replica(torch.rand(4, 3) + rank)
        nn.init.constant_(replica.weight, rank)
    copy_buffers(replicas, root=1)
    assert torch.equal(replicas[0].running_mean, replicas[2].running_mean)
    assert 1 < replicas[0].running_mean.mean() * 10 < 2
    assert replicas[2].weight[0] == 2
    copy_parameters(replicas)
    assert replicas[2].weight[0] == 0
