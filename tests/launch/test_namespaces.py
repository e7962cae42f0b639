import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("namespaces", ROOT / "launch" / "namespaces.py")
namespaces = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(namespaces)


@pytest.mark.parametrize(
    ("rate", "bits"), [("200mbit", 2e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("2gbit", 2e9)]
)
def test_rates_are_bits_a_second(rate, bits):
    assert namespaces.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["0mbit", "200", "mbit", "-1gbit", "1e3kbit", "1gbit "])
def test_what_is_no_rate_is_told(rate):
    with pytest.raises(ValueError, match="It must be a number and kbit, mbit or gbit"):
        namespaces.bits_per_second(rate)


@pytest.mark.parametrize(
    ("device", "rate", "burst", "limit"),
    # 4 ms and 4 s of bytes; at least four frames, or a packet, and 256 packets.
    [
        ("net0", "1gbit", 500_000, 500_000_000),
        ("net0", "8mbit", 6_056, 256 * 69_632),
        ("lo", "8mbit", 69_632, 256 * 69_632),
    ],
)
def test_a_bucket_holds_some_milliseconds_or_a_packet(monkeypatch, device, rate, burst, limit):
    ran = []
    monkeypatch.setattr(namespaces, "_run", lambda *words: ran.append(words))
    namespaces._shape("there", device, rate)
    sizes = ("rate", rate, "burst", str(burst), "limit", str(limit))
    assert ran == [("tc", "-n", "there", "qdisc", "add", "dev", device, "root", "tbf", *sizes)]
