"""The system's lock on an open file or folder: it goes when its holders end, however they do."""

from __future__ import annotations

import fcntl


def hold(descriptor: int) -> bool:
    """Take the lock until the descriptor, and every copy of it in other processes, is closed.

    Returns: False where another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
