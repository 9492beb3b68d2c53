"""Calls added to a chat template's syntax tree, at its loops over messages and generation blocks.

Most calls print nothing. Inside a macro or a captured block, whose output is gathered before it is
handed out, a call prints a mark instead: a number between two characters that are in no text. A
template that gathers its text in a variable can be given marks in that variable.
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


def instrument(tree: nodes.Template, *, in_variables: bool = False) -> None:
    """Add the calls, in place.

    Args:
        tree: A parsed template.
        in_variables: Whether loops that add to a variable of a namespace add marks to it as well.
    """
    tree.body = _with_calls(tree.body, count(), printed=False, in_variables=in_variables)


def _with_calls(
    statements: list[nodes.Node], numbers: Iterator[int], *, printed: bool, in_variables: bool
) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    for statement in statements:
        within = printed or isinstance(statement, _GATHERED) or _is_recursive(statement)
        for field in ("body", "elif_", "else_"):
            if hasattr(statement, field):
                inner = _with_calls(
                    getattr(statement, field), numbers, printed=within, in_variables=in_variables
                )
                setattr(statement, field, inner)
        if printed:
            statement = _printing(statement)
        found.append(statement)
        if isinstance(statement, nodes.For) and isinstance(statement.target, nodes.Name):
            variables = _grown_variables(statement) if in_variables else set()
            leave = _add_to_loop(statement, next(numbers), variables, printed=within)
            found.append(_printing(leave) if printed else leave)
            found += [_adding(leave, variable) for variable in sorted(variables)]
    return found


def _grown_variables(loop: nodes.For) -> set[tuple[str, str]]:
    """Return the (namespace, attribute) of what a loop adds to: ``ns.out = ns.out ~ ...``."""
    grown = set()
    for assign in loop.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.NSRef):
            target = (assign.target.name, assign.target.attr)
            read = {
                (node.node.name, node.attr)
                for node in assign.node.find_all(nodes.Getattr)
                if isinstance(node.node, nodes.Name)
            }
            if target in read:
                grown.add(target)
    return grown


def _adding(call: nodes.Node, variable: tuple[str, str]) -> nodes.Node:
    """Turn one of our calls into one that adds its mark to a variable of a namespace."""
    assert isinstance(call, nodes.ExprStmt)
    assert isinstance(call.node, nodes.Call)
    assert isinstance(call.node.node, nodes.Name)
    name = call.node.node.name + PRINTED
    mark = nodes.Call(nodes.Name(name, "load"), call.node.args, [], None, None)
    before = nodes.Getattr(nodes.Name(variable[0], "load"), variable[1], "load")
    target = nodes.NSRef(*variable)
    return nodes.Assign(target, nodes.Concat([before, mark])).set_lineno(call.lineno)


def _is_recursive(statement: nodes.Node) -> bool:
    return isinstance(statement, nodes.For) and bool(statement.recursive)


def _printing(statement: nodes.Node) -> nodes.Node:
    """Turn one of our calls that prints nothing into one that prints a mark."""
    if not (isinstance(statement, nodes.ExprStmt) and isinstance(statement.node, nodes.Call)):
        return statement
    call = statement.node
    if not (isinstance(call.node, nodes.Name) and call.node.name in _CALLS):
        return statement
    mark = nodes.Call(nodes.Name(call.node.name + PRINTED, "load"), call.args, [], None, None)
    return nodes.Output([mark]).set_lineno(statement.lineno)


def _add_to_loop(
    loop: nodes.For, number: int, variables: set[tuple[str, str]], *, printed: bool
) -> nodes.Node:
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
    added = [_adding(calls[0], variable) for variable in sorted(variables)]
    item, *header = [_printing(call) if printed else call for call in calls]
    loop.body = [item, *added, *loop.body[:preamble], *header, *loop.body[preamble:]]
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
