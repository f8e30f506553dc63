"""Scripts that measure, and what they share. Each is started from the root of the repository: `python -m benchmarks.search.random_search --help`."""
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Of the repository."""
