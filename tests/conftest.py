"""Options, profiles and the order of all tests. Makes the modules of this folder importable."""

import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from durations import Recorder, read_durations

# pytest rewrites the assertions of 200 files: if it may not store the result, each start takes seconds longer.
sys.dont_write_bytecode = False

hypothesis.settings.register_profile("quick", max_examples=200, deadline=None)
hypothesis.settings.register_profile("full", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile("quick")  # `--hypothesis-profile=full` replaces it


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of all tests."""
    parser.addoption("--record-durations", type=Path, metavar="FILE", help="write the seconds of each test into a file")
    parser.addoption(
        "--soak", action="store_true", help="the long form of tests: all cases, long trainings, more kills"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record durations if `--record-durations` is given."""
    if path := config.getoption("record_durations"):
        config.pluginmanager.register(Recorder(path), "durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests without `--soak`. Order the files by their recorded seconds, the longest first, if
    several processes share them.

    With `--dist=loadfile --no-loadscope-reorder`, pytest-xdist distributes files in this order, so that no long file is
    left to one process at the end. Files that are not in the record come first.
    """
    if not config.getoption("soak"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if hasattr(config, "workerinput"):
        recorded = read_durations()
        items.sort(key=lambda item: -recorded.get(item.nodeid.partition("::")[0], sys.maxsize))
