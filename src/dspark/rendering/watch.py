"""Watching a chat template run, to learn where in its text each message went.

Templates put messages into text in ways that cannot be undone by looking at the text: a user may
write markup, two messages may be equal, an earlier turn may be printed differently once a later
one exists. So calls that print nothing are added to the template's syntax tree, where a loop takes
up an item and where a loop ends. Jinja hands out its output piece by piece, so each call knows how
much text is out. One render gives the text and the regions:

    {% for m in messages %} (1) <|im_start|>{{ m.role }} ... {% endfor %} (2)

    text     <|im_start|>user Hi<|im_end|><|im_start|>assistant Hello<|im_end|>
    regions  (1) message 0               (1) message 1                         (2)

``{% generation %}`` blocks are found the same way.
"""

import re
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.rendering.instrument import HEADER, ITEM, LEAVE, PRINTED, TAG_CLOSE, TAG_OPEN
from dspark.rendering.messages import Message

# Two of the code points that Unicode keeps out of text, around the number of an event.
_MARK = re.compile("\ufdd0(\\d+)\ufdd1")

# What happened, and to which message: "message" (its text begins; None: no message's), "header",
# "open" and "close" (a generation block).
Event = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Region:
    """The text [start, stop) that the template printed for one message."""

    start: int
    stop: int
    message: int


@dataclass(frozen=True, slots=True)
class Render:
    """One rendered conversation.

    Attributes:
        text: What ``apply_chat_template(..., tokenize=False)`` gives.
        regions: In text order, without gaps after the first.
        tagged: The [start, stop) of each generation block, in text order.
    """

    text: str
    regions: list[Region]
    tagged: list[tuple[int, int]]


