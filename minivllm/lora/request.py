"""The adapter that a request names. Stands for vllm/lora/request.py (v0.22.1)."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoRARequest:
    """Names one adapter: what it is called, its number, and where its folder is. vLLM: `LoRARequest`.

    lora_name       what people call it; not empty
    lora_int_id     its number in this engine, >= 1 (0 means "base" in a batch mapping)
    lora_path       an adapter folder (PEFT's layout) or a Hugging Face id
    load_inplace    read it again although the id is loaded, once, when this request arrives

    Two requests are equal when name, id and path are: vLLM compares names alone, so that there an
    adapter with the same name and other weights counts as the same.

    Raises ValueError for an empty name or path, or an id below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = field(default=None, compare=False)
    load_inplace: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise ValueError("lora_name is empty; give the adapter a name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int):
            raise ValueError(
                f"lora_int_id of adapter '{self.lora_name}' must be an int, got {self.lora_int_id!r}"
            )
        if self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id must be > 0, got {self.lora_int_id} for adapter '{self.lora_name}'; "
                "0 stands for the base model"
            )
        if not self.lora_path:
            raise ValueError(f"lora_path of adapter '{self.lora_name}' is empty; name its folder")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path
