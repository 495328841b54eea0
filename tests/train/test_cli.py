"""What the command line says, and when it ends, if somebody presses Ctrl-C."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A verb that takes a while to close, as a run with an engine does.
SLOW = """
    import argparse, sys, time
    from train import cli

    def run(_arguments):
        try:
            print("runs", flush=True)
            time.sleep(30)
        finally:
            print("closes", flush=True)
            time.sleep(float(sys.argv[1]))
            print("closed", flush=True)

    def parser():
        made = argparse.ArgumentParser()
        made.set_defaults(run=run)
        return made

    cli._parser = parser
    raise SystemExit(cli.main([]))
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def read_until(process, text):
    for line in process.stdout:
        if line.strip() == text:
            return
    pytest.fail(f"{text!r} never came: {process.stderr.read()}")


def test_an_interruption_while_the_bridge_is_imported_is_one_line():
    slow_import = """
        import builtins, os, signal
        imported = builtins.__import__

        def interrupted(name, *arguments):
            if name == "rollout_bridge.errors":
                os.kill(os.getpid(), signal.SIGINT)
            return imported(name, *arguments)

        from train import cli
        builtins.__import__ = interrupted
        raise SystemExit(cli.main(["report", "x"]))
    """
    process = start("-c", textwrap.dedent(slow_import))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == ["sat-jax: interrupted; the same command resumes from the newest checkpoint"]


def test_the_first_interruption_closes_in_order():
    process = start("-c", textwrap.dedent(SLOW), "0.1")
    read_until(process, "runs")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, "closes\nclosed\n")
    assert errors.splitlines() == ["sat-jax: interrupted; the same command resumes from the newest checkpoint"]


def test_the_second_one_ends_it_at_once_without_a_traceback():
    process = start("-c", textwrap.dedent(SLOW), "60")
    read_until(process, "runs")
    process.send_signal(signal.SIGINT)
    read_until(process, "closes")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 10
    assert errors.startswith("sat-jax: interrupted again; ended without closing")
    assert "Traceback" not in errors
