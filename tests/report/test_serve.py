import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from moejax.report.serve import Handler, Server
from tests.browser import open_browser, wait_until
from tests.report.runs import report_line, usual_run


@contextmanager
def serving(folder, host="127.0.0.1"):
    """A server of one run, on a free port."""
    with Server([folder], host, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(url, **headers):
    """Returns status and text."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def add(folder, *lines):
    """Appends records, as a run does."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)


def test_the_page_and_its_data_are_served(tmp_path):
    folder = usual_run(tmp_path / "a")
    with serving(folder) as server:
        status, page = ask(server.url)
        assert status == 200
        assert '"live":true' in page
        status, text = ask(f"{server.url}data?mark=old")
        data = json.loads(text)
        assert (status, data["runs"][0]["name"]) == (200, "a")
        assert ask(f"{server.url}data?mark={data['mark']}")[0] == 204
        add(folder, report_line(510, 1.0))
        status, text = ask(f"{server.url}data?mark={data['mark']}")
        assert status == 200
        assert json.loads(text)["mark"] != data["mark"]
        assert ask(f"{server.url}metrics.jsonl")[0] == 404
        mark = json.loads(text)["mark"]
        with (folder / "events" / "1.jsonl").open("a") as file:
            file.write(json.dumps({"time": 1.8e9, "event": "begin", "step": 0}) + "\n")
        status, text = ask(f"{server.url}data?mark={mark}")
        assert status == 200
        assert json.loads(text)["runs"][0]["goodput"]["processes"][1]["starts"][2][2] == "silent"


def test_a_page_under_another_name_is_refused(tmp_path):
    with serving(usual_run(tmp_path / "a")) as server:
        for host in ("evil.example:80", "evil.example", ""):
            assert ask(server.url, Host=host)[0] == 403
        assert ask(server.url, Host="localhost:80")[0] == 200


def test_other_machines_need_the_token(tmp_path):
    with serving(usual_run(tmp_path / "a"), "0.0.0.0") as server:
        assert "token=" in server.url
        bare = server.url.partition("?")[0]
        assert ask(server.url)[0] == 200
        for wrong in (bare, f"{bare}?token=", f"{bare}?token=x", f"{bare}data?mark=1"):
            assert ask(wrong)[0] == 403


def test_a_directory_that_is_removed_is_told(tmp_path):
    folder = usual_run(tmp_path / "a")
    with serving(folder) as server:
        (folder / "metrics.jsonl").unlink()
        status, text = ask(server.url)
        assert status == 500
        assert "no run to report" in text


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.mark.slow
def test_the_open_page_follows_the_run(tmp_path, browser):
    folder = usual_run(tmp_path / "a")
    with serving(folder) as server:
        opened = browser.new_page()
        opened.goto(server.url)
        assert "Step 500" in opened.inner_text("main")
        opened.locator("input[type=range]").first.fill("0.5")
        add(folder, report_line(510, 1.0))
        wait_until(opened, "document.querySelector('main').innerText.includes('Step 510')")
        assert opened.evaluate("moejax.view.smooth") == 0.5
        assert opened.locator("input[type=range]").first.input_value() == "0.5"
        opened.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_the_loopback_of_ipv6_is_one_too(tmp_path):
    with serving(usual_run(tmp_path / "a"), "::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert ask(server.url)[0] == 200


def test_who_says_nothing_is_closed(tmp_path, monkeypatch):
    run = usual_run(tmp_path / "a")
    monkeypatch.setattr(Handler, "timeout", 0.2)
    with serving(run) as server, socket.create_connection(server.server_address) as silent:
        silent.settimeout(10)
        assert silent.recv(1) == b""
