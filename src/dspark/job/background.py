"""Work behind the main thread: bounded, in threads, and never failing in silence."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Background:
    """Runs tasks in threads while the caller goes on.

    At most `queue_size` tasks wait or run at a time: `submit` blocks until there is room. The first
    exception of a task is raised by the next `submit`, or on leaving the ``with`` block; tasks that
    have not begun by then are dropped. An exception of the caller drops none: what was submitted
    before it is done first.

    Args:
        threads: How many tasks run at the same time.
        queue_size: How many tasks wait or run at the same time, at least `threads`.
    """

    def __init__(self, *, threads: int, queue_size: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dspark-writer")
        self._room = threading.Semaphore(queue_size)
        self._error: BaseException | None = None

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Run `task` in a thread as soon as one is free.

        Raises:
            BaseException: What an earlier task raised.
        """
        self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        return self._pool.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            if self._error is not None:
                raise self._error  # who waits for this task must not take it for done
            task()
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._room.release()

    def __enter__(self) -> "Background":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)
        if kind is None and self._error is not None:
            raise self._error
