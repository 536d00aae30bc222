"""A stand-in for a GPU: tensors of host memory, and streams whose work runs late, in seeded order.

`installed` puts it in the place of what pyringar.distributed takes of torch.cuda. An operation on a
`Late` tensor is put on the current stream and runs when somebody waits; until then memory holds
rubbish. Which stream goes on is drawn, so that work that is not ordered comes in any order. Memory
that is let go is overwritten at once, on the stream where it was allocated, as by whoever gets it
next; `Gpu.check_freed` says whether somebody wrote there after that.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda:0")
RUBBISH = 0x7B
_empty, _zeros = torch.empty, torch.zeros
gpu: Gpu


class Gpu:
    """One device and its streams."""

    def __init__(self, seed: int) -> None:
        self.streams: list[Stream] = []
        self.freed: list[Tensor] = []
        self.is_capturing = False
        self.pinned: list[int] = []  # bytes of each buffer
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._here = threading.local()
        self.default = Stream(self)

    def current(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current(), stream
        yield
        self._here.stream = before

    def run_until(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            while not is_done():
                self._random.choice([s for s in self.streams if s.is_ready()]).step()

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.work for stream in self.streams))

    def check_freed(self) -> bool:
        """Whether nobody wrote into memory that he had let go."""
        return all((memory == RUBBISH).all() for memory in self.freed)


class Stream:
    def __init__(self, owner: Gpu | torch.device) -> None:
        self.gpu = owner if isinstance(owner, Gpu) else gpu
        self.work: deque[tuple[Event | None, Callable[[], object]]] = deque()
        self.gpu.streams.append(self)

    def is_ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].is_done)

    def step(self) -> None:
        self.work[0][1]()
        self.work.popleft()

    def put(self, run: Callable[[], object]) -> None:
        self.work.append((None, run))

    def wait_event(self, event: Event) -> None:
        if event.is_recorded:
            self.work.append((event, lambda: None))

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """Recorded once."""

    def __init__(self, blocking: bool = False) -> None:
        self.is_recorded = self.is_done = False

    def record(self, stream: Stream) -> None:
        self.is_recorded = True
        stream.put(partial(setattr, self, "is_done", True))

    def query(self) -> bool:
        return self.is_done or not self.is_recorded

    def synchronize(self) -> None:
        gpu.run_until(self.query)


class Block:
    """Memory that goes back to the stream on which it was allocated, when nobody has it any more.

    `record` makes that wait for what another stream has to do then.
    """

    def __init__(self, host: Tensor) -> None:
        self.bytes = _empty(0, dtype=torch.uint8).set_(host.untyped_storage())
        self.bytes.fill_(RUBBISH)
        self.gpu, self.stream, self.others = gpu, gpu.current(), []

    def record(self, stream: Stream) -> None:
        self.others.append(stream)

    def __del__(self) -> None:
        for other in self.others:
            self.stream.wait_event(other.record_event())
        memory, freed = self.bytes, self.gpu.freed
        self.stream.put(lambda: freed.append(memory.fill_(RUBBISH)))


class Late(Tensor):
    """A tensor that says it is on the GPU."""

    @staticmethod
    def __new__(cls, host: Tensor, block: Block) -> Late:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, **layout)

    def __init__(self, host: Tensor, block: Block) -> None:
        self.host, self.block = host, block

    @property
    def device(self) -> torch.device:
        return DEVICE

    def record_stream(self, stream: Stream) -> None:
        self.block.record(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        hosts, named = tree_map_only(Late, lambda late: late.host, (args, kwargs or {}))
        run = partial(func, *hosts, **named)
        alias = func._schema.returns[0].alias_info
        if alias is not None and not alias.is_write:
            return tree_map_only(Tensor, lambda host: Late(host, args[0].block), run())
        if alias is not None:
            gpu.current().put(run)
            crosses = func is torch.ops.aten.copy_.default and not all(
                isinstance(tensor, Late) for tensor in args[:2]
            )
            if crosses and not (len(args) > 2 and args[2]):
                gpu.current().record_event().synchronize()
            return args[0]
        return later(run(), run)


def later(like: Tensor, run: Callable[[], Tensor]) -> Late:
    """A new tensor, in which the result will be."""
    if like.numel() == 0:
        return Late(like, Block(_empty(1)))
    host = torch.empty_like(like)
    block = Block(host)
    gpu.current().put(lambda: host.copy_(run()))
    return Late(host, block)


def _make(make: Callable[..., Tensor], *size: Any, device=None, pin_memory=False, **options) -> Any:
    tensor = make(*size, **options)
    if pin_memory:
        gpu.pinned.append(tensor.nbytes)
    if device is None or torch.device(device).type == "cpu":
        return tensor
    return later(tensor, lambda: tensor)


@contextlib.contextmanager
def installed(seed: int) -> Iterator[Gpu]:
    """Let torch.cuda be this device."""
    global gpu
    gpu = Gpu(seed)
    in_cuda = {
        "Stream": Stream,
        "Event": Event,
        "stream": gpu.on,
        "current_stream": lambda device=None: gpu.current(),
        "device": lambda device: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: gpu.is_capturing,
    }
    makers = {"empty": partial(_make, _empty), "zeros": partial(_make, _zeros)}
    with mock.patch.multiple(torch.cuda, **in_cuda), mock.patch.multiple(torch, **makers):
        yield gpu
