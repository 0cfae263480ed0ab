"""A plugin of pytest: coverage keeps which test runs a line, also in the processes that the test starts."""

import base64
import json
import os

import pytest
from coverage import Coverage


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    measuring, config = Coverage.current(), os.environ.get("COVERAGE_PROCESS_CONFIG")
    if measuring and config:
        test = item.nodeid.partition("[")[0]
        measuring.switch_context(test)
        # What coverage gives to processes has no public way to say this.
        told = json.dumps({**json.loads(base64.b64decode(config)), "context": test})
        os.environ["COVERAGE_PROCESS_CONFIG"] = base64.b64encode(told.encode()).decode()
