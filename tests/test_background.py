"""Work behind the main thread: bounded, first error wins, and nothing hangs."""

import threading
from collections.abc import Callable

import pytest

from dspark.job.background import Background

SECONDS = 30  # far more than anything here takes: reached only by what hangs


class Gate:
    """A task that waits until it is opened, and counts how many are inside."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self) -> None:
        self.entered.release()
        assert self.opened.wait(SECONDS)


def fail(message: str) -> Callable[[], None]:
    def task() -> None:
        raise RuntimeError(message)

    return task


def test_every_task_has_run_when_the_block_is_left():
    done = []
    with Background(threads=3, queue_size=4) as background:
        for number in range(100):
            background.submit(lambda number=number: done.append(number))
    assert sorted(done) == list(range(100))


def test_one_thread_keeps_the_order():
    done = []
    with Background(threads=1, queue_size=4) as background:
        for number in range(100):
            background.submit(lambda number=number: done.append(number))
    assert done == list(range(100))


def test_tasks_run_beside_the_caller():
    gate = Gate()
    with Background(threads=1, queue_size=2) as background:
        future = background.submit(gate)
        assert gate.entered.acquire(timeout=SECONDS)
        assert not future.done()
        gate.opened.set()


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_tasks_than_threads_run_at_a_time(threads):
    gate = Gate()
    with Background(threads=threads, queue_size=5) as background:
        for _ in range(5):
            background.submit(gate)
        for _ in range(threads):
            assert gate.entered.acquire(timeout=SECONDS)
        assert not gate.entered.acquire(timeout=0.05)
        gate.opened.set()


def test_submit_waits_while_the_queue_is_full():
    gate = Gate()
    submitted = []

    def fill(background: Background) -> None:
        for number in range(5):
            background.submit(gate)
            submitted.append(number)

    with Background(threads=1, queue_size=3) as background:
        filler = threading.Thread(target=fill, args=(background,))
        filler.start()
        assert gate.entered.acquire(timeout=SECONDS)
        filler.join(0.05)
        assert filler.is_alive()
        assert len(submitted) <= 3
        gate.opened.set()
        filler.join(SECONDS)
        assert len(submitted) == 5


def test_an_error_reaches_the_caller_when_the_block_is_left():
    with pytest.raises(RuntimeError, match="first"), Background(threads=1, queue_size=2) as work:
        work.submit(fail("first"))


def test_an_error_stops_the_next_submit():
    with pytest.raises(RuntimeError, match="first"), Background(threads=1, queue_size=1) as work:
        work.submit(fail("first"))
        work.submit(lambda: None)  # waits for room, and finds the error
        pytest.fail("the error was not noticed")


def test_an_error_wakes_a_submit_that_waits():
    gate = Gate()

    def wait_and_fail() -> None:
        gate()
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"), Background(threads=1, queue_size=1) as work:
        work.submit(wait_and_fail)
        threading.Timer(0.05, gate.opened.set).start()
        work.submit(lambda: None)
        pytest.fail("the error was not noticed")


def test_the_first_error_wins():
    gate = Gate()

    def second() -> None:
        gate()
        raise RuntimeError("second")

    with pytest.raises(RuntimeError, match="first"), Background(threads=2, queue_size=2) as work:
        work.submit(second)
        assert gate.entered.acquire(timeout=SECONDS)
        first = work.submit(fail("first"))
        assert isinstance(first.exception(SECONDS), RuntimeError)
        gate.opened.set()


def test_tasks_that_wait_when_one_fails_are_not_run():
    gate = Gate()
    ran = []

    def wait_and_fail() -> None:
        gate()
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"), Background(threads=1, queue_size=4) as work:
        work.submit(wait_and_fail)
        waiting = [work.submit(lambda: ran.append(1)) for _ in range(3)]
        gate.opened.set()
    assert ran == []
    assert all(future.done() for future in waiting)


def test_a_task_that_was_not_run_does_not_count_as_done():
    gate = Gate()

    def wait_and_fail() -> None:
        gate()
        raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"), Background(threads=1, queue_size=4) as work:
        work.submit(wait_and_fail)
        waiting = work.submit(lambda: None)
        gate.opened.set()
    assert waiting.cancelled() or waiting.exception() is not None


def test_an_error_of_the_caller_lets_submitted_tasks_finish():
    gate = Gate()
    done = []
    with pytest.raises(KeyboardInterrupt), Background(threads=1, queue_size=3) as work:
        work.submit(gate)
        work.submit(lambda: done.append(1))
        threading.Timer(0.05, gate.opened.set).start()
        raise KeyboardInterrupt
    assert done == [1]


def test_an_error_of_the_caller_comes_before_that_of_a_task():
    with pytest.raises(KeyboardInterrupt), Background(threads=1, queue_size=3) as work:
        work.submit(fail("first"))
        raise KeyboardInterrupt


def test_even_an_error_that_is_no_exception_reaches_the_caller():
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit), Background(threads=1, queue_size=2) as work:
        work.submit(leave)


def test_no_thread_is_left_when_the_block_is_left():
    before = threading.active_count()
    with Background(threads=4, queue_size=4) as background:
        for _ in range(8):
            background.submit(lambda: None)
    assert threading.active_count() == before
