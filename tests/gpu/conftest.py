"""Tests that need a GPU. Where there is none they are skipped, with the reason; `pytest tests/gpu -rs` shows it."""
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    why = f"no GPU: torch {torch.__version__} sees none (torch.cuda.is_available() is False)"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def gpus() -> int:
    """How many there are, at least two."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, {count} is here")
    return count
