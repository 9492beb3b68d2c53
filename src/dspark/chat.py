"""Dataset rows to token ids and loss mask.

    row -> messages -> one render, watched -> one tokenization -> mask -> both cut to seq_length

`input_ids` are the tokens of the chat template's one full render. The mask is 1 on the tokens of
assistant turns; `dspark.rendering.mask` says which those are. Both are made for the whole
conversation and cut together, on the right.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np

from dspark.errors import DataError
from dspark.rendering.alignment import build_tokenize
from dspark.rendering.habits import Habits, find_habits
from dspark.rendering.mask import (
    drop_generation_prompt,
    drop_reasoning,
    lacks_end_token,
    supervised,
)
from dspark.rendering.messages import REASONING_NAMES, Chat, read_chat
from dspark.rendering.rendered import RenderedChat, render_chat
from dspark.rendering.template import ChatTemplate

_NO_END = (
    "the chat template puts no end token inside the supervised part of an assistant turn, so a "
    "draft trained on it does not learn where answers stop"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training row.

    Attributes:
        input_ids: int32 [n], n at most `seq_length`; never padded.
        loss_mask: uint8 [n], 1 where the token is supervised.
        truncated: Whether tokens were cut off.
        warnings: What the user should be told once a run, normally nothing.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool
    warnings: tuple[str, ...] = ()


def load_tokenizer(
    target_model: str,
    *,
    chat_template: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load the target's tokenizer, with another chat template if one is given.

    Args:
        target_model: Hub id or directory.
        chat_template: Inline Jinja, a file, or a JSON file with a ``chat_template`` key.
        revision: Revision on the Hub.
        trust_remote_code: Whether code in the model's repository may run.

    Raises:
        DataError: If the tokenizer cannot be loaded, or the chat template cannot be read, or there
            is none.
        FileNotFoundError: If `chat_template` is a path that does not exist.
    """
    from transformers import AutoTokenizer

    template = None if chat_template is None else read_chat_template(chat_template)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target_model, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # damaged files raise anything
        raise DataError(
            f"cannot load the tokenizer of {target_model}: {type(error).__name__}: {error}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what becomes of missing files
        raise DataError(f"the tokenizer of {target_model} has no vocabulary: are its files there?")
    if template is not None:
        tokenizer.chat_template = template
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"{target_model} has no chat template; give one with --chat-template")
    return tokenizer


def read_chat_template(value: str) -> Any:
    """Return the template that ``--chat-template`` means: Jinja text, or named templates.

    Raises:
        DataError: If a JSON file has no ``chat_template``.
        FileNotFoundError: If `value` is neither Jinja nor an existing file.
    """
    if "{{" in value or "{%" in value or "{#" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"chat template {value!r} is neither Jinja nor an existing file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix.lower() != ".json":
        return text
    try:
        template = json.loads(text)["chat_template"]
        if isinstance(template, list):  # how older tokenizer_config.json files name several
            template = {entry["name"]: entry["template"] for entry in template}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object with a 'chat_template' key") from error
    texts = list(template.values()) if isinstance(template, dict) else [template]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"the 'chat_template' of {path} must be Jinja text, or named ones")
    return template


