"""Input files, folders and datasets: their rows, order, slices, and what is refused."""

import gzip
import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import zstandard

from dspark.data.rows import RowSource, open_rows
from dspark.data.split_slice import parse_split
from dspark.errors import DataError, RowError


@pytest.fixture(autouse=True)
def _no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


def row(i: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "a"}]
    }


def jsonl(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in numbers), encoding="utf-8")
    return str(path)


def parquet(path: Path, numbers: range) -> str:
    datasets.Dataset.from_list([row(i) for i in numbers]).to_parquet(str(path))
    return str(path)


def numbers(source: RowSource) -> list[int]:
    return [int(item.value()["messages"][0]["content"]) for item in source]


def shuffled(count: int, seed: int = 42) -> list[int]:
    dataset = datasets.Dataset.from_dict({"i": list(range(count))})
    return list(dataset.shuffle(seed=seed)["i"])


class TestLines:
    def test_only_a_line_feed_ends_a_line(self, tmp_path: Path) -> None:
        texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\x0bb", "a\x1cb", "plain"]
        lines = [json.dumps({"t": text}, ensure_ascii=False) for text in texts]
        # JSON wants control characters escaped; the rest stand as they are.
        (tmp_path / "x.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
        found = [item.value()["t"] for item in open_rows([str(tmp_path / "x.jsonl")])]
        assert found == texts

    def test_bom_blank_lines_crlf_and_a_missing_final_newline_are_fine(
        self, tmp_path: Path
    ) -> None:
        data = b'\xef\xbb\xbf{"t": 1}\r\n\r\n  \n{"t": 2}\n\n{"t": 3}'
        (tmp_path / "x.jsonl").write_bytes(data)
        items = list(open_rows([str(tmp_path / "x.jsonl")]))
        assert [item.value()["t"] for item in items] == [1, 2, 3]
        assert [item.number for item in items] == [0, 1, 2]
        assert [item.where for item in items] == [
            f"{tmp_path / 'x.jsonl'} line 1",
            f"{tmp_path / 'x.jsonl'} line 4",
            f"{tmp_path / 'x.jsonl'} line 6",
        ]

    def test_a_json_file_of_lines_may_begin_with_a_bom(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"t": 1}\n{"t": 2}\n')
        assert [item.value()["t"] for item in open_rows([str(tmp_path / "x.json")])] == [1, 2]

    def test_columns_may_change_their_type_late_in_the_file(self, tmp_path: Path) -> None:
        rows: list[dict[str, Any]] = [{**row(i), "tools": None} for i in range(10_000)]
        rows.append({**row(10_000), "tools": [{"name": "t"}]})
        parts = [{"type": "text", "text": "p"}]
        rows.append({"messages": [{"role": "user", "content": parts}], "tools": "[]"})
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in rows))
        found = [item.value() for item in open_rows([str(path)])]
        assert found == rows

    def test_a_broken_line_is_an_error_of_its_row_alone(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": \n[1]\n\xff\xfe\n{"a": 5}\n')
        good, broken, listed, binary, last = open_rows([str(tmp_path / "x.jsonl")])
        assert good.value() == {"a": 1}
        assert last.value() == {"a": 5}
        for item, reason in [
            (broken, "invalid JSON"),
            (listed, "row is not an object"),
            (binary, "invalid JSON"),
        ]:
            with pytest.raises(RowError) as caught:
                item.value()
            assert caught.value.reason == reason

    def test_memory_stays_flat(self, tmp_path: Path) -> None:
        line = json.dumps(row(0)).encode() + b" " * 1000 + b"\n"
        path = tmp_path / "big.jsonl"
        with path.open("wb") as file:
            for _ in range(40):
                file.write(line * 1000)
        source = open_rows([str(path)], split="train[10:]")
        tracemalloc.start()
        count = sum(1 for _ in source)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == 39_990
        assert path.stat().st_size > 40_000_000
        assert peak < 6_000_000

    def test_rows_can_be_pickled(self, tmp_path: Path) -> None:
        items = list(open_rows([jsonl(tmp_path / "x.jsonl", range(3))]))
        assert pickle.loads(pickle.dumps(items)) == items


class TestFormats:
    def test_a_json_list_and_a_json_object(self, tmp_path: Path) -> None:
        (tmp_path / "many.json").write_text(json.dumps([row(i) for i in range(4)], indent=1))
        (tmp_path / "one.json").write_text(json.dumps(row(7), indent=1))
        assert numbers(open_rows([str(tmp_path / "many.json")])) == [0, 1, 2, 3]
        assert numbers(open_rows([str(tmp_path / "one.json")])) == [7]

    def test_a_json_file_of_lines_is_read_as_lines(self, tmp_path: Path) -> None:
        assert numbers(open_rows([jsonl(tmp_path / "lines.json", range(5))])) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
    @pytest.mark.parametrize("ending", ["gz", "zst"])
    def test_compressed_files(self, tmp_path: Path, name: str, ending: str) -> None:
        make = parquet if name.endswith("parquet") else jsonl
        plain = Path(make(tmp_path / name, range(20)))
        expected = numbers(open_rows([str(plain)]))
        data = plain.read_bytes()
        packed = gzip.compress(data) if ending == "gz" else zstandard.compress(data)
        path = tmp_path / f"{name}.{ending}"
        path.write_bytes(packed)
        assert numbers(open_rows([str(path)])) == expected

    @pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
    def test_a_compressed_file_that_is_cut_short_is_named(self, tmp_path: Path, pack: Any) -> None:
        data = Path(jsonl(tmp_path / "x.jsonl", range(2000))).read_bytes()
        packed = pack(data)
        (tmp_path / "x.jsonl.gz").write_bytes(packed[: len(packed) // 2])
        with pytest.raises(DataError, match=r"x\.jsonl\.gz is damaged or cut short"):
            list(open_rows([str(tmp_path / "x.jsonl.gz")]))

    @pytest.mark.parametrize("name", ["", " "])
    def test_an_input_without_a_name_is_refused(self, name: str) -> None:
        with pytest.raises(DataError, match="has no name"):
            open_rows([name])

    def test_a_pipe_is_refused_and_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.jsonl")
        with pytest.raises(DataError, match="no regular file"):
            open_rows([str(tmp_path / "x.jsonl")])

    def test_json_that_is_nested_too_deeply_is_an_error_that_names_the_file(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "x.json").write_text("[" * 100_000)
        with pytest.raises(DataError, match=r"x\.json is not valid JSON"):
            list(open_rows([str(tmp_path / "x.json")]))

    def test_a_folder_is_its_files_in_order_without_dot_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "chats"
        (folder / "sub").mkdir(parents=True)
        jsonl(folder / "b.jsonl", range(2, 4))
        jsonl(folder / "a.jsonl", range(2))
        jsonl(folder / "sub" / "c.jsonl", range(4, 6))
        jsonl(folder / ".hidden.jsonl", range(90, 99))
        (folder / "README.md").write_text("not data")
        items = list(open_rows([str(folder)]))
        assert [int(i.value()["messages"][0]["content"]) for i in items] == [0, 1, 2, 3, 4, 5]
        assert items[-1].where == f"{folder / 'sub' / 'c.jsonl'} line 2"

    def test_parquet_files_of_a_folder_are_shuffled_together(self, tmp_path: Path) -> None:
        folder = tmp_path / "chats"
        folder.mkdir()
        parquet(folder / "0.parquet", range(10))
        parquet(folder / "1.parquet", range(10, 20))
        assert numbers(open_rows([str(folder)])) == shuffled(20)

    def test_a_folder_of_both_kinds_is_refused(self, tmp_path: Path) -> None:
        parquet(tmp_path / "0.parquet", range(2))
        jsonl(tmp_path / "1.jsonl", range(2))
        with pytest.raises(DataError, match="mixes parquet and JSON"):
            open_rows([str(tmp_path)])

    def test_a_folder_without_data_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="holds no data file"):
            open_rows([str(tmp_path)])

    def test_a_saved_dataset_and_its_splits(self, tmp_path: Path) -> None:
        train = datasets.Dataset.from_list([row(i) for i in range(6)])
        train.save_to_disk(str(tmp_path / "one"))
        assert numbers(open_rows([str(tmp_path / "one")])) == shuffled(6)
        both = datasets.DatasetDict({"train": train, "test": train.select(range(2))})
        both.save_to_disk(str(tmp_path / "two"))
        two = str(tmp_path / "two")
        assert numbers(open_rows([two], split="test", shuffle_seed=None)) == [0, 1]
        with pytest.raises(DataError, match=r"has no split 'val'; it has 'train', 'test'"):
            open_rows([two], split="val")
        with pytest.raises(DataError, match="choose one with --split"):
            open_rows([two])

    def test_nulls_of_a_columnar_file_count_as_absent(self, tmp_path: Path) -> None:
        call = [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}]
        other = [{"function": {"name": "g", "arguments": {"day": 1}}}]
        rows = [
            {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
            for calls in (call, other, None)
        ]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "x.parquet"))
        found = [i.value() for i in open_rows([str(tmp_path / "x.parquet")], shuffle_seed=None)]
        assert [r["messages"][0].get("tool_calls") for r in found] == [call, other, None]
        assert all("content" not in r["messages"][0] for r in found)

    def test_what_is_no_parquet_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
        with pytest.raises(DataError, match=r"x\.parquet cannot be read as parquet"):
            open_rows([str(tmp_path / "x.parquet")])

    def test_reading_prints_no_progress_into_a_log(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = parquet(tmp_path / "x.parquet", range(5))
        capfd.readouterr()
        assert len(numbers(open_rows([path]))) == 5
        assert capfd.readouterr().err == ""
        assert datasets.is_progress_bar_enabled()

    def test_a_json_file_that_is_no_json_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("[1, 2")
        with pytest.raises(DataError, match=r"x\.json is not valid JSON"):
            list(open_rows([str(tmp_path / "x.json")]))

    def test_an_unknown_format_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_text("a,b")
        with pytest.raises(DataError, match=r"expected \.jsonl, \.ndjson, \.json, \.parquet"):
            open_rows([str(tmp_path / "x.csv")])


class TestOrder:
    def test_json_keeps_file_order_and_parquet_is_shuffled(self, tmp_path: Path) -> None:
        assert numbers(open_rows([jsonl(tmp_path / "x.jsonl", range(20))])) == list(range(20))
        path = parquet(tmp_path / "x.parquet", range(20))
        assert numbers(open_rows([path])) == shuffled(20)
        assert numbers(open_rows([path], shuffle_seed=7)) == shuffled(20, seed=7)
        assert numbers(open_rows([path], shuffle_seed=None)) == list(range(20))

    def test_more_rows_than_are_fetched_at_once_keep_their_order(self, tmp_path: Path) -> None:
        path = parquet(tmp_path / "x.parquet", range(600))
        assert numbers(open_rows([path])) == shuffled(600)

    def test_a_file_without_rows_among_others_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        parquet(tmp_path / "d" / "full.parquet", range(3))
        empty = pyarrow.parquet.read_schema(tmp_path / "d" / "full.parquet").empty_table()
        pyarrow.parquet.write_table(empty, tmp_path / "d" / "empty.parquet")
        assert numbers(open_rows([str(tmp_path / "d")])) == shuffled(3)
        (tmp_path / "d" / "full.parquet").unlink()
        with pytest.raises(DataError, match="d has no rows"):
            open_rows([str(tmp_path / "d")])

    def test_where_names_the_row_in_the_file_and_number_the_place_in_order(
        self, tmp_path: Path
    ) -> None:
        path = parquet(tmp_path / "x.parquet", range(5))
        items = list(open_rows([path]))
        assert [item.number for item in items] == [0, 1, 2, 3, 4]
        assert [item.where for item in items] == [f"{path} row {i}" for i in shuffled(5)]

    def test_inputs_are_ordered_and_cut_by_themselves_and_then_joined(self, tmp_path: Path) -> None:
        first = parquet(tmp_path / "a.parquet", range(10))
        second = jsonl(tmp_path / "b.jsonl", range(100, 110))
        source = open_rows([first, second], split="train[:3]")
        assert numbers(source) == [*shuffled(10)[:3], 100, 101, 102]
        assert [item.number for item in source] == list(range(6))

    def test_a_source_can_be_read_again(self, tmp_path: Path) -> None:
        source = open_rows([jsonl(tmp_path / "x.jsonl", range(4))])
        assert numbers(source) == numbers(source)


class TestSlices:
    @pytest.mark.parametrize(
        "split",
        ["train", "train[2:5]", "train[-2:]", "train[:10%]", "train[5:]", "train[:-15]",
         "train[10%:35%]", "train[3:1000]", "train[:]", "train[-50:2]"],
    )  # fmt: skip
    def test_a_slice_gives_the_same_rows_in_every_format(self, tmp_path: Path, split: str) -> None:
        (tmp_path / "x.json").write_text(json.dumps([row(i) for i in range(20)]))
        saved = datasets.Dataset.from_list([row(i) for i in range(20)])
        saved.save_to_disk(str(tmp_path / "saved"))
        names = [
            jsonl(tmp_path / "x.jsonl", range(20)),
            str(tmp_path / "x.json"),
            parquet(tmp_path / "x.parquet", range(20)),
            str(tmp_path / "saved"),
        ]
        theirs = datasets.load_dataset("parquet", data_files=names[2], split=split)
        expected = [int(item["messages"][0]["content"]) for item in theirs]
        for name in names:
            assert numbers(open_rows([name], split=split, shuffle_seed=None)) == expected

    def test_a_slice_applies_after_the_shuffle(self, tmp_path: Path) -> None:
        path = parquet(tmp_path / "x.parquet", range(20))
        assert numbers(open_rows([path], split="train[5:9]")) == shuffled(20)[5:9]

    def test_a_slice_behind_the_end_is_empty(self, tmp_path: Path) -> None:
        for name in (
            jsonl(tmp_path / "x.jsonl", range(5)),
            parquet(tmp_path / "x.parquet", range(5)),
        ):
            assert numbers(open_rows([name], split="train[50:]")) == []

    @pytest.mark.parametrize("split", ["train[1]", "train[a:b]", "[1:2]", "", "train+test", "a b"])
    def test_what_is_no_split_is_refused_with_examples(self, split: str) -> None:
        with pytest.raises(DataError, match=r"train\[100:200\]"):
            parse_split(split)

    def test_a_file_has_the_split_train_alone(self, tmp_path: Path) -> None:
        for name in (
            jsonl(tmp_path / "x.jsonl", range(2)),
            parquet(tmp_path / "x.parquet", range(2)),
        ):
            with pytest.raises(
                DataError, match="no split 'test'; plain files have one split: 'train'"
            ):
                open_rows([name], split="test")


class TestNames:
    @pytest.mark.parametrize(
        "name",
        ["missing.jsonl", "./missing", "/no/such/dir", "a/b/c", "missing.parquet.gz", "folder/",
         "~/missing", "tests/missing", "data\\x"],
    )  # fmt: skip
    def test_what_looks_local_and_is_not_there_is_never_looked_up(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(Path(__file__).resolve().parents[1])
        monkeypatch.setattr(datasets, "load_dataset_builder", pytest.fail)
        with pytest.raises(FileNotFoundError, match="input data not found"):
            open_rows([name])

    def test_a_hub_dataset_is_prepared_shuffled_and_cut(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = parquet(tmp_path / "x.parquet", range(10))
        make = datasets.load_dataset_builder
        asked = []

        def builder(name: str, config: str | None) -> Any:
            asked.append((name, config))
            files = {"train": path, "test": path}
            return make("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))

        monkeypatch.setattr(datasets, "load_dataset_builder", builder)
        source = open_rows(["org/name"], split="train[:3]", dataset_config="en")
        assert asked == [("org/name", "en")]
        assert numbers(source) == shuffled(10)[:3]
        assert next(iter(source)).where == f"org/name[train] row {shuffled(10)[0]}"
        assert source.fingerprint[0]["hub"] == "org/name"
        with pytest.raises(DataError, match="no split 'dev'; it has 'train', 'test'"):
            open_rows(["org/name"], split="dev")

    def test_a_failed_lookup_says_what_was_looked_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise datasets.exceptions.DatasetNotFoundError("not on the Hub")

        monkeypatch.setattr(datasets, "load_dataset_builder", fail)
        with pytest.raises(DataError, match="cannot load 'no-such-set' from the Hugging Face Hub"):
            open_rows(["no-such-set"])

    def test_no_input_is_refused(self) -> None:
        with pytest.raises(DataError, match="at least one input"):
            open_rows([])


class TestRecords:
    def test_a_changed_file_changes_the_fingerprint(self, tmp_path: Path) -> None:
        name = jsonl(tmp_path / "x.jsonl", range(3))
        before = open_rows([name]).fingerprint
        assert before == open_rows([name]).fingerprint
        assert before[0].keys() == {"path", "size", "mtime_ns"}
        jsonl(tmp_path / "x.jsonl", range(4))
        assert open_rows([name]).fingerprint != before

    def test_the_description_says_what_was_applied(self, tmp_path: Path) -> None:
        names = [jsonl(tmp_path / "x.jsonl", range(9)), parquet(tmp_path / "x.parquet", range(9))]
        described = open_rows(names, split="train[:5]").description
        assert json.loads(json.dumps(described)) == described
        assert [item["order"] for item in described] == [
            "file",
            "datasets.Dataset.shuffle(seed=42)",
        ]
        assert [item["slice"] for item in described] == ["train[:5]"] * 2
