"""A forked child can compute, whatever its parent computed before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import torch
import transduce.kernels

signal.alarm(300)  # a child that hangs is ended with its parent
torch.set_num_threads(2)
big = torch.ones(512, 512)
expected = float((big @ big).sum())
child = os.fork()
if child == 0:
    signal.alarm(240)
    same = float((big @ big).sum()) == expected
    os._exit(0 if same and torch.get_num_threads() == 1 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert torch.get_num_threads() == 2
sys.exit(status)
"""


@pytest.mark.slow
def test_a_child_that_is_forked_after_work_in_two_threads_computes() -> None:
    """Without the hook it waits for threads that did not survive the fork, and ends with SIGALRM."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.returncode, done.stderr)
