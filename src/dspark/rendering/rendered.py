"""One conversation as text and tokens, with the place of every message in both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.errors import RowError
from dspark.rendering.alignment import TokenizedText, common_prefix, common_suffix
from dspark.rendering.messages import Message
from dspark.rendering.template import ChatTemplate
from dspark.rendering.watch import Region, Render

Tokenize = Callable[[str], TokenizedText]


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens [first, last) that overlap what was printed for one message, header included."""

    first: int
    last: int
    message: int


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation after its one render and its one tokenization.

    Attributes:
        template: What printed it.
        messages: As the template got them.
        tools: Tool definitions, or None.
        render: The text, its regions and its generation blocks.
        tokens: The tokens of the whole text.
        regions: Where each message lies in the text, in text order.
        turns: The tokens of the assistant's messages, in text order.
        tokenize: Gives the tokens of other texts.
    """

    template: ChatTemplate
    messages: Sequence[Message]
    tools: list[Any] | None
    render: Render
    tokens: TokenizedText
    regions: list[Region]
    turns: list[Turn]
    tokenize: Tokenize

    def ids_of(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the token ids of other messages under the same template and tools."""
        return self.tokenize(self.template.render(messages, self.tools, **variables).text).ids


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: list[Any] | None,
    tokenize: Tokenize,
) -> RenderedChat:
    """Render and tokenize a conversation.

    Raises:
        RowError: If the template refuses it, prints nothing, or hides where an answer is.
    """
    render = template.render(messages, tools)
    try:
        tokens = tokenize(render.text)
    except (UnicodeError, TypeError) as error:  # a lone surrogate, from an escape in JSON
        raise RowError("text is not valid Unicode", str(error)) from error
    if not tokens.ids:
        raise RowError("nothing rendered", f"the template printed {render.text!r}")
    regions = _find_regions(template, render, messages, tools)
    turns = [
        Turn(*tokens.cover(region.start, region.stop), region.message)
        for region in regions
        if messages[region.message]["role"] == "assistant"
    ]
    return RenderedChat(template, messages, tools, render, tokens, regions, turns, tokenize)


def _find_regions(
    template: ChatTemplate, render: Render, messages: Sequence[Message], tools: list[Any] | None
) -> list[Region]:
    if _lost(render, messages):
        render = template.render_with_marks(messages, tools)
    if _lost(render, messages):
        return _regions_from_beginnings(template, render, messages, tools)
    regions = list(render.regions)
    if regions and messages[regions[0].message]["role"] == "assistant":
        for i in range(regions[0].message):
            regions = _cut_out(template, render, regions, messages, tools, i)
    return _moved(template, render, regions, messages, tools) if template.looks_ahead else regions


def _cut_out(
    template: ChatTemplate,
    render: Render,
    regions: list[Region],
    messages: Sequence[Message],
    tools: list[Any] | None,
    number: int,
) -> list[Region]:
    """Take the text of an earlier message out of the first region, if it was printed in there.

    A template may merge the system prompt into the first turn, even where that is an answer. The
    characters that change with the message's content are the message's.
    """
    if not messages[number]["content"]:
        return regions
    other = list(messages)
    other[number] = {**messages[number], "content": "\u241f"}
    text, changed = render.text, template.render(other, tools).text
    start = common_prefix(text, changed)
    stop = len(text) - common_suffix(text[start:], changed[start:])
    for place, region in enumerate(regions):
        if region.start <= start < stop <= region.stop:
            parts = replace(region, stop=start), replace(region, start=stop)
            return [*regions[:place], *parts, *regions[place + 1 :]]
    return regions


def _moved(
    template: ChatTemplate,
    render: Render,
    regions: list[Region],
    messages: Sequence[Message],
    tools: list[Any] | None,
) -> list[Region]:
    """Move the edges of turns behind text that closes the message before.

    A template may print a closing token when it takes up the next message, or at the very end of
    a conversation. The text before a message, rendered by itself, then has the token already.
    """
    for i in range(1, len(regions)):
        before, region = regions[i - 1], regions[i]
        numbers = (before.message, region.message)
        if not any(messages[number]["role"] == "assistant" for number in numbers):
            continue
        try:
            text = template.render(messages[: region.message], tools).text
        except RowError:
            continue  # no conversation of its own
        if region.start < len(text) <= region.stop and render.text.startswith(text):
            regions[i - 1] = replace(before, stop=len(text))
            regions[i] = replace(region, start=len(text))
    return regions


def _lost(render: Render, messages: Sequence[Message]) -> bool:
    """Whether an answer that says something is in no region."""
    seen = {region.message for region in render.regions}
    return any(
        message["role"] == "assistant"
        and i not in seen
        and any(value for key, value in message.items() if key != "role")
        for i, message in enumerate(messages)
    )


def _regions_from_beginnings(
    template: ChatTemplate, render: Render, messages: Sequence[Message], tools: list[Any] | None
) -> list[Region]:
    """Find the regions of a template without a loop to follow: render every beginning."""
    lengths = [0]
    for count in range(1, len(messages) + 1):
        text = template.render(messages[:count], tools).text
        if not render.text.startswith(text):
            raise RowError(
                "turns not found in the template's text",
                f"the first {count} messages are printed differently when more follow, and the "
                "template has no loop over the messages that could be followed",
            )
        lengths.append(len(text))
    return [Region(lengths[i], lengths[i + 1], i) for i in range(len(messages))]
