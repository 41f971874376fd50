"""`lab notebook`: JupyterLab with a copy of the phase's notebook, on the learner's code."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from checkout import Checkout, environment
from jupyter_client import BlockingKernelClient

from labs.kit import notebook, progress
from labs.kit.regions import PHASES, LabError
from tests.worlds.waiting import PATIENCE, wait_until

LAB = [sys.executable, "-m", "labs.kit.cli"]
SERVED = "notebooks/03_cpu_punica.ipynb"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("notebook"))
    checkout.solve("3.2")
    return checkout


class Server:
    """`lab notebook` with these arguments, and what it answers."""

    def __init__(self, checkout, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.runtime = checkout.root / "runtime"
        self.log = (checkout.root / "jupyter.log").open("w+")
        own = {"JUPYTER_RUNTIME_DIR": str(self.runtime), "JUPYTER_TOKEN": "secret"}
        options = ["--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0"]
        self.process = subprocess.Popen(
            [*LAB, "notebook", *arguments, "--no-browser", "--", *options],
            cwd=checkout.root,
            env=environment(checkout.root, None) | own,
            stdout=self.log,
            stderr=self.log,
        )

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def ask(self, path, body=None):
        """The answer of the server's REST API, once it is up."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": "token secret", "Content-Type": "application/json"},
        )
        until = time.monotonic() + PATIENCE
        while True:
            assert self.process.poll() is None, self.said()
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    return json.load(answer)
            except ConnectionError:
                assert time.monotonic() < until, self.said()
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionError) or time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def run(self, code):
        """What code prints in the notebook's kernel."""
        body = {"path": SERVED, "name": "", "type": "notebook", "kernel": {"name": "python3"}}
        kernel = self.ask("sessions", body)["kernel"]["id"]
        client = BlockingKernelClient(connection_file=str(self.runtime / f"kernel-{kernel}.json"))
        client.load_connection_file()
        client.start_channels()

        def is_ready():
            with suppress(RuntimeError):  # busy with its imports, it has answered no heartbeat for a second
                client.wait_for_ready(timeout=PATIENCE)
                return True

        wait_until(is_ready)
        printed = []

        def note(message):
            if message["msg_type"] in ("stream", "error"):
                content = message["content"]
                printed.append(content.get("text", content.get("evalue")))

        try:
            client.execute_interactive(code, timeout=PATIENCE, output_hook=note)
        except (TimeoutError, queue.Empty):
            pytest.fail(f"no answer after {PATIENCE} s: {code}")
        finally:
            client.stop_channels()
        return "".join(printed)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)
        self.log.close()


@pytest.fixture
def serve(checkout):
    servers = []

    def serve(*arguments):
        servers.append(Server(checkout, *arguments))
        return servers[-1]

    yield serve
    for server in servers:
        server.stop()


WHOSE = """
import inspect, os, sys
from minivllm.vllm.torch_ops import bgmv_shrink
print(sys.executable)
print(os.path.relpath(inspect.getsourcefile(bgmv_shrink), ".."))
"""


@pytest.mark.nightly
def test_a_phases_notebook_is_served_and_its_cells_run_on_the_learners_code(serve, checkout):
    server = serve("3")
    served = server.ask(f"contents/{SERVED}")["content"]
    committed = nbformat.read(checkout.root / "phases/03_cpu_punica/walkthrough.ipynb", as_version=4)
    first = next(cell for cell in committed.cells if cell.cell_type == "code")

    printed = server.run(first.source)
    python, source = server.run(WHOSE).split()

    assert [cell["source"] for cell in served["cells"]] == [cell.source for cell in committed.cells]
    assert first.outputs[-1].text.splitlines()[-1] in printed
    assert python == sys.executable
    assert source == "labs/03_cpu_punica/by_token.py"
    assert "yours: 3.2; ours: all else" in server.said()
    assert f"127.0.0.1:{server.port}/lab/tree/{SERVED}" in server.said()


