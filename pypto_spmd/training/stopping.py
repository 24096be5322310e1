"""Ctrl-C as a flag: the step that runs is finished, and the loop can save before it ends."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Stop:
    """Whether somebody asked to stop; true from then on."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def ask(self) -> None:
        """Asks to stop."""
        self._asked.set()

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def __repr__(self) -> str:
        return f"<Stop {'asked for' if self else 'not asked for'}>"


@contextmanager
def graceful_stop(signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[Stop]:
    """Turns Ctrl-C (and the signal by which a cluster ends a job) into a flag that a loop looks at.

    A second Ctrl-C stops at once, with `KeyboardInterrupt`. In a thread that isn't the main one, which
    gets no signals, the flag can still be set by its `ask()`.

    Args:
        signals: which signals.

    Yields:
        The flag.

    Example:
        >>> with graceful_stop() as stop:
        ...     for step in range(3):
        ...         signal.raise_signal(signal.SIGINT)  # as Ctrl-C does
        ...         if stop:
        ...             break  # here one saves
        >>> step
        0
    """
    stop = Stop()

    def asked(number: int, frame: object) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.ask()
        name = signal.Signals(number).name
        print(f"{name}: stopping after this step; once more to stop at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, asked) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
