"""What the command ``elasticdl`` calls: quiet, too, if it is interrupted while its modules are imported."""

from __future__ import annotations

import signal


def main() -> int:
    try:
        from elasticdl.cli.__main__ import main_of_process
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once more changes nothing
        return 130
    return main_of_process()
