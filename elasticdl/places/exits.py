"""What the end of a worker's process says: by its exit code, and by the last that it has printed."""

from __future__ import annotations

import signal

from elasticdl.common.stacks import last_words
from elasticdl.common.tracebacks import last_exception, last_line
from elasticdl.common.triton_first import why_it_crashed
from elasticdl.job.log_marks import without_marks
from elasticdl.master.state.events import ExitCause

OUTPUT_CHARACTERS = 4096
OUTPUT_LINES = 40
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SHELL_SIGNAL_BASE = 128
USAGE = 2  # a program ends with that which refuses its arguments, or what it was to do, and has said so


def judge_exit(code: int, output: str = "") -> tuple[ExitCause, str]:
    """What an exit code says, with a word for people. A shell reports a child's signal as 128 + its number.

    ``output``: the last that the process has printed, which may tell the reason.
    """
    if code == 0:
        return ExitCause.CLEAN, "exit code 0"
    number = -code if code < 0 else code - _SHELL_SIGNAL_BASE
    try:
        name = signal.Signals(number).name
    except ValueError:
        said = last_exception(output) if code == 1 else last_line(output) if code == USAGE else ""
        return ExitCause.CRASHED, f"exit code {code}{f': {said}' if said else ''}"
    if number in _FROM_OUTSIDE:
        return ExitCause.KILLED, name
    why = why_it_crashed(output) if number in (signal.SIGSEGV, signal.SIGABRT) else ""
    return ExitCause.CRASHED, f"{name}: {why}" if why else name


def judge_end(code: int, text: str, *, memory_was_short: bool = False) -> tuple[ExitCause, str, str]:
    """As `judge_exit`, with the end of what the process has printed, of which ``text`` is as much as may be about its end.

    ``memory_was_short``: the kernel has killed a process for it.
    """
    text = without_marks(text)
    output = end_of(text)
    cause, detail = judge_exit(code, text if code in (1, USAGE) else output)
    if memory_was_short and code in (-signal.SIGKILL, _SHELL_SIGNAL_BASE + signal.SIGKILL):
        cause, detail = ExitCause.OUT_OF_MEMORY, "the kernel has killed it, as memory was short"
    return cause, detail, output


def end_of(text: str) -> str:
    """The last lines, or the first that tell of the crash with which a log ends."""
    if stacks := last_words(text):
        return "\n".join(stacks[:OUTPUT_LINES])
    return "\n".join(text[-OUTPUT_CHARACTERS:].splitlines()[-OUTPUT_LINES:])
