"""When two manifests describe the same cache, and the digest that says so."""

import pytest

from dspark.cache import (
    manifest_mismatch_fields,
    write_manifest,
)
from dspark.disk.manifest import (
    identity_digest,
    identity_fields,
    identity_on_disk,
)
from dspark_caches import a_manifest


def test_the_digest_of_the_identity_is_frozen():
    manifest = a_manifest() | {"provenance": {"identity": {"pad_token_id": 0}, "counts": {}}}
    assert (
        identity_digest(manifest)
        == "62fb70e16dab437bf225ff83e73d941ca66cd1fca7e30724d276d5f9244b96b1"
    )


def test_equal_manifests_have_no_mismatch():
    assert manifest_mismatch_fields(a_manifest(), a_manifest()) == []


@pytest.mark.parametrize("field", sorted(set(a_manifest()) - {"format_version", "complete"}))
def test_every_field_but_the_state_on_disk_can_be_a_mismatch(field):
    assert manifest_mismatch_fields(a_manifest(), a_manifest() | {field: "other"}) == [field]


@pytest.mark.parametrize("field", ["format_version", "complete"])
def test_the_state_on_disk_is_no_mismatch(field):
    assert manifest_mismatch_fields(a_manifest(), a_manifest() | {field: "other"}) == []


def test_mismatches_are_sorted():
    other = a_manifest(seq_length=8, dtype="fp32", num_samples=6)
    assert manifest_mismatch_fields(a_manifest(), other) == ["dtype", "num_samples", "seq_length"]


def test_a_field_that_only_one_side_has_is_a_mismatch_both_ways():
    more = a_manifest() | {"extra": None}
    assert manifest_mismatch_fields(a_manifest(), more) == ["extra"]
    assert manifest_mismatch_fields(more, a_manifest()) == ["extra"]


def test_a_masking_option_that_is_absent_is_false():
    old = a_manifest()
    del old["mask_reasoning_content"], old["mask_generation_prompt"]
    assert manifest_mismatch_fields(old, a_manifest()) == []
    assert manifest_mismatch_fields(a_manifest(), old) == []
    asked = a_manifest(mask_reasoning_content=True, mask_generation_prompt=True)
    expected = ["mask_generation_prompt", "mask_reasoning_content"]
    assert manifest_mismatch_fields(old, asked) == expected


def test_of_provenance_only_the_identity_can_be_a_mismatch():
    first = a_manifest() | {"provenance": {"identity": {"a": 1, "b": 2}, "counts": {"rows": 5}}}
    same = a_manifest() | {"provenance": {"identity": {"b": 2, "a": 1}, "created_with": "x"}}
    other = a_manifest() | {"provenance": {"identity": {"a": 1, "b": 3, "c": None}}}
    assert manifest_mismatch_fields(first, same) == []
    expected = ["provenance.identity.b", "provenance.identity.c"]
    assert manifest_mismatch_fields(first, other) == expected
    assert identity_digest(first) == identity_digest(same) != identity_digest(other)


@pytest.mark.parametrize("provenance", [None, 3, "text", [], {}, {"identity": None}])
def test_a_provenance_that_says_nothing_identifies_nothing(provenance):
    manifest = a_manifest() | {"provenance": provenance}
    assert identity_fields(manifest) == identity_fields(a_manifest())
    assert manifest_mismatch_fields(manifest, a_manifest()) == []


def test_the_identity_on_disk_is_that_of_the_manifest(tmp_path):
    assert identity_on_disk(str(tmp_path), cache_name="DSpark") is None
    write_manifest(str(tmp_path), a_manifest())
    assert identity_on_disk(str(tmp_path), cache_name="DSpark") == identity_digest(a_manifest())


def test_completing_a_manifest_does_not_change_its_identity():
    assert identity_digest(a_manifest()) == identity_digest(a_manifest() | {"complete": True})
