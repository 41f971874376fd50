"""Options of adapters that vLLM has dropped: a bias on B, added tokens, longer contexts.

Brings      adapters of vLLM up to 0.8 and 0.10, as documents about it describe them; nothing is faster for it
Implements  as `minivllm.options`: an `AdapterOption` each, and `limits_of` of `EngineCore` (prompts.py)
Options     `bias_enabled`, `lora_extra_vocab_size`, `long_lora_scaling_factors`
Costs       some 600 lines, and none of them for an adapter that has nothing beside A and B. A slot's tables of added
            tokens take 2 X H elements; each factor takes the rotary table once more, 21.0 MB for the demo model's
            8,192 positions (phases/02_lora_layers/in_vllm.md). In the core: their fields of `LoRAConfig` and
            `EngineArgs`, and two seams that nothing else uses, a file beside the weights (`files`, `read_file`) and
            `tables`. All others DoRA, aLoRA or experts use, too
"""

from minivllm.lora.extensions import AdapterOption
from minivllm.options.legacy.bias import LoRABias
from minivllm.options.legacy.long_context import LongContext
from minivllm.options.legacy.vocabulary import AddedTokens

LEGACY: tuple[AdapterOption, ...] = (AddedTokens(), LoRABias(), LongContext())
