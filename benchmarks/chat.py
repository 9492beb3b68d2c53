"""Rows per second of turning conversations into ids and mask, against a tokenization per prefix.

    python benchmarks/chat.py --target-model DIR --input-data chats_long.jsonl

Both ways run in one process, alternating, and the best of the runs counts. The plain way renders
and tokenizes the whole conversation, and for every answer the messages before it and with it: the
mask is what lies between the two lengths. Ids and masks of both are compared first. The last line
is JSON.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import tokenizers
import transformers

from dspark.chat import ChatEncoder, load_tokenizer
from dspark.data.rows import open_rows
from dspark.reports.terminal import format_table

_SEQ_LENGTH = 1 << 20


def main() -> None:
    """Print a table of rows/s by number of turns, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target-model", required=True)
    parser.add_argument("--input-data", required=True)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target_model)
    encoder = ChatEncoder(tokenizer, seq_length=_SEQ_LENGTH)
    rows = [dict(row.value()) for row in open_rows([args.input_data])]
    check_equal(rows, encoder, tokenizer)
    results = [measure(rows, turns, encoder, tokenizer, args.runs) for turns in (1, 2, 3, 4)]
    results.append(measure(rows, None, encoder, tokenizer, args.runs))
    print(f"{date.today()}, {platform.processor() or platform.machine()}, one process")
    print(f"tokenizers {tokenizers.__version__}, transformers {transformers.__version__}\n")
    header = ("turns", "rows", "tokens/row", "a tokenization per prefix", "dspark", "times")
    table = [
        (
            str(r["turns"] or "all"),
            str(r["rows"]),
            f"{r['tokens_per_row']:.0f}",
            f"{r['prefix_rows_per_s']:.0f} rows/s",
            f"{r['dspark_rows_per_s']:.0f} rows/s",
            f"{r['speedup']:.1f}",
        )
        for r in results
    ]
    print(format_table([header, *table], right=range(1, 6)))
    print(json.dumps({"benchmark": "chat", "results": results}))


def measure(
    rows: Sequence[dict[str, Any]],
    turns: int | None,
    encoder: ChatEncoder,
    tokenizer: Any,
    runs: int,
) -> dict[str, Any]:
    """Time both ways over the rows with so many answers, or over all."""
    chosen = [row for row in rows if turns in (None, answers(row))]
    ours, plain = [], []
    for _ in range(runs):
        plain.append(seconds(lambda row: by_prefixes(tokenizer, row), chosen))
        ours.append(seconds(encoder.encode, chosen))
    tokens = sum(len(encoder.encode(row).input_ids) for row in chosen)
    return {
        "turns": turns,
        "rows": len(chosen),
        "tokens_per_row": tokens / len(chosen),
        "prefix_rows_per_s": len(chosen) / min(plain),
        "dspark_rows_per_s": len(chosen) / min(ours),
        "speedup": min(plain) / min(ours),
    }


def answers(row: dict[str, Any]) -> int:
    """Return the number of assistant messages."""
    return sum(message["role"] == "assistant" for message in row["messages"])


def seconds(work: Callable[[dict[str, Any]], object], rows: Sequence[dict[str, Any]]) -> float:
    """Return the processor time that `work` takes over the rows; other load does not count."""
    begin = time.process_time()
    for row in rows:
        work(row)
    return time.process_time() - begin


def by_prefixes(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return ids and mask the plain way."""
    messages = row["messages"]

    def ids_of(count: int) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            messages[:count], tokenize=True, return_dict=True, add_generation_prompt=False
        )
        return list(encoded["input_ids"])

    ids = ids_of(len(messages))
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(ids_of(i)) if i else 0
            stop = len(ids_of(i + 1))
            mask[start:stop] = [1] * (stop - start)
    return ids, mask


def check_equal(rows: Sequence[dict[str, Any]], encoder: ChatEncoder, tokenizer: Any) -> None:
    """Stop if the two ways disagree."""
    for row in rows:
        ids, mask = by_prefixes(tokenizer, row)
        result = encoder.encode(row)
        if result.input_ids.tolist() != ids or result.loss_mask.tolist() != mask:
            raise SystemExit(f"the two ways disagree on {json.dumps(row)[:200]}")


if __name__ == "__main__":
    main()
