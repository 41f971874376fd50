"""The adapter that a request names. Stands for vllm/lora/request.py (v0.22.1)."""

import os
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from minivllm.errors import in_one_sentence, is_finite, require_int


@dataclass(frozen=True)
class LoRARequest:
    """Names one adapter: what it is called, its number, and where its folder is. vLLM: `LoRARequest`.

    lora_name       what people call it; not empty
    lora_int_id     its number in this engine: an int, no bool, from 1 to `2**63 - 1`. A mapping of a batch holds no
                    larger one, and 0 means "base" there
    lora_path       an adapter folder (PEFT's layout) or a Hugging Face id
    load_inplace    read it again although the id is loaded, once, when this request arrives
    version         which weights of the adapter these are, counted from 0 where `minivllm.versions` counts them; the
                    engine sets it. None: the request ended before there were any
    lora_tensors    PEFT's name -> tensor: the adapter itself, instead of a folder. `peft_config` has then what
                    adapter_config.json would say, and `lora_path` becomes a name for these very tensors

    Requests are equal, and hash alike, when name, id and path are equal. vLLM compares names alone: there, other
    weights under the same name count as the same adapter. The same id and path under another name is an alias. It is
    not equal, but one adapter: everything below a request goes by the id.

    is_made_of_others   whether it names other adapters, of which its own is made (`minivllm.mixes`)
    awaits_version      whether it stands for weights that are still to come (`minivllm.versions`)

    Raises ValueError for an empty name or path, or an id out of range.
    """

    is_made_of_others: ClassVar[bool] = False
    awaits_version: ClassVar[bool] = False

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = field(default=None, compare=False)
    load_inplace: bool = field(default=False, compare=False)
    version: int | None = field(default=0, compare=False)
    lora_tensors: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    peft_config: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    # region lab 1.1: refuse what names no adapter
    @in_one_sentence
    def __post_init__(self) -> None:
        """Check name, id and path, in this order; a `pathlib.Path` becomes the string it stands for.

        A request with tensors gets the path `memory:` and the `id` of their dict, whatever path stands beside them. An
        empty dict counts as well: it is not None.

        ValueError names the field and shows what it was given; for id and path it also names the adapter.
        """
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be text that is not empty, got {self.lora_name!r}")
        is_int = isinstance(self.lora_int_id, int) and not isinstance(self.lora_int_id, bool)
        if not is_int or not 1 <= self.lora_int_id < 2**63:
            raise ValueError(
                f"lora_int_id of adapter '{self.lora_name}' must be an int > 0 and < 2**63, "
                f"got {self.lora_int_id!r}; 0 stands for the base model"
            )
        if self.lora_tensors is not None:
            object.__setattr__(self, "lora_path", f"memory:{id(self.lora_tensors)}")
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValueError(
                f"lora_path of adapter '{self.lora_name}' must name its folder, got {self.lora_path!r}"
            )

    # endregion

    # vLLM's short names.
    name = property(attrgetter("lora_name"))
    adapter_id = property(attrgetter("lora_int_id"))
    path = property(attrgetter("lora_path"))


class AtLeast(str):
    """The name of an adapter, in the place of its LoRARequest, for a request that is to have new enough weights.

    version   the least that will do; the request waits until `update_lora` has brought it
    seconds   at most so long, and then ends with an error that says so

    TypeError, ValueError: a version that is no int from 0 on, seconds that are no finite number from 0 on.
    """

    version: int
    seconds: float

    def __new__(cls, name: str, version: int, seconds: float = 60.0) -> "AtLeast":
        require_int(0, version=version)
        if not is_finite(seconds) or seconds < 0:
            raise ValueError(f"seconds must be a finite number from 0 on, got {seconds!r}")
        asked = super().__new__(cls, name)
        asked.version, asked.seconds = version, float(seconds)
        return asked

    def __reduce__(self) -> tuple[Any, ...]:
        return AtLeast, (str(self), self.version, self.seconds)
