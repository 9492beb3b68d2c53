"""Ids and masks of 21 conversations under SmolLM2's tokenizer, known from the reference."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.chat import ChatEncoder, load_tokenizer

DATA = Path(__file__).parent / "data"
TEMPLATES = json.loads((DATA / "golden_templates.json").read_text(encoding="utf-8"))
CASES = [
    json.loads(line)
    for line in (DATA / "golden_masks.jsonl").read_text(encoding="utf-8").split("\n")
    if line
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(str(smollm2))


@pytest.mark.real_model
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ids_and_mask_are_the_known_ones(
    case: dict[str, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case["template"] is not None:
        monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[case["template"]])
    encoder = ChatEncoder(
        tokenizer,
        seq_length=case["seq_length"],
        mask_reasoning_content=case.get("mask_reasoning_content", False),
        mask_generation_prompt=case.get("mask_generation_prompt", False),
    )
    result = encoder.encode(case["row"])
    assert result.input_ids.tolist() == case["input_ids"]
    assert result.loss_mask.tolist() == case["loss_mask"]


def test_all_golden_cases_are_here() -> None:
    assert len({case["name"] for case in CASES}) == 21
