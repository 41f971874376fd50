"""Where adapters come from beside local folders of safetensors. vLLM: inside vllm/lora/ and vllm/plugins/.

Brings      adapters by a Hugging Face id, by a name that a resolver finds, from tensors in memory, and from .bin
            files, and base models by a Hugging Face id. It is there for what users have, and makes nothing faster
Implements  of `LoRAExtensions`: `file_formats` (end of a file's name -> what reads the tensors in it), `folder_sources`
            (what makes a local folder of a path), `read_request` (an adapter whose tensors a request brings). Of
            `AdapterRegistry`: `find_by_name` (an adapter by a name that the engine does not know). Of the product's
            engine: `find_model`
Costs       some 530 lines. An adapter from a local folder runs none of it. huggingface_hub is imported for the first
            id
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm.extension import Extension
from minivllm.sources.bin import read_pickled
from minivllm.sources.by_name import find_by_name
from minivllm.sources.hub import hub_folder, hub_model_folder
from minivllm.sources.memory import read_tensors

if TYPE_CHECKING:
    from minivllm.parts import Parts

FILE_FORMATS = {".bin": read_pickled, ".pt": read_pickled}
FOLDER_SOURCES = (hub_folder,)


def _add_to(parts: "Parts") -> None:
    parts.find_by_name = find_by_name
    if parts.config.lora_config is not None and parts.config.lora_config.refuse_pickles:
        parts.lora = replace(parts.lora, file_formats={})


SOURCES = Extension(
    {"file_formats": FILE_FORMATS, "folder_sources": FOLDER_SOURCES, "read_request": read_tensors},
    _add_to,
    hub_model_folder,
)
