"""`pytest tests/ptx` runs all that is not thorough; where the folder is not named, it is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = [Path(word.split("::")[0]).resolve() for word in config.args]
    if any(path == FOLDER or FOLDER in path.parents for path in named):
        return
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)
