"""What all tests share (`tests/conftest.py`) holds here, too; `make experiments` runs these, and nothing else does."""

from tests.cluster.session import pytest_report_header, pytest_terminal_summary  # noqa: F401
from tests.conftest import _interruptible, pytest_collection_finish, pytest_configure  # noqa: F401
