"""Ctrl-C ends a loop between two steps."""

import signal
import threading

import pytest

from pypto_spmd.training import graceful_stop


def test_the_first_ctrl_c_sets_the_flag_and_the_second_stops_at_once(capsys):
    before = signal.getsignal(signal.SIGINT)
    with graceful_stop() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop
        assert capsys.readouterr().err == (
            "SIGINT: stopping after this step; once more to stop at once\n"
        )
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_signal_that_ends_a_job_sets_it_too(capsys):
    with graceful_stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop
    assert repr(stop) == "<Stop asked for>"


def test_another_thread_gets_no_signals_and_can_be_asked():
    found = []

    def run():
        with graceful_stop() as stop:
            found.append(bool(stop))
            stop.ask()
            found.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, True]
