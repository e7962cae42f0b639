"""The hub and a site's link to it, over sockets: no JAX, no devices."""

import json
import socket
import threading

import numpy as np
import pytest

from moejax.errors import InputError
from moejax.runtime.meeting import line
from moejax.train.sites import hub as hub_module
from moejax.train.sites import link as link_module
from moejax.train.sites.hub import Hub, token_of
from moejax.train.sites.ledger import WHOLE, Ledger
from moejax.train.sites.link import Link, SitesError

TOKEN = "a secret of some length"
FORM = {"sites": 2, "rows": 2, "bytes": 5, "whole_bytes": 3, "settings": "same"}
NOWHERE = ("127.0.0.1", 1)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "RETRY_S", 0.02)
    monkeypatch.setattr(hub_module, "BEAT_S", 0.05)
    opened = []

    def begin(port=0, patience_s=30.0):
        hub = Hub(("127.0.0.1", port), TOKEN, Ledger(tmp_path, patience_s=patience_s))
        opened.append(hub)
        return hub

    yield begin
    for hub in opened:
        hub.close()


def joined(hub, site, token=TOKEN):
    link = Link(("127.0.0.1", hub.port), token, site)
    link.join(FORM)
    return link


def rows_of(site, size=5):
    return {row: np.full(size, 10 * site + row, np.uint8) for row in range(2)}


def facts(tokens):
    return {row: {"steps": 1, "tokens": tokens, "sum": 3} for row in range(2)}


def meanwhile(function, *arguments, **named):
    """Calls in a thread. Returns a function that waits for the result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments, **named)))
    thread.start()

    def result():
        thread.join(20)
        return found[0]

    return result


def test_all_get_the_same_rows_once_all_are_there(serve):
    hub = serve()
    links = [joined(hub, site) for site in range(2)]
    links[0].put(0, rows_of(0), facts(6))
    first = meanwhile(links[0].get, 0, [0, 1], 5)
    links[1].put(0, rows_of(1), facts(4))
    for head, data in (first(), links[1].get(0, [0, 1], 5)):
        assert head["sites"] == {"0": {"steps": 1, "tokens": 6}, "1": {"steps": 1, "tokens": 4}}
        np.testing.assert_array_equal(data[:, :, 0], [[0, 1], [10, 11]])
    assert links[0].get(0, [1], 5)[1].shape == (2, 1, 5)  # a process with some of the devices
    links[1].put(0, rows_of(5), facts(4))  # again, with other bytes: what came first stays
    np.testing.assert_array_equal(links[0].get(0, [0], 5)[1][:, 0, 0], [0, 10])
    assert links[0].sent == 10


def gone(*_, **__):
    raise ConnectionResetError


def test_sites_wait_for_a_hub_that_is_started_again(serve):
    hub = serve()
    links = [joined(hub, site) for site in range(2)]
    links[0].put(0, rows_of(0), facts(1))
    waiting = meanwhile(links[0].get, 0, [0], 5)
    hub.close()
    hub.answer = hub._find = gone  # connections that it still has end, as those of a process do
    sending = meanwhile(links[1].put, 0, rows_of(1), facts(1))
    serve(hub.port)
    sending()
    assert waiting()[1][:, 0, 0].tolist() == [0, 10]


def test_a_site_that_has_ended_follows_the_others_to_their_end(serve):
    hub = serve()
    links = [joined(hub, site) for site in range(2)]
    links[0].leave()
    following = meanwhile(links[0].get, 0, [0], 5, follows=True)
    links[1].put(0, rows_of(1), facts(1))
    head, data = following()
    assert list(head["sites"]) == ["1"]
    assert data.shape == (1, 1, 5)
    following = meanwhile(links[0].get, 1, [0], 5, follows=True)
    links[1].leave()
    assert following()[0]["end"] is True


def test_a_site_that_waits_for_a_round_that_is_let_go_is_told(serve):
    hub = serve()
    links = [joined(hub, site) for site in range(2)]
    waiting = meanwhile(links[0].get, 0, [0], 5)
    hub.ledger.open = hub.ledger.oldest = 1
    assert waiting()[0]["gone"] is True


def test_outer_weights_go_from_one_site_to_another(serve):
    hub = serve()
    links = [joined(hub, site) for site in range(2)]
    asking = meanwhile(links[1].get, 0, [0, 1], 3, kind=WHOLE)
    while not links[0].begin(0, None)["give"]:
        pass
    links[0].put(0, rows_of(3, size=3), facts(0), WHOLE)
    head, data = asking()
    assert head["round"] == 0
    np.testing.assert_array_equal(data[0, :, 0], [30, 31])


@pytest.mark.parametrize(
    "asked",
    [
        {"kind": "put", "site": 0, "round": 0, "bytes": 10**12, "facts": {"0": {}}},
        {"kind": "put", "site": "../..", "round": 0, "bytes": 5, "facts": {"0": {}}},
        {"kind": "put", "site": 0, "round": 0, "bytes": 5, "facts": {"9": {}}},
        {"kind": "begin", "site": [], "round": 0, "seconds": None},
        {"kind": "join", "site": 0, "form": 3},
        {"site": 0},
    ],
)
def test_what_cannot_be_is_refused_with_a_line(serve, asked):
    hub = serve()
    joined(hub, 0)
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        connection.sendall(line({"token": TOKEN, **asked}))
        assert "error" in json.loads(connection.makefile().readline())


def test_without_the_token_nothing_is_answered(serve, monkeypatch):
    monkeypatch.setattr(link_module, "START_S", 0.1)
    hub = serve()
    with pytest.raises(InputError, match="another token is known there"):
        joined(hub, 0, token="a secret of another kind")
    assert hub.ledger.form is None
    with pytest.raises(InputError, match=r"outer.hub is 127.0.0.1:1. Nobody answers"):
        Link(NOWHERE, TOKEN, 0).join(FORM)


def test_a_site_that_differs_is_told_why(serve):
    hub = serve()
    joined(hub, 0)
    with pytest.raises(InputError, match="site 1 has rows 3, the others have 2"):
        Link(("127.0.0.1", hub.port), TOKEN, 1).join({**FORM, "rows": 3})
    link = joined(hub, 1)
    link.put(0, rows_of(1), facts(1))
    with pytest.raises(SitesError, match="of another run"):
        link.begin(9, None)


def test_the_token_is_drawn_once_and_only_its_owner_reads_it(tmp_path, monkeypatch):
    monkeypatch.delenv(hub_module.SECRET, raising=False)
    drawn = token_of(tmp_path)
    assert token_of(tmp_path) == drawn
    assert (tmp_path / "token").stat().st_mode & 0o77 == 0
    with pytest.raises(InputError, match="MOEJAX_SITES_TOKEN has 0 letters"):
        token_of(None)
    monkeypatch.setenv(hub_module.SECRET, drawn)
    assert token_of(None) == drawn
