"""The model names that requests use, as they stand. Stands for a part of vLLM's OpenAIServingModels (v0.22.1)."""

from collections.abc import Callable

from minivllm.lora.request import LoRARequest
from minivllm.server.errors import ApiError
from minivllm.server.keys import Holder
from minivllm.server.protocol import LoadAdapterRequest
from minivllm.server.settings import ServerSettings, check_printable
from minivllm.serving.async_llm import AsyncLLM

MOST_NAMES_SHOWN = 8


class ServedNames:
    """The base model's name, and those of the adapters that are served.

    begin    is called with every name that is new

    served   name -> its adapter: those from the start, those loaded since, and those that a resolver found
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, begin: Callable[[str], None]) -> None:
        self.llm, self.settings, self.begin = llm, settings, begin
        self.served = {adapter.lora_name: adapter for adapter in settings.adapters}

    def _serve(self, adapter: LoRARequest) -> None:
        self.served[adapter.lora_name] = adapter
        self.begin(adapter.lora_name)

    def _check_free(self, order: LoadAdapterRequest) -> None:
        """ApiError 400 for a name that nobody can write, or that is taken, unless it is to be read again."""
        name = order.lora_name
        try:
            check_printable(name)
        except ValueError as error:
            raise ApiError(400, str(error), "lora_name") from None
        if name == self.settings.model_name:
            raise ApiError(400, f"'{name}' is the base model's name; give another one", "lora_name")
        if self.is_known(name) and not order.load_inplace:
            raise ApiError(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                "lora_name",
            )

    def is_known(self, name: str) -> bool:
        """Whether it is served, or the engine still has requests that brought it along."""
        return name in self.served or name in self.llm.adapter_names

    def known(self, name: str) -> LoRARequest:
        """Of an adapter that is served. ApiError 404 for another name."""
        if name not in self.served:
            raise self._missing(name)
        return self.served[name]

    def _missing(self, name: str) -> ApiError:
        return ApiError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")

    def visible(self, holder: Holder) -> list[str]:
        """The names that a request with this key may use, the base model's first."""
        return [name for name in (self.settings.model_name, *sorted(self.served)) if holder.may_use(name)]

    def check_served(self, name: str, holder: Holder) -> None:
        """ApiError 404 for a name that is no longer served, as for whoever asks now."""
        if name not in (self.settings.model_name, *self.served):
            raise self._unknown(name, holder)

    def _unknown(self, name: str, holder: Holder) -> ApiError:
        names = self.visible(holder)
        more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
        there_are = ", ".join(names[:MOST_NAMES_SHOWN])
        return ApiError(
            404, f"The model `{name[:100]}` does not exist; there are: {there_are}{more}", "model"
        )
