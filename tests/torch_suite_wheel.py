"""DistributedTest, which torch's wheel holds, for torch_suite_threads.py."""

from __future__ import annotations

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class TestOnThreads(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
