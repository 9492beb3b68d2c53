"""Calls added to a chat template's syntax tree, at its loops over messages and generation blocks.

Most calls print nothing. Inside a macro or a captured block, whose output is gathered before it is
handed out, a call prints a mark instead: a number between two characters that are in no text.
"""

from collections.abc import Iterator
from itertools import count

from jinja2 import nodes

# Names no template uses. The printing kind of a call is the name with PRINTED behind it.
ITEM, HEADER, LEAVE = "_dspark_item", "_dspark_header", "_dspark_leave"
TAG_OPEN, TAG_CLOSE = "_dspark_tag_open", "_dspark_tag_close"
PRINTED = "_printed"
_CALLS = (ITEM, HEADER, LEAVE, TAG_OPEN, TAG_CLOSE)

_GATHERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


def instrument(tree: nodes.Template) -> None:
    """Add the calls, in place."""
    tree.body = _with_calls(tree.body, count(), printed=False)


def _with_calls(
    statements: list[nodes.Node], numbers: Iterator[int], *, printed: bool
) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    for statement in statements:
        within = printed or isinstance(statement, _GATHERED) or _is_recursive(statement)
        for field in ("body", "elif_", "else_"):
            if hasattr(statement, field):
                inner = _with_calls(getattr(statement, field), numbers, printed=within)
                setattr(statement, field, inner)
        if printed:
            statement = _printing(statement)
        found.append(statement)
        if isinstance(statement, nodes.For) and isinstance(statement.target, nodes.Name):
            leave = _add_to_loop(statement, next(numbers), printed=within)
            found.append(_printing(leave) if printed else leave)
    return found


def _is_recursive(statement: nodes.Node) -> bool:
    return isinstance(statement, nodes.For) and bool(statement.recursive)


def _printing(statement: nodes.Node) -> nodes.Node:
    """Turn one of our calls that prints nothing into one that prints a mark."""
    if not (isinstance(statement, nodes.ExprStmt) and isinstance(statement.node, nodes.Call)):
        return statement
    call = statement.node
    if not (isinstance(call.node, nodes.Name) and call.node.name in _CALLS):
        return statement
    call.node = nodes.Name(call.node.name + PRINTED, "load")
    return nodes.Output([call]).set_lineno(statement.lineno)


def _add_to_loop(loop: nodes.For, number: int, *, printed: bool) -> nodes.Node:
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
    calls = [silent_call(ITEM, loop.lineno, nodes.Const(number), *arguments)]
    if preamble:
        calls.append(silent_call(HEADER, loop.lineno, nodes.Const(number)))
    item, *header = [_printing(call) if printed else call for call in calls]
    loop.body = [item, *loop.body[:preamble], *header, *loop.body[preamble:]]
    return silent_call(LEAVE, loop.lineno, nodes.Const(number))


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
    return _needs_prompt(statement.test) and not statement.else_ and not statement.elif_


def _needs_prompt(test: nodes.Node) -> bool:
    """Whether a condition holds only where a generation prompt is asked for."""
    if isinstance(test, nodes.And):
        return _needs_prompt(test.left) or _needs_prompt(test.right)
    return isinstance(test, nodes.Name) and test.name == "add_generation_prompt"


def _is_plain_index(argument: nodes.Expr) -> bool:
    return isinstance(argument, nodes.Const) and (
        isinstance(argument.value, str) or argument.value == 0
    )


def silent_call(name: str, line: int, *arguments: nodes.Expr) -> nodes.Node:
    """Return a statement that calls `name` and prints nothing."""
    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    return nodes.ExprStmt(call).set_lineno(line)
