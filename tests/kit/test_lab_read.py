"""`lab read`: what of vLLM to read beside a phase, and where it is."""

import pytest
from checkout import Checkout

from labs.kit import reading
from labs.kit.regions import PHASES, LabError

WHERE = {"vllm/lora/worker_manager.py", "vllm/lora/model_manager.py", "vllm/utils/cache.py"}


@pytest.fixture
def vllm(tmp_path):
    """A tree like a wheel's, with another version's number."""
    for name in WHERE:
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import nothing_that_is_there\n\nclass Other:\n    def remove_oldest(self): ...\n")
    (tmp_path / "site/vllm-0.21.0.dist-info").mkdir()
    return tmp_path / "site"


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_chapter_names_files_of_vllm_and_keeps_its_answers_back(phase):
    found = reading.reading_of(phase)

    assert found.files
    assert found.text
    assert "<details>" not in found.text
    assert "answer</summary>" not in found.text


def test_a_phase_without_the_section_says_so():
    for phase in ("00_one_file", "08_incidents"):
        with pytest.raises(LabError, match="no section on reading vLLM"):
            reading.reading_of(phase)


def test_the_files_of_a_wheel_are_found_with_the_lines_of_their_names(tmp_path, vllm):
    checkout = Checkout(tmp_path / "checkout")

    result = checkout.lab("read", "5", "--vllm", str(vllm))

    assert result.returncode == 0, result.stderr
    for name in WHERE:
        assert str(vllm / name) in result.stdout
    assert "4: remove_oldest" in result.stdout
    assert "this is vLLM 0.21.0; chapters are about v0.22.1" in result.stdout


def test_without_vllm_it_says_where_the_files_are():
    found = reading.reading_of("05_slot_manager")

    lines = reading.names_in("vllm/utils/cache.py", found.files["vllm/utils/cache.py"], None)

    assert found.files.keys() == WHERE
    assert lines[0].startswith("vllm.utils.cache: ")
    assert "LRUCache" in lines[0]


def test_a_folder_that_is_no_vllm_and_a_version_without_the_file_are_named(tmp_path, vllm):
    with pytest.raises(LabError, match="holds no vLLM"):
        reading.vllm_folder(tmp_path / "nowhere")
    (vllm / "vllm/utils/cache.py").unlink()

    with pytest.raises(LabError, match=r"has no vllm/utils/cache\.py"):
        reading.place_of("vllm/utils/cache.py", reading.vllm_folder(vllm))


def test_an_editor_gets_the_file(tmp_path, monkeypatch):
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    without = reading.open_in_editor(tmp_path / "cache.py")
    monkeypatch.setenv("EDITOR", "touch")

    assert not without
    assert reading.open_in_editor(tmp_path / "cache.py")
    assert (tmp_path / "cache.py").is_file()
