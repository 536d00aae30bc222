"""pr.replicate: copies are equal and share no memory; modules that cannot be copied raise."""

import copy
import threading

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.parallel.replicate import copy_buffers
from pyringar.parallel.shards import check_replicas_equal


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(3, 3, 2)
        self.decoder = nn.Conv2d(3, 3, 2)
        self.to(memory_format=torch.channels_last)
        self.decoder.weight = self.encoder.weight
        self.decoder.bias.requires_grad_(False)
        self.norm = nn.BatchNorm2d(3).eval()
        scale = torch.rand(3)
        self.encoder.register_buffer("scale", scale)
        self.decoder.register_buffer("scale", scale)


@pytest.mark.parametrize("num_ranks", [1, 5])
def test_copies_share_no_memory(num_ranks):
    module = Tied()
    module.encoder(torch.rand(4, 3, 5, 5)).sum().backward()
    before = copy.deepcopy(module.state_dict())
    replicas = pr.replicate(module, ["cpu"] * num_ranks)
    assert len(replicas) == num_ranks
    addresses = [
        {tensor.data_ptr() for tensor in (*part.parameters(), *part.buffers())}
        for part in (module, *replicas)
    ]
    assert len(set.union(*addresses)) == sum(map(len, addresses))
    for replica in replicas:
        assert type(replica) is Tied
        assert replica.decoder.weight is replica.encoder.weight
        assert replica.decoder.scale is replica.encoder.scale
        assert [part.training for part in replica.modules()] == [True, True, True, False]
        params = [(p.requires_grad, p.grad, p.stride()) for p in replica.parameters()]
        assert params == [(p.requires_grad, None, p.stride()) for p in module.parameters()]
        for name, tensor in replica.state_dict().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name]), name


class Tagged(nn.Parameter):
    """Parameter subclass with an additional constructor argument, ``tag``."""

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


class CopiesAsItself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class CopiesWithoutGrad(nn.Linear):
    def __deepcopy__(self, memo):
        made = nn.Linear(2, 2)
        made.weight = nn.Parameter(self.weight * 1, requires_grad=False)
        return made


class HoldsLock(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.lock = threading.Lock()


UNCOPYABLE = {
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), "weight'.* not a leaf"),
    "same": (lambda: CopiesAsItself(2, 2), "weight' in a CopiesAsItself, .* shares the memory"),
    "frozen": (lambda: CopiesWithoutGrad(2, 2), "weight'.* requires_grad is False"),
    "lock": (lambda: HoldsLock(2, 2), "cannot be copied .*lock"),
    "lazy": (lambda: nn.LazyLinear(2), "lazy parameter '.*weight'"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight' on the meta device"),
}


@pytest.mark.parametrize("kind", UNCOPYABLE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_uncopyable_modules_raise(kind):
    make, words = UNCOPYABLE[kind]
    error = pr.ArgumentError if kind in ("lazy", "meta") else pr.UnsupportedError
    for module in (make(), nn.Sequential(nn.Linear(2, 2), make())):
        with pytest.raises(error, match=words):
            pr.replicate(module, ["cpu"])


def test_copy_buffers_copies_from_rank_0():
    replicas = [nn.BatchNorm1d(3) for _ in range(3)]
    for rank, replica in enumerate(replicas):
        replica(torch.rand(4, 3) + rank)
    wanted = [buffer.clone() for buffer in replicas[0].buffers()]
    copy_buffers(replicas)
    check_replicas_equal([wanted, *([*replica.buffers()] for replica in replicas)])