class Watcher:
    """Notes how much text was out when the template reached each message.

    Attributes:
        length: Characters handed out so far; whoever runs the template keeps it.
        calls: What the added calls are bound to.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.length = 0
        self._number = {id(message): i for i, message in enumerate(messages)}
        self._roles = [message["role"] for message in messages]
        self._stack: list[tuple[int, int]] = []  # (loop, message) of the loops now on a message
        self._events: list[tuple[int, Event]] = []  # (length, event)
        self._printed: list[Event] = []  # by the number in their mark
        handlers: dict[str, Callable[..., Event | None]] = {
            ITEM: self._item,
            HEADER: self._header,
            LEAVE: self._leave,
            TAG_OPEN: lambda: ("open", None),
            TAG_CLOSE: lambda: ("close", None),
        }
        self.calls: dict[str, Callable[..., object]] = {}
        for name, handler in handlers.items():
            self.calls[name] = self._silently(handler)
            self.calls[name + PRINTED] = self._with_mark(handler)
        self.calls[ITEM + PRINTED] = self._with_mark(self._gathered_item)

    def _silently(self, handler: Callable[..., Event | None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            event = handler(*arguments)
            if event is not None:
                self._events.append((self.length, event))

        return call

    def _with_mark(self, handler: Callable[..., Event | None]) -> Callable[..., str]:
        def call(*arguments: Any) -> str:
            event = handler(*arguments)
            if event is None:
                return ""
            self._printed.append(event)
            return f"\ufdd0{len(self._printed) - 1}\ufdd1"

        return call

    def _item(self, loop: int, item: Any, *containers: Any) -> Event | None:
        number = self._number.get(id(item))
        if number is None and isinstance(item, int):
            number = self._indexed(item, containers)
        if number is None:
            return None
        self._unwind(loop)
        self._stack.append((loop, number))
        return "message", number

    def _gathered_item(self, loop: int, item: Any, *containers: Any) -> Event | None:
        # A macro that is called while a loop is on a message looks other messages up for its sake.
        if self._stack and all(entry != loop for entry, _ in self._stack):
            return None
        return self._item(loop, item, *containers)

    def _indexed(self, item: int, containers: tuple[Any, ...]) -> int | None:
        """Return the message that a loop over numbers means by ``messages[item]``."""
        lists = [c for c in containers if isinstance(c, list) and -len(c) <= item < len(c)]
        found = (self._number.get(id(container[item])) for container in lists)
        return next((number for number in found if number is not None), None)

    def _header(self, loop: int) -> Event | None:
        if self._stack and self._stack[-1][0] == loop:
            return "header", self._stack[-1][1]
        return None

    def _leave(self, loop: int) -> Event | None:
        if not self._unwind(loop):
            return None
        return "message", self._stack[-1][1] if self._stack else None

    def _unwind(self, loop: int) -> bool:
        """Forget `loop` and the loops inside it; say whether there was one."""
        depth = next((i for i, (entry, _) in enumerate(self._stack) if entry == loop), None)
        if depth is not None:
            del self._stack[depth:]
        return depth is not None

    @property
    def has_printed(self) -> bool:
        """Whether there are marks in the text, so that it may differ from the plain one."""
        return bool(self._printed)

    def finish(self, raw: str, bos: str) -> Render:
        """Return what was rendered.

        Args:
            raw: The text, marks included.
            bos: What at the beginning of the text is not part of the message that follows.
        """
        text, events = self._located(raw)
        headers = {m: place for place, (kind, m) in events if kind == "header"}
        opened: list[int] = []
        tagged = []
        for place, (kind, _) in events:
            if kind == "open":
                opened.append(place)
            elif kind == "close" and opened:
                tagged.append((opened.pop(), place))
        begun = [(place, m) for place, (kind, m) in events if kind == "message"]
        return Render(text, self._regions(begun, headers, text, bos), sorted(tagged))

    def _located(self, raw: str) -> tuple[str, list[tuple[int, Event]]]:
        """Take the marks out of the text; return the events by their place in what remains."""
        if not self._printed:
            return raw, self._events
        marks = list(_MARK.finditer(raw))
        ends = [match.end() for match in marks]
        cut = [0]
        for match in marks:
            cut.append(cut[-1] + match.end() - match.start())
        # Where a silent call and a mark share a place, the call came first.
        found = [(place, place - cut[bisect(ends, place)], e) for place, e in self._events]
        for match, before in zip(marks, cut, strict=False):
            found.append((match.start(), match.start() - before, self._printed[int(match[1])]))
        found.sort(key=lambda item: item[0])
        return _MARK.sub("", raw), [(place, event) for _, place, event in found]

    def _regions(
        self,
        events: Sequence[tuple[int, int | None]],
        headers: dict[int | None, int],
        text: str,
        bos: str,
    ) -> list[Region]:
        """Turn (place, message) into regions, and give text outside every loop to a message."""
        begun: list[tuple[int, int | None]] = []  # where a message, or none, printed something
        starts = [*(start for start, _ in events), len(text)]
        for (start, message), stop in zip(events, starts[1:], strict=True):
            if stop > start and not (begun and begun[-1][1] == message):
                begun.append((start, message))
        owned = [(start, m) for start, m in self._with_owners(begun) if m is not None]
        if owned:
            # Skip what a template prints once, before the header of whichever message is first.
            start, message = owned[0]
            start = max(start, headers.get(message, start))
            owned[0] = (start + len(bos) * (start == 0 and text.startswith(bos)), message)
        stops = [*(start for start, _ in owned[1:]), len(text)]
        return [Region(start, stop, m) for (start, m), stop in zip(owned, stops, strict=False)]

    def _with_owners(self, begun: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
        """Give text between and behind the loops to the message that no loop printed there.

        Some templates take the last message out of the list and print it by itself. Where no
        message is missing, such text stays without an owner: it ends the message before it.
        """
        printed = {message for _, message in begun}
        owned = []
        for place, (start, message) in enumerate(begun):
            if message is None and place:
                before = begun[place - 1][1]
                after = next((m for _, m in begun[place + 1 :] if m is not None), len(self._roles))
                between = range(0 if before is None else before + 1, after)
                message = self._missing(m for m in between if m not in printed)
            owned.append((start, message))
        return owned

    def _missing(self, messages: Iterable[int]) -> int | None:
        missing = list(messages)
        if len(missing) > 1 and any(self._roles[m] == "assistant" for m in missing):
            return None  # whose text it is cannot be told from here
        return missing[0] if missing else None
