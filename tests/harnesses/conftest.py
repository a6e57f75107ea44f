"""The table that the suite ends with: one row a harness, those that could not run with their reason."""

import pytest

COLUMNS = ("harness", "version", "dialect", "calls", "branches and why", "tokens sampled / trainable", "prompt tokens")
ROWS = pytest.StashKey[list[tuple[str, ...]]]()


def pytest_configure(config):
    config.stash[ROWS] = []


@pytest.fixture
def row(request):
    """Adds a row to the table."""
    return lambda *cells: request.config.stash[ROWS].append(tuple(map(str, cells)))


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.write_line("")
        for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows):
            terminalreporter.write_line("| " + " | ".join(cells) + " |")
