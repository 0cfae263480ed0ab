"""A terminal that goes while a job is followed."""

import errno
import io
import sys

from elasticdl.cli.screens import LiveScreen, open_screen
from elasticdl.proto import elasticdl_pb2 as pb


class Terminal(io.StringIO):
    gone = False

    def isatty(self):
        return True

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_whoever_follows_a_job_goes_on_without_the_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_screen(100) as screen:
        assert isinstance(screen, LiveScreen)
        screen.line("before")
        terminal.gone = True
        screen.show(pb.JobStatus(phase="running"))
        screen.passing("epoch", "epoch 1 finished")
        screen.line("after")
    assert "before" in terminal.getvalue()
    assert "after" not in terminal.getvalue()
