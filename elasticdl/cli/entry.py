"""What the command ``elasticdl`` calls: quiet, too, if it is interrupted while its modules are imported, or once more while it ends."""

from __future__ import annotations

import signal


def main() -> int:
    try:
        from elasticdl.cli.__main__ import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if code >= 128 else ():
        signal.signal(number, signal.SIG_IGN)
    return code
