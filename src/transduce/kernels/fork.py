"""Fork safety: a forked child computes with one thread.

The threads of an OpenMP pool do not survive a fork. A child that asks for them waits for ever, as after
`torch.set_num_threads(2)`, a generation, and `os.fork()` or `multiprocessing` with the start method `fork`. With one
thread it asks for none. A child that is started by `spawn` or `forkserver` has a pool of its own and all its threads.
"""

from __future__ import annotations

import os

import torch


def _use_one_thread() -> None:
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_use_one_thread)