@pytest.mark.nightly
def test_the_engines_code_can_be_asked_for(serve):
    server = serve("3", "--engine")

    printed = server.run(WHOSE)

    assert printed.split()[1] == "minivllm/lora/ops/by_token.py"
    assert "yours: nothing" in server.said()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folders that copies are made in, empty."""
    monkeypatch.setattr(notebook, "FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(progress, "FOLDER", tmp_path / ".lab")
    return tmp_path


def test_an_exercise_that_has_not_passed_is_named_before_cells_run_on_it(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.solve("3.2")
    begin = "from labs.kit.commands import read\nread.os.execve = lambda *_: None\nread.notebook('3')\n"
    passes = (
        "from labs.kit.progress import Progress, digest\n"
        "from labs.kit.regions import read_engine\n"
        "Progress().remember('3.2', digest(read_engine()['3.2']))\n"
    )

    before, after = checkout.execute(begin).stdout, checkout.execute(passes + begin).stdout

    assert "yours: 3.2;" in before and "yours: 3.2;" in after
    assert (
        "\nOf yours 3.2 did not pass as it is now, so cells may show wrong results; `lab check 3.2` "
        in before
    )
    assert "did not pass" not in after


def test_a_copy_asks_as_the_committed_one_does_and_shows_no_answer(own):
    path, _ = notebook.learners_copy("05_slot_manager")

    committed = nbformat.read(notebook.ROOT / "phases/05_slot_manager/walkthrough.ipynb", as_version=4)
    copy = nbformat.read(path, as_version=4)
    assert [cell.cell_type for cell in copy.cells] == [cell.cell_type for cell in committed.cells]
    code = [(ours, yours) for ours, yours in zip(committed.cells, copy.cells) if ours.cell_type == "code"]
    assert [yours.source for _, yours in code] == [ours.source for ours, _ in code]
    assert all(ours.outputs for ours, _ in code)
    assert [(yours.outputs, yours.execution_count) for _, yours in code] == [([], None)] * len(code)
    nbformat.validate(copy)


def test_a_copy_is_opened_as_it_was_left_and_kept_when_it_is_started_over(own):
    path, is_new = notebook.learners_copy("03_cpu_punica")
    ours = path.read_text()
    path.write_text("mine")

    again = notebook.learners_copy("03_cpu_punica"), path.read_text()
    over = notebook.learners_copy("03_cpu_punica", fresh=True), path.read_text()

    assert (is_new, again, over) == (True, ((path, False), "mine"), ((path, True), ours))
    assert [kept.read_text() for kept in own.glob(".lab/backup/03_cpu_punica-*.ipynb")] == ["mine"]


def test_a_phase_that_is_a_file_to_read_has_no_notebook(own):
    with pytest.raises(LabError, match=r"phases/00_one_file has no notebook; read its README\.md"):
        notebook.learners_copy("00_one_file")


@pytest.mark.parametrize("phase", PHASES[1:])
def test_links_of_a_copy_lead_somewhere(phase, own):
    path, _ = notebook.learners_copy(phase)
    cells = nbformat.read(path, as_version=4).cells
    links = re.findall(r"\]\((?!http)([^)#]+)", "".join(c.source for c in cells if c.cell_type == "markdown"))

    # There may be no such folder yet to go up from.
    targets = [Path(os.path.normpath(notebook.ROOT / "notebooks" / link)) for link in links]
    assert [target for target in targets if not target.exists()] == []


def test_git_does_not_see_copies():
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", str(notebook.FOLDER / "03_cpu_punica.ipynb")], cwd=notebook.ROOT
    )

    if ignored.returncode == 128:
        pytest.skip("no git checkout")
    assert ignored.returncode == 0


@pytest.mark.parametrize(
    ("display", "browser", "is_started"), [(None, True, False), (":0", True, True), (":0", False, False)]
)
def test_a_browser_is_started_where_there_is_something_to_show_it_on(
    monkeypatch, display, browser, is_started
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(sys, "platform", "linux")

    started = notebook.command(notebook.FOLDER / "03_cpu_punica.ipynb", ["--port=9000"], browser)

    assert ("--no-browser" not in started) is is_started
    assert started[-1] == "--port=9000"


@pytest.mark.parametrize(("user", "told"), [(0, True), (1000, False)])
def test_root_may_start_it(monkeypatch, user, told):
    """In a container there may be nobody else, and Jupyter asks to be told."""
    monkeypatch.setattr(os, "geteuid", lambda: user)

    started = notebook.command(notebook.FOLDER / "03_cpu_punica.ipynb", [], browser=False)

    assert ("--allow-root" in started) is told


def test_without_jupyterlab_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyterlab", None)

    with pytest.raises(LabError, match=r"^JupyterLab is not installed; `make setup` installs it$"):
        notebook.require_jupyterlab()
