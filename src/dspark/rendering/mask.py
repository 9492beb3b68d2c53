r"""Which tokens of a conversation a draft learns from.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user ...
                                    |----------- supervised ------------|
                                    |- prompt -|                           --mask-generation-prompt

Without generation tags an assistant turn is supervised from its header to the start of the next
message; with tags the template decides. Nothing is shifted: the mask speaks of the token itself.
Masks are uint8 [n] over the whole conversation, before it is cut.
"""

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from dspark.errors import RowError
from dspark.rendering.alignment import common_prefix, common_suffix
from dspark.rendering.messages import Message
from dspark.rendering.rendered import RenderedChat
from dspark.rendering.watch import Region


def supervised(chat: RenderedChat) -> np.ndarray:
    """Return the mask of a conversation without further options.

    Raises:
        RowError: If the template's generation tags miss an answer or cover a prompt.
    """
    mask = np.zeros(len(chat.tokens.ids), dtype=np.uint8)
    if not chat.template.is_tagged:
        for turn in chat.turns:
            mask[turn.first : turn.last] = 1
        return mask
    for start, stop in chat.render.tagged:
        if stop > start:
            first, last = chat.tokens.cover(start, stop)
            mask[first:last] = 1
    for region in chat.regions:
        _check_tags(chat, region, mask)
    return mask


def _check_tags(chat: RenderedChat, region: Region, mask: np.ndarray) -> None:
    message = chat.messages[region.message]
    first, last = chat.tokens.cover(region.start, region.stop)
    if message["role"] == "assistant":
        if message["content"] and not mask[first:last].any():
            raise RowError(
                "generation tags miss an answer",
                f"the template tags no token of message {region.message}",
            )
        return
    # Tokens shared with the neighbours may be supervised for their sake.
    first = max(first, chat.tokens.cover(0, region.start)[1])
    last = min(last, chat.tokens.cover(region.stop, len(chat.render.text))[0])
    if mask[first:last].any():
        raise RowError(
            "generation tags cover a prompt",
            f"the template tags tokens of message {region.message}, role {message['role']!r}",
        )


def drop_reasoning(chat: RenderedChat, mask: np.ndarray, names: Sequence[str]) -> None:
    """Zero, in place, the tokens that disappear when a message's reasoning is emptied.

    Args:
        chat: The conversation.
        mask: Its mask.
        names: The message keys under which the template reads reasoning.
    """
    for turn in chat.turns:
        message = chat.messages[turn.message]
        if not any(message.get(name) for name in names):
            continue
        emptied: list[Message] = list(chat.messages)
        emptied[turn.message] = {**message, **dict.fromkeys(names, "")}
        ids, without = chat.tokens.ids, chat.ids_of(emptied)
        before = common_prefix(ids, without)
        after = common_suffix(ids[before:], without[before:])
        mask[max(before, turn.first) : min(len(ids) - after, turn.last)] = 0


def drop_generation_prompt(chat: RenderedChat, mask: np.ndarray) -> None:
    """Zero, in place, the tokens at the start of each turn that the generation prompt supplies."""
    for turn in chat.turns:
        ids = chat.tokens.ids[turn.first : turn.last]
        prompts = _generation_prompts(chat, chat.messages[: turn.message])
        fitting = [len(prompt) for prompt in prompts if ids[: len(prompt)] == prompt]
        stop = turn.first + max(fitting, default=0)
        mask[turn.first : stop] = 0


def _generation_prompts(chat: RenderedChat, before: Sequence[Message]) -> list[list[int]]:
    """Return what ``add_generation_prompt`` appends to the messages before a turn."""
    for messages in (before, [{"role": "user", "content": ""}]):
        try:
            return _appended(chat, messages)
        except RowError:
            continue  # not a conversation by itself: the prompt after any other stands for it
    return []


def _appended(chat: RenderedChat, messages: Sequence[Message]) -> list[list[int]]:
    variants: list[dict[str, Any]] = [{}]
    if "enable_thinking" in chat.template.keys:
        variants = [{"enable_thinking": True}, {"enable_thinking": False}]
    plain = chat.ids_of(messages)
    prompted = [chat.ids_of(messages, add_generation_prompt=True, **v) for v in variants]
    return [ids[common_prefix(plain, ids) :] for ids in prompted]


def lacks_end_token(
    chat: RenderedChat, mask: np.ndarray, end_ids: Container[int], blank_ids: Container[int]
) -> bool:
    """Whether the supervised part of an answer ends without an end token.

    Args:
        chat: The conversation.
        mask: Its mask.
        end_ids: Special tokens.
        blank_ids: Tokens of white space, which may follow the end token.
    """
    for turn in chat.turns:
        content = chat.messages[turn.message]["content"]
        if not content:
            continue
        places = range(turn.last - 1, turn.first - 1, -1)
        ids = (chat.tokens.ids[place] for place in places if mask[place])
        last = next((token for token in ids if token not in blank_ids), None)
        if last is not None and last not in end_ids:
            return True
    return False
