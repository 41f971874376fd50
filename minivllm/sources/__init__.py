"""Where adapters come from beside local folders of safetensors. vLLM: inside vllm/lora/ and vllm/plugins/.

FILE_FORMATS     end of a file's name -> what reads the tensors in it
FOLDER_SOURCES   what makes a local folder of a path: the hub
read_tensors     an adapter whose tensors a request brings
find_by_name     an adapter by a name that the engine does not know
"""

from dataclasses import replace

from minivllm.engine.extension import Extension, Parts
from minivllm.sources.bin import read_pickled
from minivllm.sources.by_name import find_by_name
from minivllm.sources.hub import hub_folder
from minivllm.sources.memory import read_tensors

FILE_FORMATS = {".bin": read_pickled, ".pt": read_pickled}
FOLDER_SOURCES = (hub_folder,)


def _add_to(parts: Parts) -> None:
    parts.find_by_name = find_by_name
    if parts.config.lora_config is not None and parts.config.lora_config.refuse_pickles:
        parts.lora = replace(parts.lora, file_formats={})


SOURCES = Extension(
    {"file_formats": FILE_FORMATS, "folder_sources": FOLDER_SOURCES, "read_request": read_tensors}, _add_to
)
