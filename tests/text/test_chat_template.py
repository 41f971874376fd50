"""What makes a prompt of a conversation: the tokenizer's template, another one, and its variables."""

import pytest

from minivllm import EngineArgs
from minivllm.config import ModelConfig
from minivllm.text.prompts import chat_prompt, load_tokenizer
from tests.worlds.engines import tiny_world

TALK = [{"role": "user", "content": "hi"}]
LOUD = "{% for m in messages %}{{ m.content | upper }}{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ mood }}"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world(tmp_path_factory)


def prompt(world, template, **options):
    tokenizer = load_tokenizer(ModelConfig(world.base, chat_template=template))
    return chat_prompt(TALK, tokenizer, tokenizer, 256, options)["prompt"]


def test_may_be_a_file_or_the_template_itself(world, tmp_path):
    file = tmp_path / "loud.jinja"
    file.write_text(LOUD)

    assert prompt(world, LOUD) == prompt(world, file) == prompt(world, str(file)) == "HI>"


def test_has_the_variables_that_a_request_gives(world):
    assert prompt(world, LOUD, mood="!", add_generation_prompt=False) == "HI!"


def test_that_is_not_there_is_refused_at_the_start(world):
    with pytest.raises(FileNotFoundError, match="chat template 'nowhere' cannot be read"):
        EngineArgs(world.base, chat_template="nowhere").create_engine_config()


@pytest.mark.parametrize("name", ["conversation", "tokenize", "chat_template"])
def test_is_not_replaced_by_a_variable(world, name):
    with pytest.raises(ValueError, match="chat template cannot take this conversation"):
        prompt(world, LOUD, **{name: "x"})