class ChatEncoder:
    """Turns rows into ids and mask. It can be pickled, and used in worker processes.

    Args:
        tokenizer: A transformers tokenizer with a chat template; left as it is.
        seq_length: Longest conversation kept, in tokens.
        mask_reasoning_content: Leave reasoning out of the mask.
        mask_generation_prompt: Leave what the generation prompt prints out of the mask.
        template_date: The day (YYYY-MM-DD) that a template sees as today; None for the clock's.

    Attributes:
        warnings: What was noticed on the rows so far, each once.

    Raises:
        DataError: If the template is missing or not valid, or `template_date` is not a day.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        seq_length: int,
        mask_reasoning_content: bool = False,
        mask_generation_prompt: bool = False,
        template_date: str | None = None,
    ) -> None:
        if seq_length < 1:
            raise DataError(f"seq_length must be at least 1, got {seq_length}")
        self._tokenizer = tokenizer
        self._seq_length = seq_length
        self._mask_reasoning = mask_reasoning_content
        self._mask_prompt = mask_generation_prompt
        self._clock = None if template_date is None else _midnight(template_date)
        self.warnings: list[str] = []
        self._prepare()

    def _prepare(self) -> None:
        """Build what cannot cross processes."""
        named = self._tokenizer.chat_template
        if not named:
            raise DataError("the tokenizer has no chat template; give one with --chat-template")
        variables = dict(self._tokenizer.special_tokens_map)
        if self._clock is not None:
            variables["strftime_now"] = self._clock.strftime
        sources = named.values() if isinstance(named, dict) else [named]
        self._templates = {source: ChatTemplate(source, variables) for source in sources}
        self._habits: dict[str, Habits] = {}
        self._tokenize = build_tokenize(self._tokenizer)
        # An end token need not be among the named ones: Gemma's is only marked as special.
        added = self._tokenizer.added_tokens_decoder.items()
        marked = [number for number, token in added if token.special]
        self._special_ids = frozenset([*self._tokenizer.all_special_ids, *marked])
        self._blank_ids = _BlankIds(self._tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        built = ("_templates", "_habits", "_tokenize", "_special_ids", "_blank_ids")
        return {key: value for key, value in self.__dict__.items() if key not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @property
    def template_reads_clock(self) -> bool:
        """Whether the rendered text can depend on the day."""
        return any(template.reads_clock for template in self._templates.values())

    def encode(self, row: Mapping[str, Any]) -> Conversation:
        """Return the ids and mask of one row.

        Raises:
            RowError: If the row is not a conversation, or the template cannot print it.
        """
        chat = read_chat(row)
        template = self._template_for(chat.tools)
        habits = self._habits_of(template)
        messages = [habits.adapt(message) for message in chat.messages]
        rendered = render_chat(template, messages, chat.tools, self._tokenize)
        mask = supervised(rendered)
        warnings = self._new_warnings(chat, rendered, mask)
        if self._mask_reasoning:
            drop_reasoning(rendered, mask, habits.reasoning_names)
        if self._mask_prompt:
            drop_generation_prompt(rendered, mask)
        ids = np.array(rendered.tokens.ids, dtype=np.int32)
        kept = slice(self._seq_length)
        return Conversation(ids[kept], mask[kept], len(ids) > self._seq_length, warnings)

    def _template_for(self, tools: list[Any] | None) -> ChatTemplate:
        return self._templates[self._tokenizer.get_chat_template(tools=tools)]

    def _habits_of(self, template: ChatTemplate) -> Habits:
        if template.source not in self._habits:
            self._habits[template.source] = find_habits(template)
        return self._habits[template.source]

    def _new_warnings(
        self, chat: Chat, rendered: RenderedChat, mask: np.ndarray
    ) -> tuple[str, ...]:
        """Return what this row shows for the first time."""
        found = _not_printed(chat, rendered.template)
        if _NO_END not in self.warnings and lacks_end_token(
            rendered, mask, self._special_ids, self._blank_ids
        ):
            found.append(_NO_END)
        new = tuple(warning for warning in found if warning not in self.warnings)
        self.warnings.extend(new)
        return new


def _not_printed(chat: Chat, template: ChatTemplate) -> list[str]:
    """Say which parts of a conversation the template never looks at."""
    has = {
        "reasoning": any("reasoning_content" in message for message in chat.messages),
        "tool calls": any("tool_calls" in message for message in chat.messages),
        "tools": chat.tools is not None,
    }
    read = {
        "reasoning": bool(template.keys.intersection(REASONING_NAMES)),
        "tool calls": "tool_calls" in template.keys,
        "tools": "tools" in template.keys,
    }
    return [
        f"the rows have {part} that the chat template does not print"
        for part in has
        if has[part] and not read[part]
    ]


class _BlankIds:
    """The tokens that are white space, looked up when asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bool] = {}

    def __contains__(self, token: object) -> bool:
        assert isinstance(token, int)
        if token not in self._known:
            self._known[token] = not self._tokenizer.decode([token]).strip()
        return self._known[token]


def _midnight(day: str) -> datetime:
    try:
        return datetime.combine(date.fromisoformat(day), time())
    except ValueError as error:
        raise DataError(f"template date must be a day like 2025-01-31, got {day!r}") from error
