import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortholand_lab.study.records import (
    DamagedRecordError,
    MissingRecordError,
    Record,
    Records,
    Request,
    Result,
    RunOptions,
    Store,
    encode,
    load,
)

OPTIONS = RunOptions("quick", 3, "cpu", 1)
REQUEST = Request("toy", 1, "unit-1", OPTIONS, {"p": 4, "sizes": (1, 2)}, {"torch": "2.0"})


def make_record(*values: float, request: Request = REQUEST) -> Record:
    return Record(
        request, Result({"y": values}, {"n": len(values)}), {"cpu count": 2}, 0.5, "2022-01-01"
    )


@given(st.lists(st.floats(), max_size=5))
def test_every_float_comes_back_as_it_was(tmp_path_factory, values):
    store = Store(tmp_path_factory.mktemp("records"))
    store.save(make_record(*values))
    found = store.find(REQUEST).record
    assert found is not None
    assert list(map(repr, found.series("y"))) == list(map(repr, values))
    assert found.value("n") == len(values)


@given(data=st.data())
def test_a_changed_byte_is_noticed(tmp_path_factory, data):
    whole = encode(make_record(1.0, math.inf, 2e-30)).encode()
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("records") / "record.json"
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        record = load(path)
    except DamagedRecordError:
        return
    assert encode(record).encode() == whole  # the same byte, or 2E-30 for 2e-30


@given(data=st.data())
def test_a_cut_off_record_is_noticed(tmp_path_factory, data):
    whole = encode(make_record(1.0, 2.0)).encode()
    path = tmp_path_factory.mktemp("records") / "record.json"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    with pytest.raises(DamagedRecordError):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", '{"content": 1, "checksum": 2}'])
def test_other_json_is_no_record(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(DamagedRecordError):
        load(path)


def test_a_folder_in_the_place_of_a_record_is_damage(store):
    store.path(REQUEST).mkdir(parents=True)
    assert "damaged" in store.find(REQUEST).reason


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_kill_while_saving_leaves_the_old_record(store, monkeypatch, stage):
    store.save(make_record(1.0))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[stage], killed)
    with pytest.raises(KeyboardInterrupt):
        store.save(make_record(2.0))
    monkeypatch.undo()
    found = store.find(REQUEST).record
    assert found is not None
    assert found.series("y") == [1.0]
    store.save(make_record(3.0))
    assert [p.name for p in store.path(REQUEST).parent.iterdir()] == ["unit-1.json"]


@pytest.mark.parametrize(
    "asked",
    [
        replace(REQUEST, revision=2),
        replace(REQUEST, configuration={"p": 5, "sizes": (1, 2)}),
        replace(REQUEST, options=replace(OPTIONS, threads=2)),
        replace(REQUEST, options=replace(OPTIONS, device="cuda")),
        replace(REQUEST, options=replace(OPTIONS, data="MNIST")),
    ],
)
def test_a_record_with_other_settings_does_not_answer(store, asked):
    store.save(make_record(1.0))
    assert store.find(asked) == (None, "made with other settings")


def test_a_record_in_an_old_format_is_redone_with_a_clear_word(store):
    content = json.loads(encode(make_record(1.0)))["content"]
    content["format"] = 1
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    store.path(REQUEST).parent.mkdir(parents=True)
    store.path(REQUEST).write_text(f'{{"checksum":"{checksum}","content":{text}}}')
    assert store.find(REQUEST) == (None, "made by another version, format 1")
    assert store.last_options("toy") == []


def test_each_file_is_read_once(store, monkeypatch):
    store.save(make_record(1.0))
    reads = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read_bytes(path))
    for _ in range(3):
        assert store.find(REQUEST).record is not None
        assert store.last_options("toy") == [OPTIONS]
    assert len(reads) == 1


def test_presets_and_seeds_do_not_overwrite_each_other(store):
    for preset, seed in [("quick", 0), ("quick", 1), ("paper", 0)]:
        options = replace(OPTIONS, preset=preset, seed=seed)
        store.save(make_record(1.0, request=replace(REQUEST, options=options)))
    assert len(store.last_options("toy")) == 3


def test_other_versions_are_for_drawing_only(store):
    store.save(make_record(1.0))
    asked = replace(REQUEST, versions={"torch": "3.0"})
    assert store.find(asked) == (None, "made with other versions")
    assert store.find(asked, any_versions=True).record is not None


def test_last_options_are_those_of_the_newest_whole_record(store):
    for unit, threads, finished in [("a", 1, "2022-01-02"), ("b", 2, "2022-01-03")]:
        request = replace(REQUEST, unit=unit, options=replace(OPTIONS, threads=threads))
        store.save(replace(make_record(1.0, request=request), finished=finished))
    assert store.last_options("toy") == [replace(OPTIONS, threads=2)]
    store.path(replace(REQUEST, unit="b")).write_text("damaged")
    store = Store(store.root)
    assert store.last_options("toy") == [replace(OPTIONS, threads=1)]
    assert store.last_options("unknown") == []


def test_a_missing_record_is_not_a_key_error():
    records = Records({"a": make_record(1.0)})
    assert "a" in records
    assert "b" not in records
    with pytest.raises(MissingRecordError, match="b is missing"):
        records["b"]
