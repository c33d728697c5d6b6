"""The process that forks Spark's Python workers: PySpark's own, with two changes.

The JVM starts it with ``python -m`` (``spark.python.daemon.module``), once a session, and Spark
ends a worker that had no task for a minute.

*A worker starts with its modules imported.* PySpark forks first, so that each worker imports
Arrow, Spark's serializers and everstate again: most of a second of one core, before the first task
and before the first batch after a quiet minute. Here they are imported before the fork. No module
of these may start a thread, which a fork would lose: OpenBLAS and Arrow's jemalloc are told so.

*A worker whose JVM has gone ends without a word.* When a session stops, the JVM closes the
connection of each idle worker and tells the daemon to end them all. A worker that sees the first
before the second, as one does on a busy machine, writes its reason to the closed connection, and
PySpark prints that failure's traceback into the terminal of a command that has succeeded. The JVM
knows that it has closed the connection, and a job that still needed the worker fails with a reason
of its own.
"""

from __future__ import annotations

import gc
import os
import socket
from importlib import import_module
from typing import Final

from pyspark import daemon

_IMPORTED: Final = (
    # Arrow imports pandas when it first makes an array of a list.
    *("pyspark.worker", "pyspark.sql.pandas.serializers", "pyarrow.compute", "pandas"),
    *("everstate.changes", "everstate.views.trailing", "everstate.views.stores"),
)
_WITHOUT_THREADS: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}

_pysparks_worker: Final = daemon.worker


def import_modules() -> None:
    """Import what workers need. Cost: 0.9 s of a core, which the first worker would need too."""
    for name, value in _WITHOUT_THREADS.items():
        os.environ[name] = value
    for module in _IMPORTED:
        import_module(module)
    # Otherwise all workers would draw the same numbers; Python's own generator does this itself.
    os.register_at_fork(after_in_child=import_module("numpy.random").seed)
    # Workers collect garbage after each task, and need not look at these modules each time.
    gc.collect()
    gc.freeze()


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve the JVM on ``sock`` with PySpark's worker; 1, which ends the process, if it is gone."""
    try:
        return _pysparks_worker(sock, authenticated)
    except ConnectionError:
        return 1


if __name__ == "__main__":
    import_modules()
    daemon.worker = worker
    daemon.manager()
