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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from jinja2 import nodes

from dspark.messages import Message

# Names no template uses; what they are bound to prints nothing.
_ITEM, _HEADER, _LEAVE = "_dspark_item", "_dspark_header", "_dspark_leave"
TAG_OPEN, TAG_CLOSE = "_dspark_tag_open", "_dspark_tag_close"

# Their output is gathered before it is handed out, so positions inside mean nothing.
_GATHERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


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
    """Notes how much text was out when the template reached each message."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self._number = {id(message): i for i, message in enumerate(messages)}
        self._roles = [message["role"] for message in messages]
        self._stack: list[tuple[int, int]] = []  # (loop, message) of the loops now on a message
        self._events: list[tuple[int, int | None]] = []  # from this length on, this message
        self._headers: dict[int, int] = {}
        self._open: list[int] = []
        self._tagged: list[tuple[int, int]] = []
        self.calls: dict[str, Callable[..., None]] = {
            _ITEM: self._item,
            _HEADER: self._header,
            _LEAVE: self._leave,
            TAG_OPEN: lambda: self._open.append(self.length),
            TAG_CLOSE: lambda: self._tagged.append((self._open.pop(), self.length)),
        }

    def _item(self, loop: int, item: Any, *containers: Any) -> None:
        number = self._number.get(id(item))
        if number is None and isinstance(item, int):
            number = self._indexed(item, containers)
        if number is not None:
            self._unwind(loop)
            self._stack.append((loop, number))
            self._note()

    def _indexed(self, item: int, containers: tuple[Any, ...]) -> int | None:
        """Return the message that a loop over numbers means by ``messages[item]``."""
        lists = [c for c in containers if isinstance(c, list) and -len(c) <= item < len(c)]
        found = (self._number.get(id(container[item])) for container in lists)
        return next((number for number in found if number is not None), None)

    def _header(self, loop: int) -> None:
        if self._stack and self._stack[-1][0] == loop:
            self._headers[self._stack[-1][1]] = self.length

    def _leave(self, loop: int) -> None:
        if self._unwind(loop):
            self._note()

    def _unwind(self, loop: int) -> bool:
        """Forget `loop` and the loops inside it; say whether there was one."""
        depth = next((i for i, (entry, _) in enumerate(self._stack) if entry == loop), None)
        if depth is not None:
            del self._stack[depth:]
        return depth is not None

    def _note(self) -> None:
        self._events.append((self.length, self._stack[-1][1] if self._stack else None))

    def finish(self, bos: str) -> Render:
        """Return what was rendered; `bos` is not part of the message that follows it."""
        text = "".join(self.pieces)
        return Render(text, self._regions(text, bos), sorted(self._tagged))

    def _regions(self, text: str, bos: str) -> list[Region]:
        """Turn the events into regions, and give text outside every loop to a message."""
        begun: list[tuple[int, int | None]] = []  # (start, message) of what was printed
        starts = [*(start for start, _ in self._events), len(text)]
        for (start, message), stop in zip(self._events, starts[1:], strict=True):
            if stop > start and not (begun and begun[-1][1] == message):
                begun.append((start, message))
        owned = [(start, m) for start, m in self._with_owners(begun) if m is not None]
        if owned:
            owned[0] = (self._first_header(*owned[0], text, bos), owned[0][1])
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

    def _first_header(self, start: int, message: int, text: str, bos: str) -> int:
        """Skip what a template prints once, before the header of whichever message is first."""
        start = max(start, self._headers.get(message, start))
        return start + len(bos) if start == 0 and bos and text.startswith(bos) else start


def watch(tree: nodes.Template) -> None:
    """Add the calls, in place, to every loop whose output is handed out at once."""
    tree.body = _watched(tree.body, count())


def _watched(statements: list[nodes.Node], numbers: Iterator[int]) -> list[nodes.Node]:
    watched: list[nodes.Node] = []
    for statement in statements:
        watched.append(statement)
        if isinstance(statement, _GATHERED):
            continue
        if isinstance(statement, nodes.For) and statement.recursive:
            continue  # compiled into a function whose output is gathered
        for field in ("body", "elif_", "else_"):
            if hasattr(statement, field):
                setattr(statement, field, _watched(getattr(statement, field), numbers))
        if isinstance(statement, nodes.For) and isinstance(statement.target, nodes.Name):
            watched.append(_watch_loop(statement, next(numbers)))
    return watched


def _watch_loop(loop: nodes.For, number: int) -> nodes.Node:
    """Add the calls inside `loop` and return the one to put behind it."""
    assert isinstance(loop.target, nodes.Name)
    name = loop.target.name
    containers = {
        node.node.name
        for node in loop.find_all(nodes.Getitem)  # a loop over range() that takes messages[i]
        if isinstance(node.arg, nodes.Name) and node.arg.name == name
        if isinstance(node.node, nodes.Name)
    }
    arguments = [nodes.Name(each, "load") for each in (name, *sorted(containers))]
    preamble = 0
    while preamble < len(loop.body) and _is_preamble(loop.body[preamble], name):
        preamble += 1
    header = [silent_call(_HEADER, loop.lineno, nodes.Const(number))] if preamble else []
    loop.body = [
        silent_call(_ITEM, loop.lineno, nodes.Const(number), *arguments),
        *loop.body[:preamble],
        *header,
        *loop.body[preamble:],
    ]
    return silent_call(_LEAVE, loop.lineno, nodes.Const(number))


def _is_preamble(statement: nodes.Node, item: str) -> bool:
    """Whether a statement of a loop's body prints by position alone, whatever the item is."""
    if not isinstance(statement, nodes.If):
        return False
    tested = {node.name for node in statement.test.find_all(nodes.Name)}
    named = {node.name for node in statement.find_all(nodes.Name)}
    return "loop" in tested and item not in named


def looks_ahead(tree: nodes.Template) -> bool:
    """Whether a conversation cut short may end in text that the whole one prints elsewhere.

    That takes a look at the messages to come, or text behind the last loop. The answer may be
    True for nothing; it is False only where every beginning is sure to print the same.
    """
    loops = [i for i, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    behind = [
        node
        for node in tree.body[loops[-1] + 1 if loops else 0 :]
        if not (isinstance(node, nodes.If) and _is_prompt(node))
    ]
    prints = any(isinstance(n, nodes.Output) or n.find(nodes.Output) is not None for n in behind)
    ahead = ("last", "nextitem", "length", "revindex", "revindex0")
    return (
        prints
        or any(node.attr in ahead for node in tree.find_all(nodes.Getattr))
        or any(node.name in ("last", "length", "count") for node in tree.find_all(nodes.Filter))
        or any(
            not isinstance(node.arg, nodes.Name) and not _is_plain_index(node.arg)
            for node in tree.find_all(nodes.Getitem)
        )
    )


def _is_prompt(statement: nodes.If) -> bool:
    names = {node.name for node in statement.test.find_all(nodes.Name)}
    test = statement.test
    if isinstance(test, nodes.Name):
        names.add(test.name)
    return "add_generation_prompt" in names and not statement.else_ and not statement.elif_


def _is_plain_index(argument: nodes.Expr) -> bool:
    return isinstance(argument, nodes.Const) and (
        isinstance(argument.value, str) or argument.value == 0
    )


def silent_call(name: str, line: int, *arguments: nodes.Expr) -> nodes.Node:
    """Return a statement that calls `name` and prints nothing."""
    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    return nodes.ExprStmt(call).set_lineno(line)
