"""Backends of the multi-LoRA arithmetic: metadata of a step, shrink, expand, and both together."""

from minivllm.lora.punica_wrapper.punica_base import PunicaWrapperABC, PunicaWrapperBase
from minivllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU, PunicaWrapperLoops
from minivllm.lora.punica_wrapper.punica_selector import get_punica_wrapper
from minivllm.lora.punica_wrapper.utils import convert_mapping

__all__ = [
    "PunicaWrapperABC",
    "PunicaWrapperBase",
    "PunicaWrapperCPU",
    "PunicaWrapperLoops",
    "convert_mapping",
    "get_punica_wrapper",
]
